"""Train the character model by truncated back-propagation, and tell what it learned.

Shape suffixes: T time, B batch, V vocabulary.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text
from torch import Tensor
from torch.nn import functional as F

from ecornn.errors import InvalidInput
from ecornn.recipes.language_model.data import (
    Corpus,
    endless_windows,
    load_corpus,
    streams,
    unigram_bits,
    windows,
)
from ecornn.recipes.language_model.model import CharacterModel, State

DEFAULT_STEPS = 800
WARM_UP_STEPS = 20
FINAL_RATE = 0.1  # of the highest, reached in a straight line
GRADIENT_NORM = 1.0
REPORT_EVERY = 10  # steps: reading the loss waits for the device
EVALUATION_STREAMS = 64
EVALUATION_WINDOW = 256
PROMPT = 80
TEMPERATURE = 0.7

Stopped = Literal["steps", "minutes", "interrupt"]


@dataclass(frozen=True)
class TrainingOptions:
    """What to train, on what, for how long.

    Training ends after `steps` or `minutes`, whichever comes first; `DEFAULT_STEPS` steps if
    neither is given. The same options give the same result on the same CPU unless it was time
    that ended the training.
    """

    text: Path | None = None
    steps: int | None = None
    minutes: float | None = None
    hidden: int = 256
    layers: int = 1
    batch: int = 32
    window: int = 64
    learning_rate: float = 8e-3
    tied: bool = False
    device: str = "auto"
    seed: int = 0
    sample: int = 400

    def __post_init__(self) -> None:
        for name in ("steps", "minutes", "hidden", "layers", "batch", "window", "learning_rate"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise InvalidInput(name, str(value), "a positive number", "give one")
        if self.sample < 0:
            raise InvalidInput("sample", str(self.sample), "0 or more", "give 0 for no sample")
        if not 0 <= self.seed < 2**63:
            raise InvalidInput("seed", str(self.seed), "0 or more, below 2**63", "give another")

    @property
    def step_limit(self) -> int | None:
        return DEFAULT_STEPS if self.steps is None and self.minutes is None else self.steps

    @property
    def second_limit(self) -> float:
        return math.inf if self.minutes is None else 60.0 * self.minutes

    def fraction(self, steps: int, seconds: float) -> float:
        """How much of the training is done; by the steps, unless only a time was asked for."""
        if self.step_limit is None:
            return min(1.0, seconds / self.second_limit)
        return steps / self.step_limit


@dataclass(frozen=True)
class Training:
    """How far the training got."""

    steps: int
    characters: int
    seconds: float
    stopped: Stopped


@dataclass(frozen=True)
class Outcome:
    """What came out, in bits per character of the held-out text where it says bits."""

    training: Training
    bits_unigram: float
    bits_before: float
    bits_after: float
    explanation: str
    sample: str

    def __str__(self) -> str:
        return (
            f"validation: {self.bits_after:.3f} bits per character after "
            f"{self.training.steps} steps (untrained {self.bits_before:.3f}, "
            f"unigram entropy {self.bits_unigram:.3f})"
        )


#: Called every few steps with steps, characters, seconds and the mean loss since the last call.
Observer = Callable[[int, int, float, float], None]


def run(options: TrainingOptions, console: Console) -> Outcome:
    """The whole recipe: read, train, evaluate, sample, report."""
    device = choose_device(options.device)
    corpus = load_corpus(options.text)
    check_length(corpus, options)
    torch.manual_seed(options.seed)
    model = CharacterModel(
        len(corpus.alphabet), options.hidden, layers=options.layers, tied=options.tied
    ).to(device)
    train_TB = streams(corpus.train, options.batch).to(device)
    evaluated_at_once = min(EVALUATION_STREAMS, len(corpus.held_out) // 2)
    held_out_TB = streams(corpus.held_out, evaluated_at_once).to(device)

    def say(text: str | Text) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    say(str(corpus))
    say(f"{sum(p.numel() for p in model.parameters()):,} parameters on {device}")
    explanation = model.explain(train_TB[: options.window])
    say(explanation)
    bits_unigram = unigram_bits(corpus.held_out)
    bits_before = evaluate(model, held_out_TB)
    say(f"bits per character before: {bits_before:.3f} (unigram entropy {bits_unigram:.3f})")

    with progress_bar(console, options) as observe:
        training = fit(model, train_TB, options, observe)
    if training.stopped != "steps":
        say(f"stopped by {training.stopped} after {training.steps} steps")

    outcome = Outcome(
        training=training,
        bits_unigram=bits_unigram,
        bits_before=bits_before,
        bits_after=evaluate(model, held_out_TB),
        explanation=explanation,
        sample=draw_sample(model, corpus, options),
    )
    if outcome.sample:
        prompt = corpus.decode(corpus.held_out[:PROMPT].tolist())
        say("\na sample that goes on from the first held-out characters:")
        say(Text.assemble((prompt, "dim"), outcome.sample, "\n"))
    say(str(outcome))
    return outcome


def choose_device(name: str) -> torch.device:
    """The device by name; "auto" is the GPU where there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # a torch without CUDA asserts
        reason = str(error).partition("\n")[0].rstrip(".")
        raise InvalidInput(
            "device", f"{name!r} ({reason})", "a device of this machine", "try cpu or auto"
        ) from error
    return device


def check_length(corpus: Corpus, options: TrainingOptions) -> None:
    """Refuse a text that does not fill one batch, or that leaves nothing to predict."""
    need = options.batch * (options.window + 1)
    if len(corpus.train) < need or len(corpus.held_out) < 2:
        raise InvalidInput(
            "text",
            f"{len(corpus.train)} bytes to train on and {len(corpus.held_out)} held out",
            f"{need} for one batch ({options.batch} × ({options.window} + 1)) and 2 held out",
            "give a longer text, a smaller batch or a shorter window",
        )


def fit(
    model: CharacterModel, tokens_TB: Tensor, options: TrainingOptions, observe: Observer
) -> Training:
    """Train until the steps or the minutes are over, or the user interrupts.

    The state is carried from window to window, its gradient is not; it starts anew where the
    text does.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate)
    model.train()
    start = time.monotonic()
    steps = characters = 0
    stopped: Stopped = "interrupt"
    state: State | None = None
    losses: list[Tensor] = []
    with suppress(KeyboardInterrupt):
        for at_start, inputs_TB, targets_TB in endless_windows(tokens_TB, options.window):
            seconds = time.monotonic() - start
            if steps == options.step_limit or seconds >= options.second_limit:
                stopped = "steps" if steps == options.step_limit else "minutes"
                break
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(options, steps, seconds)
            state = None if at_start else state
            loss, state = _step(model, optimizer, inputs_TB, targets_TB, state)
            steps += 1
            characters += targets_TB.numel()
            losses.append(loss)
            if len(losses) == REPORT_EVERY:
                observe(steps, characters, seconds, _mean(losses, steps, options))
                losses.clear()
    if losses:
        _mean(losses, steps, options)
    return Training(steps, characters, time.monotonic() - start, stopped)


def learning_rate(options: TrainingOptions, steps: int, seconds: float) -> float:
    """A short rise, then a straight line down to a tenth."""
    rise = min(1.0, (steps + 1) / WARM_UP_STEPS)
    fall = 1.0 - (1.0 - FINAL_RATE) * options.fraction(steps, seconds)
    return options.learning_rate * rise * fall


@torch.no_grad()
def evaluate(model: CharacterModel, tokens_TB: Tensor) -> float:
    """Mean bits per character over a text, the state carried from its start to its end."""
    model.eval()
    nats = torch.zeros((), dtype=torch.float64)
    state: State | None = None
    for inputs_TB, targets_TB in windows(tokens_TB, EVALUATION_WINDOW):
        scores_TBV, state = model(inputs_TB, state)
        loss = F.cross_entropy(scores_TBV.flatten(0, 1), targets_TB.flatten(), reduction="sum")
        nats += loss.cpu()
    return float(nats) / tokens_TB[1:].numel() / math.log(2)


def draw_sample(model: CharacterModel, corpus: Corpus, options: TrainingOptions) -> str:
    """Text that the model makes up as a continuation of the start of the held-out text."""
    model.eval()
    device = next(model.parameters()).device
    tokens = model.generate(
        corpus.held_out[:PROMPT].to(device),
        options.sample,
        temperature=TEMPERATURE,
        generator=torch.Generator().manual_seed(options.seed),
    )
    return corpus.decode(tokens)


@contextmanager
def progress_bar(console: Console, options: TrainingOptions) -> Iterator[Observer]:
    """A bar that an observer of `fit` keeps up to date."""
    columns = (
        TextColumn("step {task.fields[step]}"),
        BarColumn(),
        TextColumn("{task.fields[figures]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("training", total=1.0, step=0, figures="")

        def observe(steps: int, characters: int, seconds: float, loss: float) -> None:
            figures = (
                f"loss {loss:.3f}  {loss / math.log(2):.3f} bits/char  "
                f"{characters / max(seconds, 1e-9):,.0f} chars/s"
            )
            fraction = options.fraction(steps, seconds)
            progress.update(task, completed=fraction, step=steps, figures=figures)

        yield observe


def _step(
    model: CharacterModel,
    optimizer: torch.optim.Optimizer,
    inputs_TB: Tensor,
    targets_TB: Tensor,
    state: State | None,
) -> tuple[Tensor, State]:
    scores_TBV, (h, c) = model(inputs_TB, state)
    loss = F.cross_entropy(scores_TBV.flatten(0, 1), targets_TB.flatten())
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), GRADIENT_NORM)
    optimizer.step()
    return loss.detach(), (h.detach(), c.detach())


def _mean(losses: list[Tensor], steps: int, options: TrainingOptions) -> float:
    mean = float(torch.stack(losses).mean())
    if not math.isfinite(mean):
        raise InvalidInput(
            "learning_rate",
            f"{options.learning_rate:g}, with which the loss became {mean} by step {steps}",
            "one that keeps the loss finite",
            "give a smaller one",
        )
    return mean
