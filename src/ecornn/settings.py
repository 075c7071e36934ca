"""The environment, read here and nowhere else."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Settings:
    #: Where compiled kernels are kept between runs.
    cache: Path


def settings() -> Settings:
    """`ECORNN_CACHE` names the cache; else it is `ecornn` in the user's cache folder."""
    own = os.environ.get("ECORNN_CACHE")
    if own:
        return Settings(Path(own))
    base = os.environ.get("XDG_CACHE_HOME")
    return Settings((Path(base) if base else Path.home() / ".cache") / "ecornn")


def child_environment(package: Path, changes: Mapping[str, str]) -> dict[str, str]:
    """This process's environment for a child of it that imports the same `package`, with some
    variables changed."""
    before = os.environ.get("PYTHONPATH")
    path = str(package.parent) + (f"{os.pathsep}{before}" if before else "")
    return {**os.environ, "PYTHONPATH": path, **changes}
