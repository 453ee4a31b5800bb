# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""Grouped-query attention of one layer: local or global, with every switch of `AttentionConfig`."""

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from haliax.jax_utils import maybe_rng_split, named_call
from jaxtyping import PRNGKeyArray
from levanter.layers.attention import AttentionBackend, AttentionMask, dot_product_attention

from levanter_marin import axes
from levanter_marin.axes import LayerKind
from levanter_marin.config import AttentionConfig, AttentionImplementation, ConvSite, ShortConvConfig
from levanter_marin.layers.blockwise_attention import blockwise_attention
from levanter_marin.layers.exclusive_attention import exclude_own_value
from levanter_marin.layers.linear import truncated_normal_linear
from levanter_marin.layers.norms import rms_norm
from levanter_marin.layers.page_cache import LayerPageCache, PagedTokens
from levanter_marin.layers.paged_attention import paged_attention
from levanter_marin.layers.rotary import partial_rotary
from levanter_marin.layers.short_conv import ShortConv, decode_at_site


class AttentionContext(eqx.Module):
    """What every layer of a forward pass shares: who may attend to whom, and where tokens stand.

    Attributes:
        segment_ids: integers {batch..., position}, equal within a document, negative for padding; None is one
            document a row.
        pos_ids: absolute position in the row, {position} or {batch..., position}; only rotary embeddings read it.
        window: keys that the caller's mask allows in every layer; None is all of them.
        training: whether routed experts have the capacity of training, or that of evaluation.
    """

    segment_ids: NamedArray | None
    pos_ids: NamedArray
    window: int | None = eqx.field(static=True, default=None)
    training: bool = eqx.field(static=True, default=False)

    @staticmethod
    def create(Pos: Axis, mask: AttentionMask | NamedArray | None, pos_ids: NamedArray | None) -> "AttentionContext":
        """Read a Levanter mask.

        Raises:
            ValueError: the mask is not causal, or has an offset, an explicit array or a bidirectional window.
        """
        if pos_ids is None:
            pos_ids = hax.arange(Pos)
        if mask is None:
            return AttentionContext(None, pos_ids)
        if (
            not isinstance(mask, AttentionMask)
            or not mask.is_causal
            or mask.explicit_mask is not None
            or mask.causal_offset is not None
            or mask.bidirectional_window is not None
        ):
            raise ValueError(
                "marin_moe attends causally within documents; give AttentionMask.causal(), with segment_ids if packed"
            )
        segment_ids = None if mask.segment_ids is None else mask.segment_ids[0]
        return AttentionContext(segment_ids, pos_ids, mask.sliding_window)

    @property
    def token_valid(self) -> NamedArray | None:
        """bool {batch..., position}, False at padding; None where there cannot be any."""
        return None if self.segment_ids is None else self.segment_ids >= 0


class Attention(eqx.Module):
    """softmax(q k / sqrt(head_size)) v, then XSA, then one gate a head, then the output projection.

    Every layer stores `num_kv_heads` key and value heads; a layer uses the first ones its kind asks for, and each
    group of `num_heads / used` consecutive query heads shares one.
    """

    q_proj: hnn.Linear
    k_proj: hnn.Linear
    v_proj: hnn.Linear
    o_proj: hnn.Linear
    attn_gate: hnn.Linear | None
    sconv_k: ShortConv | None
    sconv_v: ShortConv | None
    config: AttentionConfig = eqx.field(static=True)

    @staticmethod
    def init(
        Embed: Axis, config: AttentionConfig, short_conv: ShortConvConfig, std: float, *, key: PRNGKeyArray
    ) -> "Attention":
        Heads, KvHeads, HeadSize = config.Heads, config.KvHeads, config.HeadSize
        k_q, k_k, k_v, k_o = maybe_rng_split(key, 4)

        def conv(site: ConvSite) -> ShortConv | None:
            return ShortConv.init(short_conv.Tap, (KvHeads, HeadSize)) if site in short_conv.sites else None

        gate = hnn.Linear(hax.zeros((Heads, Embed)), None, Embed, Heads) if config.head_gate else None
        return Attention(
            q_proj=truncated_normal_linear(Embed, (Heads, HeadSize), std, key=k_q),
            k_proj=truncated_normal_linear(Embed, (KvHeads, HeadSize), std, key=k_k),
            v_proj=truncated_normal_linear(Embed, (KvHeads, HeadSize), std, key=k_v),
            o_proj=truncated_normal_linear((Heads, HeadSize), Embed, std, key=k_o),
            attn_gate=gate,
            sconv_k=conv(ConvSite.k),
            sconv_v=conv(ConvSite.v),
            config=config,
        )

    @named_call
    def __call__(self, x: NamedArray, kind: LayerKind, context: AttentionContext) -> NamedArray:
        """x: {batch..., position, embed}, normalised; the result has its axes and dtype."""
        k, v = self.k_proj(x), self.v_proj(x)
        if self.sconv_k is not None:
            k = self.sconv_k(k, context.segment_ids)
        if self.sconv_v is not None:
            v = self.sconv_v(v, context.segment_ids)
        q, k, v = self._heads(self.q_proj(x), k, v, kind, context.pos_ids)
        window = self.window(kind)
        if context.window is not None:
            window = context.window if window is None else min(window, context.window)
        return self._output(x, self._attend(q, k, v, context.segment_ids, window), v)

    @named_call
    def decode(
        self, x: NamedArray, kind: LayerKind, cache: LayerPageCache, tokens: PagedTokens
    ) -> tuple[NamedArray, LayerPageCache]:
        """x: {position, embed}, the next tokens of several sequences; as `__call__` over each whole sequence."""
        k, cache = decode_at_site(ConvSite.k, self.sconv_k, self.k_proj(x), cache, tokens)
        v, cache = decode_at_site(ConvSite.v, self.sconv_v, self.v_proj(x), cache, tokens)
        q, k, v = self._heads(self.q_proj(x), k, v, kind, tokens.pos_ids)
        cache = cache.with_keys_and_values(tokens, k, v)
        return self._output(x, paged_attention(q, cache.kv.kv_pages, tokens, self.window(kind)), v), cache

    def window(self, kind: LayerKind) -> int | None:
        """Keys that a layer of this kind sees; None is all of them."""
        return self.config.sliding_window if kind is LayerKind.LOCAL else None

    def _heads(
        self, q: NamedArray, k: NamedArray, v: NamedArray, kind: LayerKind, pos_ids: NamedArray
    ) -> tuple[NamedArray, NamedArray, NamedArray]:
        """What meets in attention, from projections: queries by group, and the key and value heads in use."""
        config = self.config
        HeadSize = config.HeadSize
        used = config.kv_heads_used(kind)
        q = q.unflatten_axis(config.Heads, self._grouped(used))
        if used != config.num_kv_heads:
            k, v = k[axes.KV_HEAD, :used], v[axes.KV_HEAD, :used]
        if config.qk_norm:
            q, k = rms_norm(q, HeadSize, config.qk_norm_eps), rms_norm(k, HeadSize, config.qk_norm_eps)
        if kind is LayerKind.LOCAL or config.rope_on_global:
            q, k = (
                partial_rotary(a, pos_ids, HeadSize, config.rope_dim, config.rope_theta, config.rope_pairing)
                for a in (q, k)
            )
        return q * config.qk_mult, k, v

    def _output(self, x: NamedArray, attended: NamedArray, v: NamedArray) -> NamedArray:
        """XSA, gate and projection of what attention returned for the layer's input x."""
        config = self.config
        if config.exclusive:
            attended = exclude_own_value(attended, v, config.HeadSize)
        out = attended.flatten_axes(self._grouped(v.axis_size(axes.KV_HEAD)), config.Heads)
        if self.attn_gate is not None:
            out = out * (2 * hax.nn.sigmoid(self.attn_gate(x))).astype(out.dtype)
        return self.o_proj(out).rearrange(x.axes)

    def _grouped(self, kv_heads: int) -> tuple[Axis, Axis]:
        return self.config.KvHeads.resize(kv_heads), Axis(axes.Q_HEADS_PER_GROUP, self.config.num_heads // kv_heads)

    def _attend(
        self, q: NamedArray, k: NamedArray, v: NamedArray, segment_ids: NamedArray | None, window: int | None
    ) -> NamedArray:
        config = self.config
        implementation = config.implementation
        if implementation is AttentionImplementation.auto and jax.default_backend() == "cpu":
            implementation = AttentionImplementation.blockwise
        if implementation is AttentionImplementation.blockwise:
            return blockwise_attention(
                q, k, v, segment_ids=segment_ids, sliding_window=window, block_size=config.block_size
            )
        backend = None if implementation is AttentionImplementation.auto else AttentionBackend(implementation.value)
        rename = {axes.POSITION: axes.KEY_POSITION}
        mask = AttentionMask.causal(sliding_window=window)
        if segment_ids is not None:
            mask = mask.with_segment_ids(segment_ids, segment_ids.rename(rename))
        out = dot_product_attention(
            axes.POSITION,
            axes.KEY_POSITION,
            config.HeadSize,
            q,
            k.rename(rename),
            v.rename(rename),
            mask=mask,
            attention_dtype=jnp.float32,
            attn_backend=backend,
            flash_block_size=config.block_size,
        )
        return out.rearrange(q.axes).astype(q.dtype)
