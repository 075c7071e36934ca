"""The one form in which measurements are kept: a JSON file of an environment and rows.

docs/benchmarks.md describes the form. Rows of earlier runs stay in a file that is measured into
again, and say what of the environment was different then.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ecornn.bench.cases import Case
from ecornn.bench.training.cases import ModelCase
from ecornn.errors import InvalidInput

Scalar = str | int | float | bool | None
AnyCase = Case | ModelCase

#: How ours ran a training call, and how one without gradients; files of before the second was
#: recorded have the first alone.
TRAIN_PLAN, FORWARD_PLAN = "plan", "forward_plan"

#: Metrics that are text; all others are numbers.
TEXT_METRICS = (
    TRAIN_PLAN,
    FORWARD_PLAN,
    "failed",
    "not_measured",
    "wrong",
    "first_rows",
    "first_lines",
    "cpu_not_measured",
    "meta_not_measured",
    "exact_not_measured",
    "peak_not_predicted",
    "forward_longest",
    "train_longest",
)

#: What rows must share to stand in one file. The others may change from run to run.
MACHINE = ("gpu", "cpu", "threads", "torch", "cuda", "cudnn", "tf32")


@dataclass(frozen=True)
class Row:
    """`environment` holds what was different from the file's when this row was measured."""

    case: AnyCase
    contender: str
    metrics: Mapping[str, float | str]
    environment: Mapping[str, Scalar] = field(default_factory=dict)

    @property
    def key(self) -> tuple[AnyCase, str]:
        return self.case, self.contender

    @property
    def trouble(self) -> str | None:
        """Why there are no figures, where there are none."""
        found = self.metrics.get("failed") or self.metrics.get("not_measured")
        return None if found is None else str(found)

    def number(self, metric: str) -> float | None:
        value = self.metrics.get(metric)
        return None if value is None or isinstance(value, str) else value


@dataclass(frozen=True)
class Results:
    benchmark: str
    environment: Mapping[str, Scalar]
    rows: tuple[Row, ...]


def merge(old: Results, new: Results) -> Results:
    """The rows of both; where they speak of the same case and contender, the new one."""
    check_mergeable(old, new.benchmark, new.environment)
    fresh = {row.key: row for row in new.rows}
    rows = []
    for row in old.rows:
        if row.key in fresh:
            rows.append(fresh.pop(row.key))
            continue
        then = {**old.environment, **row.environment}
        differs = {k: v for k, v in then.items() if new.environment.get(k) != v}
        rows.append(Row(row.case, row.contender, row.metrics, differs))
    return Results(new.benchmark, new.environment, (*rows, *fresh.values()))


def check_mergeable(old: Results, benchmark: str, environment: Mapping[str, Scalar]) -> None:
    if old.benchmark != benchmark:
        raise InvalidInput(
            "out",
            f"a file of the benchmark {old.benchmark!r}",
            f"a new file or one of {benchmark!r}",
            "name another file",
        )
    # files of before it was recorded have none
    effort = ("effort",) if "effort" in old.environment else ()
    for key in (*MACHINE, *effort):
        then, now = old.environment.get(key), environment.get(key)
        if then != now:
            raise InvalidInput(
                "out",
                f"a file measured with {key} = {then}",
                f"{key} = {now}, as it is now",
                "name another file: rows of different machines or versions are not comparable",
            )


def write(results: Results, path: Path) -> None:
    """One row a line. The file is replaced as a whole, so that a reader never sees half of it."""
    text = to_text(results)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        Path(temporary).chmod(0o644)  # mkstemp lets only the owner read
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def to_text(results: Results) -> str:
    lines = [_dump(_row_to_json(row)) for row in results.rows]
    rows = "[\n  " + ",\n  ".join(lines) + "\n ]" if lines else "[]"
    return (
        f'{{"benchmark": {_dump(results.benchmark)},\n'
        f' "environment": {_dump(dict(results.environment))},\n'
        f' "rows": {rows}}}\n'
    )


def read(path: Path) -> Results:
    """The results in a file; `InvalidInput` says what is wrong with it, and where."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(str(path), str(error), "a readable file", "check the path") from error
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except ValueError as error:
        raise _invalid(str(path), str(error), "JSON") from error
    return from_json(value, str(path))


def from_json(value: Any, where: str) -> Results:
    _check_keys(value, {"benchmark", "environment", "rows"}, set(), where)
    benchmark = _check_type(value["benchmark"], str, "text", f"{where}, benchmark")
    environment = _read_environment(value["environment"], f"{where}, environment")
    listed = _check_type(value["rows"], list, "a list", f"{where}, rows")
    rows = [_read_row(row, f"{where}, rows[{i}]") for i, row in enumerate(listed)]
    seen: set[tuple[AnyCase, str]] = set()
    for row in rows:
        if row.key in seen:
            raise _invalid(
                f"{where}, rows", f"two for {row.contender}: {row.case}", "one a case and contender"
            )
        seen.add(row.key)
    return Results(benchmark, environment, tuple(rows))


def read_case(value: Any) -> AnyCase:
    """A case that names a model is one of training steps; the others are of layers."""
    if isinstance(value, dict) and "model" in value:
        return ModelCase.from_json(value)
    return Case.from_json(value)


def _read_row(value: Any, where: str) -> Row:
    _check_keys(value, {"case", "contender", "metrics"}, {"environment"}, where)
    try:
        case = read_case(value["case"])
    except InvalidInput as error:
        raise _invalid(f"{where}, {error.argument}", error.got, error.expected) from error
    contender = _check_type(value["contender"], str, "text", f"{where}, contender")
    metrics = _check_type(value["metrics"], dict, "an object", f"{where}, metrics")
    for name, metric in metrics.items():
        place = f"{where}, metrics, {name}"
        if name in TEXT_METRICS:
            _check_type(metric, str, "text", place)
        elif type(metric) not in (int, float) or not math.isfinite(metric) or metric < 0:
            raise _invalid(place, repr(metric), "a finite number that is not negative")
    environment = _read_environment(value.get("environment", {}), f"{where}, environment")
    return Row(case, contender, metrics, environment)


def _read_environment(value: Any, where: str) -> dict[str, Scalar]:
    environment: dict[str, Scalar] = _check_type(value, dict, "an object", where)
    for name, entry in environment.items():
        if not isinstance(entry, Scalar):
            raise _invalid(f"{where}, {name}", repr(entry), "text, a number, true, false or null")
    return environment


def _row_to_json(row: Row) -> dict[str, Any]:
    value = {
        "case": row.case.to_json(),
        "contender": row.contender,
        "metrics": {name: _rounded(metric) for name, metric in row.metrics.items()},
    }
    return value | ({"environment": dict(row.environment)} if row.environment else {})


def _rounded(metric: float | str) -> float | str:
    """Five digits: more than any measurement here has."""
    return float(f"{metric:.5g}") if isinstance(metric, float) else metric


def _check_keys(value: Any, required: set[str], optional: set[str], where: str) -> None:
    _check_type(value, dict, "an object", where)
    for name in sorted(required - set(value)):
        raise _invalid(where, f"no {name!r}", f"the keys {', '.join(sorted(required))}")
    for name in sorted(set(value) - required - optional):
        allowed = ", ".join(sorted(required | optional))
        raise _invalid(where, f"the key {name!r}", f"the keys {allowed}")


def _check_type(value: Any, kind: type, called: str, where: str) -> Any:
    if not isinstance(value, kind):
        raise _invalid(where, repr(value)[:80], called)
    return value


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def _invalid(where: str, got: str, expected: str) -> InvalidInput:
    return InvalidInput(where, got, expected, "see docs/benchmarks.md for the form")


def _dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def rows_by_case(rows: Iterable[Row]) -> dict[AnyCase, dict[str, Row]]:
    """The rows of each case by contender, in their order."""
    found: dict[AnyCase, dict[str, Row]] = {}
    for row in rows:
        found.setdefault(row.case, {})[row.contender] = row
    return found


def layer_rows(rows: Iterable[Row]) -> dict[Case, dict[str, Row]]:
    """The same for the cases of layers alone."""
    found = rows_by_case(rows).items()
    return {case: contenders for case, contenders in found if isinstance(case, Case)}
