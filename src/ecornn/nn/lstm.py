"""`LSTM`: torch.nn.LSTM with what it lacks."""

from __future__ import annotations

import torch

from ecornn.nn.base import RecurrentLayer


class LSTM(RecurrentLayer, torch.nn.LSTM):
    """A drop-in replacement for `torch.nn.LSTM`: same constructor, same `state_dict`, same call.

    Keyword-only options beyond torch's:

    - `layer_norm`: normalize the input's and the state's gate contributions and, for the output,
      the cell state (Ba et al. 2016);
    - `zoneout`: probability that a unit keeps its previous value, for h and c, or a pair for each;
    - `recurrent_dropout`: probability that a recurrent weight is dropped for a whole call;
    - `input_dropout`, `output_dropout`: dropout with one mask a sequence; `variational=True` makes
      the `dropout` between layers so too;
    - `keep`: what stays in memory for the backward pass, "states" or "gates", or "auto";
    - `backend`: "auto", or the one backend to use.

    A call takes, keyword-only: `lengths` (one a sequence, any order), `after_end` ("zeros" or
    "frozen": what the output holds beyond a sequence's end), `resets` (bool, the input's leading
    shape: no state crosses into a marked step from the one before), `reset_to` ("zero" or
    "initial") and `return_cell_states`, which adds every cell state of the last layer to the
    result.
    """
