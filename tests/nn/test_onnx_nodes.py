"""The LSTM, GRU and RNN node cases of the `onnx` package, with its numbers and with random ones.

onnx gives most cases the same weight everywhere, so that a wrong order of gates would not show;
its own helper classes evaluate the same nodes with random values for that.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from onnx.backend.test.case import node as onnx_nodes
from onnx.backend.test.case.node import gru, lstm, rnn
from onnx.helper import get_attribute_value
from torch import Tensor

import ecornn
from support.tolerances import assert_matches, relative_error, tolerance

HELPERS = {"LSTM": lstm.LSTMHelper, "GRU": gru.GRUHelper, "RNN": rnn.RNNHelper}
GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
#: Where our gates (i, f, g, o; r, z, n) lie in onnx's order (i, o, f, c; z, r, h).
ORDER = {"LSTM": [0, 2, 3, 1], "GRU": [1, 0, 2], "RNN": [0]}

#: `collect_testcases(None)` is these and the cases of all other operators, in five seconds.
CASES = {
    case.name: case
    for case in onnx_nodes._NodeTestCases
    if case.model.graph.node[0].op_type in HELPERS
}

#: Cases that are another cell than torch's, and why. Without what is named here, and with random
#: values, they run below as all others do.
EXCLUDED = {
    "test_lstm_with_peepholes": "torch.nn.LSTM has no weights from the cell state to the gates",
}

#: All GRU cases have linear_before_reset=0, which is n = tanh(W·x + U·(r∘h)), where torch has
#: n = tanh(W·x + r∘(U·h)). The two are one where r is the same for all units. In this case it is
#: not; here the inputs, up to 18, leave so little of h in the sum that float32 does not show it.
SATURATED = "test_gru_seq_length"


def read(case: Any) -> tuple[str, dict[str, Any], dict[str, np.ndarray], dict[str, np.ndarray]]:
    """(operator, attributes, inputs by name, outputs by name)."""
    (node,) = case.model.graph.node
    ((given, expected),) = case.data_sets
    attributes = {a.name: get_attribute_value(a) for a in node.attribute}
    attributes["direction"] = attributes.get("direction", b"forward").decode()
    inputs = dict(zip([name for name in node.input if name], given, strict=True))
    outputs = dict(zip([name for name in node.output if name], expected, strict=True))
    return node.op_type, attributes, inputs, outputs


def reordered(op: str, value: np.ndarray) -> Tensor:
    gates = np.split(value, GATES[op])
    return torch.from_numpy(np.concatenate([gates[i] for i in ORDER[op]]))


def biases(op: str, bias: np.ndarray, *, linear_before_reset: bool) -> tuple[Tensor, Tensor]:
    b_ih, b_hh = (reordered(op, half) for half in np.split(bias, 2))
    if op == "GRU" and not linear_before_reset:
        # onnx then adds the recurrent bias of n outside of the reset gate, where b_ih is
        hidden = b_hh.shape[0] // 3
        b_ih[-hidden:] += b_hh[-hidden:]
        b_hh[-hidden:] = 0
    return b_ih, b_hh


def make_layer(op: str, attributes: dict[str, Any], inputs: dict[str, np.ndarray]) -> Any:
    """Our layer with the case's weights. A reverse node is the second direction of ours."""
    w, r = inputs["W"], inputs["R"]
    layer = getattr(ecornn, op)(
        w.shape[-1],
        r.shape[-1],
        bias="B" in inputs,
        batch_first=attributes.get("layout", 0) == 1,
        bidirectional=attributes["direction"] != "forward",
        dtype=torch.from_numpy(w).dtype,
    )
    state = {}
    for d, suffix in enumerate(["", "_reverse"] if layer.bidirectional else [""]):
        source = min(d, len(w) - 1)
        state[f"weight_ih_l0{suffix}"] = reordered(op, w[source])
        state[f"weight_hh_l0{suffix}"] = reordered(op, r[source])
        if "B" in inputs:
            linear = attributes.get("linear_before_reset", 0) == 1
            b_ih, b_hh = biases(op, inputs["B"][source], linear_before_reset=linear)
            state |= {f"bias_ih_l0{suffix}": b_ih, f"bias_hh_l0{suffix}": b_hh}
    layer.load_state_dict(state)
    return layer


def run(op: str, attributes: dict[str, Any], inputs: dict[str, np.ndarray]) -> dict[str, Tensor]:
    """The node by our layer, with onnx's names and layouts."""
    layer = make_layer(op, attributes, inputs)
    reverse = attributes["direction"] == "reverse"
    batch_first = layer.batch_first

    def state(name: str) -> Tensor:
        value = torch.from_numpy(inputs[name])  # (D, B, H), or (B, D, H) with layout 1
        value = value.transpose(0, 1).contiguous() if batch_first else value
        return value.repeat(2, 1, 1) if reverse else value

    hx: Any = None
    if "initial_h" in inputs:
        hx = (state("initial_h"), state("initial_c")) if op == "LSTM" else state("initial_h")
    lengths = inputs["sequence_lens"].tolist() if "sequence_lens" in inputs else None
    output, last = layer(torch.from_numpy(inputs["X"]), hx, lengths=lengths)
    finals = dict(zip(("Y_h", "Y_c"), last if op == "LSTM" else (last,), strict=False))
    found = {"Y": output.unflatten(-1, (2 if layer.bidirectional else 1, -1)), **finals}
    if reverse:
        found = {"Y": found["Y"][:, :, 1:], **{name: finals[name][1:] for name in finals}}
    if batch_first:
        return {"Y": found.pop("Y"), **{name: s.transpose(0, 1) for name, s in found.items()}}
    return {"Y": found.pop("Y").transpose(1, 2), **found}


def reset_gate_is_uniform(inputs: dict[str, np.ndarray]) -> bool:
    """Every unit of a GRU node has the same reset gate, because it has the same weights."""
    gates = [*np.split(inputs["W"], 3, 1), *np.split(inputs["R"], 3, 1)]
    if "B" in inputs:
        gates += np.split(inputs["B"][..., None], 6, 1)
    return all((gate == gate[:, :1]).all() for gate in gates[1::3])


def test_every_case_is_known() -> None:
    """A case that onnx drops, adds or renames shows here, instead of passing unseen."""
    counts = {op: sum(read(case)[0] == op for case in CASES.values()) for op in HELPERS}
    assert counts == {"LSTM": 6, "GRU": 6, "RNN": 6}
    assert len(EXCLUDED) == 1
    assert EXCLUDED.keys() < CASES.keys()


@pytest.mark.no_cover  # runs nothing of ours
@pytest.mark.filterwarnings("ignore")  # other operators' cases overflow and divide by zero
def test_onnx_has_no_other_cases_of_these_operators() -> None:
    collected = onnx_nodes.collect_testcases(None)
    ours = {c.name for c in collected for n in c.model.graph.node if n.op_type in HELPERS}
    assert len(collected) > len(CASES)
    assert ours == CASES.keys()


@pytest.mark.parametrize("name", [name for name in CASES if name not in EXCLUDED])
def test_case_gives_onnx_numbers(name: str) -> None:
    op, attributes, inputs, expected = read(CASES[name])
    if op == "GRU":
        assert attributes.get("linear_before_reset", 0) == 0
        assert reset_gate_is_uniform(inputs) or name == SATURATED
    found = run(op, attributes, inputs)
    assert expected.keys() <= found.keys()
    for output, value in expected.items():
        reference = torch.from_numpy(value)
        assert_matches(found[output], reference, tolerance(torch.float32, steps=3), output)


def test_excluded_case_is_another_cell() -> None:
    """If it gave onnx's numbers without its peepholes, it would not be excluded."""
    op, attributes, inputs, expected = read(CASES["test_lstm_with_peepholes"])
    assert inputs.pop("P").any()
    found = run(op, attributes, inputs)["Y_h"]
    error = relative_error(found, torch.from_numpy(expected["Y_h"]))
    assert error > 100 * tolerance(torch.float32, steps=3)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("with_states", [False, True], ids=["zero_states", "initial_states"])
def test_case_with_random_values_gives_onnx_numbers(name: str, with_states: bool) -> None:
    op, attributes, inputs, _ = read(CASES[name])
    inputs.pop("P", None)
    draw = np.random.default_rng(7)
    shape = (len(inputs["W"]), inputs["X"].shape[1], attributes["hidden_size"])
    if attributes.get("layout", 0) == 1:
        shape = (inputs["X"].shape[0], shape[0], shape[2])
    inputs["B"] = np.zeros((len(inputs["W"]), 2 * inputs["W"].shape[1]))
    states = ["initial_h", "initial_c"] if op == "LSTM" else ["initial_h"]
    inputs = {key: inputs[key] for key in inputs if key not in states}
    inputs |= {key: np.zeros(shape) for key in states if with_states}
    lengths = inputs.pop("sequence_lens", None)
    inputs = {key: draw.standard_normal(value.shape) for key, value in inputs.items()}
    attributes |= {"linear_before_reset": 1} if op == "GRU" else {}

    results = HELPERS[op](**inputs, **attributes).step()
    # onnx's case gives every sequence its full length, so its helper needs not be told
    inputs |= {} if lengths is None else {"sequence_lens": lengths}
    found = run(op, attributes, inputs)
    assert len(results) == len(found)
    for output, value in zip(("Y", "Y_h", "Y_c"), results, strict=False):
        reference = torch.from_numpy(np.ascontiguousarray(value))
        assert_matches(found[output], reference, tolerance(torch.float64, steps=3), output)
