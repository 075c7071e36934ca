"""Code that is compiled only to see what it holds has no kernels, and nobody is given it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx
from torch._dynamo.utils import counters
from torch._inductor import config
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.codecache import PyCodeCache
from torch._inductor.codegen import triton as triton_codegen
from torch._inductor.virtualized import V

from ecornn.echo import inductor
from ecornn.echo.ahead import Ahead, copied
from ecornn.echo.without_kernels import LOAD, NotLoaded, without_kernels
from support.least_of_code import (
    compile_and_compare,
    count_kernels,
    from_the_cache,
    unknown_factor,
)

pytestmark = pytest.mark.usefixtures("fresh_compiler")

TESTS = Path(__file__).parents[1]
LOADED = vars(PyCodeCache)[LOAD]
STARTED_BY = triton_codegen.async_compile
#: Code, as far as a load is concerned, that says whether it was loaded.
CODE = "call = 'what was loaded'\nelse_where = 3"


class Kernels:
    """How many were asked for, and how many of these ahead of the call."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ahead = 0
        self._all = count_kernels(monkeypatch.setattr)
        look: Callable[..., Any] = Ahead._compile

        def looked_at(*args: Any) -> Any:
            before = self.asked_for
            try:
                return look(*args)
            finally:
                self.ahead += self.asked_for - before

        monkeypatch.setattr(Ahead, "_compile", looked_at)
        counters.clear()

    @property
    def asked_for(self) -> int:
        return len(self._all)


def test_kernels_are_those_of_what_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copied without saying which inputs are weights, the graph had other plans and code ahead of
    the call, and what was chosen was generated twice."""
    kernels, factor = Kernels(monkeypatch), unknown_factor()
    tried = len(compile_and_compare(factor).explain().graphs[0].code_of)
    assert tried > 1
    assert from_the_cache() == (2, 2 * tried)
    once = kernels.asked_for
    assert once > kernels.ahead == 0
    torch._dynamo.reset()
    counters.clear()
    compile_and_compare(factor)
    assert from_the_cache() == (2 * tried + 2, 0)
    assert kernels.asked_for == 2 * once
    assert kernels.ahead == 0


def test_another_process_compiles_the_kernels_of_code_that_was_looked_at() -> None:
    factor = str(unknown_factor())
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])}
    for what in ("choose", "compile"):
        command = [sys.executable, "-m", "support.least_of_code", what, factor]
        subprocess.run(command, env=environment, check=True)


def test_without_a_cache_what_is_chosen_is_compiled_in_full(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kernels = Kernels(monkeypatch)
    with config.patch(fx_graph_cache=False):
        compile_and_compare(1.0)
    assert from_the_cache() == (0, 0)
    assert kernels.asked_for > kernels.ahead == 0


def test_kernels_are_compiled_where_torch_loads_code_in_another_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def load(cls: Any, place: str, path: str, linemap: Any = None, attrs: Any = None) -> Any:
        return LOADED.__get__(None, cls)(place, path, linemap, attrs)

    monkeypatch.setattr(PyCodeCache, LOAD, classmethod(load))
    kernels = Kernels(monkeypatch)
    compile_and_compare(1.0)
    assert kernels.asked_for > kernels.ahead > 0


def nothing_is_replaced() -> bool:
    return vars(PyCodeCache)[LOAD] is LOADED and triton_codegen.async_compile is STARTED_BY


def test_what_was_replaced_is_put_back_when_a_trial_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def fails(*_: Any) -> Any:
        seen.append(nothing_is_replaced())
        raise RuntimeError("inductor fails")

    monkeypatch.setattr(inductor, "_compiled", fails)
    with pytest.raises(RuntimeError, match="inductor fails"):
        compile_and_compare(1.0)
    assert seen == [False]
    assert nothing_is_replaced()


def empty_graph() -> fx.GraphModule:
    return fx.GraphModule({}, fx.Graph())


def load(attrs: dict[str, Any] | None) -> Any:
    return PyCodeCache.load_by_key_path(*PyCodeCache.write(CODE), [], attrs)


def test_only_the_code_of_the_graph_is_not_loaded() -> None:
    """Kernels that are timed have no constants, and parts that are timed are graphs themselves."""
    module = empty_graph()
    with without_kernels(module):
        found = load({})
        assert isinstance(found, NotLoaded)
        assert Path(found.__file__).read_text() == CODE
        with V.set_graph_handler(fx.Interpreter(module)):  # type: ignore[arg-type]
            assert isinstance(load({}), NotLoaded)
        with V.set_graph_handler(fx.Interpreter(empty_graph())):  # type: ignore[arg-type]
            assert load({}).call == "what was loaded"
        assert load(None).call == "what was loaded"
    assert load({"constant": 5}).constant == 5
    with pytest.raises(AssertionError, match="has no kernels"):
        found.call([])
    assert found.else_where == 3, "whatever else it is asked for, it is loaded for"


def test_other_threads_load_and_start_what_they_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AsyncCompile, "use_process_pool", classmethod(lambda _: True))

    def starts() -> bool:
        return triton_codegen.async_compile.use_process_pool()

    theirs = without_kernels(empty_graph())
    with ThreadPoolExecutor(1) as pool:

        def there(function: Callable[..., Any], *args: Any) -> Any:
            return pool.submit(function, *args).result(timeout=60)

        with without_kernels(empty_graph()):
            assert (starts(), there(starts)) == (False, True)
            assert there(load, {}).call == "what was loaded"
            there(theirs.__enter__)
            assert not there(starts)
        assert starts()
        assert load({}).call == "what was loaded"
        assert isinstance(there(load, {}), NotLoaded)
        there(theirs.__exit__, None, None, None)
    assert nothing_is_replaced()


def test_a_copy_says_where_its_inputs_are_from() -> None:
    module: Any = empty_graph()
    node: Any = module.graph.placeholder("x")
    module.graph.output((node,))
    assert not hasattr(copied(module), "_param_name_to_source")
    module._param_name_to_source, node._dynamo_source = {"a": 1}, "where it is from"
    found: Any = copied(module)
    (its,) = found.graph.find_nodes(op="placeholder")
    assert (found._param_name_to_source, its._dynamo_source) == ({"a": 1}, "where it is from")
