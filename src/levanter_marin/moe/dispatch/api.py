# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""Tokens to their experts and back: one entry point over a table of backends."""

import functools
import logging
from collections.abc import Callable, Mapping
from types import MappingProxyType

import haliax as hax
import jax.numpy as jnp
from haliax import NamedArray

from levanter_marin import axes
from levanter_marin.config import DispatchConfig, DispatchImplementation
from levanter_marin.moe.dispatch.expert_parallel import why_not_expert_parallel
from levanter_marin.moe.dispatch.local import dispatch_local
from levanter_marin.moe.dispatch.padded_all_to_all import dispatch_padded_all_to_all
from levanter_marin.moe.dispatch.plan import DispatchCounts
from levanter_marin.moe.dispatch.ragged_all_to_all import dispatch_ragged_all_to_all
from levanter_marin.moe.dispatch.reference import dispatch_reference
from levanter_marin.moe.dispatch.sharded import mesh_shape
from levanter_marin.moe.experts import ExpertBank

logger = logging.getLogger(__name__)

_BACKENDS: Mapping[DispatchImplementation, Callable[..., tuple[NamedArray, DispatchCounts]]] = MappingProxyType(
    {
        DispatchImplementation.local: dispatch_local,
        DispatchImplementation.ragged_all_to_all: dispatch_ragged_all_to_all,
        DispatchImplementation.padded_all_to_all: dispatch_padded_all_to_all,
        DispatchImplementation.reference: dispatch_reference,
    }
)


def dispatch_experts(
    x: NamedArray,
    bank: ExpertBank,
    selected_experts: NamedArray,
    combine_weights: NamedArray,
    token_valid: NamedArray | None,
    config: DispatchConfig,
) -> tuple[NamedArray, DispatchCounts]:
    """For each token, `sum_k combine_weights[k] * expert[selected_experts[k]](x)`.

    Value: experts compute in the dtype of `x`, to which their weights are cast, with fp32 accumulation; the weighted
    sum is fp32 and then cast to the dtype of `x`. An assignment is one (token, expert) pair; a dropped one adds
    nothing, and the weights of the others stay as they are. A padding token, `token_valid` false, is never computed,
    whatever it holds: its result is exactly zero.
    Gradient: exact for `x`, the bank and `combine_weights`, reverse mode only; none through `selected_experts`;
    exactly zero for padding.
    Memory: on CPU the arguments are kept for the backward pass, and hidden activations recomputed. Elsewhere a row of
    `x`, one of the output and twice the expert width are kept for every assignment.

    Args:
        x: {token axes, latent}, any number of token axes, sharded as the current axis mapping has them.
        bank: Weights of the experts.
        selected_experts: {token axes, top_experts}, integers in [0, experts), distinct for one token.
        combine_weights: {token axes, top_experts}, fp32.
        token_valid: {token axes}, bool; None means all.
        config: `implementation` picks the backend; a name means that one or an error.

    Returns:
        The routed output with the axes and dtype of `x`, and the counts of assignments over all devices.

    Raises:
        ValueError: the backend can't run under the current mesh and mapping.
    """
    if token_valid is None:
        token_axes = hax.axis.without_axes(x.axes, axes.LATENT)
        # not `hax.ones`, which would already shard it and fail less legibly
        token_valid = hax.named(jnp.ones([axis.size for axis in token_axes], jnp.bool_), token_axes)
    implementation = config.implementation
    if implementation is DispatchImplementation.auto:
        implementation = best_implementation()
    return _BACKENDS[implementation](x, bank, selected_experts, combine_weights, token_valid, config)


def best_implementation() -> DispatchImplementation:
    """What `auto` means under the current mesh and axis mapping; logged once for each answer.

    Ragged all-to-all where experts are spread over more than one device of the mesh axis `expert`, else local.
    """
    reason = why_not_expert_parallel()
    size = mesh_shape().get(axes.EXPERT_MESH_AXIS, 1)
    if reason is None and size == 1:
        reason = f"the mesh axis `{axes.EXPERT_MESH_AXIS}` has size 1"
    if reason is None:
        choice, reason = DispatchImplementation.ragged_all_to_all, f"experts are spread over {size} devices"
    else:
        choice = DispatchImplementation.local
    _announce(choice, reason)
    return choice


@functools.cache
def _announce(choice: DispatchImplementation, reason: str) -> None:
    logger.info("dispatch.implementation auto is %s: %s", choice, reason)
