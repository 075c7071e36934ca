"""Kernels that torch's operators can stand in for: loaded when they are first asked for, one for
each device, and done without where that is not possible."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from ecornn.errors import EcornnError
from ecornn.kernels.persistent.device import too_old, unavailable
from ecornn.kernels.persistent.launch import Launcher, make_context_current
from ecornn.kernels.persistent.tile import Geometry

#: By device and tile. None: it cannot be loaded.
_LAUNCHERS: dict[tuple[int, Any], Launcher | None] = {}


def launcher_beside(values: Tensor, tile: Any, what: str) -> Launcher | None:
    """Of a kernel that is compiled as `tile` says, on the device of `values`; None where torch's
    operators have to do. `what` it is, for whoever is told that it cannot be made."""
    if not values.is_cuda or unavailable() is not None:
        return None
    key = values.get_device(), tile
    if key not in _LAUNCHERS:
        with torch.cuda.device(key[0]):
            # nothing can be loaded while a stream is captured
            if torch.cuda.is_current_stream_capturing():
                return None
            _LAUNCHERS[key] = _loaded(*key, what) if too_old() is None else None
    return _LAUNCHERS[key]


def _loaded(device: int, tile: Any, what: str) -> Launcher | None:
    make_context_current(device)
    try:
        return Launcher(Geometry(tile, 1, 1, 1, 0), device)
    except (EcornnError, OSError) as error:
        # torch's operators give the same: a cache that cannot be written, say
        warnings.warn(f"{what} could not be made: {error}", stacklevel=2)
        return None
