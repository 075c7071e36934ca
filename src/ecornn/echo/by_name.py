"""`explain`: what was decided for models that `torch.compile(..., backend="echo")` has compiled.

torch's compiled models have no place for it, so that this process remembers the latest graphs, and
whose weights they read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any
from weakref import ref

from torch import nn

from ecornn.echo.explain import Explanation
from ecornn.echo.report import GraphReport, Report
from ecornn.errors import InvalidInput


@dataclass
class ByName(Report):
    """Graphs of any model, the latest last."""

    #: By place, weights that each graph reads, as long as these live.
    weights: list[list[ref[nn.Parameter]]] = field(default_factory=list)

    def add(self, told: GraphReport, weights: Iterable[nn.Parameter] = ()) -> None:
        super().add(told)
        self.weights.append([ref(weight) for weight in weights])
        del self.weights[: -len(self.graphs)]

    def of(self, model: nn.Module) -> list[GraphReport]:
        mine = {id(weight) for weight in model.parameters()}
        return [
            graph
            for graph, weights in zip(self.graphs, self.weights, strict=True)
            if any(id(weight()) in mine for weight in weights)
        ]


#: What `torch.compile(..., backend="echo")` decided in this process; the latest graphs.
compiled_by_name = ByName(most=64)


def explain(model: Callable[..., Any] | None = None) -> Explanation:
    """What Echo has decided for a model, in the form that `ecornn.compile`'s `explain()` has: text,
    `to_json()` and `to_html()`.

    model: compiled by `ecornn.compile` or by `torch.compile(..., backend="echo")`, or the model
        that was given to that: the graphs that read its weights. Without one, the latest graphs of
        all that was compiled by the backend's name.
    """
    from ecornn.echo.compiled import CompiledFunction, CompiledModel

    if model is None:
        return Explanation(compiled_by_name.graphs)
    if isinstance(model, CompiledModel | CompiledFunction):
        return model.explain()
    if not isinstance(model, nn.Module):
        raise InvalidInput(
            "model",
            repr(model),
            "a model, or what ecornn.compile has returned",
            "leave it out for the latest graphs of all",
        )
    graphs = compiled_by_name.of(model)
    none = 'nothing is compiled by backend="echo" yet that reads the weights of this model'
    return Explanation(graphs, () if graphs else (none,))
