from __future__ import annotations

import inspect
import io
import math
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from ecornn.cli.app import app
from ecornn.cli.train import language_model
from ecornn.errors import InvalidInput
from ecornn.recipes.language_model import data
from ecornn.recipes.language_model import train as recipe
from ecornn.recipes.language_model.data import make_corpus
from ecornn.recipes.language_model.model import CharacterModel
from ecornn.recipes.language_model.train import Outcome, TrainingOptions

REPETITIVE = b"the quick brown fox jumps over the lazy dog. " * 60

SMALL = {"hidden": 32, "batch": 4, "window": 16, "device": "cpu", "sample": 20}


def console() -> Console:
    return Console(file=io.StringIO(), width=100)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "fox.txt"
    path.write_bytes(REPETITIVE)
    return path


def trained(text: Path, **changes: object) -> Outcome:
    return recipe.run(TrainingOptions(text=text, **{**SMALL, **changes}), console())


class TestData:
    def test_the_end_of_the_text_is_held_out(self) -> None:
        corpus = make_corpus(bytes(range(100)), "numbers")
        assert corpus.decode([0, 65]) == "·A"
        assert corpus.train.tolist() == list(range(90))
        assert corpus.held_out.tolist() == list(range(90, 100))

    def test_the_alphabet_is_that_of_the_text(self) -> None:
        corpus = make_corpus(b"banana" * 10, "fruit")
        assert corpus.alphabet == b"abn"
        assert corpus.decode(corpus.train[:6].tolist()) == "banana"

    def test_bytes_that_are_no_utf8_and_control_codes_are_shown_harmlessly(self) -> None:
        corpus = make_corpus(bytes(range(256)), "all bytes")
        shown = corpus.decode([0x1B, 0x5B, 0x41, 0xFF, 0x0A])
        assert shown == "·[A�\n"

    def test_streams_and_windows_lose_nothing_but_the_rest(self) -> None:
        tokens_TB = data.streams(torch.arange(23), 4)
        assert tokens_TB.shape == (5, 4)
        assert tokens_TB[:, 1].tolist() == [5, 6, 7, 8, 9]
        pairs = list(data.windows(tokens_TB, 3))
        assert [len(inputs) for inputs, _ in pairs] == [3, 1]
        assert torch.equal(torch.cat([inputs for inputs, _ in pairs]), tokens_TB[:-1])
        assert torch.equal(torch.cat([targets for _, targets in pairs]), tokens_TB[1:])

    def test_endless_windows_mark_where_the_text_begins_again(self) -> None:
        endless = data.endless_windows(torch.arange(8).view(4, 2), 2)
        assert [next(endless)[0] for _ in range(5)] == [True, False, True, False, True]

    @pytest.mark.parametrize(("tokens", "bits"), [([0, 1, 2, 3], 2.0), ([7, 7, 7], 0.0)])
    def test_unigram_entropy(self, tokens: list[int], bits: float) -> None:
        assert data.unigram_bits(torch.tensor(tokens)) == pytest.approx(bits)

    def test_by_default_python_s_own_sources_are_read_the_same_each_time(self) -> None:
        corpus = data.load_corpus()
        assert len(corpus.train) + len(corpus.held_out) >= data.STDLIB_BYTES
        assert corpus.digest == data.load_corpus().digest

    def test_a_python_without_sources_asks_for_a_text(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setattr(data.sysconfig, "get_path", lambda _: str(tmp_path))
        with pytest.raises(InvalidInput, match=r"^text: .*name any text file"):
            data.load_corpus()


class TestModel:
    @pytest.mark.parametrize("tied", [False, True])
    @pytest.mark.parametrize("layers", [1, 2])
    def test_windows_with_carried_state_give_what_one_call_gives(
        self, tied: bool, layers: int
    ) -> None:
        torch.manual_seed(0)
        model = CharacterModel(11, 16, layers=layers, tied=tied)
        tokens_TB = torch.randint(11, (9, 3))
        whole_TBV, _ = model(tokens_TB)
        first_TBV, state = model(tokens_TB[:4])
        rest_TBV, _ = model(tokens_TB[4:], state)
        torch.testing.assert_close(torch.cat([first_TBV, rest_TBV]), whole_TBV)

    def test_tied_weights_are_one_parameter(self) -> None:
        model = CharacterModel(11, 16, tied=True)
        assert model.output.weight is model.embedding.weight

    def test_it_says_which_backend_runs(self) -> None:
        explanation = CharacterModel(11, 16).explain(torch.zeros(2, 3, dtype=torch.long))
        assert any(name in explanation for name in ("aten", "reference"))


class TestTraining:
    def test_it_learns_far_more_than_the_frequencies(self, text: Path) -> None:
        outcome = trained(text, steps=120, learning_rate=2e-2)
        assert outcome.training.stopped == "steps"
        assert outcome.training.steps == 120
        assert outcome.bits_before > outcome.bits_unigram
        assert outcome.bits_after < 0.5 * outcome.bits_unigram

    def test_the_same_seed_gives_the_same_result(self, text: Path) -> None:
        first, again, other = (trained(text, steps=5, seed=seed) for seed in (1, 1, 2))
        assert (first.bits_after, first.sample) == (again.bits_after, again.sample)
        assert first.bits_after != other.bits_after

    def test_the_state_is_carried_between_windows_and_forgotten_at_the_start(
        self, text: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        corpus = data.load_corpus(text)
        tokens_TB = data.streams(corpus.train, 4)[: 2 * 16 + 1]  # two windows a round
        model = CharacterModel(len(corpus.alphabet), 8)
        carried: list[bool] = []
        forward = model.forward

        def recording(tokens_TB: torch.Tensor, state: object = None) -> object:
            carried.append(state is not None)
            assert state is None or not any(part.requires_grad for part in state)
            return forward(tokens_TB, state)

        monkeypatch.setattr(model, "forward", recording)
        options = TrainingOptions(**SMALL, steps=4)
        recipe.fit(model, tokens_TB, options, lambda *_: None)
        assert carried == [False, True, False, True]

    def test_minutes_end_the_training_too(self, text: Path) -> None:
        outcome = trained(text, minutes=1e-9)
        assert outcome.training.stopped == "minutes"
        assert outcome.training.steps == 0

    def test_the_learning_rate_rises_and_falls(self) -> None:
        options = TrainingOptions(steps=1000, learning_rate=1.0)
        rates = [recipe.learning_rate(options, step, 0.0) for step in (0, 19, 500, 1000)]
        assert rates == pytest.approx([0.05, 0.9829, 0.55, 0.1])
        timed = TrainingOptions(minutes=1, learning_rate=1.0)
        assert recipe.learning_rate(timed, 1000, 30.0) == pytest.approx(0.55)

    def test_an_interrupt_ends_it_with_a_report(
        self, text: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        step = recipe._step
        calls = iter(range(100))

        def interrupted(*arguments: object) -> object:
            if next(calls) == 3:
                raise KeyboardInterrupt
            return step(*arguments)

        monkeypatch.setattr(recipe, "_step", interrupted)
        result = CliRunner().invoke(app, [*command(text), "--steps", "50"])
        assert result.exit_code == 130
        assert "stopped by interrupt after 3 steps" in result.output
        assert last_line(result.output).startswith("validation: ")

    def test_evaluation_is_the_mean_over_the_whole_text(self) -> None:
        torch.manual_seed(0)
        model = CharacterModel(5, 8)
        tokens_TB = torch.randint(5, (recipe.EVALUATION_WINDOW + 7, 2))
        with torch.no_grad():
            scores_TBV, _ = model(tokens_TB[:-1])
        nats = torch.nn.functional.cross_entropy(
            scores_TBV.flatten(0, 1).double(), tokens_TB[1:].flatten()
        )
        assert recipe.evaluate(model, tokens_TB) == pytest.approx(
            float(nats) / math.log(2), rel=1e-5
        )


def command(path: Path, **changes: object) -> list[str]:
    options = {"text": path, **SMALL, **changes}
    pairs = [(f"--{name.replace('_', '-')}", str(value)) for name, value in options.items()]
    return ["train", "language-model", *(word for pair in pairs for word in pair)]


def last_line(output: str) -> str:
    return output.rstrip("\n").rpartition("\n")[2]


class TestCommand:
    def test_it_reports_what_was_asked(self, text: Path) -> None:
        result = CliRunner().invoke(app, command(text, steps=12))
        assert result.exit_code == 0, result.output
        assert "fox.txt: 2,430 bytes to train on, 270 held out" in result.output
        assert "unigram entropy" in result.output
        assert "a sample that goes on" in result.output
        assert any(name in result.output for name in ("aten", "reference"))
        assert last_line(result.output).startswith("validation: ")

    @pytest.mark.parametrize(
        ("changes", "complaint"),
        [
            ({"text": "/nowhere/at/all.txt"}, "text: got '/nowhere/at/all.txt' (No such file"),
            ({"text": "/"}, "text: got '/' (Is a directory"),
            ({"hidden": 0}, "hidden: got 0"),
            ({"layers": -1}, "layers: got -1"),
            ({"batch": 0}, "batch: got 0"),
            ({"window": -5}, "window: got -5"),
            ({"steps": 0}, "steps: got 0"),
            ({"minutes": 0}, "minutes: got 0.0"),
            ({"minutes": "nan"}, "minutes: got nan"),
            ({"learning_rate": "inf"}, "learning_rate: got inf"),
            ({"sample": -1}, "sample: got -1"),
            ({"seed": -1}, "seed: got -1"),
            ({"device": "abacus"}, "device: got 'abacus'"),
            ({"window": 5000}, "text: got 2430 bytes to train on and 270 held out"),
            ({"learning_rate": 1e30, "steps": 30}, "learning_rate: got 1e+30"),
        ],
    )
    def test_bad_input_is_one_line_and_exit_code_2(
        self, text: Path, changes: dict[str, object], complaint: str
    ) -> None:
        result = CliRunner().invoke(app, command(text, **changes))
        assert result.exit_code == 2
        assert result.stderr.startswith(f"error: {complaint}")
        assert result.stderr.count("\n") == 1

    @pytest.mark.parametrize("content", [b"", b"x", b"short"])
    def test_a_text_that_is_too_short(self, tmp_path: Path, content: bytes) -> None:
        path = tmp_path / "short.txt"
        path.write_bytes(content)
        result = CliRunner().invoke(app, command(path))
        assert result.exit_code == 2
        assert result.stderr.startswith("error: text: got ")
        assert result.stderr.count("\n") == 1

    @pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, so cuda is no mistake")
    def test_cuda_without_a_gpu(self, text: Path) -> None:
        result = CliRunner().invoke(app, command(text, device="cuda"))
        assert result.exit_code == 2
        assert result.stderr.startswith("error: device: got 'cuda' (")

    def test_the_defaults_are_the_recipe_s(self) -> None:
        """The command repeats them, so that --help need not import torch."""
        said = {name: p.default for name, p in inspect.signature(language_model).parameters.items()}
        assert said == {field.name: field.default for field in fields(TrainingOptions)}
        assert f'show_default="{recipe.DEFAULT_STEPS}, ' in inspect.getsource(language_model)
