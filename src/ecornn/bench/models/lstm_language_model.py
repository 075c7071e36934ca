"""A word-level language model: embedding, `nn.LSTM`, output, the embedding's weights reused.

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
        self.lstm = nn.LSTM(size.hidden, size.hidden, size.layers, dropout=size.dropout)
        self.output = nn.Linear(size.hidden, size.words)
        self.output.weight = self.embedding.weight

    def forward(self, words_TB: Tensor) -> Tensor:
        """The mean loss of every word but the first."""
        hidden_TBH, _ = self.lstm(self.dropout(self.embedding(words_TB[:-1])))
        scores_TBV = self.output(self.dropout(hidden_TBH))
        return F.cross_entropy(scores_TBV.flatten(0, 1), words_TB[1:].flatten())


def make_model(size: Size) -> LanguageModel:
    return LanguageModel(size)


def make_batch(size: Size, batch: int, generator: torch.Generator) -> tuple[Tensor, ...]:
    return (
        torch.randint(
            size.words, (size.length + 1, batch), generator=generator, device=generator.device
        ),
    )
