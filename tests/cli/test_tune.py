"""`ecornn tune`: what it refuses, and how a measured tile is remembered."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from ecornn.cli.app import app
from ecornn.kernels.persistent import choose
from ecornn.kernels.persistent.choose import Request, measured, own_table, ranked, remember
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
    ],
)
def test_bad_options_are_refused(options: list[str], word: str) -> None:
    given = {"--hidden": "64", "--batch": "4"} | {options[0]: options[1]}
    result = CliRunner().invoke(app, ["tune", *(part for pair in given.items() for part in pair)])
    assert result.exit_code == 2
    assert word in result.output


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_it_says_so() -> None:
    result = CliRunner().invoke(app, ["tune", "--hidden", "64", "--batch", "4"])
    assert result.exit_code == 2
    assert "no CUDA device" in result.output


def test_what_is_remembered_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECORNN_CACHE", str(tmp_path / "cache"))
    choose._table.cache_clear()
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
        choose._table.cache_clear()
