"""Code that inductor has generated, run on tensors without numbers, to see what it holds.

What inductor fuses, reuses, reorders and gives up is written in the Python that calls its kernels.
That Python is run here on fake tensors with kernels that do nothing: its allocations and the ends
of its variables are the real ones, so nothing is modelled. Scratch memory inside a kernel that is
not inductor's own (a convolution's workspace) is not seen, but for that of our recurrent layers.
"""

from __future__ import annotations

import ast
import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ecornn.echo.graph import NotUnderstood, number_of_the_call
from ecornn.ops.scratch import scratch_bytes

#: Bytes to which an allocator rounds up, by type of device.
GRAINS = {"cuda": 512}


class Ledger(TorchDispatchMode):
    """Bytes of storages on one type of device, from when they are first seen until they end."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device, self.grain = device, GRAINS.get(device, 1)
        self.now = self.most = 0
        self.ignoring = False  # what is made now
        #: Whose is what is made now, and, by owner, the bytes that were there at the most.
        self.owner: int | None = None
        self.owned_at_most: dict[int, int] = {}
        self._owned: Counter[int] = Counter()
        self._known: dict[int, tuple[int, int | None]] = {}  # bytes and owner, by storage

    def begin(self) -> int:
        """The most is asked for from here on; what is there now."""
        self.most, self.owned_at_most = self.now, dict(self._owned)
        return self.now

    def reach(self, count: int) -> None:
        if count > self.most:
            self.most, self.owned_at_most = count, dict(self._owned)

    def ignore(self, tensor: Tensor) -> None:
        """Somebody else holds it."""
        self._enter(tensor, 0)

    def see(self, tensor: Tensor) -> None:
        if tensor.device.type == self.device:
            count = self.rounded(tensor.untyped_storage().nbytes())
            self._enter(tensor, 0 if self.ignoring else count)

    def rounded(self, count: int) -> int:
        return -(-count // self.grain) * self.grain

    def _enter(self, tensor: Tensor, count: int) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._known:
            self._known[key] = count, self.owner
            self.now += count
            if self.owner is not None:
                self._owned[self.owner] += count
            self.reach(self.now)
            weakref.finalize(storage, self._left, key)

    def _left(self, key: int) -> None:
        count, owner = self._known.pop(key)
        self.now -= count
        if owner is not None:
            self._owned[owner] -= count

    def bytes_of(self, values: Iterable[Any]) -> int:
        """Each storage once, what somebody else holds not at all."""
        tensors = (value for value in values if isinstance(value, Tensor))
        keys = {tensor.untyped_storage()._cdata for tensor in tensors}
        return sum(self._known.get(key, (0, None))[0] for key in keys)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.see(leaf)
        if scratch := scratch_bytes(func, args):
            self.reach(self.now + scratch)
        return result


class _Nothing:
    """A kernel, a stream, a guard of a device: whatever is done with it changes no memory."""

    def __call__(self, *_: Any, **__: Any) -> _Nothing:
        return self

    def __getattr__(self, name: str) -> _Nothing:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __enter__(self) -> _Nothing:
        return self

    def __exit__(self, *_: object) -> None:
        return None


NOTHING = _Nothing()


class _Torch:
    """torch, without devices: code for CUDA is replayed where there is none as well."""

    cuda = xpu = mtia = NOTHING

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


class _ExternKernels:
    """Those that are given `out` make nothing; the others return new tensors."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if "out" in kwargs:
                return kwargs["out"]
            from torch._inductor.select_algorithm import extern_kernels

            return getattr(extern_kernels, name)(*args, **kwargs)

        return call


def _reinterpret(tensor: Tensor, size: Any, stride: Any, offset: int = 0) -> Tensor:
    return torch.as_strided(tensor, size, stride, tensor.storage_offset() + offset)


def _empty(device: str) -> Callable[..., Tensor]:
    def empty(size: Any, stride: Any, dtype: torch.dtype) -> Tensor:
        return torch.empty_strided(size, stride, dtype=dtype, device=device)

    return empty


#: What the generated code finds by these names. It brings its kernels itself, and imports more
#: that is used for nothing but autotuning.
NAMES: dict[str, Any] = {
    **{f"empty_strided_{device}": _empty(device) for device in ("cpu", "cuda", "xpu", "mtia")},
    **dict.fromkeys(("assert_size_stride", "assert_alignment", "get_raw_stream"), NOTHING),
    **dict.fromkeys(("run_intermediate_hooks", "maybe_profile"), NOTHING),
    **dict.fromkeys(("start_graph", "end_graph"), NOTHING),
    "empty_strided_cpu_pinned": _empty("cpu"),
    "empty_strided": torch.empty_strided,
    "reinterpret_tensor": _reinterpret,
    "extern_kernels": _ExternKernels(),
    "torch": _Torch(),
    "device": torch.device,
    "math": math,
    "inf": math.inf,
    "nan": math.nan,
}
#: Defined again in every generated file; the ones above are used.
OURS = frozenset({*NAMES, "async_compile", "empty_strided_p2p"})
#: How names begin of what looks at a tensor and makes nothing; newer versions of torch have more.
CHECKS = "assert_"


@dataclass(frozen=True)
class Code:
    """Of one pass, as inductor has generated it, and the tensors that it brings with it."""

    source: str
    constants: Mapping[str, Any]


def callable_of(source: str, constants: Mapping[str, Any]) -> Callable[[list[Any]], Any]:
    """The function of generated code that runs a pass, its kernels and checks doing nothing."""
    body: list[ast.stmt] = []
    idle: set[str] = set()
    for statement in ast.parse(source).body:
        if isinstance(statement, ast.FunctionDef | ast.ClassDef):
            body.append(statement)
        elif isinstance(statement, ast.ImportFrom):
            names = (alias.asname or alias.name for alias in statement.names)
            idle |= {name for name in names if name.startswith(CHECKS)}
        elif isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            name = statement.targets[0].id
            if name.startswith(CHECKS) or _mentions(statement.value, "async_compile"):
                idle.add(name)
            elif name not in OURS:
                body.append(statement)
    scope: dict[str, Any] = dict(NAMES) | dict.fromkeys(idle, NOTHING)
    for statement in body:
        # a name that is made of something imported is missed where it is used, if it is
        with suppress(NameError, AttributeError):
            exec(compile(ast.Module([statement], []), "<generated code>", "exec"), scope)
    scope |= constants
    if "call" not in scope:
        raise NotUnderstood("inductor's code has no function `call`")
    call: Callable[[list[Any]], Any] = scope["call"]
    return call


def _mentions(expression: ast.expr, name: str) -> bool:
    found = (node for node in ast.walk(expression) if isinstance(node, ast.Name))
    return any(node.id == name for node in found)


class Replay:
    """Both passes of one graph in a row. The caller holds what it gives to the forward pass; what
    is kept arrives in the backward pass as the forward pass returned it."""

    def __init__(self, inputs: Sequence[Any]) -> None:
        """`inputs`: of the forward pass, as fake tensors."""
        devices = {value.device.type for value in inputs if isinstance(value, Tensor)}
        self.ledger = Ledger(min(devices - {"cpu"}, default="cpu"))
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._inputs = self._made(inputs)
        for value in self._inputs:
            if isinstance(value, Tensor):
                self.ledger.ignore(value)
        storages = {
            theirs.untyped_storage()._cdata: ours.untyped_storage().nbytes()
            for theirs, ours in zip(inputs, self._inputs, strict=True)
            if isinstance(theirs, Tensor) and theirs.device.type == self.ledger.device
        }
        self.input_bytes = sum(map(self.ledger.rounded, storages.values()))

    def forward(self, code: Code) -> list[Any]:
        return self._run(code, list(self._inputs))

    def backward(self, code: Code, kept: list[Any], like: Sequence[Any]) -> list[Any]:
        """`kept`, which is emptied, and then the arriving gradients, make the arguments, of which
        `like` has the forms. torch's own frame holds the gradients until the pass is over."""
        forms = [_form(value) for value in like[: len(kept)]]
        if forms != [_form(value) for value in kept]:
            raise NotUnderstood("the backward pass does not take what the forward pass kept")
        with self.ledger:
            arriving = self._made(like[len(kept) :])
        arguments = [*kept, *arriving]
        kept.clear()
        self.ledger.begin()
        return self._run(code, arguments)

    def _made(self, like: Sequence[Any]) -> list[Any]:
        with self._mode:
            return [_empty_like(value) for value in like]

    def _run(self, code: Code, arguments: list[Any]) -> list[Any]:
        """What the code returns; it empties the list of its arguments."""
        held = {
            name: self._mode.from_tensor(value) if isinstance(value, Tensor) else value
            for name, value in code.constants.items()
        }
        for value in held.values():
            if isinstance(value, Tensor):
                self.ledger.ignore(value)
        call = callable_of(code.source, held)
        try:
            with self._mode, self.ledger, torch.no_grad():
                return list(call(arguments))
        except NotUnderstood:
            raise
        except Exception as error:  # whatever the code does that a fake tensor cannot
            said = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise NotUnderstood(f"inductor's code was not replayed: {said}") from error


def _empty_like(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return number_of_the_call(value)
    size, stride = ([number_of_the_call(n) for n in of] for of in (value.shape, value.stride()))
    return torch.empty_strided(size, stride, dtype=value.dtype, device=value.device)


def _form(value: Any) -> str:
    """Not the strides: inductor chooses those of what it keeps."""
    if not isinstance(value, Tensor):
        return "number"
    return f"{value.dtype} {[number_of_the_call(n) for n in value.shape]}"
