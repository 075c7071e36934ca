"""Factors stored column by column, and the gradients made from them, on a GPU."""

from __future__ import annotations

import pytest
import torch

from ecornn.backends import persistent_products
from ecornn.kernels.persistent.launch import Launcher
from ecornn.kernels.persistent.transposed import (
    transpose_arguments,
    transpose_blocks,
    transpose_launcher,
)
from support.persistent_calls import assert_like_the_definition, make_call
from support.tolerances import ONE_STEP

pytestmark = pytest.mark.gpu

#: TF32 has half precision's eleven bits.
TF32_BOUND = ONE_STEP[torch.float16]


@pytest.mark.parametrize(
    ("rows", "columns"), [(1, 1), (64, 64), (70, 37), (16_384, 1_024), (3, 999)]
)
def test_a_matrix_column_by_column(rows: int, columns: int) -> None:
    whole = torch.randn(rows, columns + 5, device="cuda")
    values = whole[:, 2 : 2 + columns]
    found = torch.full((columns, rows + 3), torch.nan, device="cuda")
    arguments = transpose_arguments(values, found[:, 1 : 1 + rows])
    transpose_launcher(0)(arguments, transpose_blocks(rows, columns))
    assert torch.equal(found[:, 1 : 1 + rows], values.t())
    assert found[:, [0, -2, -1]].isnan().all()


@pytest.mark.parametrize("keep", ["gates", "states"])
@pytest.mark.parametrize(("cell", "hidden", "directions"), [("lstm", 1024, 1), ("gru", 512, 2)])
def test_gradients_of_large_products(
    cell: str, hidden: int, directions: int, keep: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    transposed: list[int] = []

    def launcher(device: int) -> Launcher:
        transposed.append(device)
        return transpose_launcher(device)

    monkeypatch.setattr(persistent_products, "transpose_launcher", launcher)
    monkeypatch.setattr(persistent_products, "MANY", 0)
    monkeypatch.setattr(persistent_products, "LEAST_WORK", 1e8)
    more = {"inputs": 40, "directions": directions, "keep": keep}
    call = make_call(cell, torch.float32, hidden, 64, 66, **more)
    assert_like_the_definition(call, TF32_BOUND)
    # the input, its weights, the states before; some pieces are too small for that
    assert len(transposed) >= 3 * directions
