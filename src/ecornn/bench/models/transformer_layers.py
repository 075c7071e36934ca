"""What both Transformers are made of.

Shape suffixes: B batch, T places that ask, S places that are looked at, W width, N heads, D width
of one head.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F


class Attention(nn.Module):
    """Of `x_BTW` over `others_BSW`, or over itself; `causal` lets a place see only earlier ones."""

    def __init__(self, width: int, heads: int, dropout: float, *, causal: bool = False) -> None:
        super().__init__()
        self.heads, self.dropout, self.causal = heads, dropout, causal
        self.query = nn.Linear(width, width)
        self.key_value = nn.Linear(width, 2 * width)
        self.output = nn.Linear(width, width)

    def forward(self, x_BTW: Tensor, others_BSW: Tensor | None = None) -> Tensor:
        keys_BSW, values_BSW = self.key_value(x_BTW if others_BSW is None else others_BSW).chunk(
            2, dim=-1
        )
        mixed_BNTD = F.scaled_dot_product_attention(
            self._heads(self.query(x_BTW)),
            self._heads(keys_BSW),
            self._heads(values_BSW),
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=self.causal,
        )
        result: Tensor = self.output(mixed_BNTD.transpose(1, 2).flatten(2))
        return result

    def _heads(self, x_BTW: Tensor) -> Tensor:
        heads_BTND: Tensor = x_BTW.unflatten(-1, (self.heads, -1))
        return heads_BTND.transpose(1, 2)


class FeedForward(nn.Sequential):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__(nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, width))
