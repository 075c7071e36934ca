"""Under DistributedDataParallel and FSDP2, one process being enough."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from ecornn.profiler import profile
from support.process_group import process_group


def test_buckets_are_no_inputs_and_gradients_lie_in_them(tmp_path: Path) -> None:
    with process_group(tmp_path):
        _profile_buckets()


def _profile_buckets() -> None:
    model = DistributedDataParallel(nn.Linear(8, 8), gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x = torch.randn(4, 8)

    def step() -> None:
        model(x).sum().backward()
        optimizer.step()

    step()
    step()  # DDP builds its buckets anew after the first
    report = profile(step, model, optimizer)
    weights = sum(p.nbytes for p in model.parameters())
    held = {kind: sum(h.bytes for h in report.held if h.kind == kind) for kind in report.by_kind()}
    assert held["weights"] == weights
    assert held["gradients"] == weights  # one bucket, the storage of both
    assert held["inputs"] == x.nbytes
    assert {h.module for h in report.held if h.kind == "weights"} == {"module"}


def test_sharded_weights_are_known_by_their_pieces(tmp_path: Path) -> None:
    with process_group(tmp_path):
        _profile_shards()


def _profile_shards() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    mesh = init_device_mesh("cpu", (1,))
    for part in (model[0], model[2], model):
        fully_shard(part, mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters())
    x = torch.randn(4, 8)

    def step() -> None:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()

    step()
    report = profile(step, model, optimizer)
    weights = sum(p.nbytes for p in model.parameters())
    assert report.peak_bytes == report.timeline.total(report.peak_time)
    kinds = report.by_kind()
    assert kinds["weights"] == weights
    assert kinds["optimizer state"] == pytest.approx(2 * weights, abs=64)
    assert {h.module for h in report.held if h.kind == "weights"} == {"0", "2"}
