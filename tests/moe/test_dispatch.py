# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

import dispatch_cases as cases
import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from levanter_marin.config import DispatchConfig, DispatchImplementation
from levanter_marin.moe.dispatch.api import dispatch_experts
from levanter_marin.moe.dispatch.local import sum_of_experts
from levanter_marin.moe.dispatch.plan import sort_assignments
from levanter_marin.moe.grouped_matmul import GroupedMatmulImplementation

REFERENCE = DispatchImplementation.reference
LOCAL = DispatchImplementation.local
# Every backend, on a mesh it runs on; `auto` is one of the other names. The bank there has 2 experts a device.
OTHERS = [
    (LOCAL, "no_mesh"),
    (DispatchImplementation.ragged_all_to_all, "data2_expert4"),
    (DispatchImplementation.padded_all_to_all, "data2_expert4"),
]
NAMED = [(REFERENCE, "no_mesh"), *OTHERS]
LOCAL_MESHES = ["data8", "data4_model2", "replica2_data2_model2", "data8_expert1", "no_mapped_axis"]
# Of 8 x 8 tokens and 8 experts, so that they divide over every mesh.
EVEN_ROUTINGS = ["full", "padding", "nothing_valid", "one_valid", "all_to_two_experts", "empty_experts"]

# Relative to the largest element of the compared array.
TOLERANCE = {jnp.float32: 1e-5, jnp.bfloat16: 3e-2}
FINITE_STEP = 1e-4
FINITE_DIFFERENCE_TOLERANCE = 1e-6


@pytest.mark.parametrize(
    ("backend", "routing"),
    [(OTHERS[0], routing) for routing in cases.ROUTINGS]
    + [(backend, routing) for backend in OTHERS[1:] for routing in EVEN_ROUTINGS],
    ids=lambda value: value if isinstance(value, str) else value[0],
)
def test_dispatch_every_routing_equals_reference(backend, routing):
    case = cases.case(routing)
    implementation, mesh = backend
    actual = cases.value_and_gradients(implementation, case, mesh)
    cases.assert_close(actual, cases.value_and_gradients(REFERENCE, case), TOLERANCE[jnp.float32])


@pytest.mark.parametrize("routing", ["padding", "empty_experts"])
@pytest.mark.parametrize(("implementation", "mesh"), OTHERS)
def test_dispatch_bfloat16_equals_reference(implementation, mesh, routing):
    case = cases.case(routing, jnp.bfloat16)
    actual = cases.value_and_gradients(implementation, case, mesh)
    assert actual[0].dtype == jnp.bfloat16
    cases.assert_close(actual, cases.value_and_gradients(REFERENCE, case), TOLERANCE[jnp.bfloat16])


@pytest.mark.parametrize("routing", ["padding", "all_to_two_experts", "nothing_valid"])
@pytest.mark.parametrize("mesh", LOCAL_MESHES)
def test_dispatch_local_on_mesh_equals_one_device(mesh, routing):
    case = cases.case(routing)
    actual = cases.value_and_gradients(DispatchImplementation.local, case, mesh)
    cases.assert_close(actual, cases.value_and_gradients(REFERENCE, case), TOLERANCE[jnp.float32])


@pytest.mark.parametrize("mesh", ["data4_model2", "data4_expert2"])
def test_dispatch_reference_on_mesh_equals_one_device(mesh):
    case = cases.case("padding")
    cases.assert_close(
        cases.value_and_gradients(REFERENCE, case, mesh),
        cases.value_and_gradients(REFERENCE, case),
        TOLERANCE[jnp.float32],
    )


@pytest.mark.parametrize(("implementation", "mesh"), NAMED + [(LOCAL, mesh) for mesh in LOCAL_MESHES])
def test_dispatch_experts_multiplying_by_their_id_give_weighted_sum_of_ids(implementation, mesh):
    case, expected = cases.case_of_multipliers()
    weights = np.asarray(case[3].array)
    assert np.unique(weights).size == weights.size
    out = cases.value_and_gradients(implementation, case, mesh)[0]
    cases.assert_close(out, expected, TOLERANCE[jnp.float32])


@pytest.mark.parametrize(("implementation", "mesh"), [*NAMED, (REFERENCE, "data4_model2"), (LOCAL, "data4_model2")])
def test_dispatch_nan_in_padding_stays_out(implementation, mesh):
    x, bank, selected, weights, token_valid, d_out = clean_case = cases.case("padding")
    dirty_x, dirty_weights = (hax.where(token_valid, a, jnp.nan).rearrange(a.axes) for a in (x, weights))
    clean = cases.value_and_gradients(implementation, clean_case, mesh)
    dirty = cases.value_and_gradients(
        implementation, (dirty_x, bank, selected, dirty_weights, token_valid, d_out), mesh
    )
    for a, b in zip(jax.tree.leaves(clean), jax.tree.leaves(dirty), strict=True):
        assert np.array_equal(a, b)
    out, d_x, _, d_weights, _ = dirty
    padding = ~np.asarray(token_valid.array)
    for array in (out, d_x, d_weights):
        assert not np.any(array.array[padding]) and np.any(array.array[~padding])


@pytest.mark.parametrize(("implementation", "mesh"), [*NAMED, (REFERENCE, "data4_model2"), (LOCAL, "data4_model2")])
def test_dispatch_counts_of_padded_tokens_add_up_exactly(implementation, mesh):
    counts = cases.value_and_gradients(implementation, cases.case("padding"), mesh)[-1]
    assert [int(c.array) for c in counts] == [40 * 2, 0, 0, 24 * 2]


@pytest.mark.parametrize(("implementation", "mesh"), NAMED[:2])
def test_dispatch_with_padding_equals_the_tokens_alone(implementation, mesh):
    x, bank, selected, weights, token_valid, d_out = padded = cases.case("padding")
    some = {"position": slice(3, 8)}
    assert np.array_equal(np.asarray(token_valid.array), np.broadcast_to(np.arange(8) >= 3, (8, 8)))
    alone = (x[some], bank, selected[some], weights[some], token_valid[some], d_out[some])
    out, d_x, d_bank, d_weights, _ = cases.value_and_gradients(implementation, padded, mesh)
    *expected, counts = cases.value_and_gradients(implementation, alone, mesh)
    cases.assert_close((out[some], d_x[some], d_bank, d_weights[some]), tuple(expected), TOLERANCE[jnp.float32])
    assert int(counts.padding.array) == 0


@pytest.mark.parametrize("implementation", [REFERENCE, LOCAL])
def test_dispatch_without_batch_axis_equals_row_of_batch(implementation):
    x, bank, selected, weights, _, _ = cases.case("full")
    config = DispatchConfig(implementation=implementation)

    @eqx.filter_jit
    def run(x, selected, weights):
        return dispatch_experts(x, bank, selected, weights, None, config)[0]

    row = {"batch": 3}
    single = run(x[row].rearrange(("latent", "position")), selected[row], weights[row])
    assert [a.name for a in single.axes] == ["latent", "position"]
    cases.assert_close(
        single.rearrange(("position", "latent")), run(x, selected, weights)[row], TOLERANCE[jnp.float32]
    )


@pytest.mark.parametrize("implementation", GroupedMatmulImplementation)
def test_sum_of_experts_every_implementation_equals_reference(implementation):
    x, bank, selected, weights, token_valid, d_out = case = cases.case("padding")
    expected, d_x, d_bank, d_weights, _ = cases.value_and_gradients(REFERENCE, case)
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
    cases.assert_close(actual, (*per_token, *d_matrices), TOLERANCE[jnp.float32])


@pytest.mark.parametrize(("implementation", "mesh"), NAMED[:2])
def test_dispatch_gradient_equals_finite_difference_in_float64(implementation, mesh):
    with jax.enable_x64(True), cases.on_mesh(mesh):
        x, bank, selected, weights, token_valid, d_out = cases.case("padding")
        x, bank, weights, d_out = jax.tree.map(lambda a: jnp.asarray(a, jnp.float64), (x, bank, weights, d_out))
        config = DispatchConfig(implementation=implementation, capacity_factor=None)

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
        cases.value_and_gradients(DispatchImplementation.local, cases.case("full"), "data4_expert2")


def test_dispatch_local_uneven_batch_is_refused():
    with pytest.raises(ValueError, match="batch of size 2 .* 8 devices"):
        cases.value_and_gradients(DispatchImplementation.local, cases.case("62_tokens"), "data8")


def test_dispatch_local_mlp_on_a_mesh_axis_of_the_tokens_equals_reference():
    case = cases.case("padding")
    with cases.on_mesh("data8"), hax.axis_mapping({"batch": "data", "mlp": "data"}):
        out, _ = eqx.filter_jit(dispatch_experts)(*case[:5], DispatchConfig())
    cases.assert_close(out, cases.value_and_gradients(REFERENCE, case)[0], TOLERANCE[jnp.float32])
