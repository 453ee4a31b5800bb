# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""Every weight of the model as one table of plain integers, and the counts that follow from it.

Nothing here touches JAX arrays or allocates in proportion to the model: a row says how many tensors of one shape
there are, how they start, and how many of their elements one token multiplies with.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from levanter.utils.flop_utils import lm_flops_per_token

from levanter_marin import axes
from levanter_marin.config import AttentionConfig, ConvSite, MoeConfig, ShortConvConfig


class ModelShape(Protocol):
    """The fields that counting reads; `MarinMoeConfig` has them."""

    @property
    def hidden_dim(self) -> int: ...

    @property
    def num_layers(self) -> int: ...

    @property
    def global_every(self) -> int: ...

    @property
    def gated_norm_rank(self) -> int | None: ...

    @property
    def init_std(self) -> float: ...

    @property
    def attention(self) -> AttentionConfig: ...

    @property
    def short_conv(self) -> ShortConvConfig: ...

    @property
    def moe(self) -> MoeConfig: ...


class Family(StrEnum):
    """What a weight belongs to; the rows of a parameter table."""

    EMBEDDING = "embedding"
    LM_HEAD = "lm_head"
    NORMS = "norms"
    GATED_NORMS = "gated_norms"
    ATTENTION = "attention"
    ATTN_GATE = "attn_gate"
    SHORT_CONV = "short_conv"
    ROUTER = "router"
    LATENT = "latent"
    EXPERTS = "experts"
    SHARED_EXPERTS = "shared_experts"
    ROUTER_BIAS = "router_bias"


ACTIVE_FAMILIES = (Family.ATTENTION, Family.ROUTER, Family.LATENT, Family.EXPERTS, Family.SHARED_EXPERTS)
"""Families that the published count of active parameters takes in."""


class Initializer(StrEnum):
    """How a weight starts: `init_std` x a normal truncated at 3, ones, zeros, or one for lag 0 and zero else."""

    TRUNCATED_NORMAL = "truncated_normal"
    ONES = "ones"
    ZEROS = "zeros"
    IDENTITY_TAP = "identity_tap"


@dataclass(frozen=True)
class WeightRow:
    """All weights of one kind: `copies` tensors of `shape` each (`copies` is the number of layers for a layer's).

    Attributes:
        used_per_token: elements, over all copies, that take part in the computation of one token. It differs from
            `size` for routed experts (the selected ones), for the embedding (one row), and for the key and value
            projections of layers that use fewer heads than are stored.
    """

    name: str
    family: Family
    copies: int
    shape: tuple[int, ...]
    initializer: Initializer
    used_per_token: int

    @property
    def size(self) -> int:
        return self.copies * math.prod(self.shape)


def weight_table(model: ModelShape, vocab_size: int) -> tuple[WeightRow, ...]:
    """One row per kind of weight, in the order of the forward pass; components that are off have no row.

    The router bias is listed under its own family: it is state that quantile balancing replaces every step, not a
    trainable parameter.
    """
    attention, conv, moe = model.attention, model.short_conv, model.moe
    d, layers, rank = model.hidden_dim, model.num_layers, model.gated_norm_rank
    inner, stored = attention.num_heads * attention.head_dim, attention.num_kv_heads * attention.head_dim
    kv_used = sum(_kv_heads_by_layer(model)) * attention.head_dim
    latent = d if moe.latent_dim is None else moe.latent_dim
    rows: list[WeightRow] = []

    def add(name, family, copies, *shape, initializer=Initializer.TRUNCATED_NORMAL, used=None):
        used = copies * math.prod(shape) if used is None else used
        rows.append(WeightRow(name, family, copies, shape, initializer, used))

    def norm(name, copies, width=d):
        add(name, Family.NORMS, copies, width, initializer=Initializer.ONES)

    def gated_norm(site, copies):
        norm(f"{site}_norm", copies)
        if rank is not None:
            add(f"{site}_gated_norm.w_down", Family.GATED_NORMS, copies, d, rank)
            add(f"{site}_gated_norm.w_up", Family.GATED_NORMS, copies, rank, d)

    def short_conv(site, channels, used=None):
        if site in conv.sites:
            taps = (conv.kernel_size, channels)
            initializer = Initializer.IDENTITY_TAP
            used = None if used is None else conv.kernel_size * used
            add(f"sconv_{site}", Family.SHORT_CONV, layers, *taps, initializer=initializer, used=used)

    def glu(name, family, copies, reads, width, experts=(), used=None):
        for part, shape in (("w_gate", (reads, width)), ("w_up", (reads, width)), ("w_down", (width, reads))):
            add(f"{name}.{part}", family, copies, *experts, *shape, used=used)

    add("embedding", Family.EMBEDDING, 1, vocab_size, d, used=d)
    gated_norm("embed", 1)
    gated_norm("attn", layers)
    add("w_q", Family.ATTENTION, layers, d, inner)
    add("w_k", Family.ATTENTION, layers, d, stored, used=d * kv_used)
    add("w_v", Family.ATTENTION, layers, d, stored, used=d * kv_used)
    short_conv(ConvSite.k, stored, used=kv_used)
    short_conv(ConvSite.v, stored, used=kv_used)
    if attention.head_gate:
        add("attn_gate", Family.ATTN_GATE, layers, d, attention.num_heads, initializer=Initializer.ZEROS)
    add("w_o", Family.ATTENTION, layers, inner, d)
    short_conv(ConvSite.attn, d)
    gated_norm("mlp", layers)
    add("router", Family.ROUTER, layers, d, moe.num_experts)
    add("router_bias", Family.ROUTER_BIAS, layers, moe.num_experts, initializer=Initializer.ZEROS)
    if moe.latent_dim is not None:
        add("latent.w_down", Family.LATENT, layers, d, latent)
        if moe.latent_norm:
            norm("latent_norm", layers, latent)
    selected = layers * moe.num_experts_per_token * latent * moe.expert_dim
    glu("experts", Family.EXPERTS, layers, latent, moe.expert_dim, experts=(moe.num_experts,), used=selected)
    if moe.latent_dim is not None:
        add("latent.w_up", Family.LATENT, layers, latent, d)
    for j in range(moe.num_shared_experts):
        glu(f"shared_experts.{j}", Family.SHARED_EXPERTS, layers, d, moe.shared_expert_dim)
    short_conv(ConvSite.mlp, d)
    gated_norm("final", 1)
    add("lm_head", Family.LM_HEAD, 1, d, vocab_size)
    return tuple(rows)


def parameters_by_family(model: ModelShape, vocab_size: int) -> dict[Family, int]:
    """Elements stored per family, the router bias included; a family that is switched off counts 0."""
    counts = dict.fromkeys(Family, 0)
    for row in weight_table(model, vocab_size):
        counts[row.family] += row.size
    return counts


def total_parameters(model: ModelShape, vocab_size: int) -> int:
    """All elements stored, one router bias per expert and layer included, as the published totals count them.

    The published 535,477,106,688 is met only with the 48 x 384 biases; `trainable_parameters` leaves them out.
    """
    return sum(parameters_by_family(model, vocab_size).values())


def trainable_parameters(model: ModelShape, vocab_size: int) -> int:
    """Elements that an optimizer updates: `total_parameters` without the router bias."""
    counts = parameters_by_family(model, vocab_size)
    return sum(counts.values()) - counts[Family.ROUTER_BIAS]


def active_by_family(model: ModelShape) -> dict[Family, int]:
    """Published count of active parameters per family; families that it leaves out count 0.

    Per layer: w_q, w_o, w_k and w_v (all stored heads, used or not), router, latent down and up, the selected
    experts, the shared experts. Embedding, lm_head, norms, gates and short convolutions are left out.
    """
    counts = dict.fromkeys(Family, 0)
    for row in weight_table(model, vocab_size=1):
        if row.family in ACTIVE_FAMILIES:
            counts[row.family] += row.used_per_token if row.family is Family.EXPERTS else row.size
    return counts


def active_parameters(model: ModelShape) -> int:
    """Sum of `active_by_family`, the number that sets the token budget of a published rung."""
    return sum(active_by_family(model).values())


def flops_per_token(model: ModelShape, vocab_size: int, context_length: int) -> float:
    """Forward FLOPs that one token of a full row needs; Levanter's MFU multiplies it by 3.

    Two FLOPs for each multiplication with an element of a matrix or a convolution tap (selected experts at the width
    they work in, both latent projections, shared experts, router, gates, gated norms, lm_head), and for attention
    the estimate of `levanter.utils.flop_utils.lm_flops_per_token`: scores, mask and weighted values over the whole
    span, not its causal half. Every global layer counts, the last included. Stored KV heads that a layer does not use
    are not needed, whether or not an implementation projects them. Elementwise work of norms, RoPE, XSA and
    activations is left out, as upstream leaves it out.

    Args:
        model: the model's config.
        vocab_size: rows of the lm_head.
        context_length: tokens in a row; sets the span of global layers.

    Returns:
        FLOPs of one forward pass divided by its tokens.
    """
    num_global = sum(kind is axes.LayerKind.GLOBAL for kind in _kinds(model))
    left_out = (Family.EMBEDDING, Family.NORMS, Family.ROUTER_BIAS, Family.ATTENTION)
    rows = (row for row in weight_table(model, vocab_size) if row.family not in left_out)
    return attention_flops_per_token(model, context_length, num_global) + weight_flops_per_token(rows)


def weight_flops_per_token(rows: Iterable[WeightRow]) -> int:
    """Two FLOPs, a multiplication and an addition, for each element that a token uses."""
    return 2 * sum(row.used_per_token for row in rows)


def attention_flops_per_token(model: ModelShape, context_length: int, num_global_layers: int) -> float:
    """Forward FLOPs per token of the four projections and of attention itself, by Levanter's own estimate.

    Args:
        model: the model's config.
        context_length: tokens in a row.
        num_global_layers: how many layers attend to the whole row; a published figure counts fewer than there are.
    """
    attention = model.attention
    inner = attention.num_heads * attention.head_dim
    num_local_layers = model.num_layers - num_global_layers
    flops = 0.0
    for kind, count, span in (
        (axes.LayerKind.LOCAL, num_local_layers, min(attention.sliding_window, context_length)),
        (axes.LayerKind.GLOBAL, num_global_layers, context_length),
    ):
        kv_heads = attention.kv_heads_used(kind)
        flops += lm_flops_per_token(
            hidden_dim=inner,
            intermediate_dim=0,
            num_layers=count,
            num_kv_heads=kv_heads,
            num_heads=attention.num_heads,
            seq_len=span,
            vocab_size=0,
            glu=True,
        )
        # Levanter takes heads x head_dim for the width that projections read and write.
        flops += 2 * count * (model.hidden_dim - inner) * 2 * (inner + kv_heads * attention.head_dim)
    return flops


def _kinds(model: ModelShape) -> tuple[axes.LayerKind, ...]:
    return axes.layer_kinds(model.num_layers, model.global_every)


def _kv_heads_by_layer(model: ModelShape) -> list[int]:
    return [model.attention.kv_heads_used(kind) for kind in _kinds(model)]
