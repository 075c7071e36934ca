"""A budget of a divided model is one of its whole step: parts and recurrent layers share it."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ecornn
from ecornn.bench.models.step import make_step
from ecornn.bench.training.memory import allocated_peak
from ecornn.echo.graph import NotUnderstood
from ecornn.echo.lean import cross_entropy, layers
from ecornn.errors import InvalidInput

pytestmark = pytest.mark.usefixtures("fresh_compiler")


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What oneDNN takes for itself is not seen."""
    monkeypatch.setattr(layers, "FEWEST_BYTES", 0)
    torch.manual_seed(0)
    with torch.backends.mkldnn.flags(enabled=False):
        yield


class Listener(nn.Module):
    """Layers of two directions that are added, of which the first reads more than the others."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.front = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 48), nn.Tanh())
        sizes = [48, *[16] * (layers - 1)]
        self.layers = nn.ModuleList(nn.GRU(size, 16, bidirectional=True) for size in sizes)
        self.dropout, self.out = nn.Dropout(0.2), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.front(x)
        for layer in self.layers:
            both = layer(x)[0]
            x = both[..., :16] + both[..., 16:]
        return self.out(self.dropout(x)).square().mean()


def given() -> Tensor:
    """Two steps: each takes dozens of operators, of which a rehearsal runs every one."""
    return torch.randn(2, 40, 8)


def held(model: nn.Module, *inputs: Tensor) -> int:
    return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers(), *inputs))


def beside(run: nn.Module, *inputs: Tensor) -> int:
    """What both passes take, as they run."""

    def passes() -> None:
        run(*inputs).backward()

    passes()  # some allocate more, once
    found = []
    for _ in range(2):  # at times torch's profiler sees nothing at all
        run.zero_grad()
        found.append(allocated_peak(passes))
    run.zero_grad()
    return max(found)


def gradients(run: nn.Module, *inputs: Tensor) -> list[Tensor]:
    torch.manual_seed(3)
    run.zero_grad()
    run(*inputs).backward()
    return [weight.grad.clone() for weight in run.parameters() if weight.grad is not None]


def smallest(run: nn.Module, *inputs: Tensor) -> int:
    """What a refusal says would be enough."""
    with pytest.raises(InvalidInput, match="the smallest peak that was found") as refused:
        run(*inputs)
    assert refused.value.argument == "memory"
    return int(refused.value.expected.split()[2].replace(",", ""))


@pytest.mark.parametrize("fraction", [1.0, 0.85, 0.7, 0.55])
def test_a_fraction_is_one_of_what_the_model_holds_as_it_is_written(fraction: float) -> None:
    model, x = Listener(), given()
    as_written, expected = beside(model, x), gradients(model, x)
    limit = held(model, x) + int(fraction * as_written)
    run = ecornn.compile(model, memory=fraction, codegen="eager")
    assert all(map(torch.equal, gradients(run, x), expected))
    found = beside(run, x)
    assert held(model, x) + found <= limit
    explained = run.explain()
    assert explained.predicted_peak_bytes(0) == found
    told = " ".join(str(explained).split())
    assert f"{limit:,} bytes for a whole step like the first, weights and inputs included" in told
    again = run._regions.replaced.latest_again
    assert f"of 4 calls of recurrent layers in a forward pass {again} are run again" in told
    assert ("as few as were found to be enough; that is estimated to take" in told) == (again > 0)
    assert (again > 0) == (fraction < 1)


def test_what_is_said_to_be_the_smallest_is_met_and_no_less() -> None:
    model, x = Listener(3), given()
    least = smallest(ecornn.compile(model, memory=0.1, codegen="eager"), x)
    assert not model._forward_pre_hooks
    assert "forward" not in model.front.__dict__
    run = ecornn.compile(model, memory=least, codegen="eager")
    assert held(model, x) + beside(run, x) == least
    assert smallest(ecornn.compile(model, memory=least - 1, codegen="eager"), x) == least
    torch._dynamo.reset()
    as_small_as_can_be = ecornn.compile(model, memory="min", codegen="eager")
    assert held(model, x) + beside(as_small_as_can_be, x) == least
    assert "as little memory as can be was asked for" in str(as_small_as_can_be.explain())


class Looped(nn.Module):
    """Its part, which is called five times, keeps nearly all."""

    def __init__(self) -> None:
        super().__init__()
        made = (nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16), nn.Sigmoid())
        self.part, self.last = nn.Sequential(*made), nn.GRU(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(5):
            x = self.part(x)
        return self.last(x.view(4, -1, 16))[0].sum()


@cache
def least_and_most() -> tuple[int, int]:
    """Of a step of `Looped` whose layer is run again: by any part, and where none spends time."""
    model, x = Looped(), torch.randn(64, 16)
    auto = ecornn.compile(model, codegen="eager", lean="layers")
    most = held(model, x) + beside(auto, x)
    least = smallest(ecornn.compile(model, memory=0.01, codegen="eager"), x)
    torch._dynamo.reset()
    return least, most


@pytest.mark.parametrize("share", [0.05, 0.5, 0.95])
def test_parts_spend_time_where_all_layers_are_not_enough(share: float) -> None:
    least, most = least_and_most()
    limit = int(least + share * (most - least))
    model, x = Looped(), torch.randn(64, 16)
    expected = gradients(model, x)
    run = ecornn.compile(model, memory=limit, codegen="eager")
    for one, other in zip(gradients(run, x), expected, strict=True):
        torch.testing.assert_close(one, other)  # autograd adds those of a part in another order
    assert least <= held(model, x) + beside(run, x) <= limit < most
    # the first of its calls is given what needs no gradient
    graphs = run.explain().graphs
    assert {graph.name for graph in graphs} == {"part"}
    assert {graph.memory.kind for graph in graphs} <= {"bytes", "min"}
    assert share < 0.5 or graphs[-1].memory.kind == "bytes"
    assert all(graph.over_budget is None for graph in graphs)


def test_what_fits_as_it_is_written_takes_no_time() -> None:
    model, x = Looped(), torch.randn(64, 16)
    run = ecornn.compile(model, memory="1GiB", codegen="eager")
    run(x).backward()
    assert {graph.chosen.strategy for graph in run.explain().graphs} == {"keep all"}
    assert "0 are run again: none need be" in " ".join(str(run.explain()).split())


def test_who_wants_no_function_replaced_gets_none() -> None:
    model, x = Listener(2), given()
    least = smallest(ecornn.compile(model, memory=0.01, codegen="eager"), x)
    plain = smallest(ecornn.compile(model, memory=0.01, codegen="eager", lean=False), x)
    assert plain > least
    run = ecornn.compile(model, memory=plain, codegen="eager", lean=False)
    assert held(model, x) + beside(run, x) == plain
    assert run._regions.replaced.latest_able == 0
    every = ecornn.compile(model, memory="1GiB", codegen="eager", lean="layers")
    every(x).backward()
    told = " ".join(str(every.explain()).split())
    assert "of 2 calls of recurrent layers in a forward pass 2 are run again: as asked for" in told


def test_it_is_planned_for_the_first_call_that_asks_for_gradients() -> None:
    model, x, small = Listener(), given(), torch.randn(3, 2, 8)
    limit = held(model, x) + beside(model, x) * 7 // 10
    run = ecornn.compile(model, memory=limit, codegen="eager")
    model.eval()
    with torch.no_grad():
        expected = model(small)
        assert torch.equal(run(small), expected)
    assert run._regions.step is None
    run.train()
    assert held(model, x) + beside(run, x) <= limit
    assert run._regions.step is not None
    run.eval()
    with torch.no_grad():
        assert torch.equal(run(small), expected)
    assert copy.deepcopy(run)._regions.step is None, "a copy is planned anew"
    frozen = ecornn.compile(Listener().requires_grad_(False), memory=1, codegen="eager")
    assert frozen(x).requires_grad is False


def test_planning_draws_nothing() -> None:
    model, x = Listener(2), given()
    before = torch.get_rng_state()
    expected = model(x)
    torch.set_rng_state(before)
    run = ecornn.compile(model, memory=0.7, codegen="eager")
    assert torch.equal(run(x), expected)


class Scoring(nn.Module):
    """Whoever calls it may see its scores."""

    def __init__(self, *, shows: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.GRU(16, 16) for _ in range(3))
        self.output, self.shows = nn.Linear(16, 400), shows

    def forward(self, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor | None]:
        for layer in self.layers:
            x = layer(x)[0]
        scores = self.output(x).flatten(0, 1)
        return F.cross_entropy(scores, target), scores.detach() if self.shows else None


def test_scores_that_others_refer_to_are_found_out_after_a_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before, it is assumed that nobody does."""
    monkeypatch.setattr(cross_entropy, "FEWEST_BYTES", 0)
    monkeypatch.setattr(cross_entropy, "CHUNK_BYTES", 16 * 400 * 4)
    inputs = torch.randn(2, 100, 16), torch.randint(400, (200,))
    hiding, showing = Scoring(shows=False), Scoring(shows=True)
    asked = smallest(ecornn.compile(hiding, memory=0.01, codegen="eager"), *inputs)
    run = ecornn.compile(hiding, memory=asked, codegen="eager")
    for _ in range(3):
        run(*inputs)[0].backward()
    step = run._regions.step
    assert step.way.found.held + step.way.found.most == asked
    assert run.explain().predicted_peak_bytes(held(hiding, *inputs)) == asked
    asked = smallest(ecornn.compile(showing, memory=0.01, codegen="eager"), *inputs)
    shown = ecornn.compile(showing, memory=asked, codegen="eager")
    shown(*inputs)[0].backward()
    more = smallest(shown, *inputs)
    assert more > asked, "the gradient of the scores has a place of its own"
    enough = ecornn.compile(showing, memory=more, codegen="eager")
    for _ in range(3):
        enough(*inputs)[0].backward()
    assert enough.explain().predicted_peak_bytes(held(showing, *inputs)) == more


class Moody(nn.Module):
    """Its course depends on its numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

    def forward(self, x: Any) -> Tensor:
        x = x.x if isinstance(x, Held) else x
        for _ in range(4 if x.sum() > 0 else 5):
            x = self.part(x)
        return x


class Held:
    def __init__(self, x: Tensor) -> None:
        self.x = x


@pytest.mark.parametrize("regions", ["auto", ["part"]])
def test_what_cannot_be_rehearsed_cannot_be_promised(regions: Any) -> None:
    run = ecornn.compile(Moody(), memory=0.9, regions=regions)
    with torch.no_grad():
        run(torch.ones(2, 4))
    for _ in range(2):
        with pytest.raises(NotUnderstood, match=r"fraction 0.9 cannot be promised for a whole"):
            run(torch.ones(2, 4))
    unknown = ecornn.compile(Moody(), memory="1GiB", regions=regions)
    with pytest.raises(NotUnderstood, match=r"objects that may hold tensors.*\"auto\" or \"min\""):
        unknown(Held(torch.ones(2, 4)))
    for memory in ("auto", "min"):
        ecornn.compile(Moody(), memory=memory, regions=regions)(torch.ones(2, 4)).sum().backward()


class Checkpointing(nn.Module):
    """Its part is left to torch's own partitioner."""

    def __init__(self) -> None:
        super().__init__()
        self.part = Checkpointed()

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(4):
            x = self.part(x)
        return x.sum()


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        def run(x: Tensor) -> Tensor:
            return torch.tanh(self.inner(x)).sin()

        made: Tensor = checkpoint(run, x, use_reentrant=False, preserve_rng_state=False)
        return made


def test_a_part_that_is_not_understood_is_counted_all_the_same() -> None:
    model, x = Checkpointing(), torch.randn(32, 16)
    as_written, expected = held(model, x) + beside(model, x), gradients(model, x)
    run = ecornn.compile(model, memory="1GiB", codegen="eager")
    with pytest.warns(ecornn.echo.FellBack):
        run(x).backward()
    found = run._regions.step.way.found
    assert held(model, x) + beside(run, x) == found.held + found.most
    assert found.held + found.most > as_written, "torch keeps more than the checkpoints do"
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("error", ecornn.echo.FellBack)
        run = ecornn.compile(model, memory=as_written, codegen="eager")
        assert all(map(torch.equal, gradients(run, x), expected))
    assert held(model, x) + beside(run, x) == as_written
    assert "no part is compiled: the step holds less without" in " ".join(
        str(run.explain()).split()
    )


@pytest.mark.parametrize("codegen", ["eager", "inductor"])
def test_what_will_run_is_known_before(codegen: str) -> None:
    step = make_step("nmt", size="tiny", device="cpu", batch=16)
    run = step.run = ecornn.compile(step.model, memory=0.8, codegen=codegen)
    for _ in range(2):
        step()
    way = run._regions.step.way
    planned, graphs = way.graphs["decoder"], run.explain().graphs
    assert not {*map(id, planned)} & {*map(id, graphs)}, "reports are of what runs"
    for one, other in zip(planned, graphs, strict=True):
        assert (one.chosen, one.foretold) == (other.chosen, other.foretold)
        assert one.sums == other.sums is not None
    found = way.found
    assert found.most == run.explain().predicted_peak_bytes(0)

    def passes() -> None:
        step.loss().backward()

    step.clear()
    assert found.most == pytest.approx(allocated_peak(passes), rel=0.02)
    assert found.held + found.most <= run._regions.step.limit


def test_autocast_is_that_of_the_call() -> None:
    """A step is planned within it, and its backward pass runs outside."""
    model, x = Listener(), torch.randn(4, 20, 8)

    def loss(run: nn.Module) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            made: Tensor = run(x)
        return made

    as_written = allocated_peak(lambda: loss(model).backward())
    model.zero_grad()
    as_written = max(as_written, allocated_peak(lambda: loss(model).backward()))
    run = ecornn.compile(model, memory=0.7, codegen="eager")
    for _ in range(2):
        model.zero_grad()
        loss(run).backward()
    step = run._regions.step
    assert step.as_written == held(model, x) + as_written
    assert run._regions.replaced.latest_again > 0
    assert run.explain().predicted_peak_bytes(0) == step.way.found.most
    found = []
    for _ in range(2):
        model.zero_grad()
        found.append(allocated_peak(lambda: loss(run).backward()))
    assert max(found) == step.way.found.most


def test_nothing_is_kept_alive_by_planning() -> None:
    model, x = Listener(2), given()
    run = ecornn.compile(model, memory=0.7, codegen="eager")
    run(x).backward()
    gone = weakref.ref(model.layers[0].weight_hh_l0), weakref.ref(x)
    del model, run, x
    gc.collect()
    assert [one() for one in gone] == [None, None]
