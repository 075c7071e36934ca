"""Feature maps that are rounded where that is asked for, and indices in narrow integers."""

from __future__ import annotations

import copy
import operator
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._functorch.aot_autograd import aot_module, make_boxed_func
from torch._functorch.partitioners import default_partition

import ecornn
from ecornn.bench.models.step import make_step
from ecornn.echo.encode import encode
from ecornn.echo.forms import BF16, FP8
from ecornn.echo.graph import read_graph
from ecornn.echo.kept_forms import check_device, chosen_form, places_told_apart
from ecornn.echo.options import Options
from ecornn.echo.passes import Passes
from ecornn.echo.rewrite import duplicate, without_unread_draws
from ecornn.echo.verify import differences
from ecornn.errors import InvalidInput


class Maps(nn.Module):
    """Feature maps of 256 KiB, statistics, and a result that is kept too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 512), nn.Linear(512, 512)
        self.norm = nn.LayerNorm(512)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.second(self.norm(torch.sin(self.first(x)))))


def trained_with(
    model: nn.Module, x: Tensor, **asked: Any
) -> tuple[list[Tensor], list[Tensor], Any]:
    """(result and gradients, what is saved, the compiled model)"""
    torch._dynamo.reset()
    run = ecornn.compile(copy.deepcopy(model), **{"codegen": "eager", **asked})
    held: list[Tensor] = []

    def pack(kept: Tensor) -> Tensor:
        held.append(kept)
        return kept

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept):
        out = run(x)
    found = torch.autograd.grad(out.square().sum(), list(run.parameters()))
    return [out.detach(), *found], held, run


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("memory", ["auto", "min", 0.9])
@pytest.mark.parametrize(("maps", "part", "rounds"), [("bf16", 2, 2**-8), ("fp8", 4, 2**-4)])
def test_feature_maps_are_rounded_for_the_backward_pass_alone(
    maps: str, part: int, rounds: float, memory: str | float
) -> None:
    model, x = Maps(), torch.randn(128, 32)
    exact, before, _ = trained_with(model, x, memory=memory)
    rounded, after, run = trained_with(model, x, memory=memory, maps=maps)
    assert torch.equal(rounded[0], exact[0]), "the forward pass has read them as they were"
    errors = [float((a - b).norm() / b.norm()) for a, b in zip(rounded[1:], exact[1:], strict=True)]
    assert max(errors) < 2 * rounds
    narrow = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}[maps]
    mapped = [kept for kept in after if kept.dtype is narrow]
    large = [kept.nbytes for kept in before if kept.dtype is torch.float32 and kept.numel() > 30000]
    assert bool(mapped) is (max(errors) > 0)
    assert mapped or memory == "min", "where all of them are made again, none is kept"
    for kept in mapped:
        assert kept.nbytes * part in large
    if not mapped:
        return
    told = str(run.explain())
    assert f"kept as {maps}: {len(mapped)} results" in told
    assert "rounded: gradients are not eager mode's" in told


class Activated(nn.Module):
    """Results that both their own gradient and a product's read, under two names; halves of one;
    and one that the model returns."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function
        self.first, self.second = nn.Linear(32, 512), nn.Linear(512, 512)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        left, right = self.second(self.function(self.first(x))).chunk(2, -1)
        last = torch.exp(left * right)
        return last.sum(), last


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("function", [torch.relu, torch.tanh, torch.sigmoid])
def test_a_map_that_is_kept_under_several_names_is_rounded_once(
    function: Any, dynamic: bool
) -> None:
    model, x = Activated(function), torch.randn(128, 32)
    held: list[Tensor] = []
    found = []
    for run in (model, ecornn.compile(model, codegen="eager", maps="bf16", dynamic=dynamic)):
        held.clear()
        model.zero_grad()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: held.append(t) or t, lambda t: t):  # type: ignore[func-returns-value]
            loss, _ = run(x)
        loss.backward()
        found.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    for one, other in zip(*found, strict=True):
        assert 0 < float((one - other).norm() / other.norm()) < 2**-6
    rounded = sorted(tuple(kept.shape) for kept in held if kept.dtype is torch.bfloat16)
    assert rounded == [(128, 512), (128, 512)], "the activation, and of what the halves are"
    (graph,) = run.explain().graphs
    assert graph.forms == [
        "kept as bf16: 2 results, 256.00 KiB less, rounded: gradients are not eager mode's"
    ]
    stays = "1 results of 128.00 KiB stay as they are: the model returns it"
    assert stays in graph.refused[0][1]


@pytest.mark.usefixtures("fresh_compiler")
def test_what_stays_is_told_with_the_reason() -> None:
    model, x = Maps(), torch.randn(128, 32)
    told = str(trained_with(model, x, maps="bf16")[2].explain())
    assert "2 results of 1.00 KiB stay as they are: a statistic" in told
    small = str(trained_with(model, x[:16], maps="bf16")[2].explain())
    assert "stay as they are: smaller than 64.00 KiB" in small
    masked = nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.5), nn.Linear(32, 32))
    told = str(trained_with(masked, x, masks="bits", dynamic=True)[2].explain())
    assert "1 results of 4.00 KiB stay as they are: a mask of a size that is a symbol" in told


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("maps", ["bf16", "fp8"])
def test_inputs_results_and_statistics_stay(maps: str) -> None:
    model, x = Maps(), torch.randn(128, 32)
    _, held, _ = trained_with(model, x, maps=maps)
    wide = [kept for kept in held if kept.dtype is torch.float32]
    sizes = {tuple(kept.shape) for kept in wide}
    assert (128, 1) in sizes or (128,) in sizes, "the norm's statistics"
    assert any(kept.shape == (128, 512) for kept in wide), "tanh keeps its result, the model's own"
    for weight in model.parameters():
        assert weight.dtype is torch.float32


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("maps", ["bf16", "fp8"])
def test_inductor_s_code_keeps_them_too(maps: str) -> None:
    model, x = Maps(), torch.randn(128, 32)
    exact, _, _ = trained_with(model, x)
    rounded, held, run = trained_with(model, x, maps=maps, codegen="inductor")
    bound = {"bf16": 2**-7, "fp8": 2**-3}[maps]
    for one, other in zip(rounded[1:], exact[1:], strict=True):
        assert float((one - other).norm() / other.norm()) < bound
    assert any(kept.dtype in (torch.bfloat16, torch.float8_e4m3fn) for kept in held)
    plain = trained_with(model, x, codegen="inductor")[2].explain()
    mine = run.explain()
    assert mine.graphs[0].foretold.kept < plain.graphs[0].foretold.kept


@pytest.mark.usefixtures("fresh_compiler")
def test_a_loop_s_maps_and_its_foretold_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ecornn.echo.kept_forms.LEAST_MAP_BYTES", 0)
    peaks, found = [], []
    for maps in ("exact", "bf16"):
        torch._dynamo.reset()
        step = make_step("nmt", size="tiny", batch=4, length=6, device="cpu")
        step.run = ecornn.compile(step.model, codegen="eager", maps=maps)
        torch.manual_seed(4)
        step.passes()
        found.append([p.grad.clone() for p in step.model.parameters() if p.grad is not None])
        explained = step.run.explain()
        assert ("kept as bf16" in str(explained)) is (maps == "bf16")
        peaks.append(explained.predicted_peak_bytes(0))
    assert peaks[1] < peaks[0]
    for one, other in zip(*found, strict=True):
        assert float((one - other).norm()) <= 0.03 * float(other.norm()) + 1e-6


@pytest.mark.usefixtures("fresh_compiler")
def test_maps_of_any_batch() -> None:
    """Sizes that are symbols."""
    model = Maps()
    run = ecornn.compile(copy.deepcopy(model), codegen="eager", maps="bf16", dynamic=True)
    for batch in (128, 77, 200):
        x = torch.randn(batch, 32)
        for one in (model, run):
            one.zero_grad()
            one(x).square().sum().backward()
        for mine, other in zip(run.parameters(), model.parameters(), strict=True):
            assert mine.grad is not None
            assert other.grad is not None
            assert float((mine.grad - other.grad).norm() / other.grad.norm()) < 2**-7


class Pooled(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.conv, self.size = nn.Conv2d(1, 4, 3, padding=1), size

    def forward(self, x: Tensor) -> Tensor:
        pooled = nn.functional.max_pool2d(self.conv(x), 2)
        best, where = pooled.flatten(2).max(-1)
        return best.sum() + pooled.flatten(2).topk(3).values.sum() + where.sum() * 0


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(("size", "narrow"), [(12, torch.uint8), (40, torch.int16)])
def test_indices_take_as_few_bytes_as_tell_them_apart(size: int, narrow: torch.dtype) -> None:
    model, x = Pooled(size), torch.randn(2, 1, size, size)
    exact, before, _ = trained_with(model, x)
    mine, after, run = trained_with(model, x, masks="bits")
    for one, other in zip(mine, exact, strict=True):
        assert torch.equal(one, other)
    assert any(kept.dtype is torch.int64 for kept in before)
    assert not any(kept.dtype is torch.int64 for kept in after)
    assert any(kept.dtype is narrow for kept in after)
    assert "without loss" in str(run.explain())


def test_places_that_are_not_known_stay() -> None:
    graph = fx.Graph()
    x, of = graph.placeholder("x"), graph.placeholder("of")
    with torch._subclasses.FakeTensorMode() as mode:
        x.meta["val"] = torch.empty(4, 70_000)
        of.meta["val"] = torch.empty(())
    aten = torch.ops.aten
    cases = [
        (graph.call_function(aten.max.dim, (x, -1)), 1, 70_000),
        (graph.call_function(aten.max.dim, (x, 0)), 1, 4),
        (graph.call_function(aten.sort.default, (x,)), 1, 70_000),
        (graph.call_function(aten.topk.default, (x, 3)), 1, 70_000),
        (graph.call_function(aten.topk.default, (x, 3, 0)), 1, 4),
        (graph.call_function(aten.max.dim, (x, -1)), 0, None),
        (graph.call_function(aten.max.dim, (of, 0)), 1, None),
        (graph.call_function(aten.mode.default, (x, -1)), 1, None),
    ]
    for made, index, bound in cases:
        node = graph.call_function(operator.getitem, (made, index))
        with mode:
            node.meta["val"] = torch.empty(4, dtype=torch.int64)
        assert places_told_apart(node) == bound
        form = chosen_form(node, Options(masks="bits"))
        suffix = {None: None, 4: "uint8", 70_000: "int32"}[bound]
        assert (None if isinstance(form, str) else form.suffix) == suffix
        assert chosen_form(node, Options()) == ""
        view = graph.call_function(aten.unsqueeze.default, (node, -1))
        other = graph.call_function(aten.view.dtype, (node, torch.float64))
        with mode:
            view.meta["val"] = torch.empty(4, 1, dtype=torch.int64)
            other.meta["val"] = torch.empty(4, dtype=torch.float64)
        assert places_told_apart(view) == bound
        assert places_told_apart(other) is None


@pytest.mark.parametrize("form", [BF16, FP8])
def test_forms_and_their_ways_back(form: Any) -> None:
    for given in (torch.randn(100) * 1e4, torch.randn(100) * 1e-30, torch.zeros(9), torch.ones(3)):
        back = form.back(form.there(given), given)
        assert back.dtype is given.dtype
        assert bool(torch.isfinite(back).all())
        bound = 2**-8 if form is BF16 else 2**-4
        # of a number far below the largest, eight bits know little
        assert float((back - given).abs().max()) <= bound * float(given.abs().max())
    spoilt = torch.tensor([1.0, float("nan"), 2.0])
    assert bool(form.back(form.there(spoilt), spoilt).isnan().any()), "nothing is hidden"


def test_a_wrong_way_back_is_found() -> None:
    """Of a rounded map as of bits: what is not made of it by exactly these operators differs."""
    wrong: list[list[str]] = []

    def partition(joint: fx.GraphModule, inputs: Any, *, num_fwd_outputs: int, **_: Any) -> Any:
        passes = Passes(read_graph(joint), num_fwd_outputs)
        found = default_partition(duplicate(joint), inputs, num_fwd_outputs=num_fwd_outputs)
        mine = without_unread_draws(found)
        options = Options(maps="fp8")
        found = encode(mine, num_fwd_outputs, lambda node: chosen_form(node, options))
        assert found.encoded
        wrong.append(differences(joint, passes, mine))
        for node in mine[1].graph.nodes:
            scaled = node.target is torch.ops.aten.mul.Tensor and "scale" in str(node.args[1])
            if scaled:
                node.target = torch.ops.aten.div.Tensor
        wrong.append(differences(joint, passes, mine))
        return default_partition(joint, inputs, num_fwd_outputs=num_fwd_outputs)

    def compiler(module: fx.GraphModule, example: Any) -> Any:
        return make_boxed_func(module.forward)

    run = aot_module(Maps(), fw_compiler=compiler, bw_compiler=compiler, partition_fn=partition)
    run(torch.randn(128, 32)).sum().backward()
    assert wrong[0] == []
    assert any("is computed otherwise" in one for one in wrong[1])


def test_bad_maps_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidInput, match="maps: got 'int4'"):
        ecornn.compile(Maps(), maps="int4")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "an older GPU")
    cuda = torch.device("cuda", 0)
    with pytest.raises(InvalidInput, match="'fp8' on an older GPU"):
        check_device(Options(maps="fp8"), "inductor", cuda)
    for options, codegen, device in (
        (Options(maps="fp8"), "eager", cuda),
        (Options(maps="bf16"), "inductor", cuda),
        (Options(maps="fp8"), "inductor", torch.device("cpu")),
    ):
        check_device(options, codegen, device)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    check_device(Options(maps="fp8"), "inductor", cuda)


@pytest.mark.usefixtures("fresh_compiler")
def test_as_an_option_of_torch_compile() -> None:
    model, x = Maps(), torch.randn(128, 32)
    run = torch.compile(model, backend="echo", options={"maps": "bf16", "codegen": "eager"})
    held = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: held.append(t) or t, lambda t: t):  # type: ignore[func-returns-value]
        run(x).sum().backward()
    assert any(kept.dtype is torch.bfloat16 for kept in held)
