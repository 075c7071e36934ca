"""`pkg.module:make_step`: what `ecornn profile` and `ecornn fit` are told to run, found and called.

The function may take `device`, `batch`, `length` and `echo`, and is given those of them that it
names. `echo` is for it to pass on, as `ecornn.compile(model, memory=echo)`.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ecornn.errors import EcornnError, InvalidInput

if TYPE_CHECKING:
    from ecornn.profiler.steps import Made

#: Folders whose frames come before the user's own in what their code raised.
OURS = (Path(__file__).parent, Path(__file__).parent.parent / "profiler")
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
        with users_code(f"importing {module_name}", "any device"):
            found: Any = importlib.import_module(module_name)
    except Raised as raised:
        error = raised.error
        if not isinstance(error, ModuleNotFoundError):
            raise
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


REMEDIES = {
    "echo": "add `echo=None` to its arguments, and where it is given call"
    " ecornn.compile(model, memory=echo) in the step",
    "batch": "add `batch` to its arguments, and make the step's input of that size",
    "length": "add `length` to its arguments, and make the step's input of that length",
}


def check_takes(make: Callable[..., Any], *names: str) -> None:
    """What is asked for by an option must reach the function: it alone knows what to do."""
    for name in names:
        if name not in accepted(make, **{name: None}):
            expected = f"a function with an argument `{name}`"
            raise InvalidInput("TARGET", "a function without it", expected, REMEDIES[name])


def prepare(make: Callable[..., Any], device: str, **given: int | str) -> Made:
    """What the function makes on the device, by its argument or as torch's default device."""
    import torch

    from ecornn.profiler.session import run_to_end
    from ecornn.profiler.steps import Made, read_step

    name = f"{getattr(make, '__name__', 'the function')}()"
    with users_code(name, device), torch.device(device):
        result = make(**accepted(make, device=device, **given))
    made = read_step(result)

    def step() -> None:
        with torch.device(device):
            run_to_end(made.step)

    return Made(step, made.model, made.optimizers)


def read_device(given: str, without_gpu: str) -> str:
    """The device to run on; "auto" is the GPU where there is one, and else `without_gpu`."""
    import torch

    if given == "auto":
        return "cuda" if torch.cuda.is_available() else without_gpu
    if not re.fullmatch(r"cpu|meta|cuda(:\d+)?", given):
        raise InvalidInput("--device", repr(given), "auto, cpu, cuda, cuda:1 … or meta", "name one")
    number = int(given.partition(":")[2] or 0)
    if given.startswith("cuda") and torch.cuda.device_count() <= number:
        raise InvalidInput(
            "--device",
            given,
            f"a CUDA device that is there (found: {torch.cuda.device_count()})",
            "take --device meta, which needs no memory, or cpu",
        )
    return given


class Raised(EcornnError, RuntimeError):
    """The user's own code raised: what did, as Python shows it, and what can be done."""

    def __init__(self, what: str, device: str, error: Exception) -> None:
        self.error = error
        hint = _hint(device, error)
        super().__init__(f"{_trace(error)}\nerror: {what} raised {type(error).__name__}; {hint}")


@contextmanager
def users_code(what: str, device: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise Raised(what, device, error) from error


def _hint(device: str, error: Exception) -> str:
    import torch

    # of the CPU's memory torch tells by a text alone
    if isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error):
        return "try --device meta, which needs no memory, or a smaller --batch"
    if device == "meta":
        return (
            "meta tensors have no values, and code that reads them (item(), tolist(), if x > 0) "
            "fails: try --device cpu if it works there"
        )
    return f"correct it so that it runs by itself on {device}"


def _trace(error: Exception) -> str:
    """From the first frame that is the user's."""
    frame = error.__traceback__
    while frame is not None and _is_ours(frame.tb_frame.f_code.co_filename):
        frame = frame.tb_next
    return "".join(traceback.format_exception(type(error), error, frame)).rstrip()


def _is_ours(file: str) -> bool:
    path = Path(file)
    return path.parent in OURS or path.name == "contextlib.py" or "importlib" in file
