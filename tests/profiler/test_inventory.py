"""One walk through a model tells what torch's three tell."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from ecornn.profiler.inventory import contents_of
from ecornn.profiler.session import device_of


class Shared(nn.Module):
    """A module in two places, the second time further out; a tied weight; a buffer that is a
    parameter elsewhere; and what is not there."""

    def __init__(self) -> None:
        super().__init__()
        inner = nn.Linear(2, 2)
        self.block = nn.Sequential(nn.Sequential(inner, nn.BatchNorm1d(2)), nn.Linear(2, 2))
        self.inner = inner
        self.other = nn.Linear(2, 2, bias=False)
        self.other.weight = self.block[1].weight
        self.register_buffer("kept", inner.weight)
        self.register_parameter("none", None)
        self.register_module("nothing", None)


class Renamed(nn.Linear):
    def named_parameters(self, *given: Any, **named: Any) -> Iterator[tuple[str, nn.Parameter]]:
        for name, one in super().named_parameters(*given, **named):
            yield f"my.{name}", one


class Closed(nn.Sequential):
    """Does not tell what is inside of it."""

    def named_modules(self, memo: Any = None, prefix: str = "", *_: Any) -> Iterator[Any]:
        yield prefix, self


@pytest.mark.parametrize(
    "make",
    [
        Shared,
        lambda: Renamed(2, 3),
        lambda: nn.Sequential(nn.Linear(2, 2), Closed(nn.Linear(2, 2)), nn.ReLU()),
        lambda: torch.jit.script(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))),
        lambda: nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 3)),
    ],
    ids=["shared", "renamed", "closed", "scripted", "lazy"],
)
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_it_is_what_torch_tells(make: Any) -> None:
    model = make()
    found = contents_of(model)
    for ours, theirs in (
        (found.modules, model.named_modules()),
        (found.parameters, model.named_parameters()),
        (found.buffers, model.named_buffers()),
    ):
        told = list(theirs)
        assert [name for name, _ in ours] == [name for name, _ in told]
        assert [id(one) for _, one in ours] == [id(one) for _, one in told]
    assert len(found.modules) > 1 or isinstance(model, Renamed)


def test_the_device_is_that_of_most_bytes() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(9, 9, device="meta"))
    assert device_of(contents_of(model)) == torch.device("meta")
    assert not contents_of(model).are_fake
    with torch._subclasses.FakeTensorMode():
        assert contents_of(nn.Linear(2, 2)).are_fake
