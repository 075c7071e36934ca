"""Speech to characters in the manner of Deep Speech 2.

Two convolutions over time and frequency, five recurrent layers of both directions whose outputs
are added, batch norm throughout, CTC loss. No dropout, as in the original. float32: the loss needs
it, and cuDNN's recurrent layers then use TF32.

On a GPU the loss is cuDNN's, for every contender alike: torch's own reads the lengths on the host,
which no CUDA graph can. That takes labels that lie one text behind the other.

Shape suffixes: B batch, F frequencies, T frames, C channels, H hidden, A alphabet, L labels of a
text, N of all texts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

BLANK = 0
#: cuDNN's loss takes no text of more; torch asks that of lengths on the host, so we do of shapes.
LONGEST_TEXT = 255


@dataclass(frozen=True)
class Size:
    frequencies: int = 161
    channels: int = 32
    hidden: int = 800
    layers: int = 5
    alphabet: int = 29
    frames: int = 1000  # ten seconds
    labels: int = 140
    batch: int = 32


class RecurrentLayer(nn.Module):
    """Batch norm over all frames, then a GRU whose two directions are added."""

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(inputs)
        self.gru = nn.GRU(inputs, hidden, bidirectional=True)

    def forward(self, x_TBC: Tensor) -> Tensor:
        normed_TBC = self.norm(x_TBC.flatten(0, 1)).view_as(x_TBC)
        both, _ = self.gru(normed_TBC)
        forwards_TBH, backwards_TBH = both.chunk(2, dim=-1)
        total_TBH: Tensor = forwards_TBH + backwards_TBH
        return total_TBH


class Frontend(nn.Module):
    """A quarter of the frequencies, half of the frames."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, channels, (41, 11), stride=(2, 2), padding=(20, 5), bias=False),
            nn.BatchNorm2d(channels),
            nn.Hardtanh(0, 20),
            nn.Conv2d(channels, channels, (21, 11), stride=(2, 1), padding=(10, 5), bias=False),
            nn.BatchNorm2d(channels),
            nn.Hardtanh(0, 20),
        )

    def forward(self, sound_BFT: Tensor) -> Tensor:
        maps: Tensor = self.layers(sound_BFT[:, None])
        return maps.flatten(1, 2).permute(2, 0, 1).contiguous()


class CTCLoss(nn.Module):
    """The mean of the losses, each divided by the length of its text."""

    def forward(self, shares_TBA: Tensor, labels: Tensor, lengths_B: Tensor) -> Tensor:
        """`labels`: padded, one text a row, or `joined`, for cuDNN."""
        frames_B = torch.full_like(lengths_B, shares_TBA.shape[0])
        if labels.dim() == 2:
            return F.ctc_loss(shares_TBA, labels, frames_B, lengths_B, blank=BLANK)
        # What `F.ctc_loss` calls for such labels outside a capture. During one it asserts, on the
        # device, that no *frames* are more than 255, where cuDNN's limit is one of labels.
        losses_B, _ = torch._cudnn_ctc_loss(
            *(shares_TBA, labels, frames_B, lengths_B, BLANK),
            deterministic=True,
            zero_infinity=False,
        )
        found: Tensor = (losses_B / lengths_B).mean()
        return found


class SpeechModel(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.frontend = Frontend(size.channels)
        features = size.channels * halved(halved(size.frequencies))
        sizes = [features, *([size.hidden] * (size.layers - 1))]
        self.recurrent = nn.ModuleList(RecurrentLayer(inputs, size.hidden) for inputs in sizes)
        self.norm = nn.BatchNorm1d(size.hidden)
        self.output = nn.Linear(size.hidden, size.alphabet)
        self.loss = CTCLoss()

    def forward(self, sound_BFT: Tensor, labels: Tensor, lengths_B: Tensor) -> Tensor:
        x_TBC = self.frontend(sound_BFT)
        for layer in self.recurrent:
            x_TBC = layer(x_TBC)
        normed_TBH = self.norm(x_TBC.flatten(0, 1)).view_as(x_TBC)
        shares_TBA = self.output(normed_TBH).log_softmax(-1)
        loss: Tensor = self.loss(shares_TBA, labels, lengths_B)
        return loss


def halved(size: int) -> int:
    """What a padded convolution of stride 2 leaves of `size`."""
    return (size + 1) // 2


def make_model(size: Size) -> SpeechModel:
    return SpeechModel(size)


def make_batch(size: Size, batch: int, generator: torch.Generator) -> tuple[Tensor, ...]:
    sound_BFT = torch.randn(
        batch, size.frequencies, size.frames, generator=generator, device=generator.device
    )
    labels_BL = torch.randint(
        1, size.alphabet, (batch, size.labels), generator=generator, device=generator.device
    )
    lengths_B = torch.randint(
        size.labels // 2, size.labels + 1, (batch,), generator=generator, device=generator.device
    )
    if generator.device.type == "cuda":
        return sound_BFT, joined(labels_BL, lengths_B), lengths_B.int()
    # Elsewhere torch's own loss runs, of which padded labels tell what it keeps: also without
    # numbers, where the longest of texts that are joined is not known.
    return sound_BFT, labels_BL, lengths_B


def joined(labels_BL: Tensor, lengths_B: Tensor) -> Tensor:
    """One text behind the other, as cuDNN takes them. What padded them comes last and is not read:
    with as many labels for any lengths, a graph can be replayed with other texts."""
    longest = labels_BL.shape[1]
    if longest > LONGEST_TEXT:
        raise ValueError(f"texts of {longest} labels: cuDNN's CTC loss takes {LONGEST_TEXT}")
    padding_BL = torch.arange(longest, device=labels_BL.device) >= lengths_B[:, None]
    order_N = padding_BL.flatten().int().argsort(stable=True)
    return labels_BL.flatten()[order_N].int()
