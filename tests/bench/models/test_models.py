from __future__ import annotations

import ast
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ecornn.bench import models
from ecornn.bench.models.attention_nmt import AdditiveAttention
from ecornn.bench.models.resnet import ResNet
from ecornn.bench.models.speech import Frontend
from ecornn.bench.models.speech import Size as SpeechSize
from ecornn.bench.models.step import Step, make_step
from ecornn.bench.models.tasks import TASKS, matching, task_named
from ecornn.errors import InvalidInput

FOLDER = Path(models.__file__).parent
NAMES = sorted(TASKS)

#: Parameters of the models as published, without what differs on purpose: an embedding of places
#: that is learned, biases of the tied output.
RESNET_50_PARAMETERS = 25_557_032
GPT2_SMALL_PARAMETERS = 124_439_808


def tiny(name: str, **options: Any) -> Step:
    return make_step(name, size="tiny", device="cpu", **options)


def gradients(step: Step, seed: int) -> tuple[Tensor, list[Tensor]]:
    torch.manual_seed(seed)
    step.clear()
    loss = step.passes()
    found = [p.grad.clone() for p in step.model.parameters() if p.grad is not None]
    assert len(found) == len(list(step.model.parameters())), "a parameter that is never used"
    return loss, found


@pytest.mark.parametrize("name", NAMES)
class TestEveryModel:
    def test_the_loss_falls(self, name: str) -> None:
        step = tiny(name)
        first = float(step())
        for _ in range(200 if name in ("nmt", "lstm-lm") else 30):  # these take small steps
            last = float(step())
        assert math.isfinite(first)
        assert last < 0.9 * first

    def test_it_starts_near_what_guessing_costs(self, name: str) -> None:
        """A loss of even guesses, for a model that puts out one of several classes."""
        classes = {"nmt": 30, "lstm-lm": 40, "gpt2": 60, "transformer": 60, "resnet50": 10}
        if name not in classes:
            assert name == "speech", "CTC sums over alignments: no such figure"
            return
        assert float(tiny(name).loss().detach()) == pytest.approx(math.log(classes[name]), rel=0.25)

    def test_equal_seeds_give_equal_steps(self, name: str) -> None:
        ours, theirs = (gradients(tiny(name), seed=3) for _ in range(2))
        assert torch.equal(ours[0], theirs[0])
        assert all(map(torch.equal, ours[1], theirs[1]))

    def test_other_seeds_give_other_models_and_batches(self, name: str) -> None:
        ours, theirs = tiny(name, seed=0), tiny(name, seed=7)
        assert not torch.equal(ours.batch[0], theirs.batch[0])
        weights = [next(p for p in s.model.parameters() if p.dim() > 1) for s in (ours, theirs)]
        assert not torch.equal(*weights)

    def test_what_it_draws_follows_the_generator(self, name: str) -> None:
        step = tiny(name)
        losses = [float(gradients(step, seed)[0]) for seed in (1, 2, 1)]
        has_dropout = any(
            getattr(m, "p", 0) or getattr(m, "dropout", 0) for m in step.model.modules()
        )
        assert (losses[0] != losses[1]) == has_dropout
        if not any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in step.model.modules()):
            assert losses[0] == losses[2]

    def test_its_blocks_and_loops_name_modules(self, name: str) -> None:
        step, task = tiny(name), task_named(name)
        blocks = matching(step.model, task.blocks)
        assert blocks
        inside = [p for p in blocks for q in blocks if p.startswith(f"{q}.")]
        assert inside == [], "a block in a block would be recomputed twice"
        drawing = [
            path
            for path, block in matching(step.model, task.drawless).items()
            for module in block.modules()
            if isinstance(module, nn.Dropout) or getattr(module, "dropout", 0)
        ]
        assert drawing == []
        assert set(matching(step.model, task.looped)) == set(task.looped)

    def test_the_batch_can_have_another_size(self, name: str) -> None:
        step = tiny(name, batch=3)
        assert step.samples == 3
        assert all(3 in t.shape for t in step.batch)
        assert math.isfinite(float(step()))


def test_lengths_can_be_chosen_where_there_are_any() -> None:
    assert [t.shape[0] for t in tiny("nmt", length=7).batch] == [7, 8]
    with pytest.raises(InvalidInput, match="resnet50 has no sequences"):
        tiny("resnet50", length=7)
    with pytest.raises(InvalidInput, match="size"):
        make_step("nmt", size="huge", device="cpu")
    with pytest.raises(InvalidInput, match="one of nmt"):
        make_step("vgg", device="cpu")


def test_patterns_that_match_nothing_are_refused() -> None:
    with pytest.raises(InvalidInput, match="nothing"):
        matching(tiny("gpt2").model, ("nothing.*",))


def test_the_full_models_are_as_large_as_published() -> None:
    with torch.device("meta"):
        resnet = TASKS["resnet50"].make_model(TASKS["resnet50"].full)
        gpt2 = TASKS["gpt2"].make_model(TASKS["gpt2"].full)
    assert sum(p.numel() for p in resnet.parameters()) == RESNET_50_PARAMETERS
    assert sum(p.numel() for p in gpt2.parameters()) == GPT2_SMALL_PARAMETERS


def test_attention_is_a_weighted_mean_of_the_values() -> None:
    attention = AdditiveAttention(8).double()
    query, keys = torch.randn(3, 8).double(), torch.randn(3, 5, 8).double()
    same = torch.randn(3, 1, 8).double().expand(3, 5, 8)
    torch.testing.assert_close(attention(query, keys, same), same[:, 0])
    # one score that is far above the others takes all
    with torch.no_grad():
        attention.score.weight *= 1e6
    values = torch.randn(3, 5, 8).double()
    found = attention(query, keys, values)
    nearest = (values - found[:, None]).norm(dim=-1).argmin(-1)
    torch.testing.assert_close(found, values[torch.arange(3), nearest])


def test_a_place_of_the_decoder_sees_no_later_ones() -> None:
    task = TASKS["gpt2"]
    model = task.make_model(task.tiny).eval()
    seen: list[Tensor] = []
    model.norm.register_forward_hook(lambda *given: seen.append(given[2]))
    tokens = torch.randint(task.tiny.tokens, (1, task.tiny.length + 1))
    other = tokens.clone()
    other[:, 9] = (other[:, 9] + 1) % task.tiny.tokens
    with torch.no_grad():
        model(tokens), model(other)
    torch.testing.assert_close(seen[0][:, :9], seen[1][:, :9])
    assert not torch.allclose(seen[0][:, 9], seen[1][:, 9])


def test_the_front_of_the_speech_model_halves_frames_and_quarters_frequencies() -> None:
    size = SpeechSize()
    sound = torch.zeros(1, size.frequencies, 100, device="meta")
    with torch.device("meta"):
        found = Frontend(size.channels)(sound)
    assert found.shape == (50, 1, 32 * 41)


def test_resnet_halves_the_image_five_times() -> None:
    task = TASKS["resnet50"]
    with torch.device("meta"):
        model = ResNet(task.full)
        seen: list[torch.Size] = []
        model.blocks[-1].register_forward_hook(lambda *given: seen.append(given[2].shape))
        model(torch.zeros(2, 3, 224, 224), torch.zeros(2, dtype=torch.long))
    assert seen == [(2, 2048, 7, 7)]


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.stem)
def test_models_are_plain_torch(path: Path) -> None:
    """Only what trains them knows this package."""
    if path.stem in ("tasks", "step"):
        return
    imported = [
        node.module if isinstance(node, ast.ImportFrom) else node.names[0].name
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Import | ast.ImportFrom)
    ]
    rooms = {str(module).split(".")[0] for module in imported}
    assert rooms <= {"torch", "dataclasses", "__future__", "ecornn"}
    ours = {module for module in imported if str(module).startswith("ecornn")}
    assert ours <= {"ecornn.bench.models.transformer_layers"}
