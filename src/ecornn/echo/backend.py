"""`EchoBackend`: what torch.compile calls for every graph that it has traced.

Code generation is torch's: "eager" runs the operators of the two passes one by one, "inductor"
compiles them. Both get their passes from `pipeline.decide`.
"""

from __future__ import annotations

import hashlib
import warnings
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ecornn._version import __version__
from ecornn.echo.by_code import Aim
from ecornn.echo.by_name import compiled_by_name
from ecornn.echo.calls_noted import CommonInputs
from ecornn.echo.cells import without_fused_cells
from ecornn.echo.codegen import choose_codegen, start_compilers
from ecornn.echo.differentiated_once import differentiated_once
from ecornn.echo.frozen import unless_thawed
from ecornn.echo.gpu_room import limit_by_gpu
from ecornn.echo.graph import NotUnderstood
from ecornn.echo.kept_forms import check_device, in_other_forms
from ecornn.echo.one_step import comes_after, marking, why_one_of_several
from ecornn.echo.options import BUDGETS, Memory, Options, read_options
from ecornn.echo.output_losses import with_output_losses
from ecornn.echo.pipeline import Decision, decide
from ecornn.echo.recorded import Recorded, key_of
from ecornn.echo.report import GraphReport, Report
from ecornn.echo.request import Request
from ecornn.echo.rewrite import Modules
from ecornn.echo.single_sums import without_single_sums
from ecornn.echo.vectors import without_vector_products
from ecornn.echo.weight_products import views_of
from ecornn.echo.weight_sums import WeightSums, why_not
from ecornn.ops.linear_cross_entropy import NOT_TWICE


class FellBack(UserWarning):
    """A graph was left to torch's own partitioner."""


class EchoBackend:
    """A backend for torch.compile, which remembers what it decided. `calls`: how often a graph's
    forward pass runs before its backward passes do, as a decoder's step does. `beside_s`: seconds
    that a step takes elsewhere, for each of these calls. `common`: inputs of all of them.
    `among_others`: it is a part of a model, other parts of which run between its passes.
    `written_later`: what it is given is written to once it was called. `within_step`: what is asked
    for is a part of what is asked for a step, which is rehearsed as a whole."""

    def __init__(
        self,
        options: Options,
        *,
        calls: int = 1,
        beside_s: float = 0.0,
        part: str = "",
        common: CommonInputs | None = None,
        among_others: bool = False,
        written_later: bool = False,
        within_step: bool = False,
    ) -> None:
        self.options, self.calls, self.part = options, calls, part
        self.beside_s, self.common = beside_s, common or CommonInputs()
        self.among_others, self.within_step = among_others, within_step
        self.written_later = written_later
        #: The budget is not the caller's but what a step was planned with: for other sizes that do
        #: not fit it the least is taken.
        self.or_least = False
        self.report = Report()
        #: What runs, for those who rehearse it; the latest last. None: nobody will.
        self.recorded: list[Recorded] | None = None

    def __call__(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        codegen, why = choose_codegen(self.options.codegen, inputs)
        if codegen == "inductor":
            start_compilers(inputs)
        for device in {x.device for x in inputs if isinstance(x, Tensor)}:
            check_device(self.options, codegen, device)
        promised = self._promises(module, inputs)
        told = GraphReport(self.part or type(module).__name__, codegen, why, self.options.memory)
        told.within_step = self.within_step
        traced = module
        if adds_in_any_order(codegen):
            traced, told.output_losses = with_output_losses(module)
        self.report.add(told)
        try:
            aim = self._aim(traced, inputs, told)
            recorded = Recorded(self._key_of(module, inputs))
            partitioner = self._partition(told, recorded, inputs, aim)
            generate = _inductor if codegen == "inductor" else _eager
            compiled = generate(traced, inputs, partitioner)
        except BaseException:
            self.report.forget(told)  # it will never run; torch may try another one
            raise
        if told.output_losses:
            compiled = differentiated_once(compiled, NOT_TWICE)
        if promised:
            compiled = marking(compiled, self)
        if self.recorded is not None and recorded.key:
            # of those that are compiled anew the latest alone runs
            self.recorded[:] = [one for one in self.recorded if one.key != recorded.key]
            self.recorded.append(recorded)
        return unless_thawed(compiled, module, inputs)

    def _promises(self, module: fx.GraphModule, inputs: Sequence[Any]) -> bool:
        """Whether a budget is one of this graph. Raises where it is one of several: what is met by
        each of them is met by no step."""
        memory = self.options.memory
        if memory.kind not in BUDGETS or self.within_step or not asks(inputs):
            return False
        why = why_one_of_several(module)
        if why is None and comes_after(inputs, self):
            why = "torch's compiler makes several graphs of it (another one has just run)"
        if why is None:
            return True
        raise NotUnderstood(
            f"memory: {memory} cannot be promised, since {why}, and a graph is planned before the"
            " next one is known; ecornn.compile(model, memory=...) plans a whole step of a model,"
            ' whatever its graphs; or ask for "auto" or "min"'
        )

    def _aim(self, module: fx.GraphModule, inputs: Sequence[Any], told: GraphReport) -> Aim:
        """What the graph is planned for: where that is said of code, found by compiling some."""
        memory = self.options.memory
        part = self.among_others or self.within_step or self.calls > 1
        if told.codegen != "inductor" or memory.kind == "auto" or part or not asks(inputs):
            return Aim(memory, or_least=self.or_least)
        from ecornn.echo.ahead import Ahead

        def partition(told: GraphReport, recorded: Recorded, aim: Aim) -> _Partition:
            return self._partition(told, recorded, inputs, aim)

        ahead = Ahead(module, inputs, told, partition, _inductor)
        try:
            found = ahead.least() if memory.kind == "min" else ahead.within(memory)
        except NotUnderstood as error:
            if memory.kind != "min":
                raise NotUnderstood(
                    f'memory: {memory} cannot be promised, since {error}; ask for "auto" or "min"'
                ) from error
            return Aim(memory)
        told.code_of = ahead.told()
        return Aim(memory) if found is None else found

    def _partition(
        self, told: GraphReport, recorded: Recorded, inputs: Sequence[Any], aim: Aim
    ) -> _Partition:
        # other tensors of a module, states for one, may be others at each call
        weights = {k for k, value in enumerate(inputs) if isinstance(value, nn.Parameter)}
        held = self.common.tensors()
        common = {k for k, x in enumerate(inputs) if any(x is one for one in held)} - weights
        adds = why_no_sums(self.calls, inputs) is None
        return _Partition(self, told, recorded, aim, *((weights, common) if adds else ((), ())))

    def _key_of(self, module: fx.GraphModule, inputs: Sequence[Any]) -> str:
        """Empty where nobody will ask, or where a size is none that a rehearsal could have."""
        try:
            return "" if self.recorded is None else key_of(module, inputs)
        except NotUnderstood:
            return ""


class _Partition:
    """Splits the joint graph of one traced graph, and tells its report."""

    def __init__(
        self,
        backend: EchoBackend,
        told: GraphReport,
        recorded: Recorded,
        aim: Aim,
        added_up: Collection[int],
        common: Collection[int] = (),
    ) -> None:
        self.backend, self.told, self.recorded, self.aim = backend, told, recorded, aim
        #: Is told of a decision before anything is made of it, and may raise.
        self.heed: Callable[[Decision], None] | None = None
        self.added_up = added_up  # weights whose gradients are, over its calls
        self.common = common  # other inputs for which that may be done

    def __call__(
        self, joint: fx.GraphModule, inputs: Sequence[Any], *, num_fwd_outputs: int, **settings: Any
    ) -> Modules:
        self.recorded.results = num_fwd_outputs
        if adds_in_any_order(self.told.codegen):
            self.told.single_sums = without_single_sums(joint)
            self.told.vector_products = without_vector_products(joint)
            self.told.fused_cells = without_fused_cells(joint)
        backend = self.backend
        request = Request(
            *(self.aim.memory, backend.calls, settings),
            *(backend.beside_s, backend.among_others, self.aim.of_torch),
            or_least=self.aim.or_least,
            masks=backend.options.masks,
            measure=backend.options.measure,
            written_later=backend.written_later,
        )
        decision = decide(joint, inputs, num_fwd_outputs, request)
        limit = self._limit_by_gpu(decision, inputs)
        if limit is not None:
            within = replace(request, memory=Memory("bytes", limit), or_least=True)
            decision = decide(joint, inputs, num_fwd_outputs, within)
        if self.heed is not None:
            self.heed(decision)
        if decision.chosen.joint is not None:
            joint = decision.chosen.joint.module
        self.told.decided(joint, decision)
        if limit is not None or self.aim.limit is not None:
            self.told.limit_bytes = self.aim.limit
        self.told.gpu_bytes = limit
        if decision.fallback is not None:
            _warn(self.told.name, decision)
        modules = in_other_forms(joint, decision, self.told, backend.options)
        self._add_up(modules, settings.get("static_lifetime_input_indices") or ())
        return modules

    def _limit_by_gpu(self, decision: Decision, inputs: Sequence[Any]) -> int | None:
        """With "auto", of a graph that is all of a step."""
        backend = self.backend
        part = backend.among_others or backend.within_step or backend.calls > 1
        devices = {x.device for x in inputs if isinstance(x, Tensor) and x.device.type != "cpu"}
        if backend.options.memory.kind != "auto" or part or len(devices) > 1:
            return None
        return limit_by_gpu(decision, *(devices or {torch.device("cpu")}))

    def _add_up(self, modules: Modules, weights: Sequence[int]) -> None:
        forward, backward = modules
        output: Any
        (output,) = backward.graph.find_nodes(op="output")
        gradients: list[Any] = list(output.args[0])
        inputs = forward.graph.find_nodes(op="placeholder")[: len(gradients)]
        known = self.added_up if len(inputs) == len(gradients) else ()
        owed = {k for k in weights if k in known and gradients[k] is not None}
        if owed:
            sizes = [_size(one.meta.get("val")) for one in inputs]
            common = [k for k in self.common if k < len(gradients) and gradients[k] is not None]
            sums = self.recorded.sums = WeightSums(owed, sizes, views_of(forward, owed), common)
            self.told.sums = sums.told()

    def before_compiling(self, backward: fx.GraphModule) -> None:
        """torch has counted the results of the backward pass by then."""
        sums = self.recorded.sums
        if sums is not None and adds_in_any_order(self.told.codegen):
            sums.in_any_order(backward)
            self.told.sums = sums.told()

    def key(self) -> str:
        """Everything that a split depends on beside the graph."""
        one = self.backend
        asked = replace(one.options, memory=self.aim.memory), replace(self.aim, limit=None)
        beside = f"{one.calls} {one.beside_s!r} {one.among_others} {one.written_later}"
        return f"echo {asked!r} {beside} {sources_key()}"


def asks(inputs: Sequence[Any]) -> bool:
    """Whether a graph of these inputs has a backward pass, as far as they tell."""
    given = any(isinstance(x, Tensor) and x.requires_grad for x in inputs)
    return given and torch.is_grad_enabled()


def _size(value: Any) -> tuple[Any, ...] | None:
    return tuple(value.shape) if isinstance(value, Tensor) else None


def adds_in_any_order(codegen: str) -> bool:
    """Operators that are run one by one give eager's bits."""
    return codegen != "eager"


def why_no_sums(calls: int, inputs: Sequence[Any]) -> str | None:
    """Why autograd adds the weights' gradients of a graph's calls; None if it need not."""
    if calls == 1:
        return "it is called once"
    if any(is_traceable_wrapper_subclass(x) for x in inputs):
        return "its tensors are made of others"
    return why_not()


def _warn(name: str, decision: Decision) -> None:
    message = f"echo leaves {name} to torch's own partitioner: {decision.fallback}"
    warnings.warn(message, FellBack, stacklevel=2)


def _eager(
    module: fx.GraphModule, inputs: Sequence[Any], partition: _Partition
) -> Callable[..., Any]:
    from torch._dynamo.backends.common import aot_autograd

    recorded = partition.recorded

    def forward(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[[list[Any]], Any]:
        recorded.forward = one_by_one(module, inputs)
        return recorded.forward

    def backward(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[[list[Any]], Any]:
        partition.before_compiling(module)
        recorded.backward = run = one_by_one(module, inputs)
        return run if recorded.sums is None else recorded.sums.around(run)

    compiler = aot_autograd(
        fw_compiler=forward,
        bw_compiler=backward,
        partition_fn=partition,
        keep_inference_input_mutations=True,
    )
    compiled: Callable[..., Any] = compiler(module, inputs)
    return compiled


def one_by_one(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[[list[Any]], Any]:
    """Run a graph's operators as they stand. The list of arguments is emptied at the start, and
    each value is given up after its last use: nobody but the graph holds what was kept."""
    from torch.fx import graph as fx_graph

    # of some operators torch foretells other strides than they have, such as a batch norm of what
    # is transposed; then there may be no view
    for node in module.graph.find_nodes(op="call_function", target=torch.ops.aten.view.default):
        node.target = torch.ops.aten.reshape.default
    if hasattr(fx_graph, "_BoxedCodeGen"):
        module.graph.set_codegen(fx_graph._BoxedCodeGen())
        module.recompile()
        forward = module.forward
    else:
        forward = fx.Interpreter(module).boxed_run

    def run(arguments: list[Any]) -> Any:
        return forward(arguments)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def _inductor(
    module: fx.GraphModule, inputs: Sequence[Any], partition: _Partition
) -> Callable[..., Any]:
    import torch._functorch.config as functorch_config
    from torch._inductor.compile_fx import compile_fx

    from ecornn.echo.inductor import EchoPartitioner, Watched

    # AOTAutograd's cache would skip the partitioner, and with it what explain() tells. The cache
    # of compiled code, which is what takes long, stays.
    with functorch_config.patch(enable_autograd_cache=False):
        patches = {"custom_partitioner_fn": EchoPartitioner(partition, partition.key())}
        watched = Watched(partition.told, partition.recorded, partition.before_compiling)
        compiled = compile_fx(module, inputs, inner_compile=watched, config_patches=patches)
    assert callable(compiled)
    return compiled


@cache
def sources_key() -> str:
    """Changes with every change of Echo, or of torch."""
    digest = hashlib.sha256(f"{__version__} {torch.__version__}".encode())
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


#: The same options, as one object, come with all graphs of one call of torch.compile.
_by_options: deque[tuple[Mapping[str, Any] | None, EchoBackend]] = deque(maxlen=64)


def echo(
    module: fx.GraphModule, inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """The backend by its name."""
    backend = next((known for given, known in _by_options if given is options), None)
    if backend is None or backend.options != read_options(options):
        backend = EchoBackend(read_options(options))
        _by_options.append((options, backend))
    before = len(backend.report.graphs)
    compiled = backend(module, inputs)
    weights = [x for x in (*inputs, *module.parameters()) if isinstance(x, nn.Parameter)]
    for told in backend.report.graphs[before:]:
        compiled_by_name.add(told, weights)
    return compiled


def register() -> None:
    """Make `backend="echo"` known, where torch has not found the package's entry point: then it is
    about to register what that loads, and would refuse a second one of the name."""
    from torch._dynamo.backends import registry

    if "echo" not in registry._COMPILER_FNS and registry._BACKENDS.get("echo") is None:
        registry.register_backend(compiler_fn=echo, name="echo")
