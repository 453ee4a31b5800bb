# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""The weight bank of the routed experts."""

import equinox as eqx
import haliax as hax
import jax
from haliax import Axis
from haliax.nn import MoELinear
from jaxtyping import PRNGKeyArray

from levanter_marin.config import MoeConfig


class ExpertBank(eqx.Module):
    """SwiGLU weights of all routed experts of one layer: `down(silu(gate(x)) * up(x))`.

    Each projection is a `haliax.nn.MoELinear`, so that an optimizer can tell its `Experts`, `In` and `Out` axes;
    `levanter_marin.moe.dispatch.api.dispatch_experts` applies them. The axis that experts read and write is named
    `latent` also where it has the model's own width.
    """

    gate_proj: MoELinear
    """{experts, latent, mlp}"""
    up_proj: MoELinear
    """{experts, latent, mlp}"""
    down_proj: MoELinear
    """{experts, mlp, latent}"""

    @staticmethod
    def init(moe: MoeConfig, Latent: Axis, std: float, *, key: PRNGKeyArray) -> "ExpertBank":
        """Every matrix is `std` times a standard normal truncated at +-3, in fp32."""
        k_gate, k_up, k_down = jax.random.split(key, 3)

        def linear(In: Axis, Out: Axis, key: PRNGKeyArray) -> MoELinear:
            weight = hax.random.truncated_normal(key, (moe.Experts, In, Out), -3, 3) * std
            return MoELinear(weight, None, moe.Experts, In, Out, use_gmm=False)

        return ExpertBank(
            gate_proj=linear(Latent, moe.Mlp, k_gate),
            up_proj=linear(Latent, moe.Mlp, k_up),
            down_proj=linear(moe.Mlp, Latent, k_down),
        )
