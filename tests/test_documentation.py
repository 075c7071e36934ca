"""What the documentation shows works, and what it points to exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text())
    files = [target for target in targets if not target.startswith("https://")]
    assert [file for file in files if not (page.parent / file).exists()] == []


def test_the_readme_s_code_runs_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), re.M | re.S)
    assert blocks
    names: dict[str, object] = {}
    for block in blocks * 2:  # twice: the first run leaves nothing changed behind
        exec(block, names)
    assert "runs on" in capsys.readouterr().out


def test_the_readme_s_commands_exist() -> None:
    targets = re.findall(r"^make (\w+)", (ROOT / "README.md").read_text(), re.M)
    makefile = (ROOT / "Makefile").read_text()
    assert targets == ["demo", "test"]
    assert all(re.search(rf"^{target}:", makefile, re.M) for target in targets)
