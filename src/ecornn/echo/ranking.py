"""Which of several ways to split a graph comes first."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ecornn.echo.joint import Joint
from ecornn.echo.plan.budget import ALIKE, Limits, rank
from ecornn.echo.request import Request

if TYPE_CHECKING:
    from ecornn.echo.pipeline import Candidate


def place(candidate: Candidate, limits: Limits, request: Request) -> tuple[float, ...] | None:
    bounds = limits if candidate.plan else Limits(limits.bytes, float("inf"))
    others = request.among_others
    return rank(bounds, candidate.estimate, request.calls, among_others=others)


def quickest_first(
    ranked: list[tuple[tuple[float, ...], Candidate]], request: Request
) -> list[tuple[tuple[float, ...], Candidate]]:
    """Of those whose peaks are alike, whoever takes least time; then the others."""
    most = request.weight(ranked[0][1].estimate) * (1 + ALIKE)
    alike = [one for one in ranked if request.weight(one[1].estimate) <= most]
    alike.sort(key=lambda one: one[1].estimate.seconds_added)
    return [*alike, *(one for one in ranked if request.weight(one[1].estimate) > most)]


def most_kept(request: Request, candidates: list[Candidate], joint: Joint | None) -> float:
    """Inductor reorders, so that its true peak is not quite the estimated one. What lies between
    the passes is the same whoever runs them: of one joint graph nobody keeps more than torch
    would."""
    if not request.fuses or request.memory.kind not in ("auto", "min"):
        return float("inf")
    stock = (
        c.estimate.kept_bytes
        for c in candidates
        if c.modules and c.joint and joint and c.joint.gates == joint.gates
    )
    return min(stock, default=float("inf"))
