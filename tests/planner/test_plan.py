"""Who is chosen, who refused, and that the plan says so."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import ecornn
from ecornn.backends.registry import BACKENDS, by_name
from ecornn.planner import keeps_gates_unasked, plan
from ecornn.spec import RnnSpec

PLAIN = RnnSpec("lstm", 4, 8)
#: What a request for a GPU gets where there is none to run it.
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="persistent kernels serve it here")


def asked(**changes: Any) -> RnnSpec:
    return RnnSpec(**{**vars(PLAIN), **changes})


def test_a_plain_network_runs_whole_on_torchs_kernels() -> None:
    found = plan(PLAIN)
    assert (found.backend, found.scope, found.keep) == ("aten", "network", "none")
    assert [r.backend for r in found.rejections] == ["persistent"]


@pytest.mark.parametrize(
    ("feature", "word"),
    [
        ("layer_norm", "layer norm"),
        ("zoneout", "zoneout"),
        ("cell_states", "cell state"),
        ("transformed", "torch.func"),
        ("forward_mode", "forward-mode"),
    ],
)
def test_what_torchs_kernels_lack_goes_to_the_reference(feature: str, word: str) -> None:
    found = plan(asked(**{feature: True}))
    assert found.backend == "reference"
    assert [r.backend for r in found.rejections] == ["persistent", "aten"]
    assert word in found.rejections[1].reason
    for rejection in found.rejections:
        assert str(rejection) in found.explain()


@pytest.mark.parametrize("keep", ["states", "gates"])
def test_a_keep_mode_that_is_asked_for_is_what_runs(keep: str) -> None:
    found = plan(asked(keep=keep, needs_grad=True))
    assert (found.backend, found.keep) == ("reference", keep)
    assert keep in found.rejections[1].reason


def test_a_traced_call_that_nobody_told_leaves_the_mode_to_the_compiler() -> None:
    free = asked(layer_norm=True, needs_grad=True, traced=True)
    assert plan(free).keep == "auto"
    assert "if the compiler chooses" in plan(free).explain()
    for keep in ("states", "gates"):
        assert plan(replace(free, keep=keep)).keep == keep
    assert plan(replace(free, needs_grad=False)).keep == "none"
    assert plan(replace(free, traced=False)).keep == "states"
    assert plan(asked(needs_grad=True, traced=True)).keep == "none"  # torch's kernels decide


@pytest.mark.parametrize(
    ("backend", "cell", "gates"),
    [
        *[("persistent", "lstm", True), ("persistent", "gru", True)],
        *[("persistent", "rnn_tanh", False), ("reference", "lstm", False), ("aten", "gru", False)],
    ],
)
def test_who_keeps_few_gates_unasked(backend: str, cell: str, gates: bool) -> None:
    assert keeps_gates_unasked(backend, cell) == gates


def test_nothing_is_kept_where_no_gradient_is_needed() -> None:
    assert plan(asked(layer_norm=True)).keep == "none"
    assert plan(asked(layer_norm=True, needs_grad=True)).keep == "states"


@pytest.mark.parametrize("reason", ["lengths", "resets", "long", "variational"])
def test_layers_are_run_apart_where_the_whole_cannot_be(reason: str) -> None:
    assert plan(asked(**{reason: True})).scope == "layer"


def test_a_tracer_sees_operators() -> None:
    assert plan(asked(traced=True)).scope == "operator"
    assert plan(asked(traced=True, resets=True)).scope == "operator"


def test_forward_mode_sees_through_the_definition() -> None:
    assert plan(asked(forward_mode=True)).scope == "inline"


def test_a_named_backend_is_used_or_the_refusal_raised() -> None:
    found = plan(asked(backend="reference"))
    assert found.backend == "reference"
    assert "by name" in found.explain()
    with pytest.raises(ecornn.NoBackend, match="no layer norm"):
        plan(asked(backend="aten", layer_norm=True))


@no_gpu
@pytest.mark.parametrize("watched", ["traced", "captured"])
def test_resets_are_read_on_the_host_only_where_the_host_may_wait(watched: str) -> None:
    assert plan(asked(resets=True, device="cuda")).backend == "aten"
    assert plan(asked(resets=True, device="cpu", **{watched: True})).backend == "aten"
    found = plan(asked(resets=True, device="cuda", **{watched: True}))
    assert found.backend == "reference"
    assert "host" in found.rejections[1].reason


def test_an_unknown_device_is_left_to_the_reference() -> None:
    found = plan(asked(device="mps"))
    assert found.backend == "reference"
    assert "mps" in found.rejections[1].reason


def test_explain_tells_request_choice_and_refusals() -> None:
    spec = asked(
        layers=2,
        bidirectional=True,
        projection=3,
        bias=False,
        dropout=0.25,
        layer_norm=True,
        lengths=True,
        resets=True,
        needs_grad=True,
        dtype=torch.bfloat16,
        device="cuda",
    )
    told = plan(spec).explain()
    for word in (
        "lstm 4→8",
        "2 layers",
        "bidirectional",
        "projected to 3",
        "no bias",
        "dropout 0.25",
        "layer norm",
        "lengths",
        "resets",
        "bfloat16 on cuda",
        "runs on reference",
        "refused: aten",
        "states are kept",
    ):
        assert word in told, word
    assert str(plan(spec)) == told


def test_a_layers_explanation_matches_what_it_runs() -> None:
    layer = ecornn.LSTM(4, 8, 2)
    x = torch.randn(5, 3, 4)
    before = torch.get_rng_state()
    told = layer.explain(x)
    assert torch.equal(before, torch.get_rng_state())
    assert told.backend == "aten"
    assert told.spec.needs_grad
    assert not layer.requires_grad_(False).explain(x).spec.needs_grad
    assert layer.explain(x, resets=torch.zeros(5, 3, dtype=torch.bool)).scope == "layer"
    assert layer.explain(x, return_cell_states=True).backend == "reference"


def test_backends_have_distinct_names_and_can_be_looked_up() -> None:
    names = [backend.name for backend in BACKENDS]
    assert len(set(names)) == len(names)
    assert all(by_name(name).name == name for name in names)
    with pytest.raises(KeyError, match=r"no backend is called 'cudnn'.*aten"):
        by_name("cudnn")


class TestPersistent:
    """What the persistent backend says without a GPU."""

    backend = by_name("persistent")

    @pytest.mark.parametrize(
        ("feature", "word"),
        [
            ({"layer_norm": True}, "layer norm"),
            ({"zoneout": True}, "zoneout"),
            ({"projection": 3}, "projection"),
            ({"transformed": True}, "torch.func"),
            ({"forward_mode": True}, "forward-mode"),
            ({"dtype": torch.float64}, "float64"),
            ({"short": True}, "few steps"),
            ({"device": "cpu"}, "not on cpu"),
        ],
    )
    def test_refuses_what_it_lacks(self, feature: dict[str, Any], word: str) -> None:
        assert word in (self.backend.refuse(asked(**{"device": "cuda", **feature})) or "")

    @no_gpu
    def test_says_why_it_is_not_there(self) -> None:
        assert self.backend.unavailable() == "there is no CUDA device"
        with pytest.raises(ecornn.NoBackend, match="no CUDA device"):
            plan(asked(backend="persistent"))

    def test_keeps_gates_where_there_is_room(self) -> None:
        keeps = self.backend.keeps
        assert keeps(asked()) == "none"
        assert keeps(asked(needs_grad=True)) == "states"
        assert keeps(asked(needs_grad=True, roomy=True)) == "gates"
        assert keeps(asked(needs_grad=True, roomy=True, keep="states")) == "states"
        assert keeps(asked(needs_grad=True, keep="gates")) == "gates"
        # a plain RNN's gates are its output
        assert keeps(asked(cell="rnn_tanh", needs_grad=True, keep="gates")) == "states"

    @pytest.mark.parametrize(
        ("changes", "quicker"),
        [
            ({"hidden": 64, "dtype": torch.float32, "brief": False}, False),
            ({"hidden": 64, "dtype": torch.float32, "batch": 4, "brief": True}, False),
            ({"hidden": 64, "dtype": torch.float32, "batch": 16, "captured": True}, False),
            ({"hidden": 64, "dtype": torch.float32, "brief": True, "needs_grad": True}, False),
            ({"hidden": 64, "dtype": torch.float32, "needs_grad": True}, True),
            (
                {"hidden": 64, "dtype": torch.float32, "brief": True, "needs_grad": True}
                | {"captured": True},
                True,
            ),
            ({"hidden": 64, "dtype": torch.float16, "batch": 4, "brief": True}, False),
            ({"hidden": 64, "dtype": torch.float16, "batch": 4}, False),
            (
                {"hidden": 64, "dtype": torch.float16, "batch": 4, "captured": True}
                | {"needs_grad": True},
                False,
            ),
            ({"hidden": 64, "dtype": torch.float16, "batch": 4, "captured": True}, False),
            ({"hidden": 64, "dtype": torch.bfloat16, "brief": True}, False),
            ({"hidden": 128, "dtype": torch.float32, "brief": True, "needs_grad": True}, False),
            ({"hidden": 128, "dtype": torch.float16, "brief": True, "needs_grad": True}, False),
            ({"hidden": 128, "dtype": torch.float16, "brief": True}, False),
            (
                {"hidden": 128, "dtype": torch.float16, "brief": True, "needs_grad": True}
                | {"captured": True},
                False,
            ),
            ({"hidden": 128, "dtype": torch.float32, "needs_grad": True}, False),
            ({"hidden": 128, "dtype": torch.bfloat16, "brief": True}, False),
            ({"hidden": 512, "dtype": torch.float16, "batch": 16, "brief": True}, False),
            ({"hidden": 1024, "dtype": torch.float16, "batch": 16, "brief": True}, False),
            (
                {"hidden": 1024, "dtype": torch.float16, "batch": 16, "brief": True}
                | {"needs_grad": True},
                False,
            ),
            ({"hidden": 512, "dtype": torch.float16, "batch": 64, "brief": True}, False),
            ({"hidden": 512, "dtype": torch.float16, "batch": 8, "brief": True}, False),
            ({"hidden": 512, "dtype": torch.float16, "batch": 16, "input_size": 100}, False),
            ({"hidden": 512, "dtype": torch.bfloat16, "batch": 16, "brief": True}, False),
            ({"hidden": 512, "dtype": torch.float16, "batch": 16, "captured": True}, False),
            ({"hidden": 1024, "dtype": torch.float16, "batch": 16, "captured": True}, False),
        ],
    )
    def test_leaves_to_cudnn_what_cudnn_does_quicker(
        self, changes: dict[str, Any], quicker: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from ecornn.backends import persistent

        monkeypatch.setattr(persistent, "too_old", lambda: None)
        monkeypatch.setattr(persistent.Persistent, "_does_not_fit", lambda self, spec: None)
        input_size = changes.get("hidden", 8)
        spec = asked(**{"device": "cuda", "input_size": input_size, **changes})
        monkeypatch.setattr(persistent, "numbers_of", lambda dtype: "tf32")
        assert ("quicker" in (self.backend.refuse(spec) or "")) == quicker

    @pytest.mark.parametrize(
        "change",
        [
            *({"lengths": True}, {"resets": True}, {"layers": 2}, {"bidirectional": True}),
            *({"cell": "gru"}, {"keep": "states"}, {"backend": "persistent"}, {}),
        ],
    )
    def test_leaves_nothing_to_cudnn_that_was_not_measured(
        self, change: dict[str, Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from ecornn.backends import persistent

        monkeypatch.setattr(persistent, "too_old", lambda: None)
        monkeypatch.setattr(persistent.Persistent, "_does_not_fit", lambda self, spec: None)
        size = {"hidden": 64, "input_size": 64, "dtype": torch.float32, "needs_grad": True}
        spec = asked(**{"device": "cuda", **size, **change})
        assert ("quicker" in (self.backend.refuse(spec) or "")) is not bool(change)

    @pytest.mark.parametrize(
        ("changes", "quicker"),
        [
            ({}, True),
            ({"batch": 4, "brief": True}, True),
            ({"batch": 16, "brief": True}, False),
            ({"batch": 16, "captured": True}, True),
            ({"brief": True, "needs_grad": True}, False),
            ({"needs_grad": True}, True),
        ],
    )
    @pytest.mark.parametrize("numbers", ["tf32x3", "ieee"])
    def test_leaves_more_to_cudnn_without_tf32(
        self, numbers: str, changes: dict[str, Any], quicker: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from ecornn.backends import persistent

        monkeypatch.setattr(persistent, "too_old", lambda: None)
        monkeypatch.setattr(persistent.Persistent, "_does_not_fit", lambda self, spec: None)
        monkeypatch.setattr(persistent, "numbers_of", lambda dtype: numbers)
        spec = asked(device="cuda", input_size=64, hidden=64, dtype=torch.float32, **changes)
        assert ("quicker" in (self.backend.refuse(spec) or "")) == quicker
