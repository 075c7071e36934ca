"""Translation by two LSTMs and additive attention, the decoder called once a word.

The sizes are those on which Echo was shown: 2 + 2 layers of 512, attention normalized before its
tanh, and the attentional state fed back into the next step (input feeding). The vocabularies are
those of the English–Vietnamese task of IWSLT 2015. float32 throughout, as this model is trained.

Shape suffixes: S source words, T target words, B batch, H hidden, V target vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

PADDING = 0

State = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Size:
    source_words: int = 17_191
    target_words: int = 7_709
    hidden: int = 512
    layers: int = 2
    dropout: float = 0.2
    length: int = 50  # of source and target
    batch: int = 128


class AdditiveAttention(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.query = nn.Linear(hidden, hidden, bias=False)
        self.norm = nn.LayerNorm(hidden)
        self.score = nn.Linear(hidden, 1, bias=False)

    def forward(self, query_BH: Tensor, keys_BSH: Tensor, values_BSH: Tensor) -> Tensor:
        mixed_BSH = torch.tanh(self.norm(keys_BSH + self.query(query_BH)[:, None]))
        weights_BS = self.score(mixed_BSH).squeeze(-1).softmax(-1)
        return torch.bmm(weights_BS[:, None], values_BSH)[:, 0]


class DecoderStep(nn.Module):
    """One word: the cells, attention over the source, and the state that is fed back."""

    def __init__(self, hidden: int, layers: int, dropout: float) -> None:
        super().__init__()
        sizes = [2 * hidden, *([hidden] * (layers - 1))]
        self.cells = nn.ModuleList(nn.LSTMCell(size, hidden) for size in sizes)
        self.attention = AdditiveAttention(hidden)
        self.combine = nn.Linear(2 * hidden, hidden)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self,
        word_BH: Tensor,
        fed_BH: Tensor,
        states: list[State],
        keys_BSH: Tensor,
        values_BSH: Tensor,
    ) -> tuple[Tensor, list[State]]:
        x = torch.cat([word_BH, fed_BH], dim=-1)
        after: list[State] = []
        for cell, state in zip(self.cells, states, strict=True):
            h_BH, c_BH = cell(self.dropout(x), state)
            after.append((h_BH, c_BH))
            x = h_BH
        context_BH = self.attention(x, keys_BSH, values_BSH)
        return torch.tanh(self.combine(torch.cat([x, context_BH], dim=-1))), after


class AttentionNMT(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        hidden = size.hidden
        self.source_embedding = nn.Embedding(size.source_words, hidden, padding_idx=PADDING)
        self.target_embedding = nn.Embedding(size.target_words, hidden, padding_idx=PADDING)
        # Layers of their own: the dropout inside cuDNN's stack takes no seed after its first use,
        # so that no two runs of it could be compared.
        self.encoder = nn.ModuleList(nn.LSTM(hidden, hidden) for _ in range(size.layers))
        self.keys = nn.Linear(hidden, hidden, bias=False)
        self.decoder = DecoderStep(hidden, size.layers, size.dropout)
        self.dropout = nn.Dropout(size.dropout)
        self.output = nn.Linear(hidden, size.target_words)

    def forward(self, source_SB: Tensor, target_TB: Tensor) -> Tensor:
        """The mean loss a word, of all target words but the first."""
        x_SBH = self.source_embedding(source_SB)
        states: list[State] = []
        for layer in self.encoder:
            x_SBH, (h_1BH, c_1BH) = layer(self.dropout(x_SBH))
            states.append((h_1BH[0], c_1BH[0]))
        values_BSH = x_SBH.transpose(0, 1).contiguous()
        keys_BSH = self.keys(values_BSH)
        fed_BH = torch.zeros_like(values_BSH[:, 0])
        outputs = []
        for word_BH in self.target_embedding(target_TB[:-1]).unbind():
            fed_BH, states = self.decoder(word_BH, fed_BH, states, keys_BSH, values_BSH)
            outputs.append(fed_BH)
        scores_TBV = self.output(self.dropout(torch.stack(outputs)))
        return F.cross_entropy(
            scores_TBV.flatten(0, 1), target_TB[1:].flatten(), ignore_index=PADDING
        )


def make_model(size: Size) -> AttentionNMT:
    return AttentionNMT(size)


def make_batch(size: Size, batch: int, generator: torch.Generator) -> tuple[Tensor, ...]:
    """Full lengths, as batches of sentences of about one length have them."""
    source_SB = torch.randint(
        1, size.source_words, (size.length, batch), generator=generator, device=generator.device
    )
    target_TB = torch.randint(
        1, size.target_words, (size.length + 1, batch), generator=generator, device=generator.device
    )
    return source_SB, target_TB
