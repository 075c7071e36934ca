"""The weights' gradients of a part that is called many times, added up before autograd sees them.

For each call, autograd adds each weight's gradient to the sum of those before: a kernel for every
weight and call, launched while the GPU waits. `WeightSums` adds all of a call's in one; or, where
the order of adding is free, makes what was taken out of the backward pass (`weight_products.py`)
for many calls at once. So it does for inputs that calls have in common, such as attention's values.
Autograd gets nothing from a call but the last that it runs, which hands over the sums.

Which call is the last is autograd's own knowledge, and asked of it: the node of each call is known
from the forward pass, and torch tells which of them the running backward pass will execute. Calls
are added up whose gradients go to the same places, on the same stream: a part may be called with
other weights in between. A call whose node is not known hands over its own gradients. Should a sum
be left over at the end, that is an error and raised: gradients are not lost in silence.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import Tensor, fx

from ecornn.echo.calls_noted import BY_KIND
from ecornn.echo.gathered import Columns, Gathered, Product, RowSum
from ecornn.echo.weight_products import Backward
from ecornn.errors import EcornnError

#: So many calls' factors, and small gradients, wait to be made one sum: more would save few further
#: launches and keep more memory.
CALLS_AT_ONCE = 16
#: Where a call's gradients of weights go: functions of autograd's graph, and the stream.
Ways = tuple[tuple[Any, ...], int | None]
#: Where those of inputs go that calls may have in common.
Others = tuple[Any, ...]


class SumsLeftOver(EcornnError, RuntimeError):
    """A backward pass ended before all calls of a part had handed over their gradients."""


def why_not() -> str | None:
    """What this torch lacks; None if nothing."""
    names = ("_current_autograd_node", "_current_graph_task_id", "_will_engine_execute_node")
    lacking = [name for name in names if not hasattr(torch._C, name)]
    return f"torch {torch.__version__} has no {lacking[0]}" if lacking else None


@dataclass(eq=False)
class _UnderWay:
    """One backward pass: calls that it will still run, and the sums of those that it has. The pass
    holds it by its last callback, so that it goes with the pass, also with one that raises."""

    waiting: set[int]
    sums: dict[int, Tensor] = field(default_factory=dict)
    common: bool = False  # inputs that calls may have in common are the same in all of these
    ours: bool = False  # nobody else refers to those sums that are added to one by one
    #: Of calls that are not in the sums yet: what these are made of, in the order of the places;
    #: and how often each had been written to when it was handed over.
    calls: list[list[Tensor]] = field(default_factory=list)
    versions: list[list[int]] = field(default_factory=list)

    def ended(self) -> None:
        if self.waiting:
            raise SumsLeftOver(
                f"the backward pass ended while {len(self.waiting)} calls of a compiled part had "
                "not run, and the gradients of its weights are incomplete; this is a defect of "
                "Echo: compile with torch.compile(…, backend='echo') until it is mended"
            )

    def check_versions(self) -> None:
        if any(
            [t._version for t in c] != v for c, v in zip(self.calls, self.versions, strict=True)
        ):
            raise RuntimeError(
                "a tensor needed for gradients of weights was changed in place during the "
                "backward pass, by a hook perhaps: change a copy of it instead"
            )


class WeightSums:
    """Of one compiled graph. `sizes`: of its inputs, None for those that are no tensors; autograd
    is owed a gradient, or None, for each. `changing`: names of what shares the weights' memory.
    `common`: other inputs that its calls are thought to have in common, and have a gradient."""

    def __init__(
        self,
        weights: Collection[int],
        sizes: Sequence[tuple[Any, ...] | None],
        changing: Collection[str],
        common: Collection[int] = (),
    ) -> None:
        self.results, self._changing = len(sizes), frozenset(changing)
        self.weights = tuple(sorted(weights))
        self._maybe_common = tuple(common)
        #: Autograd counts inputs that are tensors alone.
        self._tensors = [k for k, size in enumerate(sizes) if size is not None]
        self._sizes = [sizes[k] for k in self.weights]
        # twice the first: of a single place it would not make a tuple
        ways = [self._tensors.index(k) for k in (self.weights[0], *self.weights)]
        self._ways_among = itemgetter(*ways)
        #: Added one by one, in autograd's order and with its bits.
        self.ordered = self.weights
        #: Made for many calls at once: of weights, and of inputs that they have in common.
        self.gathered: tuple[Gathered, ...] = ()
        self.common: tuple[Gathered, ...] = ()
        self._places: dict[int, int] = {}  # of a call's results: where they stand among those kept
        self._known_by_kind = True  # torch makes a kind of node for each graph
        self._begin()

    def _begin(self) -> None:
        self._calls: WeakKeyDictionary[Any, tuple[Ways, Others]] = WeakKeyDictionary()
        self._under_way: WeakValueDictionary[tuple[int, Ways], _UnderWay] = WeakValueDictionary()
        self._lock = Lock()  # threads may run passes of one graph

    def in_any_order(self, backward: fx.GraphModule) -> None:
        """Change the backward pass so that many calls' gradients are made at once: what is rounded
        in between is rounded less often, and not as autograd would."""
        changed = Backward(backward, self._changing)
        changed.take_products((*self.weights, *self._maybe_common))
        for take in (changed.take_row_sums, changed.take_small):
            taken = {one.weight for one in changed.gathered}
            take([k for k in self.weights if k not in taken])
        found = changed.end()
        self.gathered = tuple(one for one in found if one.weight in self.weights)
        self.common = tuple(one for one in found if one.weight not in self.weights)
        made = {one.weight for one in self.gathered}
        self.ordered = tuple(k for k in self.weights if k not in made)
        places = dict.fromkeys(place for one in found for place in one.places)
        self._places = {place: i for i, place in enumerate(places)}

    def around(self, run: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
        """The backward pass as autograd is to see it."""

        def backward(arguments: list[Any]) -> Any:
            return self.handed_over(list(run(arguments)))

        backward._boxed_call = True  # type: ignore[attr-defined]
        return backward

    def register(self, node: Any, stream: int | None) -> None:
        """A call's node in autograd's graph, and the stream on which both of its passes run. Those
        of other streams are no part of its sum: autograd lets them wait for each other."""
        functions = node.next_functions
        ways = self._ways_among(functions), stream
        others = tuple(functions[self._tensors.index(one.weight)] for one in self.common)
        with self._lock:
            self._calls[node] = ways, others

    def of_one_call(self, returned: list[Any]) -> list[Any]:
        """Its gradients, without those of others."""
        return self._made_alone(returned, (*self.gathered, *self.common))[: self.results]

    def _made_alone(self, returned: list[Any], which: Iterable[Gathered]) -> list[Any]:
        columns = Columns(self._places, [[returned[place] for place in self._places]])
        found = list(returned)
        for one in which:
            found[one.weight] = one.result(one.of_calls(columns, None))
        return found

    def anew(self) -> WeightSums:
        """The same, of no call yet: for a rehearsal, whose nodes are all of one kind."""
        other = copy.copy(self)
        other._known_by_kind = False
        other._begin()
        return other

    def handed_over(self, returned: list[Any]) -> list[Any]:
        """What autograd is given in the place of what a call's backward pass has returned."""
        node: Any = torch._C._current_autograd_node()
        task: int = torch._C._current_graph_task_id()
        if node is None or task < 0:
            return self.of_one_call(returned)
        with self._lock:
            known = self._calls.get(node)
        if known is None:
            if self._known_by_kind and self._leads_to_weights(node):
                BY_KIND[type(node)] = self  # from the next forward pass on its calls are known
            return self.of_one_call(returned)
        under_way = self._under_way.get((task, known[0]))
        if under_way is None:
            under_way = self._begun(task, *known)
        if under_way is None:
            return self.of_one_call(returned)
        under_way.waiting.discard(id(node))  # the one that a pass began at is not among them
        self._add(under_way, returned)
        last = not under_way.waiting
        if last or len(under_way.calls) >= CALLS_AT_ONCE:
            self._gather(under_way)
        if not under_way.common:
            returned = self._made_alone(returned, self.common)
        del returned[self.results :]
        together = (*self.gathered, *self.common) if under_way.common else self.gathered
        for k in (*self.ordered, *(one.weight for one in together)):
            returned[k] = under_way.sums[k] if last else None
        if last:
            for one in together:
                returned[one.weight] = one.result(returned[one.weight])
            under_way.sums.clear()  # what nobody else refers to becomes `.grad` without a copy
        return returned

    def _leads_to_weights(self, node: Any) -> bool:
        """Are autograd's places those of this graph's inputs?"""
        functions = node.next_functions
        if len(functions) != len(self._tensors):
            return False
        leaves = [getattr(f, "variable", None) for f, _ in self._ways_among(functions)[1:]]
        return all(
            isinstance(leaf, Tensor) and tuple(leaf.shape) == size
            for leaf, size in zip(leaves, self._sizes, strict=True)
        )

    def _begun(self, task: int, ways: Ways, others: Others) -> _UnderWay | None:
        """None if the pass is asked for no weight's gradient: then it may stop before a call of
        which torch says that it will be run (2.13), since the gradient of its result is."""
        if not any(_asked_for(function) for function, _ in ways[0]):
            return None
        will = torch._C._will_engine_execute_node
        with self._lock:
            calls = [(call, known[1]) for call, known in self._calls.items() if known[0] == ways]
        calls = [(call, its) for call, its in calls if will(call)]
        common = bool(self.common) and all(its == others for _, its in calls)
        begun = _UnderWay({id(call) for call, _ in calls}, common=common)
        torch.autograd.Variable._execution_engine.queue_callback(begun.ended)
        with self._lock:
            self._under_way[task, ways] = begun
        return begun

    def _add(self, under_way: _UnderWay, returned: list[Any]) -> None:
        if self._places:
            kept = [returned[place] for place in self._places]
            under_way.calls.append(kept)
            under_way.versions.append(_versions(kept))
        if not self.ordered:
            return
        more, sums = [returned[k] for k in self.ordered], under_way.sums
        if under_way.ours:
            torch._foreach_add_([sums[k] for k in self.ordered], more)
            return
        if self.ordered[0] in sums:  # two weights may have been given one tensor
            more = list(torch._foreach_add([sums[k] for k in self.ordered], more))
            under_way.ours = True
        sums.update(zip(self.ordered, more, strict=True))

    def _gather(self, under_way: _UnderWay) -> None:
        """All calls that are waiting for it into the sums."""
        if not under_way.calls:
            return
        under_way.check_versions()
        sums, columns = under_way.sums, Columns(self._places, under_way.calls)
        for one in (*self.gathered, *(self.common if under_way.common else ())):
            sums[one.weight] = one.of_calls(columns, sums.get(one.weight))
        under_way.calls.clear()
        under_way.versions.clear()

    def told(self) -> str:
        said = f"the gradients of {len(self.weights)} weights are added up over its calls"
        if not self._places:
            return said
        kinds = Counter(type(one) for one in self.gathered)
        said = f"{said}, {CALLS_AT_ONCE} calls at once, those of {kinds[Product]} by one product"
        if kinds[RowSum]:
            said = f"{said}, those of {kinds[RowSum]} as sums of such a product's factor"
        if self.common:
            said = f"{said}; so are those of {len(self.common)} inputs that calls have in common"
        return said


def _asked_for(function: Any) -> bool:
    """Will the running backward pass come to this one?"""
    try:
        return bool(torch._C._will_engine_execute_node(function))
    except RuntimeError:  # torch.autograd.grad is asked for this leaf: torch refuses to say so
        return True


def _versions(tensors: Iterable[Tensor]) -> list[int]:
    return [tensor._version for tensor in tensors]
