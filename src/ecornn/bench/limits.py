"""Why targets are missed, as far as that is known: what limits them and what was tried.

The results' page tells it beside every case that misses its target; a test asks that each such
case of the results' files has its reason here, and that no reason outlives its cases.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from ecornn.bench.cases import Where
from ecornn.bench.compare import Judgement


@dataclass(frozen=True)
class Limit:
    """Of a benchmark's targets that have all the words of `said` in them, and cases that `where`
    lets through."""

    benchmark: str
    said: tuple[str, ...]
    why: str
    where: Where = field(default_factory=dict)

    def explains(self, judgement: Judgement) -> bool:
        target, case = judgement.target, judgement.case
        told = f"{target.name}: {target}"
        return (
            target.benchmark == self.benchmark
            and all(word in told for word in self.said)
            and (not self.where or (case is not None and case.matches(self.where)))
        )


#: The first one that explains a case is told.
LIMITS = (
    Limit(
        "rnn",
        ("LSTM", "ecornn is", "forward_us"),
        "called, a layer of 64 units is as long as its launches: cuDNN's is two kernels behind one "
        "call of C++, ours two launches from Python; the smaller of both runs, and where that is "
        "cuDNN's own kernel it cannot be faster than itself",
        {"hidden": (64,), "dtype": ("fp16", "fp32")},
    ),
    Limit(
        "rnn",
        ("LSTM", "ecornn+graph"),
        "cuDNN's kernel for small layers is the one that runs: ours was slower here, and who is "
        "measured against itself is within the spread of 1",
        {"hidden": (64,), "dtype": ("fp16", "fp32")},
    ),
    Limit(
        "rnn",
        ("LSTM", "ecornn"),
        "cuDNN's persistent kernel is the one that runs forwards: ours spends on the input's "
        "product (34 GFLOP), on reading 8 MiB of weights at each launch and on the marks what it "
        "saves in its steps. Tried: two pieces, marks fetched ahead, every tile that fits",
        {"hidden": (1024,), "batch": (16,), "dtype": ("fp16",)},
    ),
    Limit(
        "rnn",
        ("LSTM", "ecornn is", "forward_us"),
        "the kernel waits for the host: a large layer's product and marks are launched first, and "
        "what is called before the first kernel takes as long as many of its steps; from a graph "
        "the target is met",
        {"hidden": (1024,), "batch": (16,), "dtype": ("fp32",)},
    ),
    Limit(
        "rnn",
        ("LSTM", "ecornn is"),
        "bound by L2: backwards the gates' gradients of 64 sequences, 1 MiB a step in float32, are "
        "read by each of the blocks' groups anew (32 MiB a step), forwards a quarter of that. "
        "Tried: the batch split over more groups, weights in shared memory read once for several "
        "tiles of sequences (decision 0023), clusters that share what they read; from a graph the "
        "target is met",
        {"hidden": (1024,), "batch": (64,), "dtype": ("fp32",)},
    ),
    Limit(
        "rnn",
        ("LSTM", "ecornn is", "forward_us"),
        "16 sequences of 2048 units in half precision: every step exchanges 64 KiB through L2 with "
        "each of 128 blocks, 8 MiB, and the weights, 32 MiB, fill registers and shared memory so "
        "far that nothing more can be loaded ahead; from a graph the target is met",
        {"hidden": (2048,), "batch": (16,)},
    ),
    Limit(
        "rnn",
        ("keep",),
        "computing the gates again is two more products of T·B × 4H × H beside the six of a "
        "training step, and the buffers' bound asks for several pieces, each with launches and "
        "weights of its own. Tried: five pieces, weight gradients added inside their products, one "
        "piece where the bound allows it",
    ),
    Limit(
        "rnn",
        ("floor",),
        "256 units in float32: the weights, 1 MiB, are spread over sixteen blocks of a cluster, so "
        "a step has TF32 products of 256 inner elements between two exchanges, which the floor, "
        "an exchange alone, does not have",
        {"hidden": (256,), "dtype": ("fp32",)},
    ),
    Limit(
        "echo",
        ("NMT: time", "echo ÷ eager"),
        "a step of the decoder is compiled and called once for each word: the host launches its "
        "kernels through torch's wrappers of compiled code (guards, autograd's function, Python "
        "between kernels), which take longer for a kernel than eager's dispatcher does, while the "
        "GPU waits. torch.compile of the same step is as slow. Replayed from a graph the step "
        "takes what eager takes",
    ),
    Limit(
        "echo",
        ("the step can be captured",),
        "eager's step cannot be captured either: the CTC loss reads its lengths on the host",
        {"model": ("speech",)},
    ),
)


def why_missed(judgement: Judgement, limits: Iterable[Limit] = LIMITS) -> str | None:
    return next((limit.why for limit in limits if limit.explains(judgement)), None)
