"""Where in a model, and in the user's code, a node of a traced graph comes from."""

from __future__ import annotations

import re

from torch import fx


def module_path(node: fx.Node) -> str:
    """Such as "decoder.attention"; "" for what was compiled itself."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    paths = [value[0] if isinstance(value, tuple) else str(value) for value in stack.values()]
    return _plain(paths[-1]) if paths else ""


def _plain(path: str) -> str:
    """Without how dynamo reached the model: `L['self']._modules['a'].b` is `a.b`."""
    path = re.sub(r"_modules\['([^']*)'\]", r"\1", path)
    path = re.sub(r"^L\['[^']*'\]", "", path)
    return ".".join(p for p in path.split(".") if p not in ("", "__self__", "_orig_mod"))


def source_line(node: fx.Node) -> str:
    """The last line of the user's code that led to a node."""
    lines = [line.strip() for line in (node.meta.get("stack_trace") or "").splitlines()]
    files = [k for k, line in enumerate(lines) if line.startswith("File ")]
    if not files:
        return ""
    last = files[-1]
    code = lines[last + 1] if last + 1 < len(lines) else ""
    return f"{lines[last].removeprefix('File ')}: {code}"
