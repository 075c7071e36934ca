"""Text as numbers: read a file, number its bytes, hold out its end, cut it into streams.

Shape suffixes: T time, B batch.
"""

from __future__ import annotations

import hashlib
import math
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ecornn.errors import InvalidInput

HELD_OUT = 0.1
STDLIB_BYTES = 1_000_000


@dataclass(frozen=True)
class Corpus:
    """A text as token numbers, and what is needed to read them back.

    `alphabet[token]` is the byte that a token stands for. `train` and `held_out` are 1-D int64
    tensors on the CPU; `held_out` is the end of the text.
    """

    source: str
    digest: str
    alphabet: bytes
    train: Tensor
    held_out: Tensor

    def decode(self, tokens: list[int]) -> str:
        """The text of some tokens, with what a terminal might act upon replaced by dots."""
        text = bytes(self.alphabet[token] for token in tokens).decode("utf-8", errors="replace")
        return "".join(c if c.isprintable() or c in "\n\t" else "·" for c in text)

    def __str__(self) -> str:
        return (
            f"{self.source}: {len(self.train):,} bytes to train on, {len(self.held_out):,} held "
            f"out, {len(self.alphabet)} different, sha256 {self.digest[:12]}"
        )


def load_corpus(path: Path | None = None) -> Corpus:
    """The text at `path`, or by default the sources of Python's own standard library."""
    if path is None:
        return make_corpus(_standard_library(), "Python's standard library")
    try:
        text = path.read_bytes()
    except OSError as error:
        raise InvalidInput(
            "text",
            f"{str(path)!r} ({error.strerror})",
            "a file that can be read",
            "check the path, or leave it out to read Python's standard library",
        ) from error
    return make_corpus(text, path.name)


def make_corpus(text: bytes, source: str) -> Corpus:
    """Number the bytes of a text and hold out its last tenth."""
    if len(text) < 2:
        raise InvalidInput(
            "text", f"{len(text)} bytes from {source}", "some text", "give a longer one"
        )
    values = np.frombuffer(text, dtype=np.uint8)
    alphabet, numbers = np.unique(values, return_inverse=True)
    tokens = torch.from_numpy(numbers.astype(np.int64))
    cut = len(text) - max(1, round(HELD_OUT * len(text)))
    return Corpus(
        source=source,
        digest=hashlib.sha256(text).hexdigest(),
        alphabet=alphabet.tobytes(),
        train=tokens[:cut],
        held_out=tokens[cut:],
    )


def streams(tokens: Tensor, batch: int) -> Tensor:
    """Cut a text into `batch` pieces that are read side by side: (T, B), a column each.

    The fewer than `batch` tokens that are left over at the end are dropped.
    """
    steps = len(tokens) // batch
    return tokens[: steps * batch].view(batch, steps).t().contiguous()


def windows(tokens_TB: Tensor, length: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Successive (input, target) windows of at most `length` steps; the target is one step on."""
    for start in range(0, len(tokens_TB) - 1, length):
        stop = min(start + length, len(tokens_TB) - 1)
        yield tokens_TB[start:stop], tokens_TB[start + 1 : stop + 1]


def endless_windows(tokens_TB: Tensor, length: int) -> Iterator[tuple[bool, Tensor, Tensor]]:
    """`windows` over and over, each with whether it is the first of its round."""
    while True:
        for index, (inputs_TB, targets_TB) in enumerate(windows(tokens_TB, length)):
            yield index == 0, inputs_TB, targets_TB


def unigram_bits(tokens: Tensor) -> float:
    """Entropy of the single tokens, in bits: the least a model without any context can reach."""
    counts = torch.bincount(tokens).double()
    shares = counts[counts > 0] / len(tokens)
    return float(-(shares * shares.log()).sum() / math.log(2)) + 0.0  # -0.0 reads badly


def _standard_library() -> bytes:
    """Top-level modules of the standard library in alphabetical order, about a megabyte."""
    folder = Path(sysconfig.get_path("stdlib"))
    parts: list[bytes] = []
    size = 0
    for path in sorted(folder.glob("*.py")):
        if size >= STDLIB_BYTES:
            break
        parts.append(path.read_bytes())
        size += len(parts[-1])
    if not parts:
        raise InvalidInput(
            "text",
            "no path",
            "one, since this Python has no sources of its standard library",
            "name any text file",
        )
    return b"".join(parts)
