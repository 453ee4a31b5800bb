# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""Frozen sub-configs of the model and their validation.

Each sub-config checks itself; `levanter_marin.models.marin_moe.MarinMoeConfig` checks what spans two of them.
"""

from dataclasses import dataclass, replace
from enum import StrEnum

from haliax import Axis

from levanter_marin import axes

# Enum members are lower case because draccus decodes an enum by its member name.


class RopePairing(StrEnum):
    """Which two of the rotated dimensions form a plane; trained weights fit only one of the two."""

    adjacent = "adjacent"  # (2i, 2i + 1)
    split_half = "split_half"  # (i, i + R/2) of R rotated dimensions


class AttentionImplementation(StrEnum):
    """`auto` is `blockwise` on CPU and Levanter's default backend elsewhere; other names mean that one."""

    auto = "auto"
    blockwise = "blockwise"
    vanilla = "vanilla"
    jax_flash = "jax_flash"
    splash = "splash"
    nvte = "nvte"


class ConvSite(StrEnum):
    """Where a short convolution may stand: on keys, on values, after attention, after the MoE."""

    k = "k"
    v = "v"
    attn = "attn"
    mlp = "mlp"


class RouterDtype(StrEnum):
    """`fp32` accumulates and returns fp32 logits; `bf16` multiplies in bf16 and casts the product."""

    fp32 = "fp32"
    bf16 = "bf16"


class QuantileEstimator(StrEnum):
    """How the load threshold of an expert is estimated; `none` leaves the router bias at zero."""

    none = "none"
    histogram = "histogram"
    topk = "topk"


class DispatchImplementation(StrEnum):
    """`auto` takes the best backend that runs on the current mesh; any other name means that one or an error."""

    auto = "auto"
    local = "local"
    ragged_all_to_all = "ragged_all_to_all"
    padded_all_to_all = "padded_all_to_all"
    reference = "reference"


def _require_positive(config_name: str, **values: int | float) -> None:
    for name, value in values.items():
        if value <= 0:
            raise ValueError(f"{config_name}.{name}={value} must be positive; set it to 1 or more")


@dataclass(frozen=True)
class AttentionConfig:
    """Grouped-query attention with QK RMSNorm, half-RoPE, Exclusive Self Attention and a headwise gate."""

    num_heads: int = 4
    head_dim: int = 32
    num_kv_heads: int = 2
    """KV heads whose weights every layer stores."""
    local_kv_heads: int | None = None
    """KV heads a local layer uses, the first ones stored; None uses all."""
    global_kv_heads: int | None = 1
    """KV heads a global layer uses, the first ones stored; None uses all."""
    sliding_window: int = 64
    """Keys a local layer sees, the query's own included."""
    rope_theta: float = 10000.0
    rope_fraction: float = 0.5
    """Share of head_dim that rotates; 0 switches rotary embeddings off."""
    rope_pairing: RopePairing = RopePairing.adjacent
    rope_on_global: bool = False
    """False: global layers carry no position (NoPE)."""
    qk_norm: bool = True
    qk_norm_eps: float = 1e-6
    qk_mult: float = 1.3
    """Factor on the normalised, rotated query, beside 1/sqrt(head_dim)."""
    exclusive: bool = True
    """Exclusive Self Attention: remove from the output its component along the token's own value."""
    head_gate: bool = True
    implementation: AttentionImplementation = AttentionImplementation.auto
    block_size: int | None = None
    """Block of a blockwise or flash implementation; None lets it choose."""

    def __post_init__(self):
        _require_positive(
            "attention",
            num_heads=self.num_heads,
            head_dim=self.head_dim,
            num_kv_heads=self.num_kv_heads,
            sliding_window=self.sliding_window,
            rope_theta=self.rope_theta,
            qk_mult=self.qk_mult,
            qk_norm_eps=self.qk_norm_eps,
        )
        if self.block_size is not None:
            _require_positive("attention", block_size=self.block_size)
        for name in ("local_kv_heads", "global_kv_heads"):
            used = getattr(self, name)
            if used is None:
                used = self.num_kv_heads
            _require_positive("attention", **{name: used})
            if used > self.num_kv_heads:
                raise ValueError(
                    f"attention.{name}={used} exceeds the {self.num_kv_heads} stored heads; "
                    f"raise attention.num_kv_heads to {used}"
                )
            if self.num_heads % used != 0:
                raise ValueError(
                    f"attention.num_heads={self.num_heads} is not a multiple of attention.{name}={used}; "
                    "set one to a multiple of the other"
                )
        if not 0.0 <= self.rope_fraction <= 1.0:
            raise ValueError(f"attention.rope_fraction={self.rope_fraction} must lie in [0, 1]; published: 0.5")
        if self.head_dim * self.rope_fraction % 2 != 0:
            raise ValueError(
                f"attention.head_dim={self.head_dim} x attention.rope_fraction={self.rope_fraction} = "
                f"{self.head_dim * self.rope_fraction:g} rotated dimensions; make it an even number"
            )

    @property
    def rope_dim(self) -> int:
        """Number of rotated dimensions of a head."""
        return int(self.head_dim * self.rope_fraction)

    def kv_heads_used(self, kind: axes.LayerKind) -> int:
        used = self.local_kv_heads if kind is axes.LayerKind.LOCAL else self.global_kv_heads
        return self.num_kv_heads if used is None else used

    @property
    def Heads(self) -> Axis:
        return Axis(axes.HEADS, self.num_heads)

    @property
    def KvHeads(self) -> Axis:
        return Axis(axes.KV_HEAD, self.num_kv_heads)

    @property
    def HeadSize(self) -> Axis:
        return Axis(axes.HEAD_SIZE, self.head_dim)


@dataclass(frozen=True)
class ShortConvConfig:
    """Depthwise causal convolution over the last `kernel_size` tokens of the same document."""

    sites: tuple[ConvSite, ...] = (ConvSite.k, ConvSite.attn, ConvSite.mlp)
    """Where to convolve; an empty list switches it off."""
    kernel_size: int = 4

    def __post_init__(self):
        _require_positive("short_conv", kernel_size=self.kernel_size)
        if len(set(self.sites)) != len(self.sites):
            raise ValueError(f"short_conv.sites={[str(s) for s in self.sites]} names a site twice; name each once")

    @property
    def Tap(self) -> Axis:
        return Axis(axes.CONV_TAP, self.kernel_size)


@dataclass(frozen=True)
class QuantileBalancingConfig:
    """Top-k quantile balancing of the raw router logits."""

    estimator: QuantileEstimator = QuantileEstimator.histogram
    num_bins: int = 10000
    """Bins of the histogram estimator; its resolution is (max margin - min margin) / num_bins."""

    def __post_init__(self):
        _require_positive("quantile_balancing", num_bins=self.num_bins)


@dataclass(frozen=True)
class DispatchConfig:
    """How tokens reach their experts. Only all-to-all backends have a capacity; local dispatch is dropless."""

    implementation: DispatchImplementation = DispatchImplementation.auto
    capacity_factor: float | None = 1.15
    """Rows a device can receive in a training step, over a balanced load; null drops nothing, at more memory.

    Read as the nearest fraction with a denominator of at most 1000."""
    eval_capacity_factor: float | None = None
    """The same outside training. Null is dropless, so that a loss does not depend on what shares its batch."""
    expert_chunks: int = 2
    """Parts of a device's experts that are exchanged and computed in turn, each with its share of the capacity; 1
    where the number of experts on a device is no multiple of it."""
    drop_warning_fraction: float = 0.01
    """A layer that drops more of its valid assignments is counted in the metric `moe/layers_over_drop_warning`."""

    def __post_init__(self):
        _require_positive("dispatch", expert_chunks=self.expert_chunks)
        for name in ("capacity_factor", "eval_capacity_factor"):
            factor = getattr(self, name)
            # the smallest fraction of denominator 1000 that does not round to zero
            if factor is not None and factor < 0.001:
                raise ValueError(
                    f"dispatch.{name}={factor} must be positive, at least 0.001; "
                    "published: 1.15, balanced load without slack: 1.0, dropless: null"
                )
        if not 0.0 <= self.drop_warning_fraction <= 1.0:
            raise ValueError(
                f"dispatch.drop_warning_fraction={self.drop_warning_fraction} must lie in [0, 1]; 1 never warns"
            )

    def for_evaluation(self) -> "DispatchConfig":
        """The same with the capacity of evaluation."""
        return replace(self, capacity_factor=self.eval_capacity_factor)


@dataclass(frozen=True)
class MoeConfig:
    """Routed experts in a latent space, beside shared experts at full width."""

    num_experts: int = 64
    num_experts_per_token: int = 8
    expert_dim: int = 64
    """Width of a routed expert."""
    latent_dim: int | None = 64
    """Width in which tokens travel and routed experts work; None keeps the model's own width."""
    latent_norm: bool = True
    """RMSNorm after the projection into the latent space; without latent_dim there is none."""
    num_shared_experts: int = 2
    shared_expert_dim: int = 64
    """Width of each shared expert."""
    renormalize: bool = True
    """Scale the selected sigmoids of a token to sum to combine_weight_sum; False uses them as they are."""
    combine_weight_sum: float = 2.5
    router_dtype: RouterDtype = RouterDtype.fp32
    quantile_balancing: QuantileBalancingConfig = QuantileBalancingConfig()
    dispatch: DispatchConfig = DispatchConfig()

    def __post_init__(self):
        _require_positive(
            "moe",
            num_experts=self.num_experts,
            num_experts_per_token=self.num_experts_per_token,
            expert_dim=self.expert_dim,
            combine_weight_sum=self.combine_weight_sum,
        )
        if self.num_experts_per_token >= self.num_experts:
            raise ValueError(
                f"moe.num_experts_per_token={self.num_experts_per_token} must be below "
                f"moe.num_experts={self.num_experts}: quantile balancing needs the next-best expert's logit; "
                f"set moe.num_experts to {self.num_experts_per_token + 1} or more"
            )
        if self.latent_dim is not None:
            _require_positive("moe", latent_dim=self.latent_dim)
        if self.num_shared_experts < 0:
            raise ValueError(
                f"moe.num_shared_experts={self.num_shared_experts} must be 0 or more; 0 switches them off"
            )
        if self.num_shared_experts > 0:
            _require_positive("moe", shared_expert_dim=self.shared_expert_dim)

    def Latent(self, Embed: Axis) -> Axis:
        """The axis routed experts read and write; it has this name without latent experts too."""
        return Axis(axes.LATENT, Embed.size if self.latent_dim is None else self.latent_dim)

    @property
    def Experts(self) -> Axis:
        return Axis(axes.EXPERTS, self.num_experts)

    @property
    def RouterExperts(self) -> Axis:
        return Axis(axes.ROUTER_EXPERTS, self.num_experts)

    @property
    def TopExperts(self) -> Axis:
        return Axis(axes.TOP_EXPERTS, self.num_experts_per_token)

    @property
    def Mlp(self) -> Axis:
        return Axis(axes.MLP, self.expert_dim)

    @property
    def SharedMlp(self) -> Axis:
        return Axis(axes.MLP, self.shared_expert_dim)
