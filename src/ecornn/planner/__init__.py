"""From what is asked (`RnnSpec`) to who does it (`ExecutionPlan`)."""

from ecornn.planner.plan import ExecutionPlan
from ecornn.planner.select import keeps_gates_unasked, plan

__all__ = ["ExecutionPlan", "keeps_gates_unasked", "plan"]
