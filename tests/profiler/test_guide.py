"""The guide's code runs in order."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

GUIDE = Path(__file__).parents[2] / "docs" / "profiler.md"


def test_the_code_of_the_guide_runs(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```$", GUIDE.read_text(), re.M | re.S)
    assert len(blocks) == 9
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, "guide.py", "exec"), names)
    printed = capsys.readouterr().out
    assert "feature maps" in printed
    assert "guide.py:" in printed
    assert "the largest batch within 24.00 MiB" in printed
    assert "difference" in printed
    assert {path.name for path in tmp_path.iterdir()} == {
        *("step.html", "step.png", "step.csv", "step.trace.json", "step.json", "change.html")
    }
