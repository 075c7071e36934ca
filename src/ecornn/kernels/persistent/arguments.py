"""The kernels' arguments, as the structures at the top of `forward.cu` and `backward.cu`."""

from __future__ import annotations

import ctypes
import struct

_POINTER = ctypes.c_void_p
_PAIR = ctypes.c_void_p * 2  # one for each direction
_SIZES = (
    "steps",
    "first_step",
    "total",
    "batch",
    "hidden",
    "output_row",
    "exchange_row",
    "first_sequence",
    "end_sequence",
    "first_direction",
    "group_batch",
    "flags",
)

RESET_TO_INITIAL = 1
FROZEN_AFTER_END = 2


def _fields(pairs: tuple[str, ...], pointers: tuple[str, ...]) -> list[tuple[str, type]]:
    return [
        *((name, _PAIR) for name in pairs),
        *((name, _POINTER) for name in pointers),
        *((name, ctypes.c_int) for name in _SIZES),
    ]


class ForwardArguments(ctypes.Structure):
    _fields_ = _fields(
        ("gates", "weights", "b_ih", "b_hh", "exchange", "output", "cells", "kept"),
        ("h0", "c0", "h_in", "c_in", "h_out", "c_n", "c_out", "lengths", "resets", "failed"),
    )


class BackwardArguments(ctypes.Structure):
    _fields_ = _fields(
        (
            *("gates", "b_ih", "b_hh", "weights", "exchange", "d_gates"),
            *("output", "cells", "d_output", "d_cells"),
        ),
        (
            *("h0", "c0", "d_h_n", "d_c_n", "d_h_in", "d_c_in", "d_h_out", "d_c_out"),
            *("d_h0", "d_c0"),
            *("d_h_initial", "d_c_initial", "lengths", "resets", "failed"),
        ),
    )


#: All fields of the arguments at once, as the structures have them, to their padded end.
FORWARD, BACKWARD = struct.Struct("@26Q12i"), struct.Struct("@35Q12i")
