# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""The dense oracle: every expert on every token, summed with one-hot weights. Plain, and kept so."""

import haliax as hax
import jax.numpy as jnp
from haliax import NamedArray

from levanter_marin import axes
from levanter_marin.config import DispatchConfig
from levanter_marin.moe.dispatch.plan import DispatchCounts, dropless_counts
from levanter_marin.moe.experts import ExpertBank


def dispatch_reference(
    x: NamedArray,
    bank: ExpertBank,
    selected_experts: NamedArray,
    combine_weights: NamedArray,
    token_valid: NamedArray,
    config: DispatchConfig,
) -> tuple[NamedArray, DispatchCounts]:
    """See `levanter_marin.moe.dispatch.api.dispatch_experts`.

    All in fp32, or fp64 if `x` is; memory tokens * experts * mlp; any mesh.
    """
    del config
    Experts = bank.gate_proj.Experts
    dtype = jnp.promote_types(x.dtype, jnp.float32)
    tokens = hax.where(token_valid, x, 0.0).astype(dtype)
    weights = hax.where(token_valid, combine_weights, 0.0).astype(dtype)
    gate = hax.dot(tokens, bank.gate_proj.weight.astype(dtype), axis=axes.LATENT)
    up = hax.dot(tokens, bank.up_proj.weight.astype(dtype), axis=axes.LATENT)
    down = hax.dot(hax.nn.silu(gate) * up, bank.down_proj.weight.astype(dtype), axis=axes.MLP)
    one_hot = hax.nn.one_hot(selected_experts, Experts, dtype=dtype)
    per_expert = hax.dot(one_hot, weights, axis=axes.TOP_EXPERTS)
    routed = hax.dot(down, per_expert, axis=Experts)
    counts = dropless_counts(token_valid, selected_experts.axis_size(axes.TOP_EXPERTS))
    return routed.rearrange(x.axes).astype(x.dtype), counts
