# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

import functools
import itertools
from fractions import Fraction

import exchange_simulation as simulation
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from levanter_marin.moe.dispatch.plan import (
    ExchangeShape,
    accepted_group_sizes,
    chunk_plan,
    dropless_capacity_factor,
    prefix_rows,
    sort_assignments,
)

# shards, tokens, top, experts, chunks
SHAPES = [(4, 6, 2, 8, 2), (2, 9, 3, 6, 2), (3, 5, 4, 12, 4)]
FACTORS = [None, 0.3, 1.0, 1.15]
SMALL_FACTORS = [None, 0.5, 1.0, 1.25]


def _shape(shards, tokens, top, experts, chunks, factor) -> ExchangeShape:
    return ExchangeShape.create(
        tokens=tokens,
        num_experts_per_token=top,
        num_experts=experts,
        shards=shards,
        expert_chunks=chunks,
        capacity_factor=factor,
    )


def _accepted(by_shard, shape):
    """bool [shards, tokens, top]"""
    accepted_sizes = accepted_group_sizes(by_shard.group_sizes, shape)

    def of_shard(order, accepted):
        rows = prefix_rows(order.group_sizes, accepted, order.assignment_of_row.size)[0]
        return rows[order.row_of_assignment]

    return jax.vmap(of_shard)(by_shard, accepted_sizes), accepted_sizes


def _sorted(selected, valid, experts):
    return jax.vmap(lambda s, v: sort_assignments(s, v, experts))(selected, valid)


@functools.cache
def _planned(sizes, factor):
    """selected [shards, tokens, top], valid -> accepted; of every shard the sorted assignments and plans of chunks."""
    shape = _shape(*sizes, factor)

    @jax.jit
    def run(selected, valid):
        by_shard = _sorted(selected, valid, sizes[3])
        accepted, accepted_sizes = _accepted(by_shard, shape)
        plans = [
            jax.vmap(lambda me, c=c: chunk_plan(by_shard.group_sizes, accepted_sizes, me, c, shape))(
                jnp.arange(sizes[0])
            )
            for c in range(shape.chunks)
        ]
        return accepted, by_shard, plans

    return run


def _fraction(factor):
    return None if factor is None else Fraction(factor).limit_denominator(1000)


def _routing(sizes, seed, skew, share_valid):
    shards, tokens, top, experts, _ = sizes
    rng = np.random.default_rng(seed)
    scores = rng.gumbel(size=(shards, tokens, experts)) + skew * rng.normal(size=experts)
    selected = np.argsort(-scores, axis=2)[:, :, :top].astype(np.int32)
    return selected, rng.random((shards, tokens)) < share_valid


def _check_exchange(sizes, factor, selected, valid, accepted, by_shard, plans):
    """Rows arrive sorted by expert and then by sender, go back to where they came from, and nothing else moves."""
    shards, _, _, experts, _ = sizes
    shape = _shape(*sizes, factor)
    local = experts // shards
    # a row is named by its shard and its place in the shard's sorted rows
    rows_per_shard = selected[0].size
    operands = [shard * rows_per_shard + np.arange(rows_per_shard) for shard in range(shards)]
    returned = [np.full(rows_per_shard, -1) for _ in range(shards)]
    for chunk, plan in enumerate(plans):
        there, back = (
            [tuple(np.asarray(field[s]) for field in transfer) for s in range(shards)]
            for transfer in (plan.there, plan.back)
        )
        empty = [np.full(shape.chunk_rows, -1) for _ in range(shards)]
        buffers = simulation.ragged_all_to_all(operands, empty, there)
        for receiver, buffer in enumerate(buffers):
            used = int(plan.group_sizes[receiver].sum())
            assert np.all(buffer[:used] >= 0) and np.all(buffer[used:] == -1)
            sender, row = np.divmod(buffer[:used], rows_per_shard)
            assignment = np.asarray(by_shard.assignment_of_row)[sender, row]
            assert np.all(accepted.reshape(shards, -1)[sender, assignment])
            expert = selected.reshape(shards, -1)[sender, assignment]
            first = receiver * local + chunk * shape.chunk_experts
            wanted = np.repeat(first + np.arange(shape.chunk_experts), np.asarray(plan.group_sizes[receiver]))
            np.testing.assert_array_equal(expert, wanted)
            assert np.all(np.diff(expert * shards + sender) >= 0)
        returned = simulation.ragged_all_to_all(buffers, returned, back)
    for shard in range(shards):
        home = accepted.reshape(shards, -1)[shard][np.asarray(by_shard.assignment_of_row)[shard]]
        np.testing.assert_array_equal(returned[shard], np.where(home, operands[shard], -1))


@settings(max_examples=500, deadline=None, derandomize=True)
@given(
    sizes=st.sampled_from(SHAPES),
    factor=st.sampled_from(FACTORS),
    seed=st.integers(0, 999),
    skew=st.sampled_from([0.0, 1.0, 4.0]),
    share_valid=st.sampled_from([1.0, 0.7, 0.1, 0.0]),
)
def test_plan_any_routing_equals_simulation(sizes, factor, seed, skew, share_valid):
    selected, valid = _routing(sizes, seed, skew, share_valid)
    accepted, by_shard, plans = jax.device_get(_planned(sizes, factor)(selected, valid))
    expected = simulation.accepted_assignments(selected, valid, sizes[3], sizes[4], _fraction(factor))
    np.testing.assert_array_equal(accepted, expected)
    if seed % 10 == 0:  # the oracle of the exchange is slow
        _check_exchange(sizes, factor, selected, valid, accepted, by_shard, plans)


@pytest.mark.parametrize("top", [1, 2])
@pytest.mark.parametrize("factor", SMALL_FACTORS)
def test_plan_every_routing_of_a_small_space_equals_simulation(top, factor):
    """2 shards with 2 tokens and 2 experts each, in chunks of 1; every choice of experts, every mask."""
    shards, tokens, experts = 2, 2, 4
    shape = _shape(shards, tokens, top, experts, 2, factor)
    run = jax.jit(jax.vmap(lambda s, v: _accepted(_sorted(s, v, experts), shape)[0], in_axes=(0, None)))
    choices = list(itertools.combinations(range(experts), top))
    selected = np.array(list(itertools.product(choices, repeat=shards * tokens)), np.int32)
    selected = selected.reshape(-1, shards, tokens, top)
    for mask in itertools.product([True, False], repeat=shards * tokens):
        valid = np.array(mask).reshape(shards, tokens)
        accepted = run(selected, valid)
        expected = [simulation.accepted_assignments(s, valid, experts, 2, _fraction(factor)) for s in selected]
        np.testing.assert_array_equal(accepted, expected)


@pytest.mark.parametrize("shards, chunks", list(itertools.product([1, 2, 4], [1, 2])))
def test_plan_all_to_one_chunk_drops_nothing_at_the_dropless_factor_and_the_excess_below(shards, chunks):
    tokens, top, experts = 8, 2, 8
    chunk_experts = experts // shards // chunks
    selected = np.broadcast_to(np.arange(top, dtype=np.int32), (shards, tokens, top)) % max(chunk_experts, 1)
    if chunk_experts == 1:  # a token's experts are distinct, so one of the two is elsewhere
        selected = np.broadcast_to(np.array([0, experts - 1], np.int32), (shards, tokens, top))
    valid = np.ones((shards, tokens), bool)
    bound = dropless_capacity_factor(shards, chunks, chunk_experts, top)
    # a chunk's room in rows is factor * tokens * top / chunks
    just_under = bound - 3 * chunks / (tokens * top)

    @jax.jit
    def dropped(selected, valid):
        by_shard = _sorted(selected, valid, experts)
        shapes = [_shape(shards, tokens, top, experts, chunks, factor) for factor in (None, bound, just_under)]
        return [jnp.sum(~_accepted(by_shard, shape)[0]) for shape in shapes]

    chunks_filled = 2 if chunk_experts == 1 else 1
    assert [int(count) for count in dropped(selected, valid)] == [0, 0, 3 * chunks_filled]


@pytest.mark.parametrize(("factor", "valid", "capacity"), [(1.15, 20, 23), (1.1, 10, 11), (1.15, 2**26, 77175194)])
def test_exchange_shape_capacity_is_exact_where_floats_are_not(factor, valid, capacity):
    shape = ExchangeShape.create(
        tokens=2**26, num_experts_per_token=1, num_experts=2, shards=1, expert_chunks=1, capacity_factor=factor
    )
    assert int(shape.chunk_capacity(jnp.int32(valid))) == capacity


def test_exchange_shape_published_sizes():
    """64 devices with 16 rows of 4096 tokens: 1.15 times the assignments of one device, in two chunks."""
    shape = _shape(64, 16 * 4096, 8, 384, 2, 1.15)
    assert (shape.local_experts, shape.chunks, shape.chunk_rows) == (6, 2, 301466)
    assert int(shape.chunk_capacity(jnp.int32(64 * 16 * 4096 * 8))) == 301466


def test_exchange_shape_odd_local_experts_have_one_chunk():
    assert _shape(4, 8, 2, 12, 2, 1.15).chunks == 1


def test_exchange_shape_indivisible_experts_are_refused():
    with pytest.raises(ValueError, match="num_experts=6 .* 4 devices .* axis to 2 or num_experts to 8"):
        _shape(4, 8, 2, 6, 2, 1.15)
