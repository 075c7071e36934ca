"""A second stream beside torch's current one, for kernels that run at the same time."""

from __future__ import annotations

from typing import Any

import torch

from ecornn.kernels.persistent.launch import LaunchError, driver, make_context_current

#: By device and by the stream that it is beside. Not one of torch's pool: another thread could have
#: the same one, and be capturing it.
_SIDES: dict[tuple[int, int], Any] = {}
#: By device, for streams that are first met while they are captured, when it is better to make
#: nothing: there are few, since torch's are from a pool.
_SPARE: dict[int, list[Any]] = {}
SPARE = 4


def prepare_sides(device: int) -> None:
    """Have streams ready that a capture may need."""
    spare = _SPARE.setdefault(device, [])
    while len(spare) < SPARE:
        spare.append(_new_stream(device))


def side_of(main: Any, device: int) -> Any:
    """The stream beside this one."""
    key = (device, main.cuda_stream)
    found = _SIDES.get(key)
    if found is None:
        spare = _SPARE.get(device)
        found = _SIDES.setdefault(key, spare.pop() if spare else _new_stream(device))
    return found


def _new_stream(device: int) -> Any:
    make_context_current(device)
    cuda = driver()
    with torch.cuda.device(device):
        error, handle = cuda.cuStreamCreate(int(cuda.CUstream_flags.CU_STREAM_NON_BLOCKING))
    if int(error) != 0:
        raise LaunchError(f"making a stream on GPU {device}: {error}")
    return torch.cuda.ExternalStream(int(handle), device)


class Fork:
    """Torch's current stream and the one beside it, from one launch to the next. Memory is torch's
    current stream's: the one beside it must be waited for before any is given back."""

    def __init__(self, device: int) -> None:
        self._main = torch.cuda.current_stream(device)
        self._side = side_of(self._main, device)
        # one is enough: a wait is for what was recorded last when it was asked for
        self._event = torch.cuda.Event()
        self.stream: Any = self._side.cuda_stream
        self._apart = False

    def side_waits(self) -> None:
        """What the side is given from now on comes after all that the main stream was given."""
        self._event.record(self._main)
        self._side.wait_event(self._event)
        self._apart = True

    def main_waits(self) -> None:
        self._event.record(self._side)
        self._main.wait_event(self._event)
        self._apart = False

    def close(self) -> None:
        """Also where something was raised in between."""
        if self._apart:
            self.main_waits()
