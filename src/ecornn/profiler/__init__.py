"""Where the memory of a training step goes, for any PyTorch model."""

from ecornn.profiler.model import Held, MemoryReport, Row, Timeline
from ecornn.profiler.session import Profile, profile

__all__ = ["Held", "MemoryReport", "Profile", "Row", "Timeline", "profile"]
