"""A child process that answers in lines of JSON, and that cannot keep anybody waiting."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any

LOG_TAIL = 4000


class NoAnswer(Exception):
    """The child said nothing: `late` if it was still running when its time was over."""

    def __init__(self, reason: str, *, late: bool) -> None:
        self.late = late
        super().__init__(reason)


class Child:
    """A context manager: when it is left, the child and all of its own children are gone."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed by close)
        self.began = time.monotonic()
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=dict(environment),
            start_new_session=True,  # a group of its own, so that compilers it starts go with it
        )
        self._buffer = b""

    def __enter__(self) -> Child:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, message: Any) -> None:
        """A child that is gone is found out when its answer is waited for."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()

    def receive(self, deadline: float) -> dict[str, Any]:
        """Its next message, before `deadline` of the monotonic clock."""
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._buffer:
                # what it has said in time is read, however late
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    took = time.monotonic() - self.began
                    raise NoAnswer(f"killed, as it had not answered after {took:.0f} s", late=True)
                read = os.read(self._process.stdout.fileno(), 2**16)
                if not read:
                    raise NoAnswer(self._why_gone(), late=False)
                self._buffer += read
        line, _, self._buffer = self._buffer.partition(b"\n")
        message: dict[str, Any] = json.loads(line)
        return message

    def close(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._log):
            if stream is not None:
                with suppress(BrokenPipeError):
                    stream.close()

    def log_tail(self) -> str:
        size = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, size - LOG_TAIL))
        return self._log.read().decode(errors="replace")

    def _why_gone(self) -> str:
        code = self._process.wait()
        how = f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        lines = self.log_tail().strip().splitlines()
        return how + (f": {lines[-1].strip()}" if lines else ", having said nothing")
