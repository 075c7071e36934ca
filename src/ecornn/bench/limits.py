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
        ("LSTM",),
        "cuDNN has a kernel for so few units. Ours takes 95 to 98 µs of any number of sequences "
        "when it is launched alone, and 20 more behind the product of the input: by a script, with "
        "up to 132 sequences one after another, those that are behind it lie two to a "
        "multiprocessor. Since this was measured each asks for so much shared memory that two have "
        "no room on one, which is yet to be measured",
        {"hidden": (64,), "batch": (64,), "dtype": ("fp32",)},
    ),
    Limit(
        "rnn",
        ("LSTM", "forward_us"),
        "cuDNN's kernel is persistent too. By the timeline both multiply the input in the same "
        "0.19 µs a step and launch little else; what ours gains is in the steps, 1.8 µs (of "
        "bfloat16, the same kernel) instead of 2.0, where the called target asks for less than "
        "1.6. Tried: marks fetched ahead, tiles measured anew",
        {"hidden": (1024,), "batch": (16,), "dtype": ("fp16",)},
    ),
    Limit(
        "rnn",
        ("LSTM", "ecornn is", "forward_us"),
        "each of 132 blocks reads the states of all 64 sequences at every step, 256 KiB in "
        "float32: 33 MiB in 6.3 µs by the timeline, which is what L2 gives. Tried: the batch split "
        "over more groups, weights in shared memory read once for several tiles of sequences "
        "(decision 0023), clusters that share what they read, rounding once and twice the vectors "
        "under way (decision 0034); from a graph the target is met. States may be exchanged as "
        "float16 with TF32's bits, half as many bytes (decision 0040): yet to be measured",
        {"hidden": (1024,), "batch": (64,), "dtype": ("fp32",)},
    ),
    Limit(
        "rnn",
        ("keep", "peak_bytes"),
        "of 16 sequences a weight's gradient is as large as T·B·H: the output, the cell states and "
        "the gradients of the input and of both weights are 5 already, and these sums over pieces "
        "of time, in float32, 2 more, so that no number of pieces keeps within 6 without rounding "
        "a weight's gradient once a piece. Buffers up to 32 MiB are not cut for that reason: five "
        "pieces backwards and two forwards would hold 8.6, and take five more launches, each of "
        "which reads the weights anew: by the model (`launch_estimate`) 0.31 ms of a step of 1.7 "
        "that takes too long beside keep=gates as it is. Of the 10, 8 are the gates and their "
        "gradients while the kernel runs; the gates are given back before other gradients are made",
        {"batch": (16,)},
    ),
    Limit(
        "rnn",
        ("keep",),
        "computing the gates again is two more products of T·B × 4H × H beside the six of a "
        "training step: of 64 sequences 275 GFLOP, which at the 989 TFLOP/s of the data sheet are "
        "0.28 ms, 8 % of the step by themselves. By a profile they run at two thirds of that rate "
        "and are more than half of what is added. The buffers' bound asks for five pieces, each "
        "with a launch, weights to read, and weights' gradients to be added to: most of the rest. "
        "Tried: five pieces, weight gradients added inside their products, one piece where the "
        "bound allows it",
    ),
    Limit(
        "rnn",
        ("floor",),
        "all of a block's weights, 256 KiB, pass through its tensor cores at every step, as 512 "
        "products with eight columns each however few sequences there are, which an exchange "
        "alone does not have. That half of the weights are read from shared memory "
        "beside them is not what limits it: with a third less there (decision 0036) steps of "
        "2,048 units and one sequence took less than one per cent less, by the tuner",
        {"hidden": (1024, 2048)},
    ),
)


def why_missed(judgement: Judgement, limits: Iterable[Limit] = LIMITS) -> str | None:
    return next((limit.why for limit in limits if limit.explains(judgement)), None)
