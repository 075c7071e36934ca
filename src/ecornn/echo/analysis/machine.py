"""`Machine`: how fast a device can be at most, for times that nobody has measured."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from ecornn.echo.work import Work

#: Of a data sheet's rate, what products reach. By a profile on an H200 those of ResNet-50 take 8.4
#: ms and those of an encoder-decoder transformer 6.9, whose arithmetic is 3.1 ms each at that rate.
REACHED = 0.5


#: Channels of a group that tensor cores take at once. By the same profile a convolution of three,
#: the first of ResNet-50, takes 0.77 ms for 30 GFLOP.
CHANNELS = 8
#: By the name of the packet: which argument has the weights.
_WEIGHTS = {"convolution": 1, "convolution_backward": 2}


@dataclass(frozen=True)
class Machine:
    """Rates a second. `rates` are of products, by dtype; `vector_rate` is of all else.
    `compiled_launch_s`: what each kernel of generated code takes beside its memory."""

    name: str
    bandwidth: float
    rates: dict[torch.dtype, float]
    vector_rate: float
    launch_s: float
    compiled_launch_s: float
    source: str
    tf32_rate: float | None = None

    def seconds(self, work: Work, *, product: bool) -> float:
        """The roofline: whichever takes longer, memory or arithmetic, and a launch."""
        rate = self.vector_rate
        if product and work.dtype is not None:
            rate = self.rates.get(work.dtype, rate)
            if work.dtype is torch.float32 and self.tf32_rate and _in_tf32():
                rate = self.tf32_rate
            if _has_odd_channels(work):
                rate = self.vector_rate
            rate *= REACHED
        moved = (work.read_bytes + work.written_bytes) / self.bandwidth
        return max(moved, work.flops / rate) + self.launch_s


def _has_odd_channels(work: Work) -> bool:
    packet = getattr(work.call and work.call.target, "overloadpacket", None)
    place = _WEIGHTS.get(getattr(packet, "__name__", ""))
    if work.call is None or place is None:
        return False
    return bool(work.call.args[place].shape[1] % CHANNELS)


def _in_tf32() -> bool:
    # not torch.get_float32_matmul_precision(): it raises where the newer settings were used
    return bool(torch.backends.cuda.matmul.fp32_precision == "tf32")


#: (part of the device's name, bytes/s, FLOP/s of bf16 products, of float32, of float64 products),
#: from NVIDIA's data sheets, dense; the first that matches.
_DATA_SHEETS = (
    ("GH200", 4.0e12, 989e12, 67e12, 67e12),
    ("H200", 4.8e12, 989e12, 67e12, 67e12),
    ("H100 PCIe", 2.0e12, 756e12, 51e12, 51e12),
    ("H100", 3.35e12, 989e12, 67e12, 67e12),
    ("A100-SXM4-40GB", 1.555e12, 312e12, 19.5e12, 19.5e12),
    ("A100-PCIE-40GB", 1.555e12, 312e12, 19.5e12, 19.5e12),
    ("A100", 1.935e12, 312e12, 19.5e12, 19.5e12),
)

#: An assumption, in seconds: the order of what launching one kernel takes. Only its ratio to the
#: other terms matters, and only where operators are tiny; `measure=True` replaces it.
_LAUNCH_S = 5e-6
#: What the host takes for a kernel of inductor's generated code: 12 µs by a sampling profiler on
#: hosts of H200s (nmt-50), of which the driver's call is 5.7 to 6.9. Steps of many kernels wait
#: for it: ResNet-50's takes 27.1 ms called and 22.0 replayed. It is not measured on the machine at
#: hand: such times spread by 15 to 30 % between quartiles, and plans and their peaks would change
#: with them.
_COMPILED_LAUNCH_S = 12e-6


def machine_of(device: torch.device | None) -> Machine:
    if device is None or device.type != "cuda":
        return _PLAIN_CPU
    if torch.cuda.device_count() == 0:
        absent = _from_sheet("NVIDIA H100", "data sheet, for want of the GPU that it is meant for")
        assert absent is not None
        return absent
    return _of_gpu(device)


@cache
def _of_gpu(device: torch.device) -> Machine:
    properties = torch.cuda.get_device_properties(device)
    return _from_sheet(properties.name, "data sheet") or _from_attributes(properties)


def _from_sheet(name: str, source: str) -> Machine | None:
    for part, bandwidth, half, single, double in _DATA_SHEETS:
        if part in name:
            rates = {torch.bfloat16: half, torch.float16: half}
            rates |= {torch.float32: single, torch.float64: double}
            launches = _LAUNCH_S, _COMPILED_LAUNCH_S
            return Machine(name, bandwidth, rates, single, *launches, source, half / 2)
    return None


def _from_attributes(properties: Any) -> Machine:
    """An estimate: two transfers a memory clock, 128 multiply-adds a clock and multiprocessor, and
    eight times that for 16-bit products."""
    clock, memory_clock = (getattr(properties, n, 0) for n in ("clock_rate", "memory_clock_rate"))
    bus = getattr(properties, "memory_bus_width", 0)
    source = "estimated from the device's attributes"
    if not (clock and memory_clock and bus):
        clock, memory_clock, bus = 1.4e6, 1.0e6, 1024
        source = "guessed: the device does not tell its clocks"
    vector = properties.multi_processor_count * 128 * 2 * clock * 1e3
    rates = {torch.bfloat16: 8 * vector, torch.float16: 8 * vector}
    rates |= {torch.float32: vector, torch.float64: vector / 32}
    bandwidth = 2 * memory_clock * 1e3 * bus / 8
    launches = _LAUNCH_S, _COMPILED_LAUNCH_S
    return Machine(properties.name, bandwidth, rates, vector, *launches, source)


#: Plain figures: what matters on a CPU is the order of the operators, which they keep.
_PLAIN_CPU = Machine(
    "CPU",
    20e9,
    {torch.float32: 200e9, torch.float64: 100e9, torch.bfloat16: 100e9, torch.float16: 50e9},
    20e9,
    _LAUNCH_S,
    _LAUNCH_S,
    "plain figures",
)
