"""A mixed-integer program, written down term by term and solved by HiGHS."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ecornn.errors import EcornnError

Variable = int
Terms = Sequence[tuple[Variable | None, float]]


class SolverMissing(EcornnError, ImportError):
    """The exact plan was asked for without the package that solves it."""


def _scipy() -> Any:
    try:
        import scipy.optimize
        import scipy.sparse
    except ImportError as error:
        raise SolverMissing("the exact plan needs scipy: pip install 'ecornn[exact]'") from error
    return scipy


@dataclass(frozen=True)
class Answer:
    values: Sequence[float]
    bound: float  # of the goal
    optimal: bool


@dataclass
class Program:
    """Variables are numbers from zero on; None in a term is a variable that is always zero."""

    _upper: list[float] = field(default_factory=list)
    _whole: list[int] = field(default_factory=list)
    _rows: list[int] = field(default_factory=list)
    _columns: list[int] = field(default_factory=list)
    _factors: list[float] = field(default_factory=list)
    _most: list[float] = field(default_factory=list)

    def choice(self) -> Variable:
        """Zero or one."""
        return self._new(1.0, whole=True)

    def real(self, upper: float = 1.0) -> Variable:
        return self._new(upper, whole=False)

    def _new(self, upper: float, *, whole: bool) -> Variable:
        self._upper.append(upper)
        self._whole.append(int(whole))
        return len(self._upper) - 1

    def at_most(self, terms: Terms, most: float) -> None:
        for variable, factor in terms:
            if variable is not None:
                self._rows.append(len(self._most))
                self._columns.append(variable)
                self._factors.append(factor)
        self._most.append(most)

    def minimized(self, goal: Terms, time_limit: float) -> Answer | None:
        """None if there is no answer at all."""
        scipy = _scipy()
        columns = len(self._upper)
        cost = [0.0] * columns
        for variable, factor in goal:
            if variable is not None:
                cost[variable] += factor
        rows = scipy.sparse.csr_matrix(
            (self._factors, (self._rows, self._columns)), shape=(len(self._most), columns)
        )
        found = scipy.optimize.milp(
            cost,
            integrality=self._whole,
            bounds=scipy.optimize.Bounds(0.0, self._upper),
            constraints=scipy.optimize.LinearConstraint(rows, ub=self._most),
            options={"time_limit": time_limit, "mip_rel_gap": 0.0},
        )
        if found.status not in (0, 1, 2):
            raise EcornnError(f"HiGHS: {found.message}")
        if found.x is None:
            if found.status == 2:
                return None
            raise EcornnError(
                f"no plan was found in {time_limit:g} s; allow more, or use the fast plan"
            )
        optimal = found.status == 0
        bound = found.fun if optimal else found.mip_dual_bound
        return Answer(list(found.x), float(bound), optimal)
