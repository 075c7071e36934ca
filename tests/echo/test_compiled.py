"""`ecornn.compile`: behaves as the model, and can say what was decided."""

from __future__ import annotations

import copy
import json
import pickle
from html.parser import HTMLParser
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ecornn
from ecornn.errors import InvalidInput
from support.translator import DecoderStep

pytestmark = pytest.mark.usefixtures("fresh_compiler")


class Attending(nn.Module):
    def __init__(self, hidden: int = 8) -> None:
        super().__init__()
        self.keys, self.step = nn.Linear(hidden, hidden), DecoderStep(hidden)

    def forward(self, values_BSH: Tensor) -> Tensor:
        state = (values_BSH.mean(1), values_BSH.amax(1))
        for _ in range(3):  # too few to be compiled alone
            state = self.step(state[0], state, self.keys(values_BSH), values_BSH)
        return state[0]


def test_it_behaves_as_the_model() -> None:
    model = Attending()
    names = list(model.state_dict())
    compiled = ecornn.compile(model)
    assert list(compiled.state_dict()) == names
    assert [name for name, _ in compiled.named_parameters()] == names
    assert compiled.step is model.step
    compiled.eval()
    assert not model.step.training
    assert not compiled.training
    compiled.train()
    assert model.training
    compiled.to(torch.float64)
    assert model.keys.weight.dtype == torch.float64
    compiled.extra = 3
    assert model.extra == 3
    del compiled.extra
    assert not hasattr(model, "extra")
    other = Attending().double()
    assert str(compiled.load_state_dict(other.state_dict())) == "<All keys matched successfully>"
    assert torch.equal(model.keys.weight, other.keys.weight)
    with pytest.raises(AttributeError):
        compiled.nothing_of_the_kind  # noqa: B018


@pytest.mark.parametrize("again", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_is_its_own(again: Any) -> None:
    compiled = ecornn.compile(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), memory="min")
    x = torch.randn(2, 8)
    expected = compiled(x)
    other = again(compiled)
    with torch.no_grad():
        compiled.get_submodule("0").weight.zero_()
    assert type(other) is type(compiled)
    assert torch.equal(other(x), expected)
    assert not torch.equal(compiled(x), expected)
    assert "memory min" in str(other.explain())


def test_a_function() -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        return torch.tanh(torch.tanh(x @ w).sin() @ w).sum()

    compiled = ecornn.compile(function, memory="min")
    x, w = (torch.randn(4, 4, requires_grad=True) for _ in range(2))
    found = torch.autograd.grad(compiled(x, w), (x, w))
    expected = torch.autograd.grad(function(x, w), (x, w))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert "function: memory min" in str(compiled.explain())


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"memory": "a lot"}, "memory: got 'a lot'"),
        ({"memory": -3}, "memory: got -3"),
        ({"codegen": "fortran"}, "codegen: got 'fortran'"),
        ({"lean": "very"}, "lean: got 'very'"),
        ({"regions": "step"}, r"write \['step'\]"),
        ({"regions": ["stop"]}, "its parts are: keys, step"),
        ({"regions": [nn.Linear(2, 2)]}, "its parts are: keys, step"),
    ],
)
def test_what_is_wrong_is_told_at_once(arguments: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidInput, match=told):
        ecornn.compile(Attending(), **arguments)


def test_what_cannot_be_compiled_is_told() -> None:
    with pytest.raises(InvalidInput, match="model: got 3"):
        ecornn.compile(3)
    with pytest.raises(InvalidInput, match="regions"):
        ecornn.compile(torch.sin, regions=["step"])


def test_an_impossible_budget_is_refused_in_plain_words() -> None:
    compiled = ecornn.compile(Attending(), memory="100 B")
    with pytest.raises(InvalidInput, match=r"at least [0-9,]+ bytes"):
        compiled(torch.randn(2, 5, 8))


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.open: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)
        assert not any(name in ("src", "href") for name, _ in attrs)  # nothing from elsewhere
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_it_explains_itself_in_three_forms() -> None:
    compiled = ecornn.compile(Attending(16), memory="min")
    assert "nothing is compiled" in str(compiled.explain())
    compiled(torch.randn(4, 40, 16)).sum().backward()
    explained = compiled.explain()
    text = str(explained)
    for expected in ("predicted peak", "step.norm", "made again", "the whole model is compiled"):
        assert expected in text
    told = json.loads(explained.to_json())
    (graph,) = told["graphs"]
    assert graph["chosen"]["peak_bytes"] < graph["keep_all"]["peak_bytes"]
    # what the values say adds up to what is kept
    kept = sum(value["bytes"] for value in graph["values"] if value["kept"])
    assert kept == graph["chosen"]["kept_bytes"]
    assert kept == sum(row["kept_bytes"] for row in graph["modules"])
    again = [value for value in graph["values"] if not value["kept"]]
    assert any("tanh" in value["line"] for value in again)
    assert all(value["runs"] >= 1 for value in again)
    reader = _Reader()
    reader.feed(explained.to_html())
    assert reader.open == []
    assert "script" not in reader.tags
    assert "step.norm" in reader.text


def test_an_inference_graph_says_that_it_has_no_plan() -> None:
    compiled = ecornn.compile(Attending())
    with torch.no_grad():
        compiled(torch.randn(2, 5, 8))
    assert "no backward pass was planned" in str(compiled.explain())
