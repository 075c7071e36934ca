"""A small attention translator, whose decoder calls one step module in a Python loop."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class DecoderStep(nn.Module):
    """Additive attention over shared keys, then an LSTM cell."""

    def __init__(self, hidden: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(2 * hidden, hidden)
        self.query, self.score = nn.Linear(hidden, hidden), nn.Linear(hidden, 1)
        self.norm, self.dropout = nn.LayerNorm(hidden), dropout

    def forward(
        self, word_BH: Tensor, state: tuple[Tensor, Tensor], keys_BSH: Tensor, values_BSH: Tensor
    ) -> tuple[Tensor, Tensor]:
        mixed_BSH = torch.tanh(self.norm(keys_BSH + self.query(state[0]).unsqueeze(1)))
        mixed_BSH = F.dropout(mixed_BSH, self.dropout, self.training)
        weights_BS = self.score(mixed_BSH).squeeze(-1).softmax(-1)
        context_BH = torch.bmm(weights_BS.unsqueeze(1), values_BSH).squeeze(1)
        h, c = self.cell(torch.cat((word_BH, context_BH), -1), state)
        return h, c


class Translator(nn.Module):
    def __init__(self, hidden: int = 8, words: int = 11, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed, self.keys = nn.Embedding(words, hidden), nn.Linear(hidden, hidden)
        self.step, self.out = DecoderStep(hidden, dropout), nn.Linear(hidden, words)

    def forward(self, source_BS: Tensor, target_BT: Tensor) -> Tensor:
        values_BSH = torch.tanh(self.embed(source_BS))
        keys_BSH = self.keys(values_BSH)
        state = (values_BSH.mean(1), values_BSH.amax(1))
        found = []
        for word_BH in self.embed(target_BT).unbind(1):
            state = self.step(word_BH, state, keys_BSH, values_BSH)
            found.append(state[0])
        return F.cross_entropy(self.out(torch.stack(found, 1)).flatten(0, 1), target_BT.flatten())


def sentences(batch: int, source: int, target: int, words: int = 11) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(source * 100 + target)
    made = (torch.randint(words, (batch, n), generator=generator) for n in (source, target))
    first, second = made
    return first, second


def loss_and_gradients(run: Any, *inputs: Tensor) -> list[Tensor]:
    """Of a training step that draws the same numbers each time."""
    torch.manual_seed(3)
    run.zero_grad()
    loss = run(*inputs)
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in run.parameters())]
