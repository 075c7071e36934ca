"""The definition of every recurrent kernel, in plain torch.

Shape suffixes used in this package: T time, B batch, I input size, R size of the state h (the
projection where there is one), H hidden size, G gates times hidden, K stored pre-activations
times hidden, D directions.
"""

from ecornn.kernels.reference.backward import DirectionGrads, backward
from ecornn.kernels.reference.forward import DirectionResult, forward
from ecornn.kernels.reference.problem import DirectionWeights, Problem

__all__ = [
    "DirectionGrads",
    "DirectionResult",
    "DirectionWeights",
    "Problem",
    "backward",
    "forward",
]
