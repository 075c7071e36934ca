"""ResNet-50, the stride of a bottleneck on its 3 × 3 convolution, for images of 224 × 224.

Trained under bfloat16 autocast with channels last, as users do on GPUs with tensor cores.

Shape suffixes: B batch, C channels, X and Y places in the image, K classes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

#: A bottleneck's output has so many times the channels of its inside.
EXPANSION = 4


@dataclass(frozen=True)
class Size:
    blocks: tuple[int, ...] = (3, 4, 6, 3)
    width: int = 64
    classes: int = 1000
    image: int = 224
    batch: int = 128


class Bottleneck(nn.Module):
    def __init__(self, inputs: int, inside: int, stride: int) -> None:
        super().__init__()
        outputs = EXPANSION * inside
        self.reduce = nn.Conv2d(inputs, inside, 1, bias=False)
        self.reduce_norm = nn.BatchNorm2d(inside)
        self.spatial = nn.Conv2d(inside, inside, 3, stride, padding=1, bias=False)
        self.spatial_norm = nn.BatchNorm2d(inside)
        self.expand = nn.Conv2d(inside, outputs, 1, bias=False)
        self.expand_norm = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x_BCYX: Tensor) -> Tensor:
        out = self.relu(self.reduce_norm(self.reduce(x_BCYX)))
        out = self.relu(self.spatial_norm(self.spatial(out)))
        out = self.expand_norm(self.expand(out))
        result: Tensor = self.relu(out + self.shortcut(x_BCYX))
        return result


class ResNet(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, size.width, 7, 2, padding=3, bias=False),
            nn.BatchNorm2d(size.width),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, padding=1),
        )
        self.blocks = nn.ModuleList()
        inputs = size.width
        for stage, count in enumerate(size.blocks):
            inside = size.width * 2**stage
            for i in range(count):
                stride = 2 if stage > 0 and i == 0 else 1
                self.blocks.append(Bottleneck(inputs, inside, stride))
                inputs = EXPANSION * inside
        self.output = nn.Linear(inputs, size.classes)

    def forward(self, images_BCYX: Tensor, classes_B: Tensor) -> Tensor:
        x_BCYX = self.stem(images_BCYX)
        for block in self.blocks:
            x_BCYX = block(x_BCYX)
        scores_BK = self.output(x_BCYX.mean((2, 3)))
        return F.cross_entropy(scores_BK, classes_B)


def make_model(size: Size) -> ResNet:
    model = ResNet(size)
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model


def make_batch(size: Size, batch: int, generator: torch.Generator) -> tuple[Tensor, ...]:
    images_BCYX = torch.randn(
        batch, 3, size.image, size.image, generator=generator, device=generator.device
    )
    classes_B = torch.randint(size.classes, (batch,), generator=generator, device=generator.device)
    return images_BCYX.contiguous(memory_format=torch.channels_last), classes_B
