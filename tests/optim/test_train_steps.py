# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""Three full steps of Levanter's trainer with model, quantile balancing and optimizer against the original's."""

from collections.abc import Iterator
from pathlib import Path

import haliax as hax
import jax
import jmp
import numpy as np
import optimizer_goldens as goldens
import pytest
from levanter.callbacks.watch import WatchConfig
from levanter.checkpoint import CheckpointerConfig
from levanter.optim.model_averaging import EmaModelAveragingConfig
from levanter.tracker import NoopConfig
from levanter.trainer import Trainer, TrainerConfig
from levanter.trainer_state import TrainerState
from levanter.utils.mesh import MeshConfig

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
NUM_STEPS = 3
# Of the eight devices; the batch is split over `data` alone, since top-k balancing depends on how it is split.
ONE_SHARD = {"data": 1, "replica": 8}
TWO_SHARDS = {"data": 2, "replica": 4}


def loss_fn(model, example, *, key=None):
    return model.compute_next_token_loss(example, key=key, logsumexp_weight=Z_LOSS_WEIGHT)


def trainer_config(path: Path, mesh: dict[str, int]) -> TrainerConfig:
    return TrainerConfig(
        id="golden",
        mp=jmp.get_policy("f32"),
        tracker=NoopConfig(),
        num_train_steps=NUM_STEPS,
        train_batch_size=2,
        mesh=MeshConfig(axes=mesh, compute_mapping={"batch": "data"}),
        model_averaging=EmaModelAveragingConfig(beta=EMA_BETA),
        log_dir=path / "logs",
        checkpointer=CheckpointerConfig(base_path=str(path / "checkpoints"), save_interval=None, keep=[]),
        require_accelerator=False,
        log_jaxprs=False,
        log_xla_hlo=False,
        watch=WatchConfig(watch_targets=[]),
    )


def trained(
    case, dtype: NewtonSchulzDtype, path: Path, mesh: dict[str, int]
) -> Iterator[tuple[int, float, TrainerState]]:
    """Loss and state after every step of Levanter's trainer, from zero router biases."""
    config = golden_cases.model_config(case.config)
    bias = np.zeros((config.num_layers, config.moe.num_experts), np.float32)
    model = golden_cases.build_model(case, config, router_bias=bias)
    trainer = trainer_config(path, mesh)
    trainer._validate_and_set_defaults()
    optimizer = goldens.config(newton_schulz_dtype=dtype).build(100)
    with Trainer(trainer, optimizer, loss_fn) as running:
        state = running.initial_state(jax.random.PRNGKey(0), model_init=lambda: model)
        batches = [golden_cases.example(case.arrays, f"in{step}/") for step in range(1, NUM_STEPS + 1)]
        loader = [hax.shard(batch, running.compute_axis_mapping) for batch in batches]
        for step, info in enumerate(running.training_steps(state, loader), start=1):
            yield step, info.loss, info.state


def router_bias(state: TrainerState) -> np.ndarray:
    return np.asarray(state.model.transformer.layers.stacked.mlp.router.bias.value().array)


def assert_parameters_match(model, expected):
    ours = golden_cases.state_dict(model)
    assert expected
    for leaf, value in expected.items():
        np.testing.assert_allclose(ours[leaf], value, rtol=0, atol=PARAMETER_ATOL, err_msg=leaf)


@pytest.mark.parametrize(("name", "mesh"), [("train_step_topk_fp32", ONE_SHARD), ("train_step_hist_fp32", TWO_SHARDS)])
def test_train_step_golden_batches_give_losses_router_biases_and_parameters(name, mesh, tmp_path):
    case = golden_cases.load(name)
    balancing = golden_cases.model_config(case.config).moe.quantile_balancing
    bias_atol = BETA_ATOL
    for step, loss, state in trained(case, NewtonSchulzDtype.fp32, tmp_path, mesh):
        assert abs(loss - case.arrays[f"out{step}/loss"]) < LOSS_ATOL
        if balancing.estimator is QuantileEstimator.histogram:
            # one bin for an expert's beta, one for the mean that centres it
            bias_atol = BETA_ATOL + 2 * np.ptp(case.arrays[f"out{step}/qb_beta"]) / balancing.num_bins
        following = f"out{step + 1}/router_bias" if step < NUM_STEPS else "out3/router_bias_next"
        np.testing.assert_allclose(router_bias(state), case.arrays[following], rtol=0, atol=bias_atol)
    assert_parameters_match(state.model, goldens.expected(f"{name}_parameters", False, "p3"))
    if golden_cases.FULL.is_dir():
        assert_parameters_match(state.model, goldens.expected(name, True, "p3"))
        assert_parameters_match(state.eval_model, goldens.expected(name, True, "ema3"))


@pytest.mark.slow
def test_train_step_in_bf16_newton_schulz_stays_near_the_golden(tmp_path):
    case = golden_cases.load("train_step_topk_bf16")
    start = golden_cases.state_dict(goldens.parameters())
    steps = list(trained(case, NewtonSchulzDtype.bf16, tmp_path, ONE_SHARD))
    for step, loss, _ in steps:
        assert loss == pytest.approx(float(case.arrays[f"out{step}/loss"]), abs=BF16_LOSS_ATOL)
    ours = golden_cases.state_dict(steps[-1][2].model)
    for leaf, value in goldens.expected("train_step_topk_bf16", True, "p3").items():
        assert goldens.cosine(ours[leaf] - start[leaf], value - start[leaf]) > BF16_MIN_COSINE, leaf
        assert goldens.norm(ours[leaf]) == pytest.approx(goldens.norm(value), rel=BF16_NORM_RTOL), leaf
