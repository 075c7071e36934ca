from __future__ import annotations

import json
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ecornn.bench import results as form
from ecornn.bench.results import Results, merge, read, write
from ecornn.errors import InvalidInput
from support.measured import MIXED, PLAIN, plain, results, row

EXAMPLE = plain((2.5, 6.0), (2.0, 5.0))


def as_json(found: Results) -> Any:
    return json.loads(form.to_text(found))


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "cpu.json"
    failed = form.Row(MIXED, "ecornn packed", {"failed": "output: not finite"}, {"commit": None})
    written = replace(EXAMPLE, rows=(*EXAMPLE.rows, failed))
    write(written, path)
    assert read(path) == written
    write(EXAMPLE, path)
    assert read(path) == EXAMPLE
    write(replace(EXAMPLE, rows=()), path)
    assert read(path).rows == ()


def test_rows_with_and_without_the_plan_of_their_forward_call_are_read(tmp_path: Path) -> None:
    old = row(PLAIN, "ecornn", 1.0, 2.0, plan="persistent, direct, keeps gates")
    new = row(MIXED, "ecornn", 1.0, 2.0, plan="aten, layer, keeps states", forward_plan="aten")
    write(results(old, new), tmp_path / "cpu.json")
    assert [r.metrics.get("forward_plan") for r in read(tmp_path / "cpu.json").rows] == [
        None,
        "aten",
    ]


def test_the_file_is_in_the_shared_form(tmp_path: Path) -> None:
    write(EXAMPLE, tmp_path / "cpu.json")
    lines = (tmp_path / "cpu.json").read_text().splitlines()
    assert len([line for line in lines if '"contender"' in line]) == 2, "one row a line"
    value = json.loads("\n".join(lines))
    assert list(value) == ["benchmark", "environment", "rows"]
    assert list(value["rows"][0]) == ["case", "contender", "metrics"]
    assert value["rows"][0]["metrics"]["forward_us"] == 2.5


def test_writing_replaces_the_file_as_a_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "cpu.json"
    write(EXAMPLE, path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    before = path.read_text()

    def broken(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(Path, "replace", broken)
    with pytest.raises(OSError, match="disk full"):
        write(results(), path)
    assert path.read_text() == before
    assert list(tmp_path.iterdir()) == [path], "nothing half-written stays behind"


class TestMerging:
    def test_rows_of_the_same_case_and_contender_are_replaced(self) -> None:
        new = results(row(PLAIN, "ecornn", 1.0, 3.0), row(MIXED, "ecornn lengths", 7.0, 8.0))
        found = merge(EXAMPLE, new)
        assert [(r.case, r.contender, r.number("forward_us")) for r in found.rows] == [
            (PLAIN, "ecornn", 1.0),
            (PLAIN, "torch.nn", 2.0),
            (MIXED, "ecornn lengths", 7.0),
        ]

    def test_a_row_that_stays_says_what_was_different_then(self) -> None:
        second = results(row(PLAIN, "ecornn", 1.0, 3.0), commit="beef")
        third = results(row(MIXED, "ecornn lengths", 1.0, 3.0), commit="cafe")
        found = merge(merge(EXAMPLE, second), third)
        assert found.environment["commit"] == "cafe"
        assert [dict(r.environment) for r in found.rows] == [
            {"commit": "beef"},
            {"commit": "c0ffee"},
            {},
        ]

    @pytest.mark.parametrize("changes", [{"torch": "8.0"}, {"threads": 1}, {"gpu": "Imaginary"}])
    def test_rows_of_another_machine_or_version_are_refused(self, changes: Any) -> None:
        with pytest.raises(InvalidInput, match="another file"):
            merge(EXAMPLE, results(**changes))

    def test_another_benchmark_s_file_is_refused(self) -> None:
        with pytest.raises(InvalidInput, match="'cpu'"):
            merge(EXAMPLE, results(benchmark="smoke"))


def changed(**changes: Any) -> Any:
    return {**as_json(EXAMPLE), **changes}


def with_row(**changes: Any) -> Any:
    first, *others = as_json(EXAMPLE)["rows"]
    return changed(rows=[{**first, **changes}, *others])


BAD = {
    "no JSON": ("{", "JSON"),
    "not a number of JSON": ('{"benchmark": NaN}', "NaN"),
    "a list": ([], "an object"),
    "no rows": ({"benchmark": "cpu", "environment": {}}, "no 'rows'"),
    "a key too many": (changed(comment="hello"), "'comment'"),
    "a benchmark without a name": (changed(benchmark=3), "benchmark: got 3, expected text"),
    "rows that are no list": (changed(rows={}), "rows: got {}, expected a list"),
    "an environment that is no object": (changed(environment="here"), "environment"),
    "an environment with depth": (changed(environment={"gpu": []}), "environment, gpu"),
    "a row that is no object": (changed(rows=[3]), r"rows\[0\]"),
    "a row without metrics": (changed(rows=[{"case": {}, "contender": "x"}]), "'metrics'"),
    "a case of an unknown cell": (with_row(case={**PLAIN.to_json(), "cell": "?"}), r"\[0\], cell"),
    "a case with less": (with_row(case={"cell": "lstm"}), r"rows\[0\], case"),
    "a contender without a name": (with_row(contender=None), "contender"),
    "a negative time": (with_row(metrics={"forward_us": -1}), "metrics, forward_us"),
    "a time in words": (with_row(metrics={"forward_us": "fast"}), "finite number"),
    "a flag for a time": (with_row(metrics={"forward_us": True}), "finite number"),
    "a reason that is a number": (with_row(metrics={"failed": 1}), "failed"),
    "a row twice": (with_row(contender="torch.nn"), "one a case and contender"),
}


@pytest.mark.parametrize(("content", "says"), BAD.values(), ids=BAD)
def test_a_bad_file_is_refused_with_the_place(tmp_path: Path, content: Any, says: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(InvalidInput, match=says) as refused:
        read(path)
    assert "bad.json" in refused.value.argument


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="missing"):
        read(tmp_path / "missing.json")
    (tmp_path / "latin.json").write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidInput, match="latin"):
        read(tmp_path / "latin.json")
