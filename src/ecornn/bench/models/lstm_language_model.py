"""A word-level language model: embedding, layers of `nn.LSTM`, output; the embedding is the output
matrix too.

The vocabulary is that of WikiText-2, batch and window those that are common for it. float32, as
this model is trained; cuDNN's LSTM then uses TF32.

Shape suffixes: T time, B batch, H hidden, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Size:
    words: int = 33_278
    hidden: int = 1024
    layers: int = 2
    dropout: float = 0.5
    length: int = 70
    batch: int = 80


class LanguageModel(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embedding = nn.Embedding(size.words, size.hidden)
        nn.init.normal_(self.embedding.weight, std=size.hidden**-0.5)
        self.dropout = nn.Dropout(size.dropout)
        # Layers of their own: the dropout inside cuDNN's stack takes no seed after its first use,
        # so that no two runs of it could be compared.
        self.layers = nn.ModuleList(nn.LSTM(size.hidden, size.hidden) for _ in range(size.layers))
        self.output = nn.Linear(size.hidden, size.words)
        self.output.weight = self.embedding.weight

    def forward(self, words_TB: Tensor) -> Tensor:
        """The mean loss of every word but the first."""
        hidden_TBH = self.dropout(self.embedding(words_TB[:-1]))
        for layer in self.layers:
            hidden_TBH = self.dropout(layer(hidden_TBH)[0])
        scores_TBV = self.output(hidden_TBH)
        return F.cross_entropy(scores_TBV.flatten(0, 1), words_TB[1:].flatten())


def make_model(size: Size) -> LanguageModel:
    return LanguageModel(size)


def make_batch(size: Size, batch: int, generator: torch.Generator) -> tuple[Tensor, ...]:
    return (
        torch.randint(
            size.words, (size.length + 1, batch), generator=generator, device=generator.device
        ),
    )
