"""Parts that a model runs within `torch.utils.checkpoint` itself.

A checkpoint runs a part again in the backward pass, when the model's call is over and the part is
what it was before, and expects what it kept the first time: so the part runs as it is written the
first time, too. A checkpoint around the whole model is none of these: it calls the compiled one
again. Nor is one with `use_reentrant=True`, which keeps nothing of the first time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ecornn.ops.keeping import inmost_checkpoint


class OwnCheckpoints:
    def __init__(self) -> None:
        self.calls = 0  # of parts within such checkpoints
        self._thread = threading.local()

    @contextmanager
    def within_call(self) -> Iterator[None]:
        """Of the model, in this thread."""
        before, self._thread.around = getattr(self._thread, "around", None), inmost_checkpoint()
        try:
            yield
        finally:
            self._thread.around = before

    def heeded(self, run: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
        """`run`, or `plain` within a checkpoint of the model's own."""

        def called(*args: Any, **kwargs: Any) -> Any:
            inmost = inmost_checkpoint()
            if inmost is None or inmost is getattr(self._thread, "around", None):
                return run(*args, **kwargs)
            self.calls += 1
            return plain(*args, **kwargs)

        return called

    def told(self) -> list[str]:
        within = (
            "calls of these parts within checkpoints of the model's own run as they are written"
        )
        return [f"{self.calls} {within}"] if self.calls else []
