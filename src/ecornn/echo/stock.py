"""torch's own ways to split a joint graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx
from torch._functorch.partitioners import default_partition, min_cut_rematerialization_partition

from ecornn.echo.rewrite import Modules, duplicate, without_unread_draws

#: In the order in which a tie is decided: whoever recomputes less comes first.
STOCK: dict[str, Callable[..., Modules]] = {
    "keep all": default_partition,
    "torch's min-cut": min_cut_rematerialization_partition,
}


def partitioned(
    name: str,
    module: fx.GraphModule,
    inputs: Sequence[Any],
    forward_outputs: int,
    given: Mapping[str, Any],
) -> Modules:
    """`given`: settings that go to torch's as they come."""
    partitioner, settings = STOCK[name], dict(given)
    if partitioner is default_partition:
        settings.pop("compiler", None)
    found = partitioner(duplicate(module), inputs, num_fwd_outputs=forward_outputs, **settings)
    return without_unread_draws(found)
