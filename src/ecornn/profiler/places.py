"""Where the program is: the module whose call is running, and the line."""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Generator, Iterable
from functools import cache
from pathlib import Path
from types import CodeType, FrameType, FunctionType, GeneratorType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ecornn.profiler.kept import next_number
from ecornn.profiler.threads import Makers

_TORCH = str(Path(torch.__file__).parent) + "/"
#: Layers of this package are passed over as those of torch.nn are; its models and recipes not.
_ROOMS = ("profiler", "nn", "ops", "backends", "kernels", "planner", "echo")
_OURS = tuple(f"{Path(__file__).parents[1] / room}/" for room in _ROOMS)
Line = tuple[CodeType, int]
#: Where files are imported from.
Folders = tuple[str, ...]


@cache
def passed_over_file(name: str) -> bool:
    return name.startswith((_TORCH, *_OURS, "<eval_with_key>", "<frozen"))


class Lines:
    """The innermost line outside of torch and of this package's layers."""

    def __init__(self) -> None:
        #: By identity, since code's own hash looks at all that is in it; the values hold on to it.
        self._passed_over: dict[int, tuple[bool, CodeType]] = {}

    def here(self) -> Line | None:
        frame: FrameType | None = sys._getframe(1)
        passed_over = self._passed_over
        while frame is not None:
            code = frame.f_code
            known = passed_over.get(id(code))
            if known is None:
                known = passed_over[id(code)] = (passed_over_file(code.co_filename), code)
            if not known[0]:
                return code, frame.f_lineno
            frame = frame.f_back
        return None


def passed_over_by_compiler(*modules: ModuleType) -> bool:
    """What is defined in them runs as it is where it is called in the midst of a program that is
    being compiled. Only the code objects are marked. False if torch has no means for that."""
    from torch._dynamo import eval_frame

    skip: Callable[[CodeType], None] | None = getattr(eval_frame, "skip_code", None)
    if skip is None:
        return False
    for module in modules:
        for code in _code_of(module):
            skip(code)
    return True


@cache
def _code_of(module: ModuleType) -> tuple[CodeType, ...]:
    own = [
        one for one in vars(module).values() if getattr(one, "__module__", "") == module.__name__
    ]
    members = [one for kind in own if isinstance(kind, type) for one in vars(kind).values()]
    functions = [getattr(one, "__func__", getattr(one, "fget", one)) for one in [*own, *members]]
    waiting = [one.__code__ for one in functions if isinstance(one, FunctionType)]
    found = []
    while waiting:  # comprehensions and inner functions have code of their own
        code = waiting.pop()
        found.append(code)
        waiting += [one for one in code.co_consts if isinstance(one, CodeType)]
    return tuple(found)


def generates_code() -> bool:
    """Whether inductor may have written code that runs here: it has, or does not tell."""
    inductor = sys.modules.get("torch._inductor.codecache")
    if inductor is None:
        return False
    written = getattr(getattr(inductor, "PyCodeCache", None), "modules", None)
    return written is None or len(written) > 0


def in_generated_code() -> bool:
    """Whether the innermost code outside of torch was written by inductor."""
    if not generates_code():
        return False
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    line = Lines().here()
    return line is not None and line[0].co_filename.startswith(cache_dir())


def folders_now() -> Folders:
    """A program may go elsewhere before its report is read."""
    try:
        here = str(Path.cwd())
    except FileNotFoundError:
        here = ""  # removed meanwhile
    return (here, *sys.path)


def line_text(line: Line | None, folders: Folders) -> str:
    """Such as "package/model.py:12 in forward", from the folder that the file was imported from."""
    if line is None:
        return ""
    code, number = line
    return file_line(code.co_filename, number, code.co_name, folders)


def file_line(file: str, number: int, function: str, folders: Folders) -> str:
    return f"{_short(file, folders)}:{number} in {function}"


@cache
def _short(name: str, folders: Folders) -> str:
    roots = [root.rstrip("/") + "/" for root in folders if root]
    return name[len(max((root for root in roots if name.startswith(root)), key=len, default="")) :]


class Calls:
    """The paths of the modules whose forward is running, innermost last.

    A module may be called twice, inside itself, or raise: each call takes off what it put on.
    Inside compiled code the hooks do nothing: what a compiler traces now would stay in its code.
    """

    def __init__(
        self,
        modules: Iterable[tuple[str, nn.Module]],
        makers: Makers,
        entered: Callable[[Iterable[Any]], None],
        moved: Callable[[], None] | None = None,
    ) -> None:
        """`modules`: with their paths. `entered` is told what one is called with while no other
        runs; `moved` that another one is the innermost."""
        self._makers, self._entered = makers, entered
        self._moved = _nothing if moved is None else moved
        #: Read by the collector at every operator.
        self.running: list[str] = []
        #: By thread, whenever that changes: the number of the next node of autograd's, and the
        #: innermost path.
        self._changes: dict[int, tuple[list[int], list[str]]] = defaultdict(lambda: ([0], [""]))
        #: Hooks are put where `register_forward_hook` puts them, under one number for all: with
        #: two handles a module that took 2.5 times as long, and their removal almost twice.
        self._key = RemovableHandle(OrderedDict()).id
        #: Of each module, where they are.
        self._hooked: list[tuple[dict[int, Any], ...]] = []
        modules = list(modules)
        alone = _left_alone(module for _, module in modules)
        for path, module in modules:
            if id(module) not in alone:
                self._watch(module, path)

    def _watch(self, module: nn.Module, path: str) -> None:
        def before(_module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
            if torch.compiler.is_compiling():
                return
            if not self.running:
                self._entered([*args, *kwargs.values()])
            self._enter(path)

        def after(_module: nn.Module, _given: Any, result: Any) -> Any:
            if torch.compiler.is_compiling():
                return None
            self._leave(path)
            # What a generator does, it does in the module that made it.
            return self._resumed(path, result) if isinstance(result, GeneratorType) else None

        key, first, last = self._key, module._forward_pre_hooks, module._forward_hooks
        with_kwargs = module._forward_pre_hooks_with_kwargs
        always_called = module._forward_hooks_always_called
        self._hooked.append((first, with_kwargs, last, always_called))
        first[key], with_kwargs[key], last[key], always_called[key] = before, True, after, True
        if len(first) > 1:
            first.move_to_end(key, last=False)  # type: ignore[attr-defined]

    def _enter(self, path: str) -> None:
        self.running.append(path)
        self._changed(path)

    def _leave(self, path: str) -> None:
        # Above it may lie calls that were left by an exception inside a hook.
        while self.running and self.running.pop() != path:
            pass
        self._changed(self.running[-1] if self.running else "")

    def _changed(self, path: str) -> None:
        numbers, paths = self._changes[self._makers.makes()]
        numbers.append(next_number())
        paths.append(path)
        self._moved()

    def at(self, maker: int, number: int) -> str:
        """The path of the module in whose call a thread made its node with this number."""
        return self.all_at(maker, (number,))[0]

    def all_at(self, maker: int, made: Iterable[int]) -> list[str]:
        """The same of several."""
        numbers, paths = self._changes[maker]
        return [paths[bisect_right(numbers, number) - 1] for number in made]

    def _resumed(self, path: str, inner: Generator[Any, Any, Any]) -> Generator[Any, Any, Any]:
        """`inner`, each of its pieces run as part of the module."""
        resume, given = inner.send, None
        while True:
            self._enter(path)
            try:
                item = resume(given)
            except StopIteration as end:
                return end.value
            finally:
                self._leave(path)
            try:
                resume, given = inner.send, (yield item)
            except GeneratorExit:
                inner.close()
                raise
            except BaseException as error:
                resume, given = inner.throw, error

    def close(self) -> None:
        """A generator that goes on later tells nobody of it."""
        key = self._key
        for hooks in self._hooked:
            for one in hooks:
                one.pop(key, None)
        self._hooked.clear()
        self._moved, self._entered = _nothing, _ignore


def _left_alone(modules: Iterable[nn.Module]) -> set[int]:
    """By identity: modules without hooks, whose doing is their caller's. Scripted ones run no
    Python. A transformer's layer that is not trained runs as one operator where gradients are off,
    but not if there is a hook on anything inside: it would run, and take memory, in another way."""
    found: set[int] = set()
    for module in modules:
        if isinstance(module, torch.jit.ScriptModule):
            found.add(id(module))
        elif isinstance(module, nn.TransformerEncoderLayer) and not module.training:
            found.update(map(id, module.modules()))
    return found


def _nothing() -> None: ...


def _ignore(_given: Iterable[Any]) -> None: ...
