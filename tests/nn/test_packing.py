"""What is remembered of a PackedSequence, and for how long."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence

import ecornn
from ecornn.nn import packing


def make() -> PackedSequence:
    return pack_sequence([torch.randn(4, 5), torch.randn(3, 5), torch.randn(1, 5)])


def test_rows_are_remembered_as_long_as_their_sequence_lives() -> None:
    gc.collect()
    before, packed = len(packing._ROWS), make()
    found = packing._rows(packed.batch_sizes, packed.data)
    assert packing._rows(packed.batch_sizes, packed.data) is found
    packed.batch_sizes.add_(0)  # changed in place
    assert packing._rows(packed.batch_sizes, packed.data) is not found
    del packed
    gc.collect()
    assert len(packing._ROWS) == before


def test_a_transform_leaves_no_wrapped_tensors_behind() -> None:
    """A kernel reads the lengths where they stand, which a wrapper cannot say."""
    layer, packed = ecornn.GRU(5, 8), make()

    def loss(data: Tensor) -> Tensor:
        return layer(PackedSequence(data, packed.batch_sizes))[0].data.sum()

    torch.func.grad(loss)(packed.data)
    padded, lengths = packing.pad(packed)
    assert lengths.data_ptr() != 0
    assert lengths.tolist() == [4, 3, 1]
    assert padded.shape == (4, 3, 5)


def test_a_captured_sequence_is_held_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "_CAPTURED", {})
    monkeypatch.setattr(packing, "_is_captured", lambda near: True)
    packed = make()
    with pytest.raises(ecornn.InvalidInput, match="before the capture"):
        packing.pad(packed)
    monkeypatch.setattr(packing, "_is_captured", lambda near: False)
    packing.pad(packed)
    monkeypatch.setattr(packing, "_is_captured", lambda near: True)
    for _ in range(3):
        packing.pack(packing.pad(packed)[0], packed)
    assert len(packing._CAPTURED) == 1


@pytest.mark.parametrize("feature", ["packed", "lengths"])
def test_torch_s_default_device_is_not_the_layer_s(feature: str) -> None:
    layer, packed, x = ecornn.LSTM(5, 8), make(), torch.randn(4, 3, 5)
    given = (packed, None) if feature == "packed" else (x, [4, 3, 1])
    with torch.device("meta"):
        output = layer(given[0], lengths=given[1])[0]
    assert output[0].device.type == "cpu"
