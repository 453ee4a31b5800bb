# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""The whole optimizer on a whole model against the original's updates and parameters."""

import numpy as np
import optimizer_goldens as goldens
import pytest

from levanter_marin.optim.hyperball import NormScope
from levanter_marin.optim.newton_schulz import Coefficients, NewtonSchulzDtype

UPDATE_RTOL = 5e-5  # of the leaf's largest
PARAMETER_ATOL = 2e-5
BF16_MIN_COSINE = 0.9
BF16_NORM_RTOL = 1e-6

VARIANT = {
    "warmup": 2,
    "lr_schedule": "linear",
    "min_lr_ratio": 0.1,
    "momentum": 0.9,
    "nesterov": False,
    "num_steps": 3,
    "beta1": 0.8,
    "beta2": 0.9,
    "epsilon": 1e-6,
    "max_grad_norm": 0.5,
    "coefficients": Coefficients.simple,
}


def assert_matches(steps, name, full):
    """Updates and parameters of every step and leaf that the golden has."""
    compared = 0
    for key, ours in steps.items():
        for leaf, value in goldens.expected(name, full, key).items():
            atol = UPDATE_RTOL * np.abs(value).max() if key.startswith("u") else PARAMETER_ATOL
            np.testing.assert_allclose(ours[leaf], value, rtol=0, atol=atol, err_msg=f"{key} {leaf}")
            compared += 1
    assert compared > 0


@pytest.mark.parametrize("full", [False, True], ids=["embedded", "full"])
def test_hyperball_golden_gradients_with_one_norm_a_bank_give_updates_and_parameters(full):
    steps = goldens.three_steps(goldens.config().build(100), full)
    assert_matches(steps, "optimizer_fp32_layer", full)


def test_hyperball_golden_gradients_with_one_norm_an_expert_give_updates_and_parameters():
    steps = goldens.three_steps(goldens.config(norm_scope=NormScope.per_expert).build(100), full=True)
    assert_matches(steps, "optimizer_fp32_matrix", full=True)


def test_hyperball_golden_gradients_clipped_and_warmed_up_give_updates_and_parameters():
    steps = goldens.three_steps(goldens.config(**VARIANT).build(10), full=True)
    # The first learning rate is zero: what the original makes of that is rounding.
    for leaf, update in steps.pop("u1").items():
        np.testing.assert_array_equal(update, 0, err_msg=leaf)
    assert_matches(steps, "optimizer_variant_fp32_layer", full=True)


def test_hyperball_golden_gradients_with_gate_and_router_decay_give_updates_and_parameters():
    steps = goldens.three_steps(goldens.config(gate_router_weight_decay=0.02).build(10), full=True)
    assert_matches(steps, "optimizer_wd_fp32_layer", full=True)


def test_hyperball_golden_gradients_in_bf16_give_directions_and_norms():
    dtype = NewtonSchulzDtype.bf16
    steps = goldens.three_steps(goldens.config(newton_schulz_dtype=dtype).build(100), full=True)
    for key in ("u1", "u3"):
        for leaf, value in goldens.expected("optimizer_bf16_layer", True, key).items():
            assert goldens.cosine(steps[key][leaf], value) > BF16_MIN_COSINE, (key, leaf)
    for key in ("p1", "p3"):
        for leaf, value in goldens.expected("optimizer_bf16_layer", True, key).items():
            ours = goldens.norm(steps[key][leaf])
            assert ours == pytest.approx(goldens.norm(value), rel=BF16_NORM_RTOL), (key, leaf)
