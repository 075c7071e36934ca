"""`RnnSpec`: one frozen value that says what is asked of a recurrent network."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

Cell = Literal["lstm", "gru", "rnn_tanh", "rnn_relu"]
#: "auto": whoever compiles the graph chooses, and the states are kept if nobody does.
Keep = Literal["none", "states", "gates", "auto"]
KeepRequest = Literal["auto", "states", "gates"]
AfterEnd = Literal["zeros", "frozen"]
ResetTo = Literal["zero", "initial"]

#: Rows of the weight matrices, in units of the hidden size.
GATES: dict[str, int] = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}

#: Every weight one direction of one layer may have, in the order the op receives them.
WEIGHT_PARTS: tuple[str, ...] = (
    "w_ih",
    "w_hh",
    "b_ih",
    "b_hh",
    "w_hr",
    "norm_ih",
    "norm_hh",
    "norm_c",
    "norm_c_bias",
)


def weight_layout(cell: str, *, bias: bool, projection: bool, layer_norm: bool) -> str:
    """The comma-separated names of the weights one direction has, in the op's order."""
    present = {"w_ih", "w_hh"}
    if bias:
        present |= {"b_ih", "b_hh"}
    if projection:
        present.add("w_hr")
    if layer_norm:
        present |= {"norm_ih", "norm_hh"}
        if cell == "lstm":
            present |= {"norm_c", "norm_c_bias"}
    return ",".join(part for part in WEIGHT_PARTS if part in present)


@dataclass(frozen=True)
class RnnSpec:
    """What is asked: the network, the features of this call, and how the call is observed.

    `lengths` and `resets` say that the call has them, not their values; `long` says that there are
    more steps than cuDNN takes. `transformed` says that torch.func is at work around the call
    (vmap, grad), `forward_mode` that forward-mode derivatives are, `traced` that a compiler or
    exporter is, `captured` that a CUDA graph is being captured. `short` says that there are too few
    steps to set up much, `brief` that there are so few that what the host does for a call counts,
    `roomy` that all gates of a layer take so little that keeping them is no loss, and that nobody
    around it wants less to be kept, `batch` how many sequences there are; 0 where a tracer does not
    say.
    """

    cell: str
    input_size: int
    hidden: int
    layers: int = 1
    bidirectional: bool = False
    projection: int = 0
    bias: bool = True
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    dropout: float = 0.0  # between layers, 0 outside of training
    variational: bool = False  # that dropout has one mask a sequence
    layer_norm: bool = False
    zoneout: bool = False
    lengths: bool = False
    resets: bool = False
    cell_states: bool = False
    needs_grad: bool = False
    keep: str = "auto"
    backend: str = "auto"
    traced: bool = False
    transformed: bool = False
    forward_mode: bool = False
    long: bool = False
    captured: bool = False
    short: bool = False
    brief: bool = False
    roomy: bool = False
    batch: int = 0

    @property
    def directions(self) -> int:
        return 2 if self.bidirectional else 1

    @property
    def output_size(self) -> int:
        """Size of the recurrent state h: the projection where there is one."""
        return self.projection or self.hidden
