"""How many bytes the results of operators take while a program runs, seen from outside."""

from ecornn.bench.profiling.alive import Alive

__all__ = ["Alive"]
