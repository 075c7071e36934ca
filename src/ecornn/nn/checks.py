"""Every refusal of bad input, before anything is computed.

Each check raises one `InvalidInput` that names the argument, what came, what was expected and
what to do, and changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ecornn.errors import InvalidInput

INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


#: Kinds of device without autocast, of which torch refuses to say whether it is on.
NO_AUTOCAST = ("meta",)


def casting(device: str) -> bool:
    """Whether autocast is on for this kind of device."""
    return device not in NO_AUTOCAST and torch.is_autocast_enabled(device)


def shape_of(x: Tensor) -> str:
    return f"{x.dim()}-D {tuple(x.shape)}"


def check_choice(argument: str, value: Any, choices: Sequence[str]) -> None:
    if value not in choices:
        listed = " or ".join(repr(choice) for choice in choices)
        raise InvalidInput(argument, repr(value), listed, "pass one of these")


def check_probability(argument: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1:
        raise InvalidInput(
            argument, repr(value), "a probability in [0, 1)", "pass a number; 0 switches it off"
        )
    return float(value)


def check_flag(argument: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise InvalidInput(argument, repr(value), "True or False", "pass a bool")
    return value


def check_zoneout(zoneout: Any) -> tuple[float, float]:
    """(of h, of c); one number is for both."""
    pair = zoneout if isinstance(zoneout, (tuple, list)) else (zoneout, zoneout)
    if len(pair) != 2:
        raise InvalidInput(
            "zoneout", f"{len(pair)} numbers", "one, or a pair (for h, for c)", "pass one or two"
        )
    of_h, of_c = (check_probability("zoneout", p) for p in pair)
    return of_h, of_c


def check_call(cell: str, after_end: Any, reset_to: Any, return_cell_states: Any) -> None:
    check_choice("after_end", after_end, ("zeros", "frozen"))
    check_choice("reset_to", reset_to, ("zero", "initial"))
    if check_flag("return_cell_states", return_cell_states) and cell != "lstm":
        raise InvalidInput(
            "return_cell_states",
            "True for a layer without cell states",
            "an LSTM",
            "the output holds every state of a GRU or RNN",
        )


def check_input(x: Any, features: int, weight: Tensor, *, batch_first: bool, cast: bool) -> None:
    """`cast` says that autocast is on, which brings input and weights to one dtype."""
    order = "(B, T, I)" if batch_first else "(T, B, I)"
    if not isinstance(x, Tensor):
        raise InvalidInput(
            "input",
            f"a {type(x).__name__}",
            "a Tensor or a PackedSequence",
            "convert it with torch.as_tensor",
        )
    if x.is_nested:
        raise InvalidInput(
            "input",
            "a nested tensor",
            "a padded one",
            "pad it with torch.nested.to_padded_tensor and pass lengths",
        )
    check_dense("input", x)
    if x.dim() not in (2, 3):
        raise InvalidInput(
            "input",
            shape_of(x),
            f"{order} or, without a batch, (T, I)",
            "add a missing dimension with unsqueeze, or flatten an extra one",
        )
    if x.shape[-1] != features:
        raise InvalidInput(
            "input",
            f"{x.shape[-1]} features in {tuple(x.shape)}",
            f"{features}, the layer's input_size",
            "check the order of the dimensions and batch_first",
        )
    if x.shape[0 if x.dim() == 2 or not batch_first else 1] == 0:
        raise InvalidInput(
            "input", f"no time steps in {tuple(x.shape)}", "at least one", "skip empty sequences"
        )
    check_values_of("input", x, weight, cast=cast)


def check_packed(data: Tensor, features: int, weight: Tensor, *, cast: bool) -> None:
    if data.dim() != 2 or data.shape[-1] != features:
        raise InvalidInput(
            "input",
            f"a PackedSequence with data of shape {tuple(data.shape)}",
            f"(sum of lengths, {features})",
            "pack sequences of the layer's input_size",
        )
    check_values_of("input", data, weight, cast=cast)


def check_dense(argument: str, x: Tensor) -> None:
    if x.layout != torch.strided:
        raise InvalidInput(
            argument, f"a tensor of layout {x.layout}", "a dense one", "convert it with .to_dense()"
        )


def check_values_of(argument: str, x: Tensor, weight: Tensor, *, cast: bool) -> None:
    """Device and dtype must be the weights'."""
    if x.device != weight.device:
        raise InvalidInput(
            argument,
            f"a tensor on {x.device}",
            f"one on {weight.device}, where the layer's weights are",
            f"move it with .to('{weight.device}') or move the layer",
        )
    if not x.dtype.is_floating_point:
        raise InvalidInput(
            argument, str(x.dtype), f"{weight.dtype}", "convert it with .to(layer's dtype)"
        )
    if x.dtype != weight.dtype and not cast:
        raise InvalidInput(
            argument,
            str(x.dtype),
            f"{weight.dtype}, the dtype of the layer's weights",
            f"convert it with .to({weight.dtype}), convert the layer, or use torch.autocast",
        )


def check_state(
    argument: str,
    state: Any,
    shape: tuple[int, int, int],
    weight: Tensor,
    *,
    batched: bool,
    cast: bool,
) -> None:
    expected = shape if batched else (shape[0], shape[2])
    if not isinstance(state, Tensor):
        raise InvalidInput(
            argument, f"a {type(state).__name__}", f"a Tensor of shape {expected}", "pass a Tensor"
        )
    check_dense(argument, state)
    if tuple(state.shape) != expected:
        raise InvalidInput(
            argument,
            shape_of(state),
            f"{expected} (layers · directions, {'batch, ' if batched else ''}size)",
            "give one state a layer and direction"
            + (", batch in the middle even with batch_first" if batched else ", without a batch"),
        )
    check_values_of(argument, state, weight, cast=cast)


def check_pair(hx: Any) -> tuple[Any, Any]:
    if not isinstance(hx, (tuple, list)) or len(hx) != 2:
        got = f"{len(hx)} items" if isinstance(hx, (tuple, list)) else f"a {type(hx).__name__}"
        raise InvalidInput(
            "hx", got, "a pair (h_0, c_0)", "an LSTM carries two states: pass both or neither"
        )
    return hx[0], hx[1]


def read_lengths(lengths: Any, batch: Any, device: torch.device, *, packed: bool) -> Tensor | None:
    """Lengths as an int64 tensor of shape (B,) on the input's device; values are checked later."""
    if lengths is None:
        return None
    if packed:
        raise InvalidInput(
            "lengths",
            "lengths beside a PackedSequence, which carries its own",
            "one of the two",
            "pass the padded tensor with lengths, or the PackedSequence alone",
        )
    if isinstance(lengths, (list, tuple)):
        if not all(isinstance(n, int) and not isinstance(n, bool) for n in lengths):
            raise InvalidInput(
                "lengths", "a list with other things than ints", "ints", "count whole steps"
            )
        if any(abs(n) >= 2**63 for n in lengths):
            raise InvalidInput(
                "lengths", "a length beyond 64 bits", "at most the input's steps", "count the steps"
            )
        lengths = torch.tensor(lengths, dtype=torch.int64, device="cpu")
    if not isinstance(lengths, Tensor):
        raise InvalidInput(
            "lengths",
            f"a {type(lengths).__name__}",
            "a Tensor or list of ints, one a sequence",
            "pass torch.tensor(lengths)",
        )
    if lengths.dtype not in INTEGERS:
        raise InvalidInput(
            "lengths", str(lengths.dtype), "integers", "convert it with .to(torch.int64)"
        )
    if lengths.device.type != "cpu" and lengths.device != device:
        raise InvalidInput(
            "lengths",
            f"a tensor on {lengths.device}",
            f"one on cpu or on {device}, where the input is",
            "move it with .cpu()",
        )
    if lengths.dim() == 0:
        lengths = lengths.unsqueeze(0)
    if lengths.dim() != 1 or lengths.shape[0] != batch:
        raise InvalidInput(
            "lengths", shape_of(lengths), f"({batch},), one a sequence", "check the batch dimension"
        )
    found: Tensor = lengths.to(device=device, dtype=torch.int64)
    return found


def read_resets(
    resets: Any, x: Tensor, *, batched: bool, batch_first: bool, packed: bool
) -> Tensor | None:
    """Resets as (T, B) beside the input (T, B, I)."""
    if resets is None:
        return None
    if packed:
        raise InvalidInput(
            "resets",
            "resets beside a PackedSequence",
            "a padded input",
            "pass the padded tensor with lengths and resets",
        )
    if not isinstance(resets, Tensor):
        raise InvalidInput(
            "resets", f"a {type(resets).__name__}", "a bool Tensor", "pass torch.tensor(resets)"
        )
    if resets.dtype != torch.bool:
        raise InvalidInput(
            "resets", str(resets.dtype), "torch.bool", "compare or convert: resets.to(torch.bool)"
        )
    if resets.device != x.device:
        raise InvalidInput(
            "resets",
            f"a tensor on {resets.device}",
            f"one on {x.device}, where the input is",
            f"move it with .to('{x.device}')",
        )
    steps, batch = x.shape[0], x.shape[1]
    expected = (steps,) if not batched else (batch, steps) if batch_first else (steps, batch)
    if tuple(resets.shape) != expected:
        raise InvalidInput(
            "resets",
            shape_of(resets),
            f"{expected}, the input's leading shape",
            "one flag a step and sequence, in the input's own order",
        )
    if not batched:
        return resets.unsqueeze(1)
    return resets.transpose(0, 1) if batch_first else resets
