"""Where the memory of a training step goes, for any PyTorch model, and what batch fits."""

from ecornn.profiler.callbacks import (
    MissingPackage,
    ProfileAt,
    lightning_callback,
    transformers_callback,
)
from ecornn.profiler.fit import Fit, fit
from ecornn.profiler.model import Held, MemoryReport, Row, Timeline, UnreadableReport, WhatIf
from ecornn.profiler.session import NotObserved, Profile, profile

__all__ = [
    "Fit",
    "Held",
    "MemoryReport",
    "MissingPackage",
    "NotObserved",
    "Profile",
    "ProfileAt",
    "Row",
    "Timeline",
    "UnreadableReport",
    "WhatIf",
    "fit",
    "lightning_callback",
    "profile",
    "transformers_callback",
]
