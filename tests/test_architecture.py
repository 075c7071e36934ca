"""The rules of the house that a machine can check; docs/architecture.md gives the reasons."""

from __future__ import annotations

import ast
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "ecornn"
MODULES = sorted(SOURCE.rglob("*.py"))

NAMES_THAT_SAY_NOTHING = {"utils.py", "common.py", "helpers.py"}
MOST_LINES_OF_A_FILE = 400
MOST_LINES_OF_A_FUNCTION = 60
#: What the docstring of a longer file or function says: "77 lines because …".
REASON = "lines because"

LINT_IMPORTS = "from importlinter.cli import lint_imports_command; lint_imports_command()"


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def lint_imports(root: Path) -> subprocess.CompletedProcess[str]:
    """Run the contracts of `root`/pyproject.toml on the package in `root`/src."""
    launch = f"import sys; sys.path.insert(0, 'src'); {LINT_IMPORTS}"
    command = [sys.executable, "-c", launch, "--no-cache", "--no-logo"]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)


def test_imports_point_down_the_rooms() -> None:
    result = lint_imports(ROOT)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    ("path", "line"),
    [
        pytest.param("kernels/intruder.py", "import ecornn.nn", id="an import that points up"),
        pytest.param("attic.py", "", id="a room that is not on the map"),
    ],
)
def test_the_contract_can_fail(tmp_path: Path, path: str, line: str) -> None:
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    package = tmp_path / "src" / "ecornn"
    shutil.copytree(SOURCE, package, ignore=shutil.ignore_patterns("__pycache__"))
    (package / path).write_text(line + "\n")
    result = lint_imports(tmp_path)
    assert result.returncode == 1, result.stdout + result.stderr
    assert Path(path).stem in result.stdout


def test_file_names_say_what_is_inside() -> None:
    everywhere = [*MODULES, *(ROOT / "tests").rglob("*.py")]
    assert [name_of(p) for p in everywhere if p.name in NAMES_THAT_SAY_NOTHING] == []


def too_long(path: Path) -> Iterator[str]:
    tree = ast.parse(path.read_text())
    lines = len(path.read_text().splitlines())
    if lines > MOST_LINES_OF_A_FILE and REASON not in (ast.get_docstring(tree) or ""):
        yield f"{name_of(path)}: {lines} lines"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > MOST_LINES_OF_A_FUNCTION and REASON not in (ast.get_docstring(node) or ""):
                yield f"{name_of(path)}:{node.lineno} {node.name}: {lines} lines"


def test_files_and_functions_are_short_or_say_why() -> None:
    pieces = [piece for path in MODULES for piece in too_long(path)]
    assert pieces == [], "\n".join(pieces)


def environment_uses(path: Path) -> Iterator[str]:
    names = {"environ", "environb", "getenv", "putenv", "unsetenv"}
    for node in ast.walk(ast.parse(path.read_text())):
        through_os = (
            isinstance(node, ast.Attribute)
            and node.attr in names
            and isinstance(node.value, ast.Name)
            and node.value.id == "os"
        )
        imported = (
            isinstance(node, ast.ImportFrom)
            and node.module == "os"
            and any(alias.name in names for alias in node.names)
        )
        if through_os or imported:
            yield f"{name_of(path)}:{node.lineno}"


def test_the_environment_is_read_in_settings_alone() -> None:
    readers = [p for p in MODULES if p != SOURCE / "settings.py"]
    assert [use for path in readers for use in environment_uses(path)] == []


def imports_at_top(path: Path) -> Iterator[str]:
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def test_commands_import_what_is_slow_only_when_they_run() -> None:
    allowed = {"ecornn._version", "ecornn.cli.bench", "ecornn.cli.doctor", "ecornn.cli.train"}
    allowed |= {"ecornn.cli.tune", "ecornn.cli.bench_echo", "ecornn.cli.profile", "ecornn.cli.fit"}
    allowed |= {"ecornn.cli.bench_profiler"}
    allowed |= {"ecornn.errors"}  # imports nothing
    slow = [
        f"{name_of(path)}: {module}"
        for path in (SOURCE / "cli").glob("*.py")
        for module in imports_at_top(path)
        if module.split(".")[0] in {"torch", "numpy", "rich", "ecornn"} and module not in allowed
    ]
    assert slow == []


def test_importing_ecornn_starts_nothing() -> None:
    program = (
        "import json, sys, torch, torch.utils.flop_counter\n"  # from 2.15 on it imports Triton
        "theirs = set(sys.modules)\n"
        "import ecornn\n"
        "print(json.dumps([torch.cuda.is_initialized(), sorted(set(sys.modules) - theirs)]))"
    )
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, check=True
    )
    initialized, modules = json.loads(result.stdout)
    assert not initialized
    unwanted = {"torch._dynamo", "torch._inductor", "matplotlib", "cuda.core", "triton", "typer"}
    assert unwanted & set(modules) == set()
    assert result.stderr == ""
