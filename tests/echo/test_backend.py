"""`torch.compile(model, backend="echo")`: right, and holding what was predicted."""

from __future__ import annotations

import copy
import importlib.util
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._dynamo.backends import registry
from torch._dynamo.exc import BackendCompilerFailed
from torch.multiprocessing.reductions import StorageWeakRef

import ecornn.echo
from ecornn.echo import backend as backend_module
from ecornn.echo.analysis.liveness import simulate
from ecornn.echo.backend import EchoBackend, one_by_one
from ecornn.echo.by_code import Aim
from ecornn.echo.codegen import choose_codegen, start_compilers
from ecornn.echo.graph import read_graph
from ecornn.echo.inductor import EchoPartitioner
from ecornn.echo.options import Options, read_options
from ecornn.echo.recorded import Recorded
from ecornn.echo.report import GraphReport
from ecornn.errors import InvalidInput
from support.alive import Alive
from support.translator import DecoderStep

pytestmark = pytest.mark.usefixtures("fresh_compiler")


class Recurrent(nn.Module):
    """A few steps of attention: most of what it makes can be made again."""

    def __init__(self, hidden: int = 8, steps: int = 5, dropout: float = 0.0) -> None:
        super().__init__()
        self.step, self.steps = DecoderStep(hidden, dropout), steps

    def forward(self, keys_BSH: Tensor) -> Tensor:
        state = (keys_BSH.mean(1), keys_BSH.amax(1))
        for _ in range(self.steps):
            state = self.step(state[1], state, keys_BSH, keys_BSH)
        return state[0]


def compiled(model: nn.Module, **options: Any) -> Any:
    asked = {"codegen": "eager", **options}
    return torch.compile(model, backend=EchoBackend(read_options(asked)))


def gradients(run: Callable[..., Tensor], model: nn.Module, *inputs: Tensor) -> list[Tensor]:
    torch.manual_seed(5)
    model.zero_grad()
    output = run(*inputs)
    (output * torch.linspace(-1, 1, output.numel()).view_as(output)).sum().backward()
    grads = [p.grad for p in model.parameters()]
    assert all(grad is not None for grad in grads)
    return [output.detach(), *(grad.clone() for grad in grads if grad is not None)]


@pytest.mark.parametrize("memory", ["auto", 0.6, "min"])
def test_by_name_with_options(memory: Any) -> None:
    model = Recurrent(dropout=0.3)
    x = torch.randn(3, 11, 8)
    options = {"memory": memory, "codegen": "eager"}
    run = torch.compile(model, backend="echo", options=options)
    for found, expected in zip(gradients(run, model, x), gradients(model, model, x), strict=True):
        assert torch.equal(found, expected)
    told = ecornn.echo.compiled_by_name.graphs[-1]
    assert told.chosen is not None
    assert (told.codegen, told.codegen_reason) == ("eager", "asked for")


def test_it_is_registered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    backend_module.register()
    assert "echo" in torch._dynamo.list_backends()

    class Entry:
        """As when torch finds the entry point first: loading it imports the room."""

        def load(self) -> Any:
            backend_module.register()
            return backend_module.echo

    monkeypatch.delitem(registry._COMPILER_FNS, "echo")
    monkeypatch.setitem(registry._BACKENDS, "echo", Entry())
    assert registry.lookup_backend("echo") is backend_module.echo


def test_its_entry_point_is_declared() -> None:
    project = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    named = f"{backend_module.__name__}:{backend_module.echo.__name__}"
    assert f'[project.entry-points.torch_dynamo_backends]\necho = "{named}"' in project


def test_options_that_are_wrong_are_told() -> None:
    for options, told in (({"memory": "6 apples"}, "apples"), ({"speed": 3}, "'speed'")):
        run = torch.compile(nn.Linear(2, 2), backend="echo", options=options)
        with pytest.raises(BackendCompilerFailed, match=told):
            run(torch.randn(1, 2))


def test_a_budget_that_cannot_be_met_is_told() -> None:
    run = compiled(Recurrent(), memory=100)
    with pytest.raises(BackendCompilerFailed, match=r"at least [0-9,]+ bytes") as failed:
        run(torch.randn(3, 11, 8))
    assert isinstance(failed.value.inner_exception, InvalidInput)


def test_code_generation_is_chosen_by_device(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_codegen(None, [torch.randn(2)])[0] == "eager"
    assert choose_codegen("inductor", [torch.randn(2)]) == ("inductor", "asked for")

    class OnCuda(Tensor):
        device = torch.device("cuda")

    there = torch.randn(2).as_subclass(OnCuda)
    started: list[bool] = []
    monkeypatch.setattr(
        "torch._inductor.async_compile.maybe_warm_pool", lambda: started.append(True), raising=False
    )
    start_compilers([torch.randn(2), 3])
    assert not started, "they compile for CUDA"
    start_compilers([3, there])
    assert started
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert choose_codegen(None, [there])[0] == "inductor"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert choose_codegen(None, [there]) == ("eager", "Triton is not installed")


def real(given: list[Tensor]) -> list[Tensor]:
    """Tensors of the same forms, those that share memory among them."""
    bases: dict[StorageWeakRef, Tensor] = {}
    for fake in given:
        storage = fake.untyped_storage()
        elements = storage.nbytes() // fake.dtype.itemsize
        bases.setdefault(StorageWeakRef(storage), torch.randn(elements))
    return [
        bases[StorageWeakRef(fake.untyped_storage())].as_strided(
            fake.shape, fake.stride(), fake.storage_offset()
        )
        for fake in given
    ]


@pytest.mark.parametrize("memory", ["auto", "min"])
def test_backward_holds_what_was_simulated(memory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every byte at every operator: what was kept is given up as the backward pass goes on."""
    graphs: list[fx.GraphModule] = []

    def watched(module: fx.GraphModule, inputs: Any) -> Any:
        graphs.append(copy.deepcopy(module))
        return one_by_one(module, inputs)

    monkeypatch.setattr(backend_module, "one_by_one", watched)
    model = Recurrent(hidden=16, steps=4)
    compiled(model, memory=memory)(torch.randn(4, 30, 16)).sum().backward()
    backward = graphs[1]
    given = [node.meta["val"] for node in backward.graph.find_nodes(op="placeholder")]
    arguments = real(given)
    run = one_by_one(copy.deepcopy(backward), given)
    alive = Alive(arguments)
    before = alive.bytes_now()
    with alive:
        run(arguments)
    assert arguments == []
    timeline = simulate(read_graph(backward), ())
    assert before == timeline.bytes_at[0]
    assert alive.peak_bytes == timeline.peak_bytes


def test_what_was_kept_is_given_up_while_the_backward_pass_runs() -> None:
    """The whole way, through torch's own wrappers."""
    model = Recurrent(hidden=16, steps=6)
    run = compiled(model, memory="auto")
    x = torch.randn(4, 30, 16)
    run(x).sum().backward()
    loss = run(x).sum()
    node = loss.grad_fn
    while node is not None and not hasattr(node, "saved_tensors"):
        node = node.next_functions[0][0]
    mine = {p.untyped_storage().data_ptr() for p in (*model.parameters(), x)}
    kept = [t for t in node.saved_tensors if t.untyped_storage().data_ptr() not in mine]
    alive = Alive(kept)
    before = alive.bytes_now()
    del kept, node
    only_kept = dict(alive._seen)
    left: list[int] = []

    class Watch(Alive):
        def __torch_dispatch__(self, *args: Any, **kwargs: Any) -> Any:
            left.append(sum(n for ref, n in only_kept.items() if not ref.expired()))
            return super().__torch_dispatch__(*args, **kwargs)

    with Watch():
        loss.backward()
    assert left[0] == before
    assert left[len(left) // 2] < 0.7 * before
    assert left[-1] < 0.2 * before


def test_inference_needs_no_plan() -> None:
    model, x = Recurrent(), torch.randn(3, 11, 8)
    backend = EchoBackend(read_options({"codegen": "eager"}))
    run = torch.compile(model, backend=backend)
    with torch.no_grad():
        torch.testing.assert_close(run(x), model(x))
    assert [graph.chosen for graph in backend.report.graphs] == [None]


def test_the_partitioners_key_covers_what_it_depends_on() -> None:
    def key(options: Options, calls: int = 1) -> Any:
        backend = EchoBackend(options, calls=calls)
        told = GraphReport("", "", "", options.memory)
        aim = Aim(options.memory)
        partition = backend_module._Partition(backend, told, Recorded(""), aim, ())
        found = EchoPartitioner(partition, partition.key())
        assert pickle.loads(pickle.dumps(found)).uuid() == found.uuid()
        return found.uuid()

    plain = key(read_options({}))
    assert plain == key(read_options({}))
    assert len({plain, key(read_options({"memory": "min"})), key(read_options({}), 3)}) == 3
    assert backend_module.sources_key() in plain


def test_inductor_generates_the_same() -> None:
    """Once, and small: compiling C++ takes its time."""

    class Small(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(4, 4, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            large = self.a(x).unsqueeze(1).expand(8, 50, 4).sin().cos()
            return self.a(large).sum(1)

    model, x = Small().double(), torch.randn(8, 4, dtype=torch.float64)
    backend = EchoBackend(read_options({"memory": "min", "codegen": "inductor"}))
    run = torch.compile(model, backend=backend)
    for found, expected in zip(gradients(run, model, x), gradients(model, model, x), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    (told,) = backend.report.graphs
    assert told.chosen is not None
    assert told.chosen.kept_bytes < told.keep_all.kept_bytes
    assert told.codegen == "inductor"


def test_a_tensor_and_its_view_are_not_overwritten_one_before_the_other_is_read() -> None:
    """Whoever keeps all hands both over, and torch takes each for memory of its own."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.key, self.score = nn.Linear(16, 16), nn.Linear(16, 1)

        def forward(self, x_BSH: Tensor) -> Tensor:
            state = x_BSH.mean(1)
            for _ in range(2):
                mixed = torch.tanh(state.unsqueeze(1) + self.key(x_BSH))
                state = (self.score(mixed).softmax(1) * x_BSH).sum(1) + state
            return state

    torch.manual_seed(0)
    model, x = Attention(), torch.randn(8, 20, 16)
    run = compiled(model, memory="auto", codegen="inductor")
    for found, expected in zip(gradients(run, model, x), gradients(model, model, x), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_a_fall_back_warns_once_and_is_told() -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            def part(y: Tensor) -> Tensor:
                return torch.tanh(self.inner(y))

            return torch.utils.checkpoint.checkpoint(part, x, use_reentrant=False)

    model, x = Checkpointed(), torch.randn(3, 4)
    run = compiled(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = gradients(run, model, x)
    told = [w for w in caught if issubclass(w.category, ecornn.echo.FellBack)]
    assert len(told) == 1
    assert "checkpoint" in str(told[0].message)
    for one, other in zip(found, gradients(model, model, x), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(
    ("codegen", "memories"),
    [("eager", ("auto", 0.9, "bytes", "min")), ("inductor", ("auto", "bytes", "min"))],
)
def test_dropout_does_not_fool_finite_differences(codegen: str, memories: tuple[Any, ...]) -> None:
    """ "bytes": a budget of a little less than what is held when all is kept."""
    model: nn.Module = Recurrent(hidden=4, steps=3, dropout=0.5).double()
    if codegen == "inductor":  # compiling C++ takes its time
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Dropout(0.5), nn.Softmax(-1)).double()
    budget = 0
    for memory in memories:
        asked = budget if memory == "bytes" else memory
        backend = EchoBackend(read_options({"memory": asked, "codegen": codegen}))
        run = torch.compile(model, backend=backend)
        x = torch.randn(2, 5, 4, dtype=torch.float64, requires_grad=True)

        def loss(value: Tensor, run: Any = run) -> Tensor:
            torch.manual_seed(11)
            return F.silu(run(value)).square().sum()

        (grad,) = torch.autograd.grad(loss(x), x)
        direction = torch.randn_like(x)
        # with gradients asked for: the code that is tested, and not other code for inference, which
        # draws other numbers where it is generated
        ahead, behind = (loss(x + s * 1e-6 * direction).detach() for s in (1, -1))
        difference = (ahead - behind) / 2e-6
        torch.testing.assert_close((grad * direction).sum(), difference, rtol=1e-6, atol=1e-8)
        (told,) = (graph for graph in backend.report.graphs if graph.chosen is not None)
        assert told.keep_all is not None
        budget = int((0.95 if codegen == "eager" else 2) * told.keep_all.peak_bytes)
        torch._dynamo.reset()
