from __future__ import annotations

import pytest

from ecornn.bench.timeline.operations import KINDS, Operation, busy_ns, kind_of, summary

#: Ours, and such as cuBLAS, cuDNN and torch give their own.
NAMES = {
    "forward": "steps",
    "backward": "steps",
    "exchange_floor": "steps",
    "shares": "products",
    "gradients": "products",
    "nvjet_hsh_128x256_64x4_2x1_v_bz_coopA_TNN": "products",
    "void cublasLt::splitKreduce_kernel<32, 16, int, float>": "products",
    "sm80_xmma_gemm_f32f32_tf32f32_f32_tn_n_tilesize32x32x8": "products",
    "void gemv2T_kernel_val<int, int, __nv_bfloat16>": "products",
    "void RNN_blockPersist_fp_LSTM<__half, __half, float>": "steps",
    "void LSTM_elementWise_fp<__half, __half, float, (cudnnRNNBiasMode_t)2>": "steps",
    "void GRU_elementWise_bp1<float, float, float>": "steps",
    "Memset (Device)": "fills",
    "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<int>>": "fills",
    "Memcpy DtoD (Device -> Device)": "rest",
    "void at::native::elementwise_kernel<128, 2, bfloat16_copy>": "rest",
    "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float>>": "rest",
    "forward_of_somebody_else": "rest",
}


@pytest.mark.parametrize(("name", "kind"), NAMES.items())
def test_operations_are_known_by_their_names(name: str, kind: str) -> None:
    assert kind_of(name) == kind


def test_every_kind_has_a_name_here() -> None:
    assert set(NAMES.values()) == set(KINDS)


def test_time_in_which_two_run_counts_once() -> None:
    assert busy_ns([]) == 0
    one, inside, over = Operation("a", 100, 50), Operation("b", 110, 20), Operation("c", 140, 30)
    apart = Operation("d", 200, 5)
    assert busy_ns([one]) == 50
    assert busy_ns([inside, one]) == 50
    assert busy_ns([over, one, inside]) == 70
    assert busy_ns([apart, over, one, inside]) == 75


def test_a_summary_is_of_a_time_step() -> None:
    """Two calls of ten steps, the second of whose kernels begins before its product has ended."""
    seen = [
        Operation("Memset (Device)", 1_000, 1_000),
        Operation("some_gemm", 2_000, 4_000),
        Operation("forward", 7_000, 10_000),
        Operation("some_gemm", 20_000, 4_000),
        Operation("forward", 23_000, 10_000),
        Operation("void at::native::reduce_kernel<512>", 33_000, 2_000),
    ]
    found = summary("train", seen, calls=2, steps=10)
    assert found == {
        "train_steps_us": pytest.approx(1.0),
        "train_products_us": pytest.approx(0.4),
        "train_fills_us": pytest.approx(0.05),
        "train_rest_us": pytest.approx(0.1),
        "train_idle_us": pytest.approx(0.2),  # 1 and 3 µs
        "train_span_us": pytest.approx(1.7),
        "train_operations": 3.0,
        "train_longest": "10.0 µs in 1 × forward; 4.0 µs in 1 × some_gemm; "
        "1.0 µs in 0.5 × void at::native::reduce_kernel<512>; 0.5 µs in 0.5 × Memset (Device)",
    }
