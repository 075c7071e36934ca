"""A Transformer for translation, of the base size of the first one.

One vocabulary of 37,000 pieces serves both languages and the output. Trained under bfloat16
autocast, as users do on GPUs that have it.

Shape suffixes: B batch, S source, T target, W width, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ecornn.bench.models.transformer_layers import Attention, FeedForward


@dataclass(frozen=True)
class Size:
    pieces: int = 37_000
    width: int = 512
    inner: int = 2048
    layers: int = 6
    heads: int = 8
    dropout: float = 0.1
    smoothing: float = 0.1
    length: int = 64  # of source and target
    batch: int = 128


class EncoderLayer(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(size.width) for _ in range(2))
        self.attention = Attention(size.width, size.heads, size.dropout)
        self.feed = FeedForward(size.width, size.inner)
        self.dropout = nn.Dropout(size.dropout)

    def forward(self, x_BSW: Tensor) -> Tensor:
        x_BSW = x_BSW + self.dropout(self.attention(self.norms[0](x_BSW)))
        fed_BSW: Tensor = self.dropout(self.feed(self.norms[1](x_BSW)))
        return x_BSW + fed_BSW


class DecoderLayer(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(size.width) for _ in range(3))
        self.own = Attention(size.width, size.heads, size.dropout, causal=True)
        self.source = Attention(size.width, size.heads, size.dropout)
        self.feed = FeedForward(size.width, size.inner)
        self.dropout = nn.Dropout(size.dropout)

    def forward(self, x_BTW: Tensor, source_BSW: Tensor) -> Tensor:
        x_BTW = x_BTW + self.dropout(self.own(self.norms[0](x_BTW)))
        x_BTW = x_BTW + self.dropout(self.source(self.norms[1](x_BTW), source_BSW))
        fed_BTW: Tensor = self.dropout(self.feed(self.norms[2](x_BTW)))
        return x_BTW + fed_BTW


class EncoderDecoder(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.smoothing = size.smoothing
        self.pieces = nn.Embedding(size.pieces, size.width)
        self.places = nn.Embedding(size.length, size.width)
        self.dropout = nn.Dropout(size.dropout)
        self.encoder = nn.ModuleList(EncoderLayer(size) for _ in range(size.layers))
        self.encoder_norm = nn.LayerNorm(size.width)
        self.decoder = nn.ModuleList(DecoderLayer(size) for _ in range(size.layers))
        self.decoder_norm = nn.LayerNorm(size.width)
        self.output = nn.Linear(size.width, size.pieces, bias=False)
        for embedding in (self.pieces, self.places):
            nn.init.normal_(embedding.weight, std=size.width**-0.5)
        self.output.weight = self.pieces.weight

    def forward(self, source_BS: Tensor, target_BT: Tensor) -> Tensor:
        """The mean loss of every target piece but the first."""
        source_BSW = self._embedded(source_BS)
        for encoding in self.encoder:
            source_BSW = encoding(source_BSW)
        source_BSW = self.encoder_norm(source_BSW)
        x_BTW = self._embedded(target_BT[:, :-1])
        for decoding in self.decoder:
            x_BTW = decoding(x_BTW, source_BSW)
        scores_BTV = self.output(self.decoder_norm(x_BTW))
        return F.cross_entropy(
            scores_BTV.flatten(0, 1), target_BT[:, 1:].flatten(), label_smoothing=self.smoothing
        )

    def _embedded(self, pieces_BT: Tensor) -> Tensor:
        places_T = torch.arange(pieces_BT.shape[1], device=pieces_BT.device)
        both: Tensor = self.dropout(self.pieces(pieces_BT) + self.places(places_T))
        return both


def make_model(size: Size) -> EncoderDecoder:
    return EncoderDecoder(size)


def make_batch(size: Size, batch: int, generator: torch.Generator) -> tuple[Tensor, ...]:
    source_BS = torch.randint(
        size.pieces, (batch, size.length), generator=generator, device=generator.device
    )
    target_BT = torch.randint(
        size.pieces, (batch, size.length + 1), generator=generator, device=generator.device
    )
    return source_BS, target_BT
