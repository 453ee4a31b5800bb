# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""RMSNorm in fp32 and the low-rank gate that follows it (gated norm)."""

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax.numpy as jnp
from haliax import Axis, NamedArray
from haliax.jax_utils import named_call
from haliax.nn.normalization import LayerNormBase
from jaxtyping import PRNGKeyArray

from levanter_marin import axes
from levanter_marin.layers.linear import truncated_normal_linear
from levanter_marin.layers.materialized import materialized


def rms_norm(x: NamedArray, axis: Axis, eps: float) -> NamedArray:
    """x / sqrt(mean(x^2) + eps) over `axis`, computed in fp32 and cast back; no gain."""
    x32 = x.astype(jnp.float32)
    return (x32 * hax.rsqrt(hax.mean(hax.square(x32), axis=axis) + eps)).astype(x.dtype)


class RmsNorm(LayerNormBase):
    """x / sqrt(mean(x^2) + eps) * weight over `axis`, with the product taken in fp32 before the cast back.

    `haliax.nn.RmsNorm` casts before it multiplies by the gain, which rounds twice in bf16.
    """

    @named_call
    def __call__(self, x: NamedArray) -> NamedArray:
        x32 = x.astype(jnp.float32)
        out = x32 * hax.rsqrt(hax.mean(hax.square(x32), axis=self.axis) + self.eps)
        if self.weight is not None:
            out = out * self.weight.astype(jnp.float32)
        return materialized(out.astype(x.dtype))


class GatedNorm(eqx.Module):
    """x * sigmoid(up(silu(down(x)))): a low-rank gate on every channel of a normalised input (arXiv:2601.22966).

    The gate of each channel lies in (0, 1) and is 1/2 where the two matrices are zero. Stands behind a `RmsNorm`,
    which it does not contain.
    """

    down_proj: hnn.Linear
    up_proj: hnn.Linear

    @staticmethod
    def init(Embed: Axis, rank: int, std: float, *, key: PRNGKeyArray) -> "GatedNorm":
        Rank = Axis(axes.GATE_RANK, rank)
        k_down, k_up = hax.jax_utils.maybe_rng_split(key, 2)
        return GatedNorm(
            truncated_normal_linear(Embed, Rank, std, key=k_down), truncated_normal_linear(Rank, Embed, std, key=k_up)
        )

    @named_call
    def __call__(self, x: NamedArray) -> NamedArray:
        gate = hax.nn.sigmoid(self.up_proj(hax.nn.silu(self.down_proj(x))))
        return materialized(x * gate.astype(x.dtype))
