# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""What a config implies before any weight exists: layer schedule, initial norms, training budget and FLOPs.

The weights themselves are counted in `levanter_marin.models.parameter_counts`. Two FLOP counts exist and are not the
same number: `parameter_counts.flops_per_token` is what the model spends (Levanter's MFU uses it), while
`published_flops_per_token` below is the convention under which the published training FLOPs were given.
"""

import math
from dataclasses import dataclass

from levanter_marin import axes
from levanter_marin.models.parameter_counts import (
    ACTIVE_FAMILIES,
    Family,
    Initializer,
    ModelShape,
    WeightRow,
    active_parameters,
    attention_flops_per_token,
    weight_flops_per_token,
    weight_table,
)

TRUNCATION = 3.0
"""Standard deviations at which initial weights are cut off."""

TOKENS_PER_ACTIVE_PARAMETER = 791
"""Training tokens per active parameter on every rung of the published ladder."""

BACKWARD_AND_FORWARD = 3
"""FLOPs of a training step over those of its forward pass; recomputation under remat is not counted."""


@dataclass(frozen=True)
class LayerRow:
    """What one layer attends to. `window` None: every earlier key. `rope_dim` 0: no rotary embedding."""

    index: int
    kind: axes.LayerKind
    window: int | None
    kv_heads: int
    rope_dim: int


def layer_schedule(model: ModelShape) -> tuple[LayerRow, ...]:
    """One row per layer, in order."""
    attention = model.attention
    rows = []
    for index, kind in enumerate(axes.layer_kinds(model.num_layers, model.global_every)):
        is_global = kind is axes.LayerKind.GLOBAL
        window = None if is_global else attention.sliding_window
        rope_dim = attention.rope_dim if attention.rope_on_global or not is_global else 0
        rows.append(LayerRow(index, kind, window, attention.kv_heads_used(kind), rope_dim))
    return tuple(rows)


def truncated_normal_std(bound: float = TRUNCATION) -> float:
    """Standard deviation of a standard normal cut off at +-`bound`: sqrt(1 - 2 b phi(b) / (2 Phi(b) - 1))."""
    density = math.exp(-0.5 * bound**2) / math.sqrt(2 * math.pi)
    return math.sqrt(1 - 2 * bound * density / math.erf(bound / math.sqrt(2)))


def expected_initial_norm(row: WeightRow, init_std: float) -> float:
    """Frobenius norm that all copies of a weight have together before training.

    Exact for gains, gates and convolutions, which start at constants; for random matrices the square root of the
    expected square, which a real initialisation of n elements misses by a standard deviation of about
    0.67 / sqrt(n) of itself.
    """
    match row.initializer:
        case Initializer.TRUNCATED_NORMAL:
            return truncated_normal_std() * init_std * math.sqrt(row.size)
        case Initializer.ONES:
            return math.sqrt(row.size)
        case Initializer.IDENTITY_TAP:
            return math.sqrt(row.size / row.shape[0])
        case Initializer.ZEROS:
            return 0.0


def initial_norms(model: ModelShape, vocab_size: int) -> dict[str, float]:
    """`expected_initial_norm` of every row of the weight table, by name; a layer's weights are stacked over layers."""
    return {row.name: expected_initial_norm(row, model.init_std) for row in weight_table(model, vocab_size)}


def published_steps(model: ModelShape, tokens_per_step: int) -> int:
    """Training steps that come closest to 791 tokens per active parameter."""
    return round(TOKENS_PER_ACTIVE_PARAMETER * active_parameters(model) / tokens_per_step)


def published_flops_per_token(model: ModelShape, context_length: int) -> float:
    """Forward FLOPs per token under the convention of the published training FLOPs; not what the model spends.

    `levanter.utils.flop_utils.lm_flops_per_token` with window and hybrid KV heads, routed experts at latent width plus
    both latent projections, without lm_head. Gates, gated norms and short convolutions are left out, and every
    `global_every`-th layer counts as global, so that a last layer beyond the stride (d2048's) counts as local.
    """
    families = set(ACTIVE_FAMILIES) - {Family.ATTENTION}
    rows = (row for row in weight_table(model, vocab_size=1) if row.family in families)
    num_global = model.num_layers // model.global_every
    return attention_flops_per_token(model, context_length, num_global) + weight_flops_per_token(rows)


def published_training_flops(model: ModelShape, tokens: int, context_length: int) -> float:
    """Forward and backward FLOPs of `tokens` tokens by `published_flops_per_token`; the compute axis of forecasts."""
    return BACKWARD_AND_FORWARD * tokens * published_flops_per_token(model, context_length)
