# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

import contextlib
import functools

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
from levanter_marin.moe.dispatch.local import sum_of_experts
from levanter_marin.moe.dispatch.plan import sort_assignments
from levanter_marin.moe.experts import ExpertBank
from levanter_marin.moe.grouped_matmul import GroupedMatmulImplementation

REFERENCE = DispatchImplementation.reference
# `auto` is one of the other names.
NAMED = [i for i in DispatchImplementation if i is not DispatchImplementation.auto]
OTHERS = [i for i in NAMED if i is not REFERENCE]

# Relative to the largest element of the compared array.
TOLERANCE = {jnp.float32: 1e-5, jnp.bfloat16: 3e-2}
FINITE_STEP = 1e-4
FINITE_DIFFERENCE_TOLERANCE = 1e-6

MAPPING = {
    "batch": ("replica", "data"),
    "mlp": ("model",),
    "experts": ("expert",),
}
EXPERT_PARALLEL = "data4_expert2"
MESHES = {
    "no_mesh": {},
    "data8": {"replica": 1, "data": 8, "model": 1},
    "data4_model2": {"replica": 1, "data": 4, "model": 2},
    "replica2_data2_model2": {"replica": 2, "data": 2, "model": 2},
    "expert_axis_of_1": {"data": 8, "expert": 1},
    "no_mapped_axis": {"other": 2},
    EXPERT_PARALLEL: {"data": 4, "expert": 2},
}
LOCAL_MESHES = [m for m in MESHES if m not in ("no_mesh", EXPERT_PARALLEL)]


@contextlib.contextmanager
def _on_mesh(name):
    shape = MESHES[name]
    if not shape:
        yield
        return
    types = (AxisType.Auto,) * len(shape)
    mapping = {axis: tuple(n for n in names if n in shape) for axis, names in MAPPING.items()}
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
    valid = (tokens % 8) >= 3
    full = tokens >= 0
    return {
        "full": (8, _random_routing(8), full),
        "padding": (8, _random_routing(8), valid),
        "nothing_valid": (8, _random_routing(8), ~full),
        "one_valid": (8, _random_routing(8), tokens == 37),
        "all_to_two_experts": (8, jnp.broadcast_to(jnp.array([7, 2]), (8, 8, 2)), full),
        "empty_experts": (8, _random_routing(3) * 3, valid),
        "six_experts": (6, _random_routing(6), None),
        "62_tokens": (6, _random_routing(6, batch=2, position=31), None),
        "one_token": (8, _random_routing(8, batch=1, position=1), None),
        "more_experts_than_rows": (200, _random_routing(200), valid),
        "each_expert_one_token": (64, jnp.stack([tokens, (tokens + 17) % 64], axis=-1), None),
        "top_one": (8, _random_routing(8, top=1), valid),
    }


ROUTINGS = _routings()


def _case(name, dtype=jnp.float32):
    num_experts, selected, valid = ROUTINGS[name]
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


@functools.cache
def _compiled(implementation, mesh):
    """A function of its own for each mesh: the axis mapping is no part of the key of a jitted one."""
    config = DispatchConfig(implementation=implementation)

    @eqx.filter_jit
    def run(x, bank, selected, weights, token_valid, d_out):
        def forward(differentiable):
            x, bank, weights = differentiable
            return dispatch_experts(hax.auto_sharded(x), bank, selected, weights, token_valid, config)

        out, vjp, counts = eqx.filter_vjp(forward, (x, bank, weights), has_aux=True)
        return out, *vjp(d_out)[0], counts

    return run


def _value_and_gradients(implementation, case, mesh="no_mesh"):
    """Output; gradient of x, bank and combine weights; counts."""
    with _on_mesh(mesh):
        return _compiled(implementation, mesh)(*case)


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
    actual = _value_and_gradients(implementation, case)
    _assert_close(actual, _value_and_gradients(REFERENCE, case), TOLERANCE[jnp.float32])


@pytest.mark.parametrize("routing", ["padding", "empty_experts"])
@pytest.mark.parametrize("implementation", OTHERS)
def test_dispatch_bfloat16_equals_reference(implementation, routing):
    case = _case(routing, jnp.bfloat16)
    actual = _value_and_gradients(implementation, case)
    assert actual[0].dtype == jnp.bfloat16
    _assert_close(actual, _value_and_gradients(REFERENCE, case), TOLERANCE[jnp.bfloat16])


@pytest.mark.parametrize("routing", ["padding", "all_to_two_experts", "nothing_valid"])
@pytest.mark.parametrize("mesh", LOCAL_MESHES)
def test_dispatch_local_on_mesh_equals_one_device(mesh, routing):
    case = _case(routing)
    actual = _value_and_gradients(DispatchImplementation.local, case, mesh)
    _assert_close(actual, _value_and_gradients(REFERENCE, case), TOLERANCE[jnp.float32])


@pytest.mark.parametrize("mesh", ["data4_model2", EXPERT_PARALLEL])
def test_dispatch_reference_on_mesh_equals_one_device(mesh):
    case = _case("padding")
    _assert_close(
        _value_and_gradients(REFERENCE, case, mesh), _value_and_gradients(REFERENCE, case), TOLERANCE[jnp.float32]
    )


def _case_of_multipliers():
    """Experts that multiply by their id, and the weighted sum of ids that has to come out."""
    x, bank, selected, weights, token_valid, d_out = _case("full")
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


@pytest.mark.parametrize(
    "implementation, mesh",
    [(DispatchImplementation.reference, "no_mesh"), (DispatchImplementation.local, "no_mesh")]
    + [(DispatchImplementation.local, mesh) for mesh in LOCAL_MESHES],
)
def test_dispatch_experts_multiplying_by_their_id_give_weighted_sum_of_ids(implementation, mesh):
    case, expected = _case_of_multipliers()
    weights = np.asarray(case[3].array)
    assert np.unique(weights).size == weights.size
    out = _value_and_gradients(implementation, case, mesh)[0]
    _assert_close(out, expected, TOLERANCE[jnp.float32])


@pytest.mark.parametrize("mesh", ["no_mesh", "data4_model2"])
@pytest.mark.parametrize("implementation", NAMED)
def test_dispatch_nan_in_padding_stays_out(implementation, mesh):
    x, bank, selected, weights, token_valid, d_out = clean_case = _case("padding")
    dirty_x, dirty_weights = (hax.where(token_valid, a, jnp.nan).rearrange(a.axes) for a in (x, weights))
    clean = _value_and_gradients(implementation, clean_case, mesh)
    dirty = _value_and_gradients(implementation, (dirty_x, bank, selected, dirty_weights, token_valid, d_out), mesh)
    for a, b in zip(jax.tree.leaves(clean), jax.tree.leaves(dirty), strict=True):
        assert np.array_equal(a, b)
    out, d_x, _, d_weights, _ = dirty
    padding = ~np.asarray(token_valid.array)
    for array in (out, d_x, d_weights):
        assert not np.any(array.array[padding]) and np.any(array.array[~padding])


@pytest.mark.parametrize("mesh", ["no_mesh", "data4_model2"])
@pytest.mark.parametrize("implementation", NAMED)
def test_dispatch_counts_of_padded_tokens_add_up_exactly(implementation, mesh):
    counts = _value_and_gradients(implementation, _case("padding"), mesh)[-1]
    assert [int(c.array) for c in counts] == [40 * 2, 0, 0, 24 * 2]


@pytest.mark.parametrize("implementation", NAMED)
def test_dispatch_with_padding_equals_the_tokens_alone(implementation):
    x, bank, selected, weights, token_valid, d_out = padded = _case("padding")
    some = {"position": slice(3, 8)}
    assert np.array_equal(np.asarray(token_valid.array), np.broadcast_to(np.arange(8) >= 3, (8, 8)))
    alone = (x[some], bank, selected[some], weights[some], token_valid[some], d_out[some])
    out, d_x, d_bank, d_weights, _ = _value_and_gradients(implementation, padded)
    *expected, counts = _value_and_gradients(implementation, alone)
    _assert_close((out[some], d_x[some], d_bank, d_weights[some]), tuple(expected), TOLERANCE[jnp.float32])
    assert int(counts.padding.array) == 0


@pytest.mark.parametrize("implementation", NAMED)
def test_dispatch_without_batch_axis_equals_row_of_batch(implementation):
    x, bank, selected, weights, _, _ = _case("full")
    config = DispatchConfig(implementation=implementation)

    @eqx.filter_jit
    def run(x, selected, weights):
        return dispatch_experts(x, bank, selected, weights, None, config)[0]

    row = {"batch": 3}
    single = run(x[row].rearrange(("latent", "position")), selected[row], weights[row])
    assert [a.name for a in single.axes] == ["latent", "position"]
    _assert_close(single.rearrange(("position", "latent")), run(x, selected, weights)[row], TOLERANCE[jnp.float32])


@pytest.mark.parametrize("implementation", GroupedMatmulImplementation)
def test_sum_of_experts_every_implementation_equals_reference(implementation):
    x, bank, selected, weights, token_valid, d_out = case = _case("padding")
    expected, d_x, d_bank, d_weights, _ = _value_and_gradients(REFERENCE, case)
    T = token_valid.array.size

    @jax.jit
    def run(x, weights, w_gate, w_up, w_down, d_out):
        plan = sort_assignments(selected.array.reshape(T, -1), token_valid.array.reshape(T), w_gate.shape[0])

        def forward(x, weights, w_gate, w_up, w_down):
            weights = jnp.where(token_valid.array.reshape(T, 1), weights, 0)
            return sum_of_experts(x, w_gate, w_up, w_down, weights, plan, implementation)

        out, vjp = jax.vjp(forward, x, weights, w_gate, w_up, w_down)
        return out, *vjp(d_out)

    matrices = [p.weight.array for p in (bank.gate_proj, bank.up_proj, bank.down_proj)]
    actual = run(x.array.reshape(T, -1), weights.array.reshape(T, -1), *matrices, d_out.array.reshape(T, -1))
    d_matrices = [p.weight.array for p in (d_bank.gate_proj, d_bank.up_proj, d_bank.down_proj)]
    per_token = [a.array.reshape(T, -1) for a in (expected, d_x, d_weights)]
    _assert_close(actual, (*per_token, *d_matrices), TOLERANCE[jnp.float32])


@pytest.mark.parametrize("implementation", NAMED)
def test_dispatch_gradient_equals_finite_difference_in_float64(implementation):
    with jax.enable_x64(True):
        x, bank, selected, weights, token_valid, d_out = _case("padding")
        x, bank, weights, d_out = jax.tree.map(lambda a: jnp.asarray(a, jnp.float64), (x, bank, weights, d_out))
        config = DispatchConfig(implementation=implementation)

        @eqx.filter_jit
        def loss(arguments):
            x, bank, weights = arguments
            return hax.dot(
                dispatch_experts(x, bank, selected, weights, token_valid, config)[0], d_out, axis=None
            ).scalar()

        arguments = (x, bank, weights)
        gradients = eqx.filter_jit(eqx.filter_grad(loss))(arguments)
        for i in range(len(arguments)):
            direction = jax.tree.map(lambda g: jnp.sign(g) / jnp.size(g) ** 0.5, gradients[i])
            slope = sum(jnp.sum(jnp.abs(g)) / jnp.size(g) ** 0.5 for g in jax.tree.leaves(gradients[i]))

            def at(step, i=i, direction=direction):
                moved = jax.tree.map(lambda a, d: a + step * d, arguments[i], direction)
                return loss((*arguments[:i], moved, *arguments[i + 1 :]))

            difference = (at(FINITE_STEP) - at(-FINITE_STEP)) / (2 * FINITE_STEP)
            assert abs(slope - difference) < FINITE_DIFFERENCE_TOLERANCE * slope


def test_dispatch_local_sharded_experts_are_refused():
    with pytest.raises(ValueError, match="all 8 experts.*over 2"):
        _value_and_gradients(DispatchImplementation.local, _case("full"), EXPERT_PARALLEL)


def test_dispatch_local_uneven_batch_is_refused():
    with pytest.raises(ValueError, match="batch of size 2 .* 8 devices"):
        _value_and_gradients(DispatchImplementation.local, _case("62_tokens"), "data8")


def test_dispatch_local_mlp_on_a_mesh_axis_of_the_tokens_equals_reference():
    case = _case("padding")
    with _on_mesh("data8"), hax.axis_mapping({"batch": "data", "mlp": "data"}):
        out, _ = eqx.filter_jit(dispatch_experts)(*case[:5], DispatchConfig())
    _assert_close(out, _value_and_gradients(REFERENCE, case)[0], TOLERANCE[jnp.float32])
