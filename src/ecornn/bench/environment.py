"""Where and with what a measurement is made."""

from __future__ import annotations

import platform
import re
import subprocess
from datetime import datetime, timezone
from pathlib import Path

import torch

import ecornn
from ecornn.bench.results import Scalar

PACKAGE = Path(ecornn.__file__).resolve().parent
CPU_FILE = Path("/proc/cpuinfo")
GIT_TIMEOUT_S = 10


def describe(device: torch.device) -> dict[str, Scalar]:
    found: dict[str, Scalar] = {}
    if device.type == "cuda":
        found["gpu"] = torch.cuda.get_device_name(device)
    found |= {"cpu": cpu_name(), "threads": torch.get_num_threads(), "torch": torch.__version__}
    if device.type == "cuda":
        found |= {
            "cuda": torch.version.cuda,
            "cudnn": str(torch.backends.cudnn.version()),
            "tf32": torch.get_float32_matmul_precision() != "highest",
        }
    return found | {
        "python": platform.python_version(),
        "ecornn": ecornn.__version__,
        "commit": commit(PACKAGE),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def cpu_name() -> str:
    if CPU_FILE.is_file():
        found = re.search(r"^model name\s*:\s*(.+)$", CPU_FILE.read_text(), re.M)
        if found:
            return found[1].strip()
    return platform.processor() or platform.machine()


def commit(package: Path) -> str | None:
    """The commit of the checkout that the package runs from, "+changes" added where its source
    differs; None for an installed package, also inside somebody else's repository."""
    root = _git(package, "rev-parse", "--show-toplevel")
    if root is None or Path(root).resolve() / "src" / "ecornn" != package:
        return None
    found = _git(package, "rev-parse", "HEAD")
    changes = _git(package, "status", "--porcelain", "--", str(package))
    return None if found is None else found + ("+changes" if changes else "")


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        answer = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            text=True,
            timeout=GIT_TIMEOUT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip()
