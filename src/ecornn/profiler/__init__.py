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
from ecornn.profiler.without_numbers import meta_kernels

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
    "meta_kernels",
    "profile",
    "transformers_callback",
]
