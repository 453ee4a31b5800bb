# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""Named model shapes. Each equals the `model` section of the YAML file of the same name under `config/`."""

from levanter_marin.config import (
    AttentionConfig,
    DispatchConfig,
    MoeConfig,
    QuantileBalancingConfig,
    QuantileEstimator,
    RouterDtype,
)
from levanter_marin.models.marin_moe import MarinMoeConfig

PUBLISHED_VOCAB_SIZE = 128256
PUBLISHED_SEQ_LEN = 4096

_QUANTILE_BALANCING = QuantileBalancingConfig(estimator=QuantileEstimator.histogram, num_bins=10000)
_DISPATCH = DispatchConfig(capacity_factor=1.15)


def nano() -> MarinMoeConfig:
    """Every component on a CPU: 128 wide, 8 layers, 64 experts; train at 256 tokens with a vocabulary of 4096."""
    return _small(hidden_dim=128, max_seq_len=256, num_heads=4, local_kv_heads=2, global_kv_heads=1, window=64)


def d256() -> MarinMoeConfig:
    """The nano model at twice its width and heads; train at 512 tokens."""
    return _small(hidden_dim=256, max_seq_len=512, num_heads=8, local_kv_heads=4, global_kv_heads=2, window=128)


def d512() -> MarinMoeConfig:
    """Rung of the published ladder: 597.6M parameters, 20.8M active."""
    return _published(hidden_dim=512, num_layers=6, local_kv_heads=1, global_kv_heads=1)


def d768() -> MarinMoeConfig:
    """Rung of the published ladder: 1.592B parameters, 60.6M active."""
    return _published(hidden_dim=768, num_layers=8, local_kv_heads=1, global_kv_heads=1)


def d1024() -> MarinMoeConfig:
    """Rung of the published ladder: 3.980B parameters, 162.0M active."""
    return _published(hidden_dim=1024, num_layers=12, local_kv_heads=2, global_kv_heads=1)


def d1536() -> MarinMoeConfig:
    """Rung of the published ladder: 11.534B parameters, 481.3M active."""
    return _published(hidden_dim=1536, num_layers=16, local_kv_heads=3, global_kv_heads=1)


def d2048() -> MarinMoeConfig:
    """Rung of the published ladder: 27.743B parameters, 1.171B active."""
    return _published(hidden_dim=2048, num_layers=22, local_kv_heads=4, global_kv_heads=2)


def hero_535b_a23b() -> MarinMoeConfig:
    """The published model: 535,477,106,688 parameters, 22,762,487,808 active."""
    return _published(hidden_dim=6144, num_layers=48, local_kv_heads=12, global_kv_heads=6)


def _published(*, hidden_dim: int, num_layers: int, local_kv_heads: int, global_kv_heads: int) -> MarinMoeConfig:
    """Heads of 128, 384 experts top-8 at half width, window 2048; router logits in bf16, as published."""
    half = hidden_dim // 2
    return MarinMoeConfig(
        max_seq_len=PUBLISHED_SEQ_LEN,
        hidden_dim=hidden_dim,
        num_layers=num_layers,
        global_every=4,
        gated_norm_rank=128,
        attention=AttentionConfig(
            num_heads=hidden_dim // 128,
            head_dim=128,
            num_kv_heads=local_kv_heads,
            local_kv_heads=local_kv_heads,
            global_kv_heads=global_kv_heads,
            sliding_window=2048,
            qk_mult=1.3,
        ),
        moe=MoeConfig(
            num_experts=384,
            num_experts_per_token=8,
            expert_dim=half,
            latent_dim=half,
            num_shared_experts=2,
            shared_expert_dim=half,
            router_dtype=RouterDtype.bf16,
            quantile_balancing=_QUANTILE_BALANCING,
            dispatch=_DISPATCH,
        ),
    )


def _small(
    *, hidden_dim: int, max_seq_len: int, num_heads: int, local_kv_heads: int, global_kv_heads: int, window: int
) -> MarinMoeConfig:
    """Heads of 32, 64 experts top-8 at half width, 8 layers."""
    half = hidden_dim // 2
    return MarinMoeConfig(
        max_seq_len=max_seq_len,
        hidden_dim=hidden_dim,
        num_layers=8,
        global_every=4,
        gated_norm_rank=128,
        attention=AttentionConfig(
            num_heads=num_heads,
            head_dim=32,
            num_kv_heads=local_kv_heads,
            local_kv_heads=local_kv_heads,
            global_kv_heads=global_kv_heads,
            sliding_window=window,
            qk_mult=1.3,
        ),
        moe=MoeConfig(
            num_experts=64,
            num_experts_per_token=8,
            expert_dim=half,
            latent_dim=half,
            num_shared_experts=2,
            shared_expert_dim=half,
            quantile_balancing=_QUANTILE_BALANCING,
            dispatch=_DISPATCH,
        ),
    )
