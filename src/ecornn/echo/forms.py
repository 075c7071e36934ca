"""Other forms of kept results: fewer bytes between the passes, and a way back.

Without loss: booleans as bits, indices in narrow integers. With loss: feature maps in bfloat16, or
in eight bits with a scale for each. Plain torch operators, which compiled code makes a part of the
kernels that write and read the result.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, fx
from torch._subclasses import FakeTensor
from torch.fx.experimental.proxy_tensor import make_fx

convert = torch.ops.prims.convert_element_type

#: The largest number of eight bits; and what is added to a map's scale, for one of zeros.
LARGEST_FP8, SMALLEST_SCALE = 448.0, 2.0**-126


@dataclass(frozen=True)
class Form:
    """`there` makes what is handed over in the place of a result, called by the result's name and
    `suffix`; `back` makes the result again, of which the second argument has the form."""

    suffix: str
    there: Callable[[Tensor], tuple[Tensor, ...]]
    back: Callable[[tuple[Tensor, ...], Tensor], Tensor]

    def names(self, name: str) -> tuple[str, str]:
        """Of the first tensor that is handed over, and of a second one."""
        return f"{name}_{self.suffix}", f"{name}_{self.suffix}_scale"

    def there_and_back(self, value: FakeTensor) -> fx.GraphModule:
        with value.fake_mode, torch.no_grad():
            return make_fx(lambda given: self.back(self.there(given), value))(value)


def bits_of(mask: Tensor) -> Tensor:
    """A byte for eight booleans that are as far apart as there are bytes, so that compiled code
    reads and writes side by side; what is left over is zeros."""
    flat = mask.reshape(-1)
    count = -(-flat.shape[0] // 8)
    if more := 8 * count - flat.shape[0]:
        flat = torch.nn.functional.pad(flat, (0, more))
    planes = convert(flat.view(8, count), torch.uint8)
    return torch.bitwise_left_shift(planes, _places(mask)).sum(0, dtype=torch.uint8)


def mask_of(bits: Tensor, shape: torch.Size) -> Tensor:
    planes = torch.bitwise_and(torch.bitwise_right_shift(bits, _places(bits)), 1)
    flat: Tensor = convert(planes, torch.bool).view(-1)
    return (flat if shape.numel() == flat.shape[0] else flat[: shape.numel()]).view(shape)


def _places(like: Tensor) -> Tensor:
    # not arange: inductor has it written otherwise before graphs are split
    eight: Tensor = torch.ops.prims.iota(
        8, start=0, step=1, dtype=torch.uint8, device=like.device, requires_grad=False
    )
    return eight.unsqueeze(-1)


def _scaled(given: Tensor) -> tuple[Tensor, Tensor]:
    """Each map by its own largest number, so that none is out of range."""
    wide = convert(given, torch.float32)
    scale = wide.abs().amax() / LARGEST_FP8 + SMALLEST_SCALE
    return convert(wide / scale, torch.float8_e4m3fn), scale


def _unscaled(given: tuple[Tensor, ...], like: Tensor) -> Tensor:
    eighths, scale = given
    found: Tensor = convert(convert(eighths, torch.float32) * scale, like.dtype)
    return found


def _as(dtype: torch.dtype, given: Tensor) -> tuple[Tensor]:
    return (convert(given, dtype),)


def _again(given: tuple[Tensor, ...], like: Tensor) -> Tensor:
    found: Tensor = convert(given[0], like.dtype)
    return found


BITS = Form(
    "bits", lambda mask: (bits_of(mask),), lambda given, like: mask_of(given[0], like.shape)
)
BF16 = Form("bf16", partial(_as, torch.bfloat16), _again)
FP8 = Form("fp8", _scaled, _unscaled)
#: By how many numbers each can tell apart, from zero on.
NARROW = {
    2**8: Form("uint8", partial(_as, torch.uint8), _again),
    2**15: Form("int16", partial(_as, torch.int16), _again),
    2**31: Form("int32", partial(_as, torch.int32), _again),
}
FORMS = (BITS, BF16, FP8, *NARROW.values())
