"""A Transformer that predicts the next token, of the size of GPT-2's smallest.

Trained under bfloat16 autocast, as users do on GPUs that have it.

Shape suffixes: B batch, T time, W width, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ecornn.bench.models.transformer_layers import Attention, FeedForward


@dataclass(frozen=True)
class Size:
    tokens: int = 50_257
    width: int = 768
    layers: int = 12
    heads: int = 12
    dropout: float = 0.1
    length: int = 1024
    batch: int = 8


class Block(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(size.width)
        self.attention = Attention(size.width, size.heads, size.dropout, causal=True)
        self.feed_norm = nn.LayerNorm(size.width)
        self.feed = FeedForward(size.width, 4 * size.width)
        self.dropout = nn.Dropout(size.dropout)

    def forward(self, x_BTW: Tensor) -> Tensor:
        x_BTW = x_BTW + self.dropout(self.attention(self.attention_norm(x_BTW)))
        fed_BTW: Tensor = self.dropout(self.feed(self.feed_norm(x_BTW)))
        return x_BTW + fed_BTW


class DecoderOnly(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tokens = nn.Embedding(size.tokens, size.width)
        self.places = nn.Embedding(size.length, size.width)
        self.dropout = nn.Dropout(size.dropout)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        self.output = nn.Linear(size.width, size.tokens, bias=False)
        for embedding in (self.tokens, self.places):
            nn.init.normal_(embedding.weight, std=0.02)
        self.output.weight = self.tokens.weight

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """The mean loss of every token but the first."""
        read_BT, next_BT = tokens_BT[:, :-1], tokens_BT[:, 1:]
        places_T = torch.arange(read_BT.shape[1], device=read_BT.device)
        x_BTW = self.dropout(self.tokens(read_BT) + self.places(places_T))
        for block in self.blocks:
            x_BTW = block(x_BTW)
        scores_BTV = self.output(self.norm(x_BTW))
        return F.cross_entropy(scores_BTV.flatten(0, 1), next_BT.flatten())


def make_model(size: Size) -> DecoderOnly:
    return DecoderOnly(size)


def make_batch(size: Size, batch: int, generator: torch.Generator) -> tuple[Tensor, ...]:
    return (
        torch.randint(
            size.tokens, (batch, size.length + 1), generator=generator, device=generator.device
        ),
    )
