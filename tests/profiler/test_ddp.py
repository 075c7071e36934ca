"""Under DistributedDataParallel, one process being enough."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ecornn.profiler import profile


def test_buckets_are_no_inputs_and_gradients_lie_in_them(tmp_path: Path) -> None:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        model = DistributedDataParallel(nn.Linear(8, 8), gradient_as_bucket_view=True)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        x = torch.randn(4, 8)

        def step() -> None:
            model(x).sum().backward()
            optimizer.step()

        step()
        step()  # DDP builds its buckets anew after the first
        report = profile(step, model, optimizer)
    finally:
        dist.destroy_process_group()
    weights = sum(p.nbytes for p in model.parameters())
    held = {kind: sum(h.bytes for h in report.held if h.kind == kind) for kind in report.by_kind()}
    assert held["weights"] == weights
    assert held["gradients"] == weights  # one bucket, the storage of both
    assert held["inputs"] == x.nbytes
    assert {h.module for h in report.held if h.kind == "weights"} == {"module"}
