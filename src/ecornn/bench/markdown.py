"""Figures and tables as the page of results has them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ecornn.bench.compare import Judgement, by_target, tally, worst
from ecornn.bench.limits import why_missed
from ecornn.bench.results import Results, Scalar

#: Where a table has no figure.
NONE = "–"


def listed(environment: Mapping[str, Scalar]) -> str:
    return "; ".join(f"{k} {v}" for k, v in environment.items() if v is not None)


def digits(value: float) -> str:
    """Three of them, or all before the point."""
    places = next((p for p, least in enumerate((100, 10, 1)) if value >= least), None)
    return f"{value:.3g}" if places is None else f"{value:,.{places}f}"


def figure(value: float | None, form: str) -> str:
    return NONE if value is None else form.format(value)


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
    return "### Without figures\n\n" + "\n".join(lines) + "\n" if lines else ""


def folded(title: str, body: str) -> str:
    """What few want to see, behind its title."""
    return f"<details><summary>{escaped(title)}</summary>\n\n{body}\n</details>\n"


def earlier(results: Results) -> str:
    """Rows of other runs than the file's last, those of one run together."""
    runs: dict[str, dict[str, list[str]]] = {}
    for row in results.rows:
        if row.environment:
            cases = runs.setdefault(listed(row.environment), {})
            cases.setdefault(str(row.case), []).append(row.contender)
    if not runs:
        return ""
    lines = [
        f"- {run}\n" + "".join(f"  - {case}: {', '.join(names)}\n" for case, names in cases.items())
        for run, cases in runs.items()
    ]
    count = sum(bool(row.environment) for row in results.rows)
    return folded(
        f"Measured in an earlier run: {count} of {len(results.rows)} rows", "".join(lines)
    )


def judged(judgements: Sequence[Judgement]) -> str:
    """What was found of each target, over its cases."""
    if not judgements:
        return ""
    body = [
        [target.name, str(target), tally(found), figure(worst(found), f"{{:.2f}}{target.unit}")]
        for target, found in by_target(judgements)
    ]
    every = folded("Each target", table(["of", "target", "cases", "worst"], body))
    head = f"### Targets\n\nOver their cases: {tally(judgements)}.\n"
    return f"{head}\n{every}{_missed(judgements)}"


def _missed(judgements: Sequence[Judgement]) -> str:
    """The cases that miss their target, by what is known of the reason."""
    reasons: dict[str, list[list[str]]] = {}
    for one in judgements:
        if one.outcome == "failed":
            reasons.setdefault(why_missed(one) or "not known", []).append(
                [
                    "all" if one.case is None else str(one.case),
                    str(one.target),
                    one.reason if one.found is None else f"{one.found:.2f}{one.target.unit}",
                ]
            )
    if not reasons:
        return ""
    parts = [
        f"{table(['case', 'target', 'found'], body)}\nWhy: {escaped(why)}.\n"
        for why, body in reasons.items()
    ]
    return "\n#### Missed, and why\n\n" + "\n".join(parts)
