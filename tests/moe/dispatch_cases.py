# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""Routings, meshes and one compiled value-and-gradient function for every test of a dispatch backend."""

import contextlib
import functools
import math

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from haliax import Axis
from haliax.partitioning import set_mesh
from jax.sharding import AxisType

from levanter_marin.config import DispatchConfig, MoeConfig
from levanter_marin.moe.dispatch.api import dispatch_experts
from levanter_marin.moe.experts import ExpertBank

MAPPING = {
    "batch": ("replica", "data", "expert"),
    "mlp": ("model",),
    "experts": ("expert",),
}
MESHES = {
    "no_mesh": {},
    "data8": {"replica": 1, "data": 8, "model": 1},
    "data4_model2": {"replica": 1, "data": 4, "model": 2},
    "replica2_data2_model2": {"replica": 2, "data": 2, "model": 2},
    "no_mapped_axis": {"other": 2},
    "data8_expert1": {"data": 8, "expert": 1},
    "expert4": {"expert": 4},
    "expert8": {"data": 1, "expert": 8},
    "data2_expert4": {"data": 2, "expert": 4},
    "data4_expert2": {"data": 4, "expert": 2},
    "data2_expert2_model2": {"data": 2, "expert": 2, "model": 2},
}


@contextlib.contextmanager
def on_mesh(name):
    shape = MESHES[name]
    if not shape:
        yield
        return
    types = (AxisType.Auto,) * len(shape)
    devices = jax.devices()[: math.prod(shape.values())]
    mapping = {axis: tuple(n for n in names if n in shape) for axis, names in MAPPING.items()}
    mapping = {axis: names for axis, names in mapping.items() if names}
    mesh = jax.make_mesh(tuple(shape.values()), tuple(shape), axis_types=types, devices=devices)
    with set_mesh(mesh), hax.axis_mapping(mapping):
        yield


def make_bank(num_experts, latent=16, width=24, top=2):
    moe = MoeConfig(num_experts=num_experts, num_experts_per_token=top, expert_dim=width, latent_dim=latent)
    return ExpertBank.init(moe, Axis("latent", latent), 0.3, key=jax.random.key(1))


def random_routing(num_experts, top=2, batch=8, position=8, seed=0):
    scores = jax.random.uniform(jax.random.key(seed), (batch, position, num_experts))
    return jax.lax.top_k(scores, top)[1]


def routings():
    """Name: (experts, selected [batch, position, top], valid or None)."""
    tokens = jnp.arange(64).reshape(8, 8)
    valid = (tokens % 8) >= 3
    full = tokens >= 0
    return {
        "full": (8, random_routing(8), full),
        "padding": (8, random_routing(8), valid),
        "nothing_valid": (8, random_routing(8), ~full),
        "one_valid": (8, random_routing(8), tokens == 37),
        "all_to_two_experts": (8, jnp.broadcast_to(jnp.array([7, 2]), (8, 8, 2)), full),
        "empty_experts": (8, random_routing(3) * 3, valid),
        "six_experts": (6, random_routing(6), None),
        "62_tokens": (6, random_routing(6, batch=2, position=31), None),
        "62_tokens_of_8_experts": (8, random_routing(8, batch=2, position=31), None),
        "one_token": (8, random_routing(8, batch=1, position=1), None),
        "more_experts_than_rows": (200, random_routing(200), valid),
        "each_expert_one_token": (64, jnp.stack([tokens, (tokens + 17) % 64], axis=-1), None),
        "top_one": (8, random_routing(8, top=1), valid),
    }


ROUTINGS = routings()


def case(name, dtype=jnp.float32):
    num_experts, selected, valid = ROUTINGS[name]
    Batch, Position, Top = hax.make_axes(
        batch=selected.shape[0], position=selected.shape[1], top_experts=selected.shape[2]
    )
    bank = make_bank(num_experts, top=Top.size)
    bank = jax.tree.map(lambda w: w.astype(dtype), bank)
    k_x, k_w, k_d = jax.random.split(jax.random.key(2), 3)
    x = hax.random.normal(k_x, (Batch, Position, bank.gate_proj.In)).astype(dtype)
    weights = hax.random.uniform(k_w, (Batch, Position, Top))
    d_out = hax.random.normal(k_d, x.axes).astype(dtype)
    token_valid = None if valid is None else hax.named(valid, (Batch, Position))
    return x, bank, hax.named(selected.astype(jnp.int32), (Batch, Position, Top)), weights, token_valid, d_out


@functools.cache
def compiled(config, mesh):
    """A function of its own for each mesh: the axis mapping is no part of the key of a jitted one."""

    @eqx.filter_jit
    def run(x, bank, selected, weights, token_valid, d_out):
        def forward(differentiable):
            x, bank, weights = differentiable
            return dispatch_experts(hax.auto_sharded(x), bank, selected, weights, token_valid, config)

        out, vjp, counts = eqx.filter_vjp(forward, (x, bank, weights), has_aux=True)
        return out, *vjp(d_out)[0], counts

    return run


def value_and_gradients(implementation, case, mesh="no_mesh", **config):
    """Output; gradient of x, bank and combine weights; counts. Dropless, if `config` does not say otherwise."""
    config = DispatchConfig(**{"implementation": implementation, "capacity_factor": None, **config})
    with on_mesh(mesh):
        return compiled(config, mesh)(*case)


def assert_close(actual, expected, tolerance):
    actual_leaves, structure = jax.tree.flatten(actual)
    expected_leaves, expected_structure = jax.tree.flatten(expected)
    assert structure == expected_structure
    for a, b in zip(actual_leaves, expected_leaves, strict=True):
        assert a.dtype == b.dtype
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        assert np.max(np.abs(a - b), initial=0) <= tolerance * np.max(np.abs(b), initial=0)


def case_of_multipliers():
    """Experts that multiply by their id, and the weighted sum of ids that has to come out."""
    x, bank, selected, weights, token_valid, d_out = case("full")
    E, D, F = (axis.size for axis in bank.gate_proj.weight.axes)
    # Feature 0 of every token is 1, which makes every gate 1; the first D of the width carry the token.
    x = x.at["latent", 0].set(1.0)
    gate = np.zeros((E, D, F), np.float32)
    gate[:, 0] = 1.0
    up = np.arange(E)[:, None, None] * np.eye(D, F, dtype=np.float32) / jax.nn.silu(1.0)
    down = np.tile(np.eye(F, D, dtype=np.float32), (E, 1, 1))
    bank = eqx.tree_at(
        lambda b: (b.gate_proj.weight.array, b.up_proj.weight.array, b.down_proj.weight.array),
        bank,
        (jnp.asarray(gate), jnp.asarray(up), jnp.asarray(down)),
    )
    expected = x * hax.sum(weights * selected, "top_experts")
    return (x, bank, selected, weights, token_valid, d_out), expected.rearrange(x.axes)
