# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

import contextlib

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis
from haliax.partitioning import set_mesh
from jax.sharding import AxisType

from levanter_marin.config import DispatchConfig, DispatchImplementation, MoeConfig
from levanter_marin.moe.dispatch.api import dispatch_experts
from levanter_marin.moe.experts import ExpertBank

REFERENCE = DispatchImplementation.reference
# `auto` is one of the other names.
NAMED = [i for i in DispatchImplementation if i is not DispatchImplementation.auto]
OTHERS = [i for i in NAMED if i is not REFERENCE]

# Relative to the largest element of the compared array.
TOLERANCE = {jnp.float32: 1e-5, jnp.bfloat16: 3e-2}

MAPPING = {
    "batch": ("replica", "data"),
    "mlp": ("model",),
    "experts": ("expert",),
}
MESHES = {
    "no_mesh": None,
    "data8": {"replica": 1, "data": 8, "model": 1},
    "data4_model2": {"replica": 1, "data": 4, "model": 2},
    "replica2_data2_model2": {"replica": 2, "data": 2, "model": 2},
    "expert_axis_of_1": {"data": 8, "expert": 1},
    "no_mapped_axis": {"other": 2},
}


@contextlib.contextmanager
def _on_mesh(shape, mapping=MAPPING):
    if shape is None:
        yield
        return
    types = (AxisType.Auto,) * len(shape)
    mapping = {axis: tuple(n for n in names if n in shape) for axis, names in mapping.items()}
    mapping = {axis: names for axis, names in mapping.items() if names}
    with set_mesh(jax.make_mesh(tuple(shape.values()), tuple(shape), axis_types=types)), hax.axis_mapping(mapping):
        yield


def _bank(num_experts, latent=16, width=24, top=2):
    moe = MoeConfig(num_experts=num_experts, num_experts_per_token=top, expert_dim=width, latent_dim=latent)
    return ExpertBank.init(moe, Axis("latent", latent), 0.3, key=jax.random.key(1))


def _random_routing(num_experts, top=2, batch=8, position=8, seed=0):
    scores = jax.random.uniform(jax.random.key(seed), (batch, position, num_experts))
    return jax.lax.top_k(scores, top)[1]


def _routings():
    """Name: (experts, selected [batch, position, top], valid or None)."""
    tokens = jnp.arange(64).reshape(8, 8)
    valid = (tokens % 8) < 5
    return {
        "random": (8, _random_routing(8), None),
        "padding": (8, _random_routing(8), valid),
        "nothing_valid": (8, _random_routing(8), jnp.zeros((8, 8), bool)),
        "one_valid": (8, _random_routing(8), tokens == 37),
        "all_to_two_experts": (8, jnp.broadcast_to(jnp.array([7, 2]), (8, 8, 2)), None),
        "empty_experts": (8, _random_routing(3) * 3, valid),
        "six_experts": (6, _random_routing(6), None),
        "62_tokens": (6, _random_routing(6, batch=2, position=31), None),
        "one_token": (8, _random_routing(8, batch=1, position=1), None),
        "more_experts_than_rows": (200, _random_routing(200), valid),
        "each_expert_one_token": (64, tokens[..., None] + jnp.array([0, 17]), None),
        "top_one": (8, _random_routing(8, top=1), valid),
    }


ROUTINGS = _routings()


def _case(name, dtype=jnp.float32):
    num_experts, selected, valid = ROUTINGS[name]
    selected = selected % num_experts
    Batch, Position, Top = hax.make_axes(
        batch=selected.shape[0], position=selected.shape[1], top_experts=selected.shape[2]
    )
    bank = _bank(num_experts, top=Top.size)
    bank = jax.tree.map(lambda w: w.astype(dtype), bank)
    k_x, k_w, k_d = jax.random.split(jax.random.key(2), 3)
    x = hax.random.normal(k_x, (Batch, Position, bank.gate_proj.In)).astype(dtype)
    weights = hax.random.uniform(k_w, (Batch, Position, Top))
    d_out = hax.random.normal(k_d, x.axes).astype(dtype)
    token_valid = None if valid is None else hax.named(valid, (Batch, Position))
    return x, bank, hax.named(selected.astype(jnp.int32), (Batch, Position, Top)), weights, token_valid, d_out


def _value_and_gradients(implementation, x, bank, selected, weights, token_valid, d_out):
    config = DispatchConfig(implementation=implementation)

    @eqx.filter_jit
    def run(x, bank, selected, weights, token_valid, d_out):
        def forward(differentiable):
            x, bank, weights = differentiable
            x = hax.auto_sharded(x)
            return dispatch_experts(x, bank, selected, weights, token_valid, config)

        out, vjp, counts = eqx.filter_vjp(forward, (x, bank, weights), has_aux=True)
        return out, *vjp(d_out)[0], counts

    return run(x, bank, selected, weights, token_valid, d_out)


def _assert_close(actual, expected, tolerance):
    actual_leaves, structure = jax.tree.flatten(actual)
    expected_leaves, expected_structure = jax.tree.flatten(expected)
    assert structure == expected_structure
    for a, b in zip(actual_leaves, expected_leaves, strict=True):
        assert a.dtype == b.dtype
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        assert np.max(np.abs(a - b), initial=0) <= tolerance * np.max(np.abs(b), initial=0)


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("implementation", OTHERS)
def test_dispatch_every_routing_equals_reference(implementation, routing):
    case = _case(routing)
    _assert_close(
        _value_and_gradients(implementation, *case), _value_and_gradients(REFERENCE, *case), TOLERANCE[jnp.float32]
    )


@pytest.mark.parametrize("routing", ["padding", "empty_experts"])
def test_dispatch_bfloat16_equals_reference(routing):
    case = _case(routing, jnp.bfloat16)
    actual = _value_and_gradients(DispatchImplementation.local, *case)
    assert actual[0].dtype == jnp.bfloat16
    _assert_close(actual, _value_and_gradients(REFERENCE, *case), TOLERANCE[jnp.bfloat16])


@pytest.mark.parametrize("routing", ["padding", "all_to_two_experts", "nothing_valid"])
@pytest.mark.parametrize("mesh", [m for m in MESHES if m != "no_mesh"])
def test_dispatch_on_mesh_equals_one_device(mesh, routing):
    case = _case(routing)
    expected = _value_and_gradients(REFERENCE, *case)
    with _on_mesh(MESHES[mesh]):
        actual = _value_and_gradients(DispatchImplementation.local, *case)
    _assert_close(actual, expected, TOLERANCE[jnp.float32])


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("implementation", NAMED)
def test_dispatch_experts_multiplying_by_their_id_give_weighted_sum_of_ids(implementation, mesh):
    x, bank, selected, weights, token_valid, d_out = _case("random")
    E, D, F = (axis.size for axis in bank.gate_proj.weight.axes)
    # Feature 0 of every token is 1, which makes every gate 1; the first D of the width carry the token.
    x = x.at["latent", 0].set(1.0)
    gate = np.zeros((E, D, F), np.float32)
    gate[:, 0] = 1.0
    up = np.arange(E)[:, None, None] * np.eye(D, F, dtype=np.float32) / jax.nn.silu(1.0)
    down = np.tile(np.eye(F, D, dtype=np.float32), (E, 1, 1))
    arrays = {"gate_proj": gate, "up_proj": up, "down_proj": down}
    for name, array in arrays.items():
        weight = getattr(bank, name).weight
        bank = eqx.tree_at(lambda b: getattr(b, name).weight, bank, hax.named(jnp.asarray(array), weight.axes))
    expected = x * hax.sum(weights * selected, "top_experts")
    with _on_mesh(MESHES[mesh]):
        out = _value_and_gradients(implementation, x, bank, selected, weights, token_valid, d_out)[0]
    assert np.unique(np.asarray(weights.array)).size == weights.array.size
    _assert_close(out, expected.rearrange(out.axes), TOLERANCE[jnp.float32])


@pytest.mark.parametrize("mesh", ["no_mesh", "data4_model2"])
@pytest.mark.parametrize("implementation", NAMED)
def test_dispatch_nan_in_padding_stays_out(implementation, mesh):
    x, bank, selected, weights, token_valid, d_out = _case("padding")
    with _on_mesh(MESHES[mesh]):
        clean = _value_and_gradients(implementation, x, bank, selected, weights, token_valid, d_out)
        dirty = _value_and_gradients(
            implementation,
            hax.where(token_valid, x, jnp.nan),
            bank,
            selected,
            hax.where(token_valid, weights, jnp.nan),
            token_valid,
            d_out,
        )
    for a, b in zip(jax.tree.leaves(clean), jax.tree.leaves(dirty), strict=True):
        assert np.array_equal(a, b)
    out, d_x, _, d_weights, _ = dirty
    padding = ~np.asarray(token_valid.array)
    for array in (out, d_x, d_weights):
        assert not np.any(array.array[padding]) and np.any(array.array[~padding])


@pytest.mark.parametrize("mesh", ["no_mesh", "data4_model2"])
@pytest.mark.parametrize("implementation", NAMED)
def test_dispatch_counts_of_padded_tokens_add_up_exactly(implementation, mesh):
    case = _case("padding")
    with _on_mesh(MESHES[mesh]):
        counts = _value_and_gradients(implementation, *case)[-1]
    assert [int(c.array) for c in counts] == [40 * 2, 0, 0, 24 * 2]


@pytest.mark.parametrize("implementation", NAMED)
def test_dispatch_tokens_without_batch_axis_equal_tokens_with_it(implementation):
    x, bank, selected, weights, _, _ = _case("random")
    config = DispatchConfig(implementation=implementation)
    whole, _ = dispatch_experts(x, bank, selected, weights, None, config)
    row = {"batch": 3}
    single, _ = dispatch_experts(
        x[row].rearrange(("latent", "position")), bank, selected[row], weights[row], None, config
    )
    assert [a.name for a in single.axes] == ["latent", "position"]
    _assert_close(single.rearrange(("position", "latent")), whole[row], TOLERANCE[jnp.float32])


def test_dispatch_local_gradient_of_combine_weights_equals_finite_difference():
    x, bank, selected, weights, token_valid, d_out = _case("padding", jnp.float32)
    with jax.enable_x64(True):
        # The sum of a token is fp32 by contract, but linear in the weights: a wide step loses nothing.
        direction = hax.random.normal(jax.random.key(7), weights.axes, dtype=jnp.float32)
        config = DispatchConfig(implementation=DispatchImplementation.local)

        def loss(weights):
            out = dispatch_experts(x, bank, selected, weights, token_valid, config)[0]
            return hax.sum(out.astype(jnp.float64) * d_out.astype(jnp.float64)).scalar()

        gradient = jax.grad(loss)(weights)
        difference = (loss(weights + direction) - loss(weights - direction)) / 2
        slope = hax.sum(gradient.astype(jnp.float64) * direction.astype(jnp.float64)).scalar()
        scale = hax.sum(hax.abs(gradient * direction).astype(jnp.float64)).scalar()
    assert abs(slope - difference) < 1e-6 * scale


def test_dispatch_local_sharded_experts_are_refused():
    case = _case("random")
    with _on_mesh({"data": 4, "expert": 2}), pytest.raises(ValueError, match="all 8 experts.*over 2"):
        _value_and_gradients(DispatchImplementation.local, *case)


def test_dispatch_local_uneven_batch_is_refused():
    case = _case("62_tokens")
    with _on_mesh({"data": 8}), pytest.raises(ValueError, match="batch of size 2 .* 8 devices"):
        _value_and_gradients(DispatchImplementation.local, *case)


def test_dispatch_local_tokens_and_mlp_on_one_mesh_axis_equal_reference():
    case = _case("padding")
    expected = _value_and_gradients(REFERENCE, *case)
    with _on_mesh({"data": 8}, {"batch": ("data",), "mlp": ("data",)}):
        actual = _value_and_gradients(DispatchImplementation.local, *case)
    _assert_close(actual, expected, TOLERANCE[jnp.float32])
