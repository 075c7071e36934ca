"""Figures and tables as the page of results has them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ecornn.bench.compare import Judgement, by_target, tally, worst
from ecornn.bench.limits import why_missed
from ecornn.bench.results import Results, Scalar


def listed(environment: Mapping[str, Scalar]) -> str:
    return "; ".join(f"{k} {v}" for k, v in environment.items() if v is not None)


def digits(value: float) -> str:
    """Three of them, or all before the point."""
    places = next((p for p, least in enumerate((100, 10, 1)) if value >= least), None)
    return f"{value:.3g}" if places is None else f"{value:,.{places}f}"


def figure(value: float | None, form: str) -> str:
    return "–" if value is None else form.format(value)


def both(texts: Iterable[str]) -> str:
    return " / ".join(texts)


def table(heads: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    rule = ["---", *(["---:"] * (len(heads) - 1))]
    rows = (heads, rule, *body)
    lines = [" | ".join(escaped(cell) for cell in row) for row in rows]
    return "".join(f"| {line} |\n" for line in lines)


def escaped(text: str | None) -> str:
    return (text or "").replace("|", "\\|").replace("<", "&lt;")


def troubles(results: Results) -> str:
    lines = [
        f"- {row.contender}, {row.case}: {escaped(row.trouble)}"
        for row in results.rows
        if row.trouble is not None
    ]
    return "Without figures\n\n" + "\n".join(lines) + "\n" if lines else ""


def earlier(results: Results) -> str:
    lines = [
        f"- {row.contender}, {row.case}: {listed(row.environment)}"
        for row in results.rows
        if row.environment
    ]
    return "Measured in an earlier run\n\n" + "\n".join(lines) + "\n" if lines else ""


def judged(judgements: Sequence[Judgement]) -> str:
    """What was found of each target, over its cases."""
    if not judgements:
        return ""
    body = [
        [target.name, str(target), tally(found), figure(worst(found), f"{{:.2f}}{target.unit}")]
        for target, found in by_target(judgements)
    ]
    title = f"Targets, over their cases: {tally(judgements)}\n"
    return f"{title}\n{table(['of', 'target', 'cases', 'worst'], body)}{_missed(judgements)}"


def _missed(judgements: Sequence[Judgement]) -> str:
    """Each case that misses its target, with what is known of the reason."""
    body = [
        [
            "all" if one.case is None else str(one.case),
            str(one.target),
            one.reason if one.found is None else f"{one.found:.2f}{one.target.unit}",
            why_missed(one) or "not known",
        ]
        for one in judgements
        if one.outcome == "failed"
    ]
    if not body:
        return ""
    return f"\nMissed, and why\n\n{table(['case', 'target', 'found', 'what limits it'], body)}"
