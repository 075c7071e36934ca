"""A report written by hand, small enough to add up in the head."""

from __future__ import annotations

from ecornn.profiler.model import Held, MemoryReport, Row, Timeline

LINE = "model.py:{} in forward"


def made_by_hand() -> MemoryReport:
    """Two layers on a GPU: five operators, the peak at the fourth."""
    held = (
        Held(0, 1000, 1024, (250,), "float32", "weights", "encoder", "", "", 0, None, (),
             "a parameter"),
        Held(1, 512, 512, (128,), "float32", "inputs", "", "", "", 0, None, (),
             "was there before the step"),
        Held(2, 4000, 4096, (10, 100), "float32", "feature maps", "encoder", "aten.addmm",
             LINE.format(7), 1, 5, ("encoder.act: aten.tanh",),
             "kept for the backward pass of aten.tanh in encoder.act"),
        Held(3, 2000, 2048, (5, 100), "float32", "feature maps", "decoder.attention", "aten.tanh",
             LINE.format(12), 2, 4, ("decoder.attention: aten.bmm",),
             "kept for the backward pass of aten.bmm in decoder.attention"),
        Held(4, 1000, 1024, (250,), "float32", "gradients", "encoder", "aten.mm", "", 3, None, (),
             "the gradient of a parameter"),
        Held(5, 300, 512, (75,), "float32", "workspace", "decoder.attention", "aten.mul",
             LINE.format(13), 3, 4, (), "made and given up again within the step"),
        Held(6, 500, 512, (125,), "float32", "optimizer state", "encoder", "aten.zeros_like", "",
             5, None, (), "exp_avg of a parameter"),
    )  # fmt: skip
    timeline = Timeline(
        phase=("before", "forward", "forward", "backward", "backward", "optimizer"),
        operator=("", "aten.addmm", "aten.tanh", "aten.mul", "aten.mm", "aten.zeros_like"),
        module=("", "encoder", "decoder.attention", "decoder.attention", "encoder", ""),
        bytes={
            "weights": (1000,) * 6,
            "gradients": (0, 0, 0, 1000, 1000, 1000),
            "optimizer state": (0, 0, 0, 0, 0, 500),
            "feature maps": (0, 4000, 6000, 6000, 4000, 0),
            "workspace": (0, 0, 0, 300, 0, 0),
            "inputs": (512,) * 6,
            "rounding": (24, 120, 168, 404, 144, 60),
            "no tensor": (0, 0, 0, 2048, 0, 0),
        },
    )
    rows = (
        Row("encoder", "feature maps", 4000, 1),
        Row("decoder.attention", "no tensor", 2048, 0),
        Row("decoder.attention", "feature maps", 2000, 1),
        Row("encoder", "weights", 1000, 1),
        Row("encoder", "gradients", 1000, 1),
        Row("", "inputs", 512, 1),
        Row("", "rounding", 404, 0),
        Row("decoder.attention", "workspace", 300, 1),
        Row("", "reserved, unused", 8192, 0),
        Row("", "driver", 65536, 0),
    )
    return MemoryReport(
        device="cuda:0",
        peak_time=3,
        rows=rows,
        held=held,
        timeline=timeline,
        notes=("written by hand",),
        environment={"device": "made up", "torch": "2.11.0"},
    )
