# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""The Marin mixture-of-experts language model, registered with Levanter as `marin_moe`."""

import dataclasses
import math
from dataclasses import dataclass
from typing import cast

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax.numpy as jnp
from haliax import Axis, NamedArray, ScanCheckpointPolicy
from haliax.jax_utils import maybe_rng_split, named_call, shaped_rng_split
from haliax.nn.scan import BlockSeq, Stacked
from haliax.state_dict import ModuleWithStateDictSerialization
from jaxtyping import PRNGKeyArray
from levanter.compat.hf_checkpoints import HFCompatConfig
from levanter.inference.page_table import PageBatchInfo, PageTableSpec
from levanter.layers.attention import AttentionMask
from levanter.layers.kv_cache import KvPageCache, ListCache
from levanter.metrics import Metric
from levanter.models.lm_model import LmConfig, LmExample, LmHeadModel, resize_embeddings_and_lm_head
from levanter.models.loss import maybe_fused_next_token_loss
from transformers import PretrainedConfig

import levanter_marin.whole_chunks  # noqa: F401
from levanter_marin import axes
from levanter_marin.config import AttentionConfig, ConvSite, MoeConfig, ShortConvConfig
from levanter_marin.interop.converter import MarinMoeConverter
from levanter_marin.interop.hf_code.configuration_marin_moe import MarinMoeHfConfig
from levanter_marin.interop.hf_config import from_hf_dict, to_hf_dict
from levanter_marin.interop.state_dict import TensorView, to_tensors
from levanter_marin.layers.attention import AttentionContext
from levanter_marin.layers.embedding import NormedEmbedding
from levanter_marin.layers.linear import truncated_normal_linear
from levanter_marin.layers.norms import GatedNorm, RmsNorm
from levanter_marin.layers.page_cache import ConvPageCache, LayerPageCache, PagedTokens
from levanter_marin.models import parameter_counts
from levanter_marin.models.block import Block
from levanter_marin.models.transformer import run_layers
from levanter_marin.moe.statistics import RoutingStatistics, training_metrics


@LmConfig.register_subclass("marin_moe")
@dataclass(frozen=True)
class MarinMoeConfig(HFCompatConfig):
    """Shape and switches of the model. Defaults are the `nano` shape with every component on."""

    max_seq_len: int = 256
    hidden_dim: int = 128
    num_layers: int = 8
    global_every: int = 4
    """Every such layer, and the last, attends to all earlier keys; the others to a sliding window."""
    gated_norm_rank: int | None = 128
    """Rank of the gate after the embedding, attention, MoE and final norms; None leaves plain RMSNorm."""
    layer_norm_epsilon: float = 1e-5
    initializer_std: float | None = None
    """Standard deviation of every weight matrix, truncated at 3 of it; None is 0.5 / sqrt(hidden_dim)."""
    attention: AttentionConfig = AttentionConfig()
    short_conv: ShortConvConfig = ShortConvConfig()
    moe: MoeConfig = MoeConfig()
    gradient_checkpointing: bool | str | ScanCheckpointPolicy = True
    scan_layers: bool = True
    """False unrolls the layers; same numbers, longer compilation."""

    def __post_init__(self):
        for name in ("max_seq_len", "hidden_dim", "num_layers", "global_every", "layer_norm_epsilon"):
            if getattr(self, name) <= 0:
                raise ValueError(f"model.{name}={getattr(self, name)} must be positive; set it to 1 or more")
        if self.gated_norm_rank is not None and self.gated_norm_rank <= 0:
            raise ValueError(f"model.gated_norm_rank={self.gated_norm_rank} must be positive; null switches it off")
        if self.initializer_std is not None and self.initializer_std <= 0:
            raise ValueError(
                f"model.initializer_std={self.initializer_std} must be positive; null is 0.5/sqrt(hidden)"
            )
        if self.moe.latent_dim is not None and self.moe.latent_dim > self.hidden_dim:
            raise ValueError(
                f"moe.latent_dim={self.moe.latent_dim} exceeds hidden_dim={self.hidden_dim}; "
                f"set it to {self.hidden_dim} or less, or to null for no latent space"
            )

    def hf_checkpoint_converter(self) -> MarinMoeConverter:  # pyrefly: ignore[bad-override]
        """Levanter's converter for the published formats; building it asks neither disk nor network."""
        return MarinMoeConverter(type(self))

    def to_hf_config(self, vocab_size: int, config_overrides: dict | None = None) -> MarinMoeHfConfig:
        """config.json as an object; refuses by name a component that the format has no place for."""
        return MarinMoeHfConfig(**(to_hf_dict(self, vocab_size) | (config_overrides or {})))

    @classmethod
    def from_hf_config(cls, hf_config: PretrainedConfig) -> "MarinMoeConfig":
        """The architecture that a config.json describes; fields that only training reads get their defaults."""
        return cls(**from_hf_dict(hf_config.to_dict()))

    @property
    def model_type(self) -> type["MarinMoeLMHeadModel"]:  # pyrefly: ignore[bad-override]
        return MarinMoeLMHeadModel

    def flops_per_token(self, vocab_size: int, context_length: int) -> float:
        return parameter_counts.flops_per_token(self, vocab_size, context_length)

    def total_trainable_params(self, vocab_size: int) -> int:
        return parameter_counts.trainable_parameters(self, vocab_size)

    @property
    def Embed(self) -> Axis:
        return Axis(axes.EMBED, self.hidden_dim)

    @property
    def Layers(self) -> Axis:
        return Axis(axes.LAYER, self.num_layers)

    @property
    def layer_kinds(self) -> tuple[axes.LayerKind, ...]:
        return axes.layer_kinds(self.num_layers, self.global_every)

    @property
    def init_std(self) -> float:
        return 0.5 / math.sqrt(self.hidden_dim) if self.initializer_std is None else self.initializer_std


class MarinMoeTransformer(eqx.Module):
    """All layers and the final gated norm.

    Attributes:
        layers: every leaf has a leading `layer` axis (scan), or one entry a layer (unrolled).
    """

    layers: Stacked[Block] | BlockSeq[Block]
    norm: RmsNorm
    final_gated_norm: GatedNorm | None
    config: MarinMoeConfig = eqx.field(static=True)

    @staticmethod
    def init(config: MarinMoeConfig, *, key: PRNGKeyArray) -> "MarinMoeTransformer":
        k_layers, k_gate = maybe_rng_split(key, 2)
        Embed, rank, eps, std = config.Embed, config.gated_norm_rank, config.layer_norm_epsilon, config.init_std
        container = Stacked if config.scan_layers else BlockSeq
        layers = container.init(config.Layers, Block, gradient_checkpointing=config.gradient_checkpointing)(
            Embed,
            config.attention,
            config.short_conv,
            config.moe,
            rank,
            eps,
            std,
            key=shaped_rng_split(k_layers, config.num_layers),
        )
        return MarinMoeTransformer(
            layers=layers,
            norm=RmsNorm.init(Embed, eps, use_bias=False),
            final_gated_norm=None if rank is None else GatedNorm.init(Embed, rank, std, key=k_gate),
            config=config,
        )

    @named_call
    def __call__(self, x: NamedArray, context: AttentionContext) -> tuple[NamedArray, RoutingStatistics]:
        x, statistics = run_layers(self.layers, self.config.layer_kinds, self.config.global_every, x, context)
        return self._final_norm(x), statistics

    @named_call
    def decode(
        self, x: NamedArray, caches: ListCache[LayerPageCache], tokens: PagedTokens
    ) -> tuple[NamedArray, ListCache[LayerPageCache]]:
        """x: {position, embed}, the next tokens of several sequences.

        Layers are unrolled: caches that travel through a scan would be copied at every step.
        """
        updated = []
        for i, (kind, cache) in enumerate(zip(self.config.layer_kinds, caches, strict=True)):
            x, cache = self.layers.get_layer(i).decode(x, kind, cache, tokens)
            updated.append(cache)
        return self._final_norm(x), ListCache.from_iterable(updated)

    def initial_cache(self, spec: PageTableSpec, dtype: jnp.dtype) -> ListCache[LayerPageCache]:
        attention, conv = self.config.attention, self.config.short_conv
        of_heads = (attention.KvHeads, attention.HeadSize)
        channels = {site: of_heads if site in (ConvSite.k, ConvSite.v) else self.config.Embed for site in conv.sites}

        def layer_cache(kind: axes.LayerKind) -> LayerPageCache:
            KvHeads = attention.KvHeads.resize(attention.kv_heads_used(kind))
            return LayerPageCache(
                KvPageCache.init(spec, KvHeads, attention.HeadSize, dtype=dtype),
                {site: ConvPageCache.init(spec, conv.Tap, channels[site], dtype) for site in conv.sites},
            )

        return ListCache.from_iterable(layer_cache(kind) for kind in self.config.layer_kinds)

    def _final_norm(self, x: NamedArray) -> NamedArray:
        x = self.norm(x)
        return x if self.final_gated_norm is None else self.final_gated_norm(x)


class MarinMoeLMHeadModel(ModuleWithStateDictSerialization, LmHeadModel[MarinMoeConfig]):
    """Embedding, transformer and an untied output projection."""

    embeddings: NormedEmbedding
    transformer: MarinMoeTransformer
    lm_head: hnn.Linear

    @property
    def config(self) -> MarinMoeConfig:
        return self.transformer.config

    @property
    def Vocab(self) -> Axis:
        return self.embeddings.token_embeddings.Vocab

    @classmethod
    def init(cls, Vocab: Axis, config: MarinMoeConfig, *, key: PRNGKeyArray) -> "MarinMoeLMHeadModel":
        k_embed, k_layers, k_head = maybe_rng_split(key, 3)
        Embed, std = config.Embed, config.init_std
        embeddings = NormedEmbedding.init(
            Vocab, Embed, config.gated_norm_rank, config.layer_norm_epsilon, std, key=k_embed
        )
        transformer = MarinMoeTransformer.init(config, key=k_layers)
        return MarinMoeLMHeadModel(embeddings, transformer, truncated_normal_linear(Embed, Vocab, std, key=k_head))

    def activations(
        self,
        input_ids: NamedArray,
        attn_mask: AttentionMask | NamedArray | None = None,
        *,
        key: PRNGKeyArray | None = None,
        pos_ids: NamedArray | None = None,
    ) -> NamedArray:
        """Final hidden states {batch..., position, embed} of tokens {batch..., position}."""
        return self.activations_and_statistics(input_ids, attn_mask, pos_ids=pos_ids)[0]

    def activations_and_statistics(
        self,
        input_ids: NamedArray,
        attn_mask: AttentionMask | NamedArray | None = None,
        *,
        pos_ids: NamedArray | None = None,
        training: bool = False,
    ) -> tuple[NamedArray, RoutingStatistics]:
        """As `activations`, with what each layer's router did.

        Expert-parallel layers have the capacity of evaluation, `moe.dispatch.eval_capacity_factor`, which by default
        drops nothing; with `training` that of `moe.dispatch.capacity_factor`.
        A token whose segment id is negative is padding: routed experts leave it out, and so does every statistic.
        """
        context = AttentionContext.create(input_ids.resolve_axis(axes.POSITION), attn_mask, pos_ids)
        context = dataclasses.replace(context, training=training)
        return self.transformer(self.embeddings(input_ids), context)

    def get_lm_head(self) -> NamedArray:
        return self.lm_head.weight

    def initial_cache(self, spec: PageTableSpec, *, dtype: jnp.dtype) -> ListCache[LayerPageCache]:
        """Empty page caches, one a layer: a local layer stores its KV heads, a global one its own, fewer ones."""
        return hax.auto_sharded(self.transformer.initial_cache(spec, dtype))

    @named_call
    def decode(
        self,
        input_ids: NamedArray,
        kv_cache: ListCache[LayerPageCache],
        batch_info: PageBatchInfo,
        pos_ids: NamedArray,
        *,
        key: PRNGKeyArray | None = None,
    ) -> tuple[NamedArray, ListCache[LayerPageCache]]:
        """One step of prefill or decoding, as Levanter's inference engine wants it. No gradient.

        Args:
            input_ids: tokens {position} of several sequences, one behind the other, then padding. Tokens of one
                sequence are consecutive and follow those of its earlier steps.
            kv_cache: `initial_cache`, or what the last step returned.
            batch_info: the pages of those sequences.
            pos_ids: position of each token in its sequence {position}.

        Returns:
            Logits {position, vocab}, those of a full forward pass over each sequence up to rounding (and up to the
            cache's dtype), without meaning for padding; and the cache with these tokens in it.
        """
        tokens = PagedTokens.create(batch_info, pos_ids)
        x = self.embeddings(hax.where(tokens.valid, input_ids, 0))
        x, kv_cache = self.transformer.decode(x, kv_cache, tokens)
        return hax.dot(x, self.get_lm_head(), axis=self.Embed), kv_cache

    # upstream's signature has no place for the metrics that its trainer accepts beside a loss
    def compute_next_token_loss(  # pyrefly: ignore[bad-override]
        self,
        example: LmExample,
        *,
        key: PRNGKeyArray | None = None,
        reduction: hax.ReductionFunction | None = cast(hax.ReductionFunction | None, hax.mean),
        reduction_axis: hax.AxisSelection | None = None,
        logsumexp_weight: float | None = None,
        loss_dtype: jnp.dtype | None = jnp.float32,
        logit_soft_cap: float | None = None,
    ) -> NamedArray | tuple[NamedArray, dict[str, Metric]]:
        """Cross-entropy of the next token plus logsumexp_weight * logsumexp^2.

        Returns:
            (loss, metrics) in a training step, which is a call with a key and the default reduction; the loss alone
            otherwise. Auxiliary router terms are among the metrics and never in the loss. A call without a key is
            an evaluation: dropless by default, also on an expert-parallel mesh.
        """
        activations, statistics = self.activations_and_statistics(
            example.tokens, example.attn_mask, training=key is not None
        )
        loss = maybe_fused_next_token_loss(
            self.Pos,
            self.Embed,
            self.Vocab,
            activations,
            self.get_lm_head(),
            example.tokens,
            loss_weight=example.loss_weight,
            reduction=reduction,
            reduction_axis=reduction_axis,
            logsumexp_weight=logsumexp_weight,
            dtype=loss_dtype,
            logit_soft_cap=logit_soft_cap,
        )
        if key is None or reduction is not hax.mean or reduction_axis is not None:
            return loss
        return loss, training_metrics(statistics, self.config.Layers, self.config.moe.dispatch.drop_warning_fraction)

    def resize_vocab(self, new_size: int, key: PRNGKeyArray | None = None) -> "MarinMoeLMHeadModel":
        embeddings, lm_head = resize_embeddings_and_lm_head(self.Vocab, self.embeddings, self.lm_head, new_size, key)
        return dataclasses.replace(self, embeddings=embeddings, lm_head=lm_head)

    def flatten_for_export(self) -> TensorView:  # pyrefly: ignore[bad-override]
        """The published tensors, which is what Haliax's state dicts hold of this model."""
        return TensorView(to_tensors(self))
