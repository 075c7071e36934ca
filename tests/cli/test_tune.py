"""`ecornn tune`: what it refuses, and how a measured tile is remembered."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from ecornn.cli.app import app
from ecornn.kernels.persistent import device, tables, tune
from ecornn.kernels.persistent.choose import Request, measured, ranked
from ecornn.kernels.persistent.tables import own_table, remember
from ecornn.kernels.persistent.tune import entry
from support.chips import HOPPER


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (["--hidden", "12"], "multiple of 8"),
        (["--hidden", "0"], "multiple of 8"),
        (["--batch", "0"], "at least 1"),
        (["--tiles", "0"], "at least 1"),
        (["--cell", "lsmt"], "lstm"),
        (["--numbers", "fp8"], "bf16"),
        (["--again"], "leave --hidden and --batch out"),
    ],
)
def test_bad_options_are_refused(options: list[str], word: str) -> None:
    given = {"--hidden": ["64"], "--batch": ["4"]} | {options[0]: options[1:]}
    flat = [part for name, values in given.items() for part in (name, *values)]
    result = CliRunner().invoke(app, ["tune", *flat])
    assert result.exit_code == 2
    assert word in result.output


def test_without_a_size_it_asks_for_one() -> None:
    result = CliRunner().invoke(app, ["tune"])
    assert result.exit_code == 2
    assert "--hidden must be a multiple of 8" in result.output


@pytest.mark.parametrize("interrupted", [False, True])
def test_known_sizes_are_measured_again(
    interrupted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And remembered, in the place of what this machine knew of them."""
    monkeypatch.setenv("ECORNN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(device, "unavailable", lambda: None)
    tables.table.cache_clear()
    ask = Request("forward", "lstm", "bf16", 512, 4)
    known = measured(ask)
    assert known is not None
    quicker = replace(known, tile=replace(known.tile, polling="all delayed"))

    def measures(_: int, numbers: str) -> Iterator[tune.Again]:
        asked.append(numbers)
        yield tune.Again(entry(ask, quicker, 0.5), 0.75, 0)
        if interrupted:
            raise KeyboardInterrupt

    monkeypatch.setattr(tune, "tuned_again", measures)
    asked: list[str] = []
    only = ["--numbers", "fp16"] if interrupted else []
    try:
        result = CliRunner().invoke(app, ["tune", "--again", *only])
        assert asked == ["fp16" if interrupted else ""]
        assert (result.exit_code != 0) is interrupted
        assert "forward lstm bf16 512 × 4: 0.750 µs a step, now 0.500" in result.output
        assert measured(ask) == quicker
    finally:
        tables.table.cache_clear()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_it_says_so() -> None:
    result = CliRunner().invoke(app, ["tune", "--hidden", "64", "--batch", "4"])
    assert result.exit_code == 2
    assert "no CUDA device" in result.output


def test_what_is_remembered_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECORNN_CACHE", str(tmp_path / "cache"))
    tables.table.cache_clear()
    ask = Request("forward", "gru", "bf16", 320, 6)
    try:
        assert measured(ask) is None
        found = ranked(ask, HOPPER)
        for slow in (found[3], found[5]):  # the second replaces the first
            path = remember([entry(ask, slow, 9.0)])
            assert path == own_table()
            assert ranked(ask, HOPPER)[0] == slow == measured(ask)
        assert len(path.read_text().strip().splitlines()) == 3
        # what the package brings stays
        assert measured(Request("forward", "lstm", "bf16", 512, 4)) is not None
    finally:
        tables.table.cache_clear()
