"""What compiled code keeps, by the modules and lines it was compiled from.

A node of compiled code saves results of its forward graph, in their order. The graph is there where
operators are run one by one; inductor keeps the text of its own, without modules: a module is then
known by the line, and among several of a class by the weights that were read last. Neither is
promised by torch: where a graph cannot be found, or does not fit what is saved, nothing is said.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor, fx, nn

from ecornn.profiler.places import Folders, file_line

_DEPTH = 6
_FILE = re.compile(r"# File: (?P<file>.+?):(?P<line>\d+) in (?P<function>\w+), code:")
_CALL = re.compile(r'(?P<name>\w+)(?:: "[^"]*?\[(?P<shape>[^\]]*)\].*?")? = (?P<call>.*)')
_GIVEN = re.compile(r'(\w+): "[^"]*?\[([^\]]*)\][^"]*"')
_VIEWS = frozenset(
    {*(f"aten.{name}" for name in ("permute", "t", "view", "reshape", "transpose", "expand"))}
    | {"prims.convert_element_type"}
)
_FRAME = re.compile(r'File "(?P<file>.+)", line (?P<line>\d+), in (?P<function>\w+)')


@dataclass(frozen=True)
class Value:
    """A result of a forward graph. `module`: its path from what was compiled; None if unknown."""

    operator: str
    module: str | None = None
    file: str = ""
    line: int = 0
    function: str = ""
    #: Of sizes that are numbers; None for the others.
    shape: tuple[int | None, ...] | None = None
    #: Places of the graph's inputs that were read last, and of those that it reads itself.
    read: tuple[int, ...] = ()
    own: tuple[int, ...] = ()

    def line_text(self, folders: Folders) -> str:
        return file_line(self.file, self.line, self.function, folders) if self.file else ""


def is_compiled(node: Any) -> bool:
    return "CompiledFunction" in str(node.name())


class CompiledGraphs:
    """Reads each graph once, however often its code is called."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._results: dict[tuple[int, int], list[Value]] = {}

    def saved_by(self, node: Any, region: str) -> dict[int, Value]:
        """By a storage's address what is kept in it, with the module's path in the model. `region`:
        the module in whose call the code ran."""
        tensors = [raw.data for raw in getattr(node, "_raw_saved_tensors", ()) if raw is not None]
        tensors += list(getattr(node, "_tensors_no_vc_check", None) or ())
        forward = getattr(type(node), "_forward_cls", None)
        symbols = getattr(forward, "num_symints_saved_for_bw", 0) or 0
        key = (id(forward), len(tensors) + symbols)
        if key not in self._results:
            self._results[key] = _results(getattr(forward, "compiled_fw", None), key[1])
        values = self._results[key][: len(tensors)]
        if len(values) != len(tensors) or not all(map(_fits, values, tensors)):
            return {}
        named = _Namer(self._model, region, _weights(node, self._model)).named(values)
        kept = [(one, value) for one, value in zip(tensors, named, strict=True) if _plain(one)]
        return {tensor.untyped_storage()._cdata: value for tensor, value in kept}


def _plain(tensor: Any) -> bool:
    return isinstance(tensor, Tensor) and tensor.layout is torch.strided


def _fits(value: Value, tensor: Any) -> bool:
    if not isinstance(tensor, Tensor) or value.shape is None:
        return isinstance(tensor, Tensor)
    sizes = zip(value.shape, tensor.shape, strict=False)
    return len(value.shape) == tensor.dim() and all(a is None or a == b for a, b in sizes)


def _results(compiled: Any, count: int) -> list[Value]:
    """The last `count` results of the forward graph."""
    for one in _reached(compiled):
        if isinstance(one, fx.GraphModule):
            return _of_graph(one)[-count:] if count else []
        text = getattr(one, "inductor_post_grad_graph_str", None)
        if isinstance(text, str) and "return" in text:
            return _of_text(text)[-count:] if count else []
    return []


def _reached(start: Any) -> Iterator[Any]:
    """A function and what it is wrapped around."""
    waiting, seen = [(start, 0)], set()
    while waiting:
        one, depth = waiting.pop(0)
        if one is None or id(one) in seen or depth > _DEPTH:
            continue
        seen.add(id(one))
        yield one
        inner = [getattr(one, name, None) for name in ("__wrapped__", "__self__", "compiled_fn")]
        if isinstance(one, FunctionType):
            inner += [_content(cell) for cell in one.__closure__ or ()]
        waiting += [(each, depth + 1) for each in inner]


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # empty
        return None


def _of_graph(module: fx.GraphModule) -> list[Value]:
    from ecornn.echo.origins import module_path

    found = []
    (output,) = module.graph.find_nodes(op="output")
    for node in output.args[0]:
        if not isinstance(node, fx.Node):
            found.append(Value(""))
            continue
        made = node.args[0] if "getitem" in str(node.target) else node
        frames = _FRAME.findall(node.stack_trace or "")
        file, line, function = frames[-1] if frames else ("", "0", "")
        operator = str(getattr(getattr(made, "target", ""), "overloadpacket", ""))
        shape = getattr(node.meta.get("val"), "shape", None)
        sizes = None if shape is None else tuple(n if type(n) is int else None for n in shape)
        path = None if node.op == "placeholder" else module_path(node)
        found.append(Value(operator, path, file, int(line), function, sizes))
    return found


def _of_text(text: str) -> list[Value]:
    """From the readable form of inductor's graph."""
    values: dict[str, Value] = {}
    #: Inputs, and what is a view of one.
    place: dict[str, int] = {}
    where: tuple[str, int, str] = ("", 0, "")
    read: tuple[int, ...] = ()
    for row in map(str.strip, text.splitlines()):
        if row.startswith("def forward("):
            given = _GIVEN.findall(row)
            place = {name: i for i, (name, _) in enumerate(given)}
            values = {name: Value("", shape=_sizes(shape)) for name, shape in given}
        elif row.startswith("#"):
            told = _FILE.match(row)
            where = (told["file"], int(told["line"]), told["function"]) if told else ("", 0, "")
        elif row.startswith("return"):
            names = re.findall(r"\w+", row.removeprefix("return"))
            return [values.get(name, Value("")) for name in names]
        elif (told := _CALL.match(row)) is not None:
            target, _, arguments = told["call"].partition(";")[0].partition("(")
            own = tuple(place[name] for name in re.findall(r"\w+", arguments) if name in place)
            read = own or read
            operator = ".".join(target.removeprefix("torch.ops.").split(".")[:2])
            if "[" in target:  # one of several results
                several = values.get(target.partition("[")[0], Value(""))
                operator, own = several.operator, several.own
            if operator in _VIEWS and len(own) == 1:
                place[told["name"]] = own[0]
            shape = _sizes(told["shape"])
            values[told["name"]] = Value(operator, None, *where, shape, read, own)
    return []


def _sizes(text: str | None) -> tuple[int | None, ...] | None:
    if text is None:
        return None
    return tuple(int(n) if n.strip().isdigit() else None for n in text.split(",") if n.strip())


def _weights(node: Any, model: nn.Module) -> list[str]:
    """For each input of the graph the module whose parameter it is, or ""."""
    owners = {id(p): name.rpartition(".")[0] for name, p in model.named_parameters()}
    edges = [following for following, _ in node.next_functions]
    return [owners.get(id(getattr(edge, "variable", None)), "") for edge in edges]


class _Namer:
    """From what a graph says to paths in the model."""

    def __init__(self, model: nn.Module, region: str, weights: Sequence[str]) -> None:
        self._modules: Mapping[str, nn.Module] = dict(model.named_modules())
        self._region, self._weights = region, weights

    def named(self, values: Sequence[Value]) -> list[Value]:
        prefix = self._prefix([one.module for one in values if one.module is not None])
        return [self._with_module(value, prefix) for value in values]

    def _with_module(self, value: Value, prefix: str) -> Value:
        if value.module is not None:
            path = ".".join(name for name in (prefix, value.module) if name)
        else:
            path = self._by_line(value)
        path = path if path in self._modules else self._region
        return Value(value.operator, path, value.file, value.line, value.function)

    def _prefix(self, paths: Sequence[str]) -> str:
        """What was compiled: the region, or a part of it that is compiled by itself."""
        parts = [
            path
            for path, module in self._modules.items()
            if path.startswith(self._region) and getattr(module, "_compiled_call_impl", None)
        ]
        for prefix in (*parts, self._region, f"{self._region}._orig_mod".strip(".")):
            full = (".".join(name for name in (prefix, path) if name) for path in paths)
            if all(path in self._modules for path in full):
                return prefix
        return self._region

    def _by_line(self, value: Value) -> str:
        """The module whose weights are read; or the one whose forward has the line, of several the
        one nearest to the weights that were read last."""
        owners = {self._weights[i] for i in value.own if i < len(self._weights)} - {""}
        if len(owners) == 1:
            return owners.pop()
        if not value.file:
            return self._region
        found = [
            path
            for path, module in self._modules.items()
            if path.startswith(self._region) and _has_line(type(module), value)
        ]
        near = [self._weights[i] for i in value.read if i < len(self._weights)]
        around = [path for path in found if any(_is_in(weight, path) for weight in near)]
        best = around or found
        return max(best, key=len) if len(best) == 1 or around else self._region


def _is_in(path: str, outer: str) -> bool:
    return not outer or path == outer or path.startswith(f"{outer}.")


def _has_line(kind: type[nn.Module], value: Value) -> bool:
    code = getattr(getattr(kind, value.function, None), "__code__", None)
    if not isinstance(code, CodeType) or code.co_filename != value.file:
        return False
    return any(line == value.line for _, _, line in code.co_lines())
