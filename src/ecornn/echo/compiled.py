"""`ecornn.compile`: a model, or a function, compiled with Echo, that can say what was decided."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any
from weakref import WeakMethod

import torch
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed

from ecornn.echo.backend import EchoBackend
from ecornn.echo.explain import Explanation
from ecornn.echo.lean.mode import without_lean_functions
from ecornn.echo.options import Options, read_options
from ecornn.echo.parts import named
from ecornn.echo.regions import Regions
from ecornn.echo.twin import alone
from ecornn.errors import EcornnError, InvalidInput


def compile(  # torch's name for it
    model: Callable[..., Any],
    *,
    memory: str | int | float = "auto",
    codegen: str | None = None,
    regions: str | Sequence[str | nn.Module] = "auto",
    dynamic: bool | None = None,
    lean: bool | str = True,
    masks: str = "auto",
    maps: str = "exact",
    recurrent: str = "auto",
    measure: bool = False,
) -> Any:
    """Compile a model or a function with Echo.

    memory: "auto", "min", a size such as "6GiB", bytes, or a fraction; see `Memory`.
    codegen: "inductor" or "eager"; by default "inductor" on CUDA where Triton is installed.
    regions: parts that the model calls many times in one forward pass and that are compiled by
        themselves, once for all calls: "auto" finds them at the first call; paths or modules name
        them; () compiles the whole model, its loops unrolled.
    dynamic: as in torch.compile.
    lean: functions outside such parts that keep far more than they need, such as cross entropy of
        many words, are replaced by ones that give the same bits. torch's recurrent layers outside
        such parts are run again in the backward pass: with "layers", or memory "min", all of them,
        with a budget as few as are enough, with "auto" those that are nearly free.
    masks: "bits" keeps booleans eight to a byte, those that ReLU's gradient needs among them, and
        indices in as few bytes as tell them apart; "auto" has a plan for less memory, of
        operators that run one by one, keep bits where it is better for it; "bytes" never does.
    maps: "bf16" or "fp8" keeps feature maps rounded to 16 or 8 bits; gradients are not eager mode's
        then. "exact" rounds nothing.
    recurrent: layers of torch.nn are made to run on this package's kernels at the first call, as by
        `ecornn.convert`, where code is generated ("inductor") and these kernels serve them.
        "torch" leaves them as they are; so do parts that are named and lean="layers".

    measure: plans are made by times of operators that were measured on this device, and are kept
        for later, in the place of a roofline where they may be run again.

    A model's parameters, `state_dict`, training mode and devices are those of the compiled one,
    which also has `explain()`.
    """
    asked = {"memory": memory, "codegen": codegen, "masks": masks, "maps": maps}
    options = read_options({**asked, "measure": measure})
    if lean not in (True, False, "layers"):
        raise InvalidInput("lean", repr(lean), 'True, False or "layers"', "give one of these")
    if recurrent not in ("auto", "torch"):
        raise InvalidInput("recurrent", repr(recurrent), '"auto" or "torch"', "give one of these")
    if isinstance(model, nn.Module):
        return CompiledModel(model, options, _checked(model, regions), dynamic, lean, recurrent)
    if not callable(model):
        raise InvalidInput("model", repr(model), "a module or a function", "pass what is called")
    if regions not in ("auto", ()):
        raise InvalidInput(
            "regions", repr(regions), "a model that has parts", "a function is compiled as a whole"
        )
    return CompiledFunction(model, options, dynamic)


def _checked(model: nn.Module, regions: Any) -> tuple[str, ...] | None:
    """Paths of parts; None: to be found."""
    if regions == "auto":
        return None
    if isinstance(regions, str):
        raise InvalidInput(
            "regions", repr(regions), '"auto" or a list of parts', f"write [{regions!r}]"
        )
    return tuple(named(model, region) for region in regions)


class CompiledFunction:
    def __init__(self, function: Callable[..., Any], options: Options, dynamic: bool | None):
        self.backend = EchoBackend(options, part=getattr(function, "__name__", "function"))
        compiled = torch.compile(alone(function), backend=self.backend, dynamic=dynamic)
        self._run = without_lean_functions(compiled)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _with_plain_errors(self._run, args, kwargs)

    def explain(self) -> Explanation:
        return Explanation(self.backend.report.graphs)


class CompiledModel(nn.Module):
    """Behaves as the model that it holds: its attributes, parameters and `state_dict` are those of
    the model. Copies and pickles are compiled anew when they are called."""

    def __init__(
        self,
        model: nn.Module,
        options: Options,
        regions: tuple[str, ...] | None,
        dynamic: bool | None,
        lean: bool | str = True,
        recurrent: str = "auto",
    ) -> None:
        super().__init__()
        self._modules["_orig_mod"] = model
        self.__dict__["training"] = model.training
        # a model that holds this one loads what `state_dict` has saved: names without ours
        self._register_load_state_dict_pre_hook(_with_our_name)
        self.__dict__["_asked"] = asked = (options, regions, dynamic, lean, recurrent)
        self.__dict__["_regions"] = Regions(model, *asked)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return _untraced(self._regions, args, kwargs)

    def explain(self) -> Explanation:
        """What is kept and what is made again, for every graph that was compiled so far."""
        regions: Regions = self._regions
        rehearse = WeakMethod(regions.rehearsed) if regions.divided else None
        return Explanation(regions.graphs(), regions.told(), rehearse=rehearse)

    def __getattr__(self, name: str) -> Any:
        model = self.__dict__["_modules"]["_orig_mod"]
        if name == "_orig_mod":
            return model
        if name.startswith("__"):  # copying and pickling are ours
            raise AttributeError(name)
        return getattr(model, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "training":
            self.__dict__[name] = self._orig_mod.training = value
        elif name.startswith("__"):  # `fully_shard` gives it another class
            object.__setattr__(self, name, value)
        elif name in self.__dict__:
            self.__dict__[name] = value
        else:
            setattr(self._orig_mod, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._orig_mod, name)

    def train(self, mode: bool = True) -> CompiledModel:
        self.__dict__["training"] = mode
        self._orig_mod.train(mode)
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self._orig_mod.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self._orig_mod.load_state_dict(*args, **kwargs)

    def register_buffer(self, *args: Any, **kwargs: Any) -> None:
        self._orig_mod.register_buffer(*args, **kwargs)

    def register_parameter(self, *args: Any, **kwargs: Any) -> None:
        self._orig_mod.register_parameter(*args, **kwargs)

    def add_module(self, *args: Any, **kwargs: Any) -> None:
        self._orig_mod.add_module(*args, **kwargs)

    def __len__(self) -> int:
        return len(self._orig_mod)

    def __getitem__(self, key: Any) -> Any:
        return self._orig_mod[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._orig_mod)

    def __bool__(self) -> bool:
        return True

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        return self._orig_mod.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Any:
        return self._orig_mod.named_buffers(*args, **kwargs)

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        memo = set() if memo is None else memo
        if type(self) is not CompiledModel and self not in memo:
            # `fully_shard` looks for what it gave its own class and state to
            memo.add(self)
            yield prefix, self
        yield from self._orig_mod.named_modules(memo, prefix, remove_duplicate)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._orig_mod, *self._asked)


def _with_our_name(state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Names of the model's values as those of the part that it is here."""
    ours = f"{prefix}_orig_mod."
    for name in [n for n in state if n.startswith(prefix) and not n.startswith(ours)]:
        state[ours + name.removeprefix(prefix)] = state.pop(name)


def _with_plain_errors(run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """What this library refuses is raised as it is, not as a failure of torch's compiler."""
    try:
        return run(*args, **kwargs)
    except BackendCompilerFailed as failed:
        if isinstance(failed.inner_exception, EcornnError):
            raise failed.inner_exception from None
        raise


#: For a model within what is compiled by others. Their compiler (torch 2.11 and 2.13) would trace
#: what we do around the model's parts, and has lost the last operator of such a model by that: its
#: results were wrong. So it stops here, and the model is compiled as was asked for.
_untraced = torch.compiler.disable(_with_plain_errors)
