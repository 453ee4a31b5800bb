# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""Evaluation under several capacities, each under its own label."""

import dataclasses
from collections.abc import Sequence
from typing import cast

import haliax as hax
import jax
import jax.numpy as jnp
from haliax import NamedArray
from levanter.models.lm_model import LmExample

from levanter_marin.models.marin_moe import MarinMoeLMHeadModel
from levanter_marin.moe.latent_moe import LatentMoe


def with_eval_capacity(model: MarinMoeLMHeadModel, capacity_factor: float | None) -> MarinMoeLMHeadModel:
    """The same weights, evaluated with another `moe.dispatch.eval_capacity_factor`; None is dropless."""

    def of_layer(node):
        if not isinstance(node, LatentMoe):
            return node
        dispatch = dataclasses.replace(node.config.dispatch, eval_capacity_factor=capacity_factor)
        return dataclasses.replace(node, config=dataclasses.replace(node.config, dispatch=dispatch))

    return jax.tree.map(of_layer, model, is_leaf=lambda node: isinstance(node, LatentMoe))


def loss_by_capacity(
    model: MarinMoeLMHeadModel, example: LmExample, capacity_factors: Sequence[float | None] = (None,)
) -> dict[str, NamedArray]:
    """Mean next-token loss and drop fraction, fp32 scalars, for each capacity factor.

    Returns:
        `loss/LABEL` and `drop_fraction/LABEL`, the latter over the valid assignments of all layers. LABEL is
        `dropless` for None, else `capacity_FACTOR`. Without an expert-parallel mesh nothing is ever dropped.
    """
    results = {}
    for factor in capacity_factors:
        label = "dropless" if factor is None else f"capacity_{factor}"
        limited = with_eval_capacity(model, factor)
        results[f"loss/{label}"] = cast(NamedArray, limited.compute_next_token_loss(example))
        counts = limited.activations_and_statistics(example.tokens, example.attn_mask)[1].dispatch
        dropped = hax.sum(counts.sender_dropped + counts.receiver_dropped).astype(jnp.float32)
        kept = hax.sum(counts.kept).astype(jnp.float32)
        results[f"drop_fraction/{label}"] = dropped / hax.maximum(dropped + kept, 1.0)
    return results
