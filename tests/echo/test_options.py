"""What Echo can be asked for, and how it refuses the rest."""

from __future__ import annotations

from typing import Any

import pytest

from ecornn.echo.options import Memory, Options, read_memory, read_options
from ecornn.errors import InvalidInput
from ecornn.sizes import size_text


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("auto", Memory("auto")),
        ("min", Memory("min")),
        ("6GiB", Memory("bytes", 6 * 2**30)),
        ("1.5 gb", Memory("bytes", 1_500_000_000)),
        (" 10KiB ", Memory("bytes", 10 * 1024)),
        (4096, Memory("bytes", 4096)),
        (0.5, Memory("fraction", 0.5)),
        (1.0, Memory("fraction", 1.0)),
    ],
)
def test_sizes(given: Any, expected: Memory) -> None:
    assert read_memory(given) == expected


@pytest.mark.parametrize(
    "given",
    ["6", "GiB", "six GiB", "-6GiB", "6GiBs", "", "0MB", -1, 0, -0.5, 0.0, 1.5, True, None, [1]],
)
def test_what_is_no_size_is_refused_with_what_would_be(given: Any) -> None:
    with pytest.raises(InvalidInput, match="memory: got"):
        read_memory(given)
    with pytest.raises(InvalidInput):
        read_memory(float("nan"))


def test_options() -> None:
    assert read_options(None) == Options(Memory("auto"), None)
    given = {"memory": "min", "codegen": "eager"}
    assert read_options(given) == Options(Memory("min"), "eager")
    assert given == {"memory": "min", "codegen": "eager"}
    with pytest.raises(InvalidInput, match=r"'memroy'.*'memory', .*'maps' and 'measure'"):
        read_options({"memroy": "min"})
    with pytest.raises(InvalidInput, match="codegen: got 'cuda'"):
        read_options({"codegen": "cuda"})


def test_sizes_are_told_in_words() -> None:
    assert [size_text(n) for n in (12, 1536, 3 * 2**20, 6 * 2**30)] == [
        *("12 B", "1.50 KiB", "3.00 MiB", "6.00 GiB")
    ]
