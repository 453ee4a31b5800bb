# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""The SwiGLU MLP that every token passes through: a shared expert."""

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
from haliax import Axis, NamedArray
from haliax.jax_utils import maybe_rng_split, named_call
from jaxtyping import PRNGKeyArray

from levanter_marin.layers.linear import truncated_normal_linear


class SwiGlu(eqx.Module):
    """down(silu(gate(x)) * up(x)), without biases."""

    gate_proj: hnn.Linear
    up_proj: hnn.Linear
    down_proj: hnn.Linear

    @staticmethod
    def init(Embed: Axis, Mlp: Axis, std: float, *, key: PRNGKeyArray) -> "SwiGlu":
        k_gate, k_up, k_down = maybe_rng_split(key, 3)
        return SwiGlu(
            truncated_normal_linear(Embed, Mlp, std, key=k_gate),
            truncated_normal_linear(Embed, Mlp, std, key=k_up),
            truncated_normal_linear(Mlp, Embed, std, key=k_down),
        )

    @named_call
    def __call__(self, x: NamedArray) -> NamedArray:
        return self.down_proj(hax.nn.silu(self.gate_proj(x)) * self.up_proj(x))
