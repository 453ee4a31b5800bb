# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""The router: raw logits, a bias that moves the selection only, sigmoid combine weights."""

from typing import NamedTuple

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from haliax.jax_utils import named_call
from haliax.partitioning import current_thread_local_mapping, round_axis_for_partitioning
from jaxtyping import PRNGKeyArray

from levanter_marin import axes
from levanter_marin.config import MoeConfig, RouterDtype
from levanter_marin.layers.linear import truncated_normal
from levanter_marin.layers.materialized import materialized
from levanter_marin.moe.router_bias import RouterBias

WEIGHT_SUM_EPS = 1e-9


class Routing(NamedTuple):
    """Where tokens go. Token axes are those of the router's input without `embed`.

    Attributes:
        logits: fp32 {token..., router_experts}, without the bias.
        selected_experts: int32 {token..., top_experts}, in descending order of logit + bias.
        combine_weights: fp32 {token..., top_experts}.
        qb_alpha: fp32 {token...}, the best logit + bias that was not selected; no gradient.
    """

    logits: NamedArray
    selected_experts: NamedArray
    combine_weights: NamedArray
    qb_alpha: NamedArray

    @property
    def margins(self) -> NamedArray:
        """logit - qb_alpha {token..., router_experts}, what quantile balancing ranks; no gradient."""
        return jax.lax.stop_gradient(self.logits - self.qb_alpha).rearrange(self.logits.axes)


def select_experts(logits: NamedArray, bias: NamedArray, config: MoeConfig) -> Routing:
    """Take the `num_experts_per_token` largest of logits + bias and weigh them by their unbiased sigmoid.

    The bias decides which experts are taken and nothing else: it has no gradient and is in no combine weight.
    """
    logits = logits.rearrange((..., config.RouterExperts))
    TopAndNext = config.TopExperts.resize(config.num_experts_per_token + 1)
    biased = jax.lax.stop_gradient(logits + bias)
    top, selected = _top_k(biased, config.RouterExperts, TopAndNext)
    selected = selected[TopAndNext, :-1].astype(jnp.int32)
    # haliax's named take would first copy the logits once per selected expert
    weights = hax.named(jnp.take_along_axis(logits.array, selected.array, axis=-1), selected.axes)
    weights = hax.nn.sigmoid(weights)
    if config.renormalize:
        weights = weights * (config.combine_weight_sum / (hax.sum(weights, axis=axes.TOP_EXPERTS) + WEIGHT_SUM_EPS))
    return Routing(logits, selected, weights, top[axes.TOP_EXPERTS, -1])


def _top_k(x: NamedArray, axis: Axis, TopAxis: Axis) -> tuple[NamedArray, NamedArray]:
    """The largest of each token and their indices. Each device sorts its own tokens; XLA would gather all of them."""

    def of_shard(x: NamedArray) -> tuple[NamedArray, NamedArray]:
        top, indices = hax.top_k(x, axis, TopAxis.size, TopAxis)
        # XLA:CPU recognises a top-k only where values and indices are cut alike, and sorts all experts elsewhere
        return top, materialized(indices)

    unmapped = jax.sharding.get_abstract_mesh().empty or current_thread_local_mapping() is None
    if unmapped or any(round_axis_for_partitioning(token_axis) != token_axis for token_axis in x.axes):
        return of_shard(x)
    return hax.shard_map(of_shard)(x)


class Router(eqx.Module):
    """x @ weight, then `select_experts`.

    Attributes:
        weight: {embed, router_experts}.
        bias: state of quantile balancing, replaced each training step and never trained.
    """

    weight: NamedArray
    bias: RouterBias
    config: MoeConfig = eqx.field(static=True)

    @staticmethod
    def init(Embed: Axis, config: MoeConfig, std: float, *, key: PRNGKeyArray) -> "Router":
        weight = truncated_normal((Embed, config.RouterExperts), std, key=key)
        return Router(weight, RouterBias.init(config.RouterExperts), config)

    @named_call
    def __call__(self, x: NamedArray) -> Routing:
        if self.config.router_dtype is RouterDtype.fp32:
            logits = hax.dot(x, self.weight, axis=axes.EMBED, preferred_element_type=jnp.float32)
        else:
            logits = hax.dot(x.astype(jnp.bfloat16), self.weight.astype(jnp.bfloat16), axis=axes.EMBED)
        return select_experts(logits.astype(jnp.float32), self.bias.value(), self.config)
