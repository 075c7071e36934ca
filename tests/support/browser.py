"""A headless Chromium for tests of pages, spoken to over a pipe by its DevTools protocol.

A pipe and not a port: nothing can be in use already, and nothing but the test can connect.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import time
from collections.abc import Callable
from fcntl import F_DUPFD, fcntl
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless",
    "--remote-debugging-pipe",
    "--no-sandbox",  # it does not start as root otherwise, and tests run as root in containers
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--window-size=1200,900",
)
START_SECONDS = 60
ANSWER_SECONDS = 30


def executable() -> str | None:
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Browser:
    """One browser with one page at a time; `events` holds what it told since `open`."""

    def __init__(self, profile: Path) -> None:
        path = executable()
        assert path is not None, "no Chromium here"
        asked, self._ask = os.pipe()
        self._answers, answered = os.pipe()
        # It reads on 3 and writes on 4; moved out of the way first, lest one overwrite the other.
        ends = [fcntl(end, F_DUPFD, 10) for end in (asked, answered)]
        null = os.open(os.devnull, os.O_RDWR)
        self._process = os.posix_spawn(
            path,
            [path, *FLAGS, f"--user-data-dir={profile}", "about:blank"],
            # dbus and others are looked for by their addresses here, and are not needed.
            {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ},
            file_actions=[
                *((os.POSIX_SPAWN_DUP2, null, place) for place in (0, 1, 2)),
                *((os.POSIX_SPAWN_DUP2, end, place) for end, place in ((ends[0], 3), (ends[1], 4))),
            ],
            setpgroup=0,
        )
        for end in (asked, answered, null, *ends):
            os.close(end)
        self._buffer, self._number, self._session = b"", 0, ""
        self.events: list[dict[str, Any]] = []
        self.version = self.ask("Browser.getVersion", seconds=START_SECONDS)["product"]

    def open(self, url: str, *, scripts: bool = True) -> None:
        """A new page, with everything it asks for and complains about recorded."""
        target = self._call("", "Target.createTarget", {"url": "about:blank"})["targetId"]
        attached = self._call("", "Target.attachToTarget", {"targetId": target, "flatten": True})
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")
        self.ask("Emulation.setScriptExecutionDisabled", value=not scripts)
        self.events.clear()
        self.ask("Page.navigate", url=url)
        self._wait(lambda: bool(self.told("Page.loadEventFired")), ANSWER_SECONDS)

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page; what it throws is raised here."""
        answer = self.ask(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def told(self, method: str) -> list[dict[str, Any]]:
        return [event["params"] for event in self.events if event.get("method") == method]

    def requests(self) -> list[str]:
        return [told["request"]["url"] for told in self.told("Network.requestWillBeSent")]

    def complaints(self) -> list[dict[str, Any]]:
        """Exceptions, what was written to the console, and what the browser itself logged."""
        methods = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")
        return [told for method in methods for told in self.told(method)]

    def ask(self, method: str, seconds: float = ANSWER_SECONDS, **parameters: Any) -> Any:
        return self._call(self._session, method, parameters, seconds)

    def close(self) -> None:
        os.close(self._ask)
        os.close(self._answers)
        # Its own group, made above: the browser and the processes it started.
        os.killpg(self._process, signal.SIGKILL)
        os.waitpid(self._process, 0)

    def _call(
        self, session: str, method: str, parameters: dict[str, Any], seconds: float = ANSWER_SECONDS
    ) -> Any:
        self._number += 1
        number = self._number
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if session:
            message["sessionId"] = session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._ask, data) :]
        answer: dict[str, Any] = {}

        def arrived() -> bool:
            for event in self.events:
                if event.get("id") == number:
                    answer.update(event)
                    self.events.remove(event)
                    return True
            return False

        self._wait(arrived, seconds)
        assert "error" not in answer, f"{method}: {answer['error']}"
        return answer["result"]

    def _wait(self, done: Callable[[], bool], seconds: float) -> None:
        end = time.monotonic() + seconds
        while not done():
            left = end - time.monotonic()
            ready = left > 0 and select.select([self._answers], [], [], left)[0]
            assert ready, f"the browser said nothing for {seconds} s"
            part = os.read(self._answers, 1 << 16)
            assert part, "the browser ended"
            *whole, self._buffer = (self._buffer + part).split(b"\0")
            self.events += [json.loads(message) for message in whole]
