# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""Goldens of the original's optimizer: three gradients, and updates and parameters after one and three steps.

`tests/data/goldens` holds the leaves outside the layers and those of the first layer, which is enough where a norm is
taken over no more than one layer. The full set is read from `shared/goldens` beside the project when it is there.
"""

import dataclasses
from functools import cache
from typing import Any

import equinox as eqx
import numpy as np
import pytest
from haliax.quantization import partition_for_grad_overwrite
from levanter.trainer_state import trainables_only

import golden_cases
from levanter_marin.optim.config import HyperballConfig
from levanter_marin.optim.hyperball import NormScope
from levanter_marin.optim.newton_schulz import Coefficients, NewtonSchulzDtype

MODEL = "hero_tiny"


def config(
    *,
    newton_schulz_dtype: NewtonSchulzDtype = NewtonSchulzDtype.fp32,
    norm_scope: NormScope = NormScope.all_experts,
    **overrides,
) -> HyperballConfig:
    """The optimizer of the golden cases."""
    fields: dict[str, Any] = {
        "learning_rate": 0.02,
        "adam_lr": 0.0006,
        "warmup": 0,
        "lr_schedule": "constant",
        "momentum": 0.95,
        "nesterov": True,
        "num_steps": 5,
        "beta1": 0.9,
        "beta2": 0.95,
        "epsilon": 1e-8,
        "coefficients": Coefficients.quintic,
    }
    return HyperballConfig(**(fields | overrides), newton_schulz_dtype=newton_schulz_dtype, norm_scope=norm_scope)


def is_embedded(name: str) -> bool:
    return (golden_cases.EMBEDDED / f"{name}.npz").exists()


@cache
def arrays(name: str, full: bool) -> dict[str, np.ndarray]:
    """Skips the test where the full set is asked for and absent."""
    if not full:
        return dict(np.load(golden_cases.EMBEDDED / f"{name}.npz"))
    if not golden_cases.FULL.is_dir():
        pytest.skip(f"only part of {name} is in the test data; the rest was looked for at {golden_cases.FULL}")
    return dict(np.load(golden_cases.FULL / f"{name}.npz"))


@cache
def parameters():
    """The model's weights, as the trainer gives them to an optimizer."""
    return _as_model(golden_cases.load(MODEL).group("w/"))


@cache
def gradient(step: int, full: bool):
    """The gradient of a step; leaves that the embedded set lacks have that of the first step."""
    values = golden_cases.load(MODEL).group("g/")
    if step > 1:
        prefix = f"g{step}/"
        given = arrays("optimizer_inputs", full)
        values = values | {k[len(prefix) :]: v for k, v in given.items() if k.startswith(prefix)}
    return _as_model(values)


def _as_model(values: dict[str, np.ndarray]):
    case = golden_cases.load(MODEL)
    filled = dataclasses.replace(case, arrays=case.arrays | {f"w/{name}": value for name, value in values.items()})
    model_config = golden_cases.model_config(case.config)
    bias = np.zeros((model_config.num_layers, model_config.moe.num_experts), np.float32)
    return optimized(golden_cases.build_model(filled, model_config, router_bias=bias))


def optimized(model):
    """What of a model the trainer hands to an optimizer."""
    return partition_for_grad_overwrite(trainables_only(model, True))[1]


def three_steps(optimizer, full: bool) -> dict[str, dict[str, np.ndarray]]:
    """State dicts `u1`, `p1`, `u3`, `p3`."""
    params, out = parameters(), {}
    state, update = optimizer.init(params), eqx.filter_jit(optimizer.update)
    for step in (1, 2, 3):
        updates, state = update(gradient(step, full), state, params)
        params = eqx.apply_updates(params, updates)
        out |= {f"u{step}": golden_cases.state_dict(updates), f"p{step}": golden_cases.state_dict(params)}
    return out


def expected(name: str, full: bool, key: str) -> dict[str, np.ndarray]:
    """Updates or parameters by state-dict name; the original holds the router bias too, which is no parameter here."""
    given = arrays(name, full)
    return {
        k.removeprefix(f"{key}/"): v
        for k, v in given.items()
        if k.startswith(f"{key}/") and not k.endswith("router.bias")
    }


def norm(x: np.ndarray) -> float:
    return float(np.linalg.norm(x.astype(np.float64)))


def cosine(x: np.ndarray, y: np.ndarray) -> float:
    return float(np.sum(x.astype(np.float64) * y) / (norm(x) * norm(y)))
