# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""One layer: attention and latent MoE, each behind a gated norm and before a short convolution."""

import equinox as eqx
from haliax import Axis, NamedArray
from haliax.jax_utils import maybe_rng_split, named_call
from jaxtyping import PRNGKeyArray

from levanter_marin.axes import LayerKind
from levanter_marin.config import AttentionConfig, ConvSite, MoeConfig, ShortConvConfig
from levanter_marin.layers.attention import Attention, AttentionContext
from levanter_marin.layers.mlp import SwiGlu
from levanter_marin.layers.norms import GatedNorm, RmsNorm
from levanter_marin.layers.page_cache import LayerPageCache, PagedTokens
from levanter_marin.layers.short_conv import ShortConv, decode_at_site
from levanter_marin.moe.latent_moe import LatentMoe
from levanter_marin.moe.statistics import RoutingStatistics


class Block(eqx.Module):
    """x += conv(attn(norm(x))); h = norm(x); x += conv(moe(h) + sum_j shared_j(h)).

    Leaves carry the names of the published checkpoints.
    """

    input_layernorm: RmsNorm
    attn_gated_norm: GatedNorm | None
    self_attn: Attention
    sconv_attn: ShortConv | None
    post_attention_layernorm: RmsNorm
    mlp_gated_norm: GatedNorm | None
    mlp: LatentMoe
    shared_experts: tuple[SwiGlu, ...]
    sconv_mlp: ShortConv | None

    @staticmethod
    def init(
        Embed: Axis,
        attention: AttentionConfig,
        short_conv: ShortConvConfig,
        moe: MoeConfig,
        gated_norm_rank: int | None,
        norm_eps: float,
        std: float,
        *,
        key: PRNGKeyArray,
    ) -> "Block":
        k_attn, k_attn_gate, k_moe, k_moe_gate, k_shared = maybe_rng_split(key, 5)

        def gated_norm(k: PRNGKeyArray) -> GatedNorm | None:
            return None if gated_norm_rank is None else GatedNorm.init(Embed, gated_norm_rank, std, key=k)

        def conv(site: ConvSite) -> ShortConv | None:
            return ShortConv.init(short_conv.Tap, Embed) if site in short_conv.sites else None

        shared_keys = maybe_rng_split(k_shared, moe.num_shared_experts) if moe.num_shared_experts else ()
        return Block(
            input_layernorm=RmsNorm.init(Embed, norm_eps, use_bias=False),
            attn_gated_norm=gated_norm(k_attn_gate),
            self_attn=Attention.init(Embed, attention, short_conv, std, key=k_attn),
            sconv_attn=conv(ConvSite.attn),
            post_attention_layernorm=RmsNorm.init(Embed, norm_eps, use_bias=False),
            mlp_gated_norm=gated_norm(k_moe_gate),
            mlp=LatentMoe.init(Embed, moe, std, norm_eps, key=k_moe),
            shared_experts=tuple(SwiGlu.init(Embed, moe.SharedMlp, std, key=k) for k in shared_keys),
            sconv_mlp=conv(ConvSite.mlp),
        )

    @named_call
    def __call__(
        self, x: NamedArray, kind: LayerKind, context: AttentionContext
    ) -> tuple[NamedArray, RoutingStatistics]:
        """x: {batch..., position, embed}, the residual stream; returned updated."""
        attn_out = self.self_attn(self.attention_input(x), kind, context)
        x = x + self._convolve(self.sconv_attn, attn_out, context)
        mlp_out, statistics = self.mlp_output(x, context.token_valid, training=context.training)
        return x + self._convolve(self.sconv_mlp, mlp_out, context), statistics

    @named_call
    def decode(
        self, x: NamedArray, kind: LayerKind, cache: LayerPageCache, tokens: PagedTokens
    ) -> tuple[NamedArray, LayerPageCache]:
        """x: {position, embed}, the next tokens of several sequences; as `__call__` over each whole sequence.

        The router bias stays as it is; experts have the capacity of evaluation, which by default drops nothing.
        """
        attn_out, cache = self.self_attn.decode(self.attention_input(x), kind, cache, tokens)
        attn_out, cache = decode_at_site(ConvSite.attn, self.sconv_attn, attn_out, cache, tokens)
        x = x + attn_out
        mlp_out, _ = self.mlp_output(x, tokens.valid)
        mlp_out, cache = decode_at_site(ConvSite.mlp, self.sconv_mlp, mlp_out, cache, tokens)
        return x + mlp_out, cache

    def attention_input(self, x: NamedArray) -> NamedArray:
        h = self.input_layernorm(x)
        return h if self.attn_gated_norm is None else self.attn_gated_norm(h)

    def mlp_output(
        self, x: NamedArray, token_valid: NamedArray | None, *, training: bool = False
    ) -> tuple[NamedArray, RoutingStatistics]:
        """Routed and shared experts of the residual stream x, before the convolution."""
        mlp_in = self.mlp_input(x)
        mlp_out, statistics = self.mlp(mlp_in, token_valid, training=training)
        for shared in self.shared_experts:
            mlp_out = mlp_out + shared(mlp_in)
        return mlp_out, statistics

    def mlp_input(self, x: NamedArray) -> NamedArray:
        h = self.post_attention_layernorm(x)
        return h if self.mlp_gated_norm is None else self.mlp_gated_norm(h)

    @staticmethod
    def _convolve(conv: ShortConv | None, x: NamedArray, context: AttentionContext) -> NamedArray:
        return x if conv is None else conv(x, context.segment_ids)
