"""A process group of one, which is left without waiting for itself."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist


@contextmanager
def process_group(folder: Path) -> Iterator[None]:
    """What uses the group must be gone at the end: whoever drops the last reference to it waits for
    gloo's thread, holding the interpreter's lock, and that thread may need the lock to give up the
    last step's work. So it has a moment first, and the group is dropped by nobody but this."""
    store = dist.FileStore(str(folder / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        gc.collect()
        time.sleep(0.2)
        dist.destroy_process_group()
