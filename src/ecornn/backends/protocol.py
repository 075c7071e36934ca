"""What a backend is given, what it returns, and how it refuses.

Shape suffixes: T time, B batch, I input size, R size of the state h, H hidden size, D directions,
O = D·R.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import NamedTuple, Protocol

from torch import Tensor

from ecornn.kernels.reference import DirectionWeights
from ecornn.spec import RnnSpec


@dataclass(frozen=True)
class Rejection:
    """A backend's refusal of a request, with the reason a person can act on."""

    backend: str
    reason: str

    def __str__(self) -> str:
        return f"{self.backend}: {self.reason}"


@dataclass(frozen=True)
class LayerCall:
    """One recurrent layer with all its directions, time first."""

    cell: str
    input_TBI: Tensor
    h0_DBR: Tensor
    c0_DBH: Tensor | None
    weights: tuple[DirectionWeights, ...]
    resets_TB: Tensor | None = None
    lengths_B: Tensor | None = None
    zoneout_h: Tensor | None = None  # (D, T or 1, B or 1, R or 1)
    zoneout_c: Tensor | None = None
    reset_to: str = "zero"
    after_end: str = "zeros"
    cell_states: bool = False
    keep: str = "none"

    @property
    def directions(self) -> int:
        return len(self.weights)

    def flat_weights(self) -> list[Tensor]:
        """The weights that exist, direction after direction, in the order of `WEIGHT_PARTS`."""
        return [part for direction in self.weights for part in present(direction)]


def present(direction: DirectionWeights) -> list[Tensor]:
    values = (getattr(direction, f.name) for f in fields(direction))
    return [value for value in values if value is not None]


class LayerResult(NamedTuple):
    output_TBO: Tensor
    h_n_DBR: Tensor
    c_n_DBH: Tensor | None
    cells_TBE: Tensor | None  # all cell states, (T, B, D·H), where asked for or kept
    kept: list[Tensor]


class ResultGrads(NamedTuple):
    """Gradients of a `LayerResult`; None stands for zero."""

    output_TBO: Tensor | None
    h_n_DBR: Tensor | None
    c_n_DBH: Tensor | None
    cells_TBE: Tensor | None


class BackwardRequest(NamedTuple):
    """What of the gradients is wanted."""

    needs_input: bool = True
    #: The batch is this many groups of equal size; each gets weight gradients of its own, in a
    #: leading dimension that does not exist for one group.
    samples: int = 1
    #: Nobody else reads what the forward pass kept: its list may be emptied once it was read, so
    #: that the gradients have its memory.
    last: bool = False


class CallGrads(NamedTuple):
    """Gradients of a `LayerCall`; `weights` is parallel to `flat_weights()`."""

    input_TBI: Tensor | None
    h0_DBR: Tensor
    c0_DBH: Tensor | None
    weights: list[Tensor]


class Scratch(NamedTuple):
    """Bytes that each pass of a call takes beside its results, and gives back; and those that the
    backward pass takes while it has no results yet."""

    forward: int
    backward: int
    before_gradients: int

    def beside(self, gradients: int) -> int:
        """What the backward pass takes at most beyond so many bytes of gradients."""
        return max(self.backward, self.before_gradients - gradients)


#: Of kernels that are not ours, where nobody counts it.
NOT_KNOWN = Scratch(0, 0, 0)


class Backend(Protocol):
    """Serves layer calls. `forward` and `backward` are opaque to autograd."""

    @property
    def name(self) -> str: ...

    @property
    def summary(self) -> str: ...

    def unavailable(self) -> str | None:
        """Why this backend cannot run on this machine at all; None if it can."""

    def refuse(self, spec: RnnSpec) -> str | None:
        """Why this backend cannot serve this request; None if it can."""

    def keeps(self, spec: RnnSpec) -> str:
        """What stays allocated for the backward pass: "none", "states" or "gates"."""

    def details(self, spec: RnnSpec) -> list[str]:
        """How it would serve the request, for a person to read."""

    def forward(self, call: LayerCall) -> LayerResult: ...

    def backward(
        self, call: LayerCall, result: LayerResult, grads: ResultGrads, ask: BackwardRequest
    ) -> CallGrads: ...

    def scratch(self, call: LayerCall) -> Scratch:
        """By the sizes alone: its tensors may have no numbers."""
