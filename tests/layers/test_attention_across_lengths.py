# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""A longer context changes nothing for a token whose whole past lies inside the sliding window."""

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis
from levanter.layers.attention import AttentionMask

from levanter_marin import axes
from levanter_marin.axes import LayerKind
from levanter_marin.config import AttentionConfig, ShortConvConfig
from levanter_marin.layers.attention import Attention, AttentionContext

Embed = Axis(axes.EMBED, 64)
CONFIG = AttentionConfig(num_heads=4, head_dim=16, num_kv_heads=2, sliding_window=64)
SHORT, TOKENS = 256, 1024  # of a sequence, and of a step at either length


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_local_layer_at_a_longer_length_gives_the_same_bits_inside_the_window(dtype):
    layer = Attention.init(Embed, CONFIG, ShortConvConfig(), 0.05, key=jax.random.PRNGKey(0))
    layer = jax.tree.map(lambda a: a.astype(dtype), layer)
    tokens = jax.random.normal(jax.random.PRNGKey(1), (TOKENS, Embed.size), dtype)

    @eqx.filter_jit
    def first_row(layer, tokens, length):
        Batch, Pos = Axis(axes.BATCH, TOKENS // length), Axis(axes.POSITION, length)
        x = hax.named(tokens.reshape(Batch.size, length, Embed.size), (Batch, Pos, Embed))
        out = layer(x, LayerKind.LOCAL, AttentionContext.create(Pos, AttentionMask.causal(), None))
        return out.rearrange((Batch, Pos, Embed)).array[0, : CONFIG.sliding_window]

    short, long = (np.asarray(first_row(layer, tokens, length).astype(jnp.float32)) for length in (SHORT, TOKENS))
    np.testing.assert_array_equal(short, long)
    assert np.abs(short).max() > 0.01
