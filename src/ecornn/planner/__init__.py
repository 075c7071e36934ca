"""From what is asked (`RnnSpec`) to who does it (`ExecutionPlan`)."""

from ecornn.planner.plan import ExecutionPlan
from ecornn.planner.select import plan

__all__ = ["ExecutionPlan", "plan"]
