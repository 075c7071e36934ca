"""Public modules: drop-in recurrent layers and cells."""

from ecornn.nn.cells import GRUCell, LSTMCell, RNNCell
from ecornn.nn.convert import convert, patch
from ecornn.nn.gru import GRU
from ecornn.nn.lstm import LSTM
from ecornn.nn.rnn import RNN

__all__ = ["GRU", "LSTM", "RNN", "GRUCell", "LSTMCell", "RNNCell", "convert", "patch"]
