# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""Three full steps of the trainer's state with model, quantile balancing and optimizer against the original's."""

import equinox as eqx
import jax
import numpy as np
import optimizer_goldens as goldens
import pytest
from levanter.optim.model_averaging import EmaModelAveragingConfig
from levanter.trainer_state import TrainerState

import golden_cases
from levanter_marin.config import QuantileEstimator
from levanter_marin.optim.newton_schulz import NewtonSchulzDtype

LOSS_ATOL = 2e-6
BETA_ATOL = 2e-5
PARAMETER_ATOL = 2e-5
BF16_LOSS_ATOL = 0.02
BF16_MIN_COSINE = 0.9
BF16_NORM_RTOL = 1e-3

Z_LOSS_WEIGHT = 1e-4
EMA_BETA = 0.9


@eqx.filter_jit
def train_step(state: TrainerState, example):
    """What `levanter.trainer.Trainer` does with its state."""

    def loss_fn(model):
        loss, _ = model.compute_next_token_loss(example, key=jax.random.PRNGKey(0), logsumexp_weight=Z_LOSS_WEIGHT)
        return loss.scalar()

    loss, gradient = eqx.filter_value_and_grad(loss_fn)(state.model)
    return loss, state.take_step(gradient, key=state.training_key)[0]


def trained(case, dtype: NewtonSchulzDtype):
    """Loss and state after every step, from zero router biases."""
    config = golden_cases.model_config(case.config)
    bias = np.zeros((config.num_layers, config.moe.num_experts), np.float32)
    model = golden_cases.build_model(case, config, router_bias=bias)
    state = TrainerState.init(
        goldens.config(newton_schulz_dtype=dtype).build(100),
        model,
        key=jax.random.PRNGKey(0),
        model_averaging=EmaModelAveragingConfig(beta=EMA_BETA),
    )
    for step in (1, 2, 3):
        loss, state = train_step(state, golden_cases.example(case.arrays, f"in{step}/"))
        yield step, float(loss), state


def router_bias(state: TrainerState) -> np.ndarray:
    return np.asarray(state.model.transformer.layers.stacked.mlp.router.bias.value().array)


def assert_parameters_match(model, expected):
    ours = golden_cases.state_dict(model)
    assert expected
    for leaf, value in expected.items():
        np.testing.assert_allclose(ours[leaf], value, rtol=0, atol=PARAMETER_ATOL, err_msg=leaf)


@pytest.mark.parametrize("name", ["train_step_topk_fp32", "train_step_hist_fp32"])
def test_train_step_golden_batches_give_losses_router_biases_and_parameters(name):
    case = golden_cases.load(name)
    balancing = golden_cases.model_config(case.config).moe.quantile_balancing
    bias_atol = BETA_ATOL
    for step, loss, state in trained(case, NewtonSchulzDtype.fp32):
        assert abs(loss - case.arrays[f"out{step}/loss"]) < LOSS_ATOL
        if balancing.estimator is QuantileEstimator.histogram:
            # one bin for an expert's beta, one for the mean that centres it
            bias_atol = BETA_ATOL + 2 * np.ptp(case.arrays[f"out{step}/qb_beta"]) / balancing.num_bins
        following = f"out{step + 1}/router_bias" if step < 3 else "out3/router_bias_next"
        np.testing.assert_allclose(router_bias(state), case.arrays[following], rtol=0, atol=bias_atol)
    assert_parameters_match(state.model, goldens.expected(f"{name}_parameters", False, "p3"))
    if golden_cases.FULL.is_dir():
        assert_parameters_match(state.model, goldens.expected(name, True, "p3"))
        assert_parameters_match(state.eval_model, goldens.expected(name, True, "ema3"))


def test_train_step_in_bf16_newton_schulz_stays_near_the_golden():
    case = golden_cases.load("train_step_topk_bf16")
    start = golden_cases.state_dict(goldens.parameters())
    steps = list(trained(case, NewtonSchulzDtype.bf16))
    for step, loss, _ in steps:
        assert loss == pytest.approx(float(case.arrays[f"out{step}/loss"]), abs=BF16_LOSS_ATOL)
    ours = golden_cases.state_dict(steps[-1][2].model)
    for leaf, value in goldens.expected("train_step_topk_bf16", True, "p3").items():
        assert goldens.cosine(ours[leaf] - start[leaf], value - start[leaf]) > BF16_MIN_COSINE, leaf
        assert goldens.norm(ours[leaf]) == pytest.approx(goldens.norm(value), rel=BF16_NORM_RTOL), leaf
