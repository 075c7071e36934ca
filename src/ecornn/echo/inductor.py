"""Echo's partitioner in the form that inductor takes; imported when inductor is used."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx
from torch._inductor.custom_graph_pass import CustomPartitionerFn

from ecornn.echo.rewrite import Modules


class EchoPartitioner(CustomPartitionerFn):
    """`key` stands for everything that the split depends on beside the graph: inductor's cache of
    compiled code asks for it, and pickles the partitioner with its other settings."""

    def __init__(self, partition: Callable[..., Modules] | None, key: str) -> None:
        self.partition, self.key = partition, key

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **settings: Any
    ) -> Modules:
        assert self.partition is not None, "a partitioner from a pickle only stands for its key"
        return self.partition(gm, joint_inputs, **settings)

    def uuid(self) -> str:
        return self.key

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (None, self.key)
