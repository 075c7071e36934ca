"""`pkg.module:make_step`: what `ecornn profile` and `ecornn fit` are told to run, found and called.

The function may take `device`, `batch` and `length`; it is given those of them that it names.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from ecornn.errors import InvalidInput

FORM = "package.module:function, such as train:make_step"


def load(target: str) -> Callable[..., Any]:
    """The function that `target` names; modules in the current folder are found as well."""
    module_name, _, name = target.partition(":")
    if not module_name or not name or not all(part.isidentifier() for part in name.split(".")):
        raise InvalidInput("TARGET", repr(target), FORM, "put a colon between module and function")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if missing != module_name and not module_name.startswith(missing + "."):
            raise InvalidInput(
                "TARGET",
                f"{module_name}, which imports {missing}",
                "a module whose own imports are installed",
                f"install {missing}, or run with the Python that has it ({sys.executable})",
            ) from error
        raise InvalidInput(
            "TARGET",
            repr(target),
            "a module that Python finds",
            f"there is no module {missing}; run from the folder that holds it, or install it",
        ) from error
    for part in name.split("."):
        if not hasattr(found, part):
            near = get_close_matches(part, dir(found), 1)
            remedy = f"did you mean {near[0]}?" if near else f"define {part} there"
            raise InvalidInput("TARGET", repr(target), f"a name in {module_name}", remedy)
        found = getattr(found, part)
    if not callable(found):
        raise InvalidInput(
            "TARGET",
            f"{target}, which is of type {type(found).__name__}",
            "a function",
            "name a function that makes the step and returns it with its model",
        )
    return found  # type: ignore[no-any-return]


def accepted(function: Callable[..., Any], **offered: Any) -> dict[str, Any]:
    """Those of the arguments on offer that the function names."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # built-in, or without a signature
        return {}
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return offered
    return {name: value for name, value in offered.items() if name in parameters}
