"""torch's fused cells, written out, are torch's cells: states, and all gradients."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._subclasses import FakeTensorMode

from ecornn.echo.cells import without_fused_cells

aten = torch.ops.aten
BATCH, SIZE = 3, 5
GATES = {"lstm": 4, "gru": 3}
FORWARD = {
    "lstm": aten._thnn_fused_lstm_cell.default,
    "gru": aten._thnn_fused_gru_cell.default,
}
BACKWARD = {
    "lstm": aten._thnn_fused_lstm_cell_backward_impl.default,
    "gru": aten._thnn_fused_gru_cell_backward.default,
}


class Joint:
    """Both passes of a cell as torch traces them on a GPU. These operators run nowhere else, and
    tensors without numbers cannot be traced through autograd for a GPU that is not there: written
    by hand."""

    def __init__(self, kind: str, dtype: torch.dtype, *, bias: bool, of: str = "hc") -> None:
        self.kind, self.dtype, self.bias, self.of = kind, dtype, bias, of
        self.mode, self.graph = FakeTensorMode(), fx.Graph()
        columns = GATES[kind] * SIZE
        x, h = self.given("of_x", BATCH, columns), self.given("of_h", BATCH, columns)
        state = self.given("state", BATCH, SIZE)
        biases = [self.given(name, columns) for name in ("bias_x", "bias_h")] if bias else []
        cell = self.graph.call_function(FORWARD[kind], (x, h, state, *biases))
        lstm = kind == "lstm"
        after = [self.part(cell, k, BATCH, SIZE) for k in range(2 if lstm else 1)]
        workspace = self.part(cell, len(after), BATCH, (4 if lstm else 5) * SIZE)
        arriving = [self.given(f"gradient_{n}", BATCH, SIZE) for n in ("hc" if lstm else "h")]
        if lstm:
            shown = [g if name in of else None for g, name in zip(arriving, "hc", strict=True)]
            args: tuple[Any, ...] = (*shown, state, after[1], workspace, bias)
        else:
            args = (arriving[0], workspace, bias)
        back = self.graph.call_function(BACKWARD[kind], args)
        back.meta["val"] = ()
        sizes = [(BATCH, columns), (BATCH, SIZE)] if lstm else [(BATCH, columns)] * 2
        sizes += [] if lstm else [(BATCH, SIZE)]
        sizes += [(columns,)] * ((1 if lstm else 2) * bias)
        found = [self.part(back, k, *size) for k, size in enumerate(sizes)]
        self.workspace, self.results = workspace, [*after, *found]

    def given(self, name: str, *size: int) -> fx.Node:
        node = self.graph.placeholder(name)
        node.meta["val"] = self.sized(*size)
        return node

    def part(self, of: fx.Node, index: int, *size: int) -> fx.Node:
        node = self.graph.call_function(operator.getitem, (of, index))
        node.meta["val"] = self.sized(*size)
        return node

    def sized(self, *size: int) -> Tensor:
        with self.mode:
            return torch.empty(size, dtype=self.dtype)

    def module(self, *more: fx.Node) -> fx.GraphModule:
        self.graph.output((*self.results, *more))
        return fx.GraphModule({}, self.graph)

    def numbers(self) -> list[Tensor]:
        generator = torch.Generator().manual_seed(3)
        found = self.graph.find_nodes(op="placeholder")
        return [
            torch.randn(node.meta["val"].shape, generator=generator, dtype=torch.float64).to(
                self.dtype
            )
            for node in found
        ]

    def expected(self, numbers: list[Tensor]) -> list[Tensor]:
        """By torch's own cell, in float64: its products are with unit matrices."""
        with_grad = [n.double().requires_grad_() for n in numbers]
        count = 5 if self.bias else 3
        (of_x, of_h, state, *biases), arriving = with_grad[:count], with_grad[count:]
        unit = torch.eye(GATES[self.kind] * SIZE, dtype=torch.float64)
        zeros = [torch.zeros(len(unit), dtype=torch.float64)] * 2
        # the state's own product is left out: what is given as `of_h` is taken in its place
        into = torch.zeros(len(unit), SIZE, dtype=torch.float64)
        if self.kind == "lstm":
            given_h = torch.zeros(BATCH, SIZE, dtype=torch.float64)
            after = torch.lstm_cell(of_x + of_h, [given_h, state], unit, into, *(biases or zeros))
            both = zip(after, arriving, strict=True)
            pairs = [pair for pair, name in zip(both, "hc", strict=True) if name in self.of]
            wanted = [of_x, state, *biases[:1]]
        else:
            after = (_gru(of_x, of_h, state, biases),)
            pairs, wanted = [(after[0], arriving[0])], [of_x, of_h, state, *biases]
        loss = sum(((a * g).sum() for a, g in pairs), torch.zeros(()))
        return [*after, *torch.autograd.grad(loss, wanted)]


def _gru(of_x: Tensor, of_h: Tensor, h: Tensor, biases: list[Tensor]) -> Tensor:
    """torch's cell multiplies the state itself: here is what it does with the product."""
    if biases:
        of_x, of_h = of_x + biases[0], of_h + biases[1]
    (x_r, x_z, x_n), (h_r, h_z, h_n) = of_x.chunk(3, 1), of_h.chunk(3, 1)
    z = torch.sigmoid(x_z + h_z)
    n = torch.tanh(x_n + torch.sigmoid(x_r + h_r) * h_n)
    return (1 - z) * n + z * h


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("kind", "of"), [("lstm", "hc"), ("lstm", "h"), ("lstm", "c"), ("gru", "h")]
)
def test_the_same_cell(kind: str, of: str, dtype: torch.dtype, bias: bool) -> None:
    joint = Joint(kind, dtype, bias=bias, of=of)
    numbers = joint.numbers()
    module = joint.module()
    assert without_fused_cells(module) == 1
    targets = {node.target for node in module.graph.nodes}
    assert not targets & {FORWARD[kind], BACKWARD[kind], operator.getitem}
    found, expected = module(*numbers), joint.expected(numbers)
    bound = {
        torch.float64: 1e-12,
        torch.float32: 1e-6,
        torch.bfloat16: 2**-8,
        torch.float16: 2**-11,
    }
    assert len(found) == len(expected)
    for one, right in zip(found, expected, strict=True):
        assert one.dtype == dtype
        # a bias's gradient is the sum of rows that were rounded
        atol = float(right.detach().abs().max()) * bound[dtype] * (BATCH if one.dim() == 1 else 1)
        torch.testing.assert_close(one.double(), right, rtol=bound[dtype], atol=atol)
    for node in module.graph.nodes:
        if node.op == "call_function":
            assert isinstance(node.meta["val"], Tensor), "later stages read the sizes"


def test_the_definition_above_is_torch_s() -> None:
    torch.manual_seed(0)
    x, h = torch.randn(BATCH, 2, dtype=torch.float64), torch.randn(BATCH, SIZE, dtype=torch.float64)
    cell = torch.nn.GRUCell(2, SIZE).double()
    of_x, of_h = x @ cell.weight_ih.t(), h @ cell.weight_hh.t()
    torch.testing.assert_close(_gru(of_x, of_h, h, [cell.bias_ih, cell.bias_hh]), cell(x, h))


@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_a_cell_without_a_backward_pass(kind: str) -> None:
    joint = Joint(kind, torch.float64, bias=True)
    numbers = joint.numbers()
    count = 2 if kind == "lstm" else 1
    expected = joint.expected(numbers)[:count]
    del joint.results[count:]
    module = joint.module()
    module.graph.eliminate_dead_code()
    assert without_fused_cells(module) == 1
    torch.testing.assert_close(list(module(*numbers)), expected)


@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_a_workspace_that_somebody_else_reads_stays(kind: str) -> None:
    joint = Joint(kind, torch.float32, bias=True)
    module = joint.module(joint.workspace)
    assert without_fused_cells(module) == 0
    assert FORWARD[kind] in {node.target for node in module.graph.nodes}
