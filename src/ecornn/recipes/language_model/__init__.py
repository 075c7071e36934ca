"""A character language model: an LSTM that predicts the next byte of a text."""

from ecornn.recipes.language_model.data import Corpus, load_corpus
from ecornn.recipes.language_model.model import CharacterModel
from ecornn.recipes.language_model.train import Outcome, TrainingOptions, run

__all__ = [
    "CharacterModel",
    "Corpus",
    "Outcome",
    "TrainingOptions",
    "load_corpus",
    "run",
]
