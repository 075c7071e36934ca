"""`ecornn.explain`: what was decided for a model that was compiled by the backend's name."""

from __future__ import annotations

import gc
import json

import pytest
import torch
from torch import Tensor, nn

import ecornn
from ecornn.echo.by_name import ByName
from ecornn.echo.options import AUTO
from ecornn.echo.report import GraphReport
from ecornn.errors import InvalidInput

pytestmark = pytest.mark.usefixtures("fresh_compiler")


class Two(nn.Module):
    """Two graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.one(x)).sin()
        torch._dynamo.graph_break()
        return self.two(x).cos()


def trained(model: nn.Module, memory: str) -> nn.Module:
    options = {"memory": memory, "codegen": "eager"}
    run: nn.Module = torch.compile(model, backend="echo", options=options)
    run(torch.randn(3, 4)).sum().backward()
    return run


def test_a_model_is_told_its_own_graphs_in_three_forms() -> None:
    first, other = Two(), nn.Linear(4, 4)
    run = trained(first, "min")
    trained(other, "auto")
    for asked in (run, first):
        explained = ecornn.explain(asked)
        assert len(explained.graphs) == 2
        assert str(explained).count("memory min") == 2
        assert "predicted peak" in str(explained)
        assert [g["memory"]["kind"] for g in json.loads(explained.to_json())["graphs"]] == [
            "min",
            "min",
        ]
        assert explained.to_html().count("<h2>") == 2
    assert [graph.memory.kind for graph in ecornn.explain(other).graphs] == ["auto"]
    assert [graph.memory.kind for graph in ecornn.explain().graphs[-3:]] == ["min", "min", "auto"]
    assert "nothing is compiled" in str(ecornn.explain(Two()))


def test_what_is_compiled_in_the_friendly_form_explains_itself() -> None:
    compiled = ecornn.compile(nn.Linear(4, 4), memory="min")
    compiled(torch.randn(3, 4)).sum().backward()
    assert str(ecornn.explain(compiled)) == str(compiled.explain())
    with pytest.raises(InvalidInput, match="model: got 3"):
        ecornn.explain(3)  # type: ignore[arg-type]


def test_old_graphs_and_weights_that_are_gone_are_forgotten() -> None:
    known = ByName(most=2)
    layers = [nn.Linear(2, 2) for _ in range(3)]
    for k, layer in enumerate(layers):
        known.add(GraphReport(str(k), "eager", "", AUTO), layer.parameters())
    assert [[graph.name for graph in known.of(layer)] for layer in layers] == [[], ["1"], ["2"]]
    del layers[1], layer
    gc.collect()
    assert [weight() for weight in known.weights[0]] == [None, None]
