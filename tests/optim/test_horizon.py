# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""A schedule pinned to the steps of a run is not stretched over the steps of a stage."""

import draccus
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from levanter.optim.config import OptimizerConfig

import levanter_marin.registration  # noqa: F401

ADAM = {"type": "adam", "learning_rate": 0.1, "warmup": 0.25, "lr_schedule": "linear", "weight_decay": 0.1}
TOTAL = 16


def updates_of(optimizer, steps):
    params = {"w": jnp.linspace(-1.0, 1.0, 4)}
    state = optimizer.init(params)
    found = []
    for step in range(steps):
        update, state = optimizer.update({"w": jnp.sin(params["w"] + step)}, state, params)
        params = jax.tree.map(jnp.add, params, update)
        found.append(np.asarray(update["w"]))
    return np.stack(found), state


def test_horizon_in_a_short_stage_updates_as_the_whole_run_does():
    whole = draccus.decode(OptimizerConfig, ADAM).build(TOTAL)
    pinned = draccus.decode(OptimizerConfig, {"type": "horizon", "total_steps": TOTAL, "optimizer": ADAM}).build(6)
    expected, expected_state = updates_of(whole, 6)
    found, state = updates_of(pinned, 6)
    np.testing.assert_array_equal(found, expected)
    assert jax.tree.structure(state) == jax.tree.structure(expected_state)
    restarted, _ = updates_of(draccus.decode(OptimizerConfig, ADAM).build(6), 6)
    assert np.abs(restarted - expected).max() > 1e-3  # the schedule that the wrapper prevents


REFUSED = {
    "steps": ({"optimizer": ADAM}, "total_steps=0 must be positive"),
    "no_inner": ({"total_steps": 4}, "needs the `type` of another optimizer"),
    "itself": ({"total_steps": 4, "optimizer": {"type": "horizon"}}, "needs the `type` of another optimizer"),
    "outer_field": (
        {"total_steps": 4, "optimizer": ADAM, "learning_rate": 1.0},
        "set optimizer.optimizer.learning_rate",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_horizon_without_effect_is_refused(case):
    fields, expected = REFUSED[case]
    with pytest.raises(Exception) as refusal:
        draccus.decode(OptimizerConfig, {"type": "horizon", **fields})
    causes, error = [], refusal.value
    while error is not None:
        causes.append(str(error))
        error = error.__cause__
    assert any(expected in cause for cause in causes)


def test_horizon_shorter_than_the_trainer_is_refused():
    config = draccus.decode(OptimizerConfig, {"type": "horizon", "total_steps": TOTAL, "optimizer": ADAM})
    with pytest.raises(ValueError, match="total_steps=16 is below the 17 steps"):
        config.build(TOTAL + 1)
