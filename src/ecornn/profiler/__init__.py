"""Where the memory of a training step goes, for any PyTorch model."""

from ecornn.profiler.model import Held, MemoryReport, Row, Timeline

__all__ = ["Held", "MemoryReport", "Row", "Timeline"]
