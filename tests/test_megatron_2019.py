"""Megatron's weak scaling of 2019 by the planner: its parts by hand, and what is taken from the paper."""

import math

import pytest

from pardemo.formulas import scaling
from pardemo.planner.layouts.published import megatron_2019
from pardemo.planner.layouts.published.megatron_2019 import PARTS, longer, planned

SMALLEST, LARGEST = scaling.TABLE_1[1], scaling.TABLE_1[8]
#: Table 8 (App. D.2), the smallest model shared by t GPUs, its batch kept: times as fast as one GPU.
TABLE_8 = {2: 1.64, 4: 2.34, 8: 2.98}


def test_one_gpu_is_the_baseline_and_nothing_but_the_rate_of_products_is_set_by_it():
    assert planned(SMALLEST, 1).seconds == pytest.approx(SMALLEST.linear_seconds(1), rel=1e-12)
    program, younger = megatron_2019.program(), megatron_2019.MEGATRON_2022
    changed = {name for name, value in vars(program).items() if value != getattr(younger, name)}
    assert changed == {"name", "matmul_efficiency", "gradient_bytes"}
    assert sum(longer(SMALLEST, 1).values()) == pytest.approx(0, abs=1e-9)


def test_all_reduces_by_hand():
    activation, start = LARGEST.activation_bytes, 3 * 50e-6  # three doublings of ranks
    in_layer = 6 * (2 * 7 / 8 * activation / 120e9 + start)
    assert planned(LARGEST, 8).parts["tensor-parallel traffic"] == pytest.approx(72 * in_layer, rel=1e-12)
    gradients = 2 * 63 / 64 * 2 * LARGEST.parameters / 8 / 10e9  # eight rings share 80 GB/s
    of_replicas = planned(LARGEST, 8, 64).parts["data-parallel traffic"]
    assert of_replicas == pytest.approx(gradients + 6 * 250e-6, rel=0.01), "norms are whole on each GPU"
    in_fp32 = planned(LARGEST, 8, 64, gradient_bytes=4).parts["data-parallel traffic"]
    assert in_fp32 == pytest.approx(2 * of_replicas, rel=0.01)


@pytest.mark.parametrize("tp", scaling.TABLE_1)
def test_parts_add_up_and_overlap_hides_the_sum_of_gradients(tp):
    of = scaling.TABLE_1[tp]
    step, parts = planned(of, tp, 64), longer(of, tp, 64)
    assert list(parts) == list(PARTS)
    assert math.isclose(1 + sum(parts.values()) / 100, step.seconds / of.linear_seconds(tp))
    assert longer(of, tp, 64, overlap=True) == pytest.approx(longer(of, tp))


def test_the_figure_has_all_but_the_calibration_and_hides_the_larger_models_sums():
    found = megatron_2019.figure_5()
    assert list(found) == [2, 4, 8, 64, 128, 256, 512]
    assert [round(paper) for _, paper in found.values()] == [5, 22, 30, 4, 20, 27, 35]
    shown = {gpus: parts["data-parallel all-reduce"] > 0 for gpus, (parts, _) in found.items()}
    assert [gpus for gpus, seen in shown.items() if seen] == [64, 128]


def test_a_smaller_share_of_a_small_model_takes_more_than_its_share():
    speedups = {t: planned(SMALLEST, 1).seconds / planned(SMALLEST, t).seconds for t in (2, 4, 8)}
    assert all(published < speedups[t] < t for t, published in TABLE_8.items())
    products = [planned(SMALLEST, t).parts["matrix multiplications"] * t for t in (1, 2, 4, 8)]
    assert products == sorted(products), "narrower products run at a lower rate"
