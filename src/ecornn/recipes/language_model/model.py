"""The model: embedding, LSTM, output.

Shape suffixes: T time, B batch, E embedding, H hidden, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import ecornn

State = tuple[Tensor, Tensor]

EMBEDDING = 64


class CharacterModel(nn.Module):
    """Predicts the next token from all tokens before it.

    With `tied` the embedding is as wide as the hidden state, and is the output matrix too.
    """

    def __init__(
        self, vocabulary: int, hidden: int, *, layers: int = 1, tied: bool = False
    ) -> None:
        super().__init__()
        width = hidden if tied else EMBEDDING
        self.embedding = nn.Embedding(vocabulary, width)
        self.lstm = ecornn.LSTM(width, hidden, num_layers=layers)
        self.output = nn.Linear(hidden, vocabulary)
        if tied:
            # nn.Embedding's own spread of 1 would start the scores far from even.
            nn.init.normal_(self.embedding.weight, std=hidden**-0.5)
            self.output.weight = self.embedding.weight

    def forward(self, tokens_TB: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """Scores of the next token at each place, and the state to go on with."""
        hidden_TBH, state = self.lstm(self.embedding(tokens_TB), state)
        scores_TBV: Tensor = self.output(hidden_TBH)
        return scores_TBV, state

    def explain(self, tokens_TB: Tensor) -> str:
        """Which backend runs the LSTM on such an input, and why the others do not."""
        return str(self.lstm.explain(self.embedding(tokens_TB)))

    @torch.no_grad()
    def generate(
        self, prompt: Tensor, length: int, *, temperature: float, generator: torch.Generator
    ) -> list[int]:
        """Continue a 1-D prompt by `length` drawn tokens; `generator` is one of the CPU."""
        tokens: list[int] = []
        scores_TBV, state = self(prompt[:, None])
        for _ in range(length):
            shares_V = (scores_TBV[-1, 0].float().cpu() / temperature).softmax(-1)
            tokens.append(int(torch.multinomial(shares_V, 1, generator=generator)))
            next_TB = torch.tensor([[tokens[-1]]], device=prompt.device)
            scores_TBV, state = self(next_TB, state)
        return tokens
