"""Compiled kernels: what their key covers, and that the store never gives out a wrong one."""

from __future__ import annotations

import multiprocessing
import os
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from ecornn.kernels import jit
from ecornn.kernels.jit import (
    CompileError,
    Variant,
    build,
    cache_key,
    cached,
    compiled,
    compiler_unavailable,
)
from ecornn.kernels.jit.store import MAGIC, UnsafeCache
from ecornn.settings import settings

VARIANT = Variant("forward.cu", "sm_90a", (("CELL", 0), ("UNITS", 8)))
needs_compiler = pytest.mark.skipif(
    compiler_unavailable() is not None, reason=str(compiler_unavailable())
)


def no_build() -> bytes:
    raise AssertionError("it is in the store")


def test_the_key_covers_all_that_the_code_depends_on() -> None:
    base = cache_key(VARIANT, ("std=c++17",), "nvrtc 13.0")
    others = [
        cache_key(replace(VARIANT, arch="sm_80"), ("std=c++17",), "nvrtc 13.0"),
        cache_key(replace(VARIANT, source="other.cu"), ("std=c++17",), "nvrtc 13.0"),
        cache_key(replace(VARIANT, constants=(("CELL", 1),)), ("std=c++17",), "nvrtc 13.0"),
        cache_key(VARIANT, ("std=c++20",), "nvrtc 13.0"),
        cache_key(VARIANT, ("std=c++17",), "nvrtc 13.1"),
    ]
    assert len({base, *others}) == len(others) + 1
    assert cache_key(VARIANT, ("std=c++17",), "nvrtc 13.0") == base
    turned = replace(VARIANT, constants=VARIANT.constants[::-1])
    assert cache_key(turned, ("std=c++17",), "nvrtc 13.0") == base


def test_the_key_covers_included_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ecornn.kernels.jit import key

    monkeypatch.setattr(key, "SOURCES", tmp_path)
    found = []
    for text in ("a", "b"):
        (tmp_path / "shared.cuh").write_text(text)
        key.sources_digest.cache_clear()
        found.append(cache_key(VARIANT, (), ""))
    key.sources_digest.cache_clear()
    assert found[0] != found[1]


def test_what_was_built_is_found_again(tmp_path: Path) -> None:
    folder = tmp_path / "kernels"
    assert cached(folder, "k", lambda: b"code") == b"code"
    assert cached(folder, "k", no_build) == b"code"
    assert cached(folder, "other", lambda: b"more") == b"more"


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: b"",
        lambda content: content[:-1],
        lambda content: content + b"x",
        lambda content: content[:-1] + bytes([content[-1] ^ 1]),
        lambda content: content.replace(MAGIC, b"something-else\n"),
    ],
    ids=["empty", "cut", "longer", "a bit", "another form"],
)
def test_a_damaged_file_is_built_anew(tmp_path: Path, damage: object) -> None:
    folder = tmp_path / "kernels"
    cached(folder, "k", lambda: b"code")
    (file,) = folder.iterdir()
    file.write_bytes(damage(file.read_bytes()))  # type: ignore[operator]
    assert cached(folder, "k", lambda: b"code again") == b"code again"
    assert cached(folder, "k", no_build) == b"code again"


def test_the_store_is_its_owners_alone(tmp_path: Path) -> None:
    folder = tmp_path / "kernels"
    cached(folder, "k", lambda: b"code")
    (file,) = folder.iterdir()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    folder.chmod(0o777)
    with pytest.raises(UnsafeCache, match="chmod 700"):
        cached(folder, "k", no_build)


def test_a_build_that_fails_leaves_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "kernels"

    def fail() -> bytes:
        raise CompileError("no")

    with pytest.raises(CompileError):
        cached(folder, "k", fail)
    assert not folder.exists()
    assert cached(folder, "k", lambda: b"code") == b"code"


def _build_in_a_process(folder: Path, start: object) -> None:
    start.wait()  # type: ignore[attr-defined]
    code = os.urandom(1 << 16)
    found = cached(folder, "k", lambda: code)
    assert len(found) == 1 << 16


def test_many_processes_may_build_at_once(tmp_path: Path) -> None:
    folder = tmp_path / "kernels"
    # forked from one process that has imported what they need: in each anew it would take seconds
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["pytest", "ecornn.kernels.jit"])
    start = context.Barrier(4)
    processes = [
        context.Process(target=_build_in_a_process, args=(folder, start)) for _ in range(4)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 4
    assert [file.name for file in folder.iterdir()] == ["k.cubin"]
    assert len(cached(folder, "k", no_build)) == 1 << 16


def test_where_the_store_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ECORNN_CACHE", str(tmp_path / "own"))
    assert settings().cache == tmp_path / "own"
    monkeypatch.delenv("ECORNN_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert settings().cache == tmp_path / "ecornn"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert settings().cache == Path.home() / ".cache" / "ecornn"


@needs_compiler
def test_a_compiler_error_says_what_and_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ecornn.kernels.jit.nvrtc.SOURCES", tmp_path)
    (tmp_path / "broken.cu").write_text("__global__ void k() { undeclared = 1; }")
    with pytest.raises(CompileError, match="undeclared") as error:
        build(Variant("broken.cu", "sm_90a"))
    assert "broken.cu for sm_90a" in str(error.value)


@needs_compiler
def test_a_variant_is_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECORNN_CACHE", str(tmp_path))
    monkeypatch.setattr("ecornn.kernels.jit.nvrtc.SOURCES", tmp_path)
    (tmp_path / "small.cu").write_text("__global__ void small() { static_assert(UNITS == 8); }")
    variant = Variant("small.cu", "sm_90a", (("UNITS", 8),))
    code = compiled(variant)
    assert code[:4] == b"\x7fELF"
    monkeypatch.setattr(jit, "build", lambda _: no_build())
    assert compiled(variant) == code
    assert [file.suffix for file in (tmp_path / "kernels").iterdir()] == [".cubin"]


@needs_compiler
def test_two_threads_may_be_the_first_to_compile() -> None:
    """cuda-core's names are not all there while another thread imports it."""
    program = """
from concurrent.futures import ThreadPoolExecutor
from ecornn.kernels.jit import Variant, build
from ecornn.kernels.losses import CrossEntropyTile
variant = CrossEntropyTile().variant("sm_80")
with ThreadPoolExecutor(8) as pool:
    print(len({*pool.map(lambda _: build(variant), range(8))}) >= 1)
"""
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert ran.stdout.strip() == "True", ran.stderr
