# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""What the CPU kernel computes grows with tokens x k and not with the number of experts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from levanter_marin.moe import blocked_swiglu

TOKENS, TOP_K = 8192, 8
MAX_COMPUTED_OVER_ROWS = 1.2  # what rounding groups up to chunks may add


@pytest.mark.parametrize("num_experts", (8, 64, 384))
def test_blocked_swiglu_computes_each_row_once_and_few_others_whatever_the_number_of_experts(num_experts):
    rows = TOKENS * TOP_K
    rng = np.random.default_rng(num_experts)
    group_sizes = rng.multinomial(rows, np.full(num_experts, 1 / num_experts))
    row = jnp.arange(rows)

    def count(carry, batch, _):
        times_used, computed = carry
        return times_used.at[batch.row].add(1, mode="drop"), computed + batch.row.size

    @jax.jit
    def fold(row, group_sizes):
        start = (jnp.zeros(rows, jnp.int32), jnp.int32(0))
        return blocked_swiglu._over_batches(count, start, rows, row, jnp.ones(rows), group_sizes)

    times_used, computed = fold(row, jnp.asarray(group_sizes))
    assert np.all(np.asarray(times_used) == 1)
    assert rows <= int(computed) <= MAX_COMPUTED_OVER_ROWS * rows
