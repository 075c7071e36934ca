"""Functions are replaced in the rest of a model with compiled parts, and nowhere else."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

import ecornn
from ecornn.echo.lean import cross_entropy, needs
from support.translator import Translator, loss_and_gradients, sentences

pytestmark = pytest.mark.usefixtures("fresh_compiler")


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cross_entropy, "FEWEST_BYTES", 0)
    monkeypatch.setattr(cross_entropy, "CHUNK_BYTES", 16 * 11 * 4)


def test_a_model_s_bits_do_not_change_and_it_says_what_was_replaced() -> None:
    model = Translator(dropout=0.3)
    inputs = sentences(9, 7, 6)
    plain = ecornn.compile(copy.deepcopy(model), lean=False)
    lean = ecornn.compile(model)
    for _ in range(2):
        pairs = zip(
            loss_and_gradients(lean, *inputs), loss_and_gradients(plain, *inputs), strict=True
        )
        assert all(torch.equal(*pair) for pair in pairs)
    told = " ".join(str(lean.explain()).split())
    assert "cross_entropy keeps only its scores, to the same bits, in 2 calls" in told
    assert "nothing else refers to them (2 calls)" in told
    assert "no function of it is replaced: as asked for" in str(plain.explain())
    assert copy.deepcopy(plain)._asked[-2] is False
    assert len(lean.explain().graphs) == 1
    with torch.no_grad():
        lean(*inputs)
    assert "in 2 calls" in str(lean.explain())


def test_nothing_is_active_without_parts_or_after_an_error() -> None:
    model = Translator()
    lean = ecornn.compile(model)
    lean(*sentences(2, 5, 7))
    with pytest.raises(IndexError):
        lean(torch.full((2, 5), 99), torch.full((2, 7), 3))
    assert _get_current_function_mode_stack() == []
    whole = ecornn.compile(Watching(), regions=())
    whole(torch.ones(2))
    assert Watching.seen == []


def test_a_torch_that_lacks_something_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(needs, "NEEDED", ("_C._nothing_of_the_kind",))
    needs.missing.cache_clear()
    compiled = ecornn.compile(Translator())
    compiled(*sentences(2, 5, 7)).backward()
    assert "is replaced: torch" in str(compiled.explain())
    assert "has no torch._C._nothing_of_the_kind" in str(compiled.explain())
    monkeypatch.undo()
    needs.missing.cache_clear()
    assert needs.missing() is None


class Watching(nn.Module):
    """Sees the modes in force; not compiled into the graph."""

    seen: list[Any]

    def forward(self, x: Tensor) -> Tensor:
        Watching.seen = []
        watch()
        return x * 2


@torch._dynamo.disable
def watch() -> None:
    Watching.seen = _get_current_function_mode_stack()


class Negating(TorchFunctionMode):
    """A user's own."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return -result if func is torch.cos else result


class Rest(nn.Module):
    """Compiles a function of its own, and uses a mode of its own around its step."""

    def __init__(self) -> None:
        super().__init__()
        self.graphs: list[list[str]] = []
        self.step = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.compiled = torch.compile(self.losses, backend=self.counted)
        self.modes: list[list[Any]] = []

    def counted(self, module: torch.fx.GraphModule, inputs: Any) -> Any:
        self.graphs.append([str(node.target) for node in module.graph.nodes])
        self.modes.append(_get_current_function_mode_stack())
        return module.forward

    @staticmethod
    def losses(x: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(torch.cos(x), target)

    def forward(self, x: Tensor) -> Tensor:
        with Negating():
            for _ in range(5):
                x = torch.cos(self.step(x))
        target = torch.zeros(3, dtype=torch.int64)
        return self.compiled(x, target) + F.cross_entropy(x * 2, target)


def test_a_user_s_modes_and_compiled_functions() -> None:
    model, x = Rest(), torch.randn(3, 4, requires_grad=True)
    expected = loss_and_gradients(model, x)
    lean = ecornn.compile(model, regions=["step"])
    compiled = []
    for run in (lean, lean, model, lean):
        for one, other in zip(loss_and_gradients(run, x), expected, strict=True):
            torch.testing.assert_close(one, other)
        compiled.append(len(model.graphs))
    assert len(lean.explain().graphs) == 1  # of the step: the modes have not compiled it anew
    # The function was, for the mode: once, and to the same graph.
    assert len(set(compiled)) == 1
    assert all(graph == model.graphs[0] for graph in model.graphs)
    assert model.modes == [[]] * len(model.graphs)
    # The graph's own call is replaced as well, since this backend runs it as it stands.
    assert "in 6 calls" in str(lean.explain())
