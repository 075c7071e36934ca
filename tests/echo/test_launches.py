"""Kernels that have been chosen are launched without asking again, and only those."""

from __future__ import annotations

from types import FunctionType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch.autograd import profiler

from ecornn.echo.launches import CAREFUL_CALLS, launch_directly, with_direct_launches


class CachingAutotuner:
    """Stands for inductor's, of the same name."""

    triton_interpret = dump_launch_params = dump_launch_tensors = False

    def __init__(self, **differing: Any) -> None:
        self.runs: list[Any] = []
        self.launched: list[Any] = []

        def launcher(*args: Any, stream: int) -> str:
            self.launched.append((args, stream))
            return "launched"

        launcher.store_cubin = False  # type: ignore[attr-defined]
        self.launchers: list[Any] = [launcher]
        self.inductor_meta: dict[str, Any] = {}
        self.__dict__.update(differing)

    def run(self, *args: Any, stream: int, grid: int = 0) -> str:
        self.runs.append((args, stream))
        return "run"


class Compiled:
    """Stands for inductor's compiled code: a function `call`, its kernels are its globals."""

    def __init__(self, **names: Any) -> None:
        def call(arguments: list[Any]) -> Any:
            return kernel.run(*arguments, stream=7)  # type: ignore[name-defined]  # noqa: F821

        self.names = names
        self.compiled_fn_runner = SimpleNamespace(call=FunctionType(call.__code__, self.names))

    def __call__(self, arguments: list[Any]) -> Any:
        return self.compiled_fn_runner.call(arguments)


def test_the_first_calls_ask_and_the_others_do_not() -> None:
    tuner = CachingAutotuner()
    compiled = Compiled(kernel=tuner)
    x = torch.zeros(2)
    run = with_direct_launches(compiled)
    assert run._boxed_call  # type: ignore[attr-defined]
    assert [run([x]) for _ in range(CAREFUL_CALLS)] == ["run"] * CAREFUL_CALLS
    assert [run([x]) for _ in range(3)] == ["launched"] * 3
    assert len(tuner.runs) == CAREFUL_CALLS
    assert tuner.launched == [((x,), 7)] * 3


def test_a_profiler_has_its_records(monkeypatch: pytest.MonkeyPatch) -> None:
    tuner = CachingAutotuner()
    compiled = Compiled(kernel=tuner)
    assert launch_directly(compiled) == 1
    monkeypatch.setattr(profiler, "_is_profiler_enabled", True)
    assert compiled([torch.zeros(2)]) == "run"
    monkeypatch.setattr(profiler, "_is_profiler_enabled", False)
    assert compiled([torch.zeros(2)]) == "launched"


def test_what_is_named_beside_the_stream_is_the_tuner_s() -> None:
    tuner = CachingAutotuner()
    compiled = Compiled(kernel=tuner)
    assert launch_directly(compiled) == 1
    kernel = compiled.names["kernel"]
    assert kernel.run(1, stream=2, grid=3) == "run"
    assert kernel.run(1, stream=2) == "launched"


def _storing() -> Any:
    def launcher(*args: Any, stream: int) -> None:
        raise AssertionError("launched")

    launcher.store_cubin = True  # type: ignore[attr-defined]
    return launcher


@pytest.mark.parametrize(
    "differing",
    [
        {"launchers": []},
        {"launchers": [_storing(), _storing()]},
        {"launchers": [_storing()]},
        {"launchers": [lambda *args, stream: None]},  # nobody knows whether it stores
        {"triton_interpret": True},
        {"dump_launch_params": True},
        {"dump_launch_tensors": True},
        {"inductor_meta": {"coordinate_descent_tuning": True}},
        {"_cached_launcher": None},  # of a newer torch, which does so itself
    ],
    ids=lambda given: "-".join(given),
)
def test_a_tuner_that_has_more_to_do_is_left(differing: dict[str, Any]) -> None:
    tuner = CachingAutotuner(**differing)
    compiled = Compiled(kernel=tuner)
    assert launch_directly(compiled) == 0
    assert compiled.names["kernel"] is tuner
    assert compiled([torch.zeros(2)]) == "run"


def test_what_is_not_known_is_left_alone() -> None:
    class Other(CachingAutotuner):
        pass

    other = Other()
    assert launch_directly(Compiled(kernel=other)) == 0
    assert launch_directly(SimpleNamespace()) == 0
    assert launch_directly(SimpleNamespace(compiled_fn_runner=None)) == 0
    bare = SimpleNamespace(compiled_fn_runner=SimpleNamespace(call=len))
    assert launch_directly(bare) == 0


class StaticallyLaunchedCudaKernel:
    """Stands for torch's, of the same name."""

    function: int | None = 11
    num_warps, shared, arg_tys = 4, 128, "OOi"
    has_global_scratch = has_profile_scratch = False

    def __init__(self, **differing: Any) -> None:
        self.launched: list[Any] = []
        self.asked = 0
        self.C_impl = SimpleNamespace(_launch_kernel=lambda *given: self.launched.append(given))
        self.__dict__.update(differing)

    def run(self, x: int, y: int, z: int, stream: int, *args: Any) -> None:
        self.asked += 1
        given = (self.function, x, y, z, self.num_warps, self.shared, self.arg_tys, args, stream)
        self.C_impl._launch_kernel(*given)


def launched_by(kernel: Any) -> Compiled:
    names: dict[str, Any] = {"runner": kernel.run}
    exec("def launcher(a, b, n, stream):\n    runner(-(n // -8), 1, 1, stream, a, b, n)", names)
    launcher = names["launcher"]
    launcher.store_cubin = False
    compiled = Compiled(kernel=CachingAutotuner(launchers=[launcher]))
    assert launch_directly(compiled) == 1
    return compiled


def test_a_kernel_that_takes_no_scratch_is_launched_as_it_would_launch_itself() -> None:
    kernel, x = StaticallyLaunchedCudaKernel(), torch.zeros(2)
    compiled = launched_by(kernel)
    for _ in range(2):
        compiled([x, x, 20])
    kernel.run(3, 1, 1, 7, x, x, 20)
    assert kernel.asked == 1
    assert [str(one) for one in kernel.launched] == [str(kernel.launched[-1])] * 3


@pytest.mark.parametrize(
    "differing", [{"has_global_scratch": True}, {"has_profile_scratch": True}, {"function": None}]
)
def test_a_kernel_that_has_more_to_do_launches_itself(differing: dict[str, Any]) -> None:
    kernel, x = StaticallyLaunchedCudaKernel(**differing), torch.zeros(2)
    launched_by(kernel)([x, x, 20])
    assert kernel.asked == 1
    assert len(kernel.launched) == 1
