# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""Every config that cannot work is refused with one line: what is wrong, both numbers, what to set instead."""

import dataclasses

import pytest

from levanter_marin.config import (
    AttentionConfig,
    ConvSite,
    DispatchConfig,
    MoeConfig,
    QuantileBalancingConfig,
    ShortConvConfig,
)
from levanter_marin.models.marin_moe import MarinMoeConfig

REFUSED = (
    (lambda: MarinMoeConfig(moe=MoeConfig(latent_dim=129)), ("latent_dim=129", "hidden_dim=128")),
    (lambda: DispatchConfig(capacity_factor=0.0), ("capacity_factor=0", "1.15")),
    (lambda: MarinMoeConfig(global_every=0), ("global_every=0", "1 or more")),
    (lambda: MoeConfig(num_experts=8, num_experts_per_token=8), ("num_experts_per_token=8", "num_experts=8", "9")),
    (lambda: MoeConfig(num_experts=4, num_experts_per_token=8), ("num_experts_per_token=8", "num_experts=4", "9")),
    (lambda: MoeConfig(num_shared_experts=-1), ("num_shared_experts=-1", "0")),
    (lambda: MoeConfig(shared_expert_dim=0), ("shared_expert_dim=0",)),
    (lambda: MoeConfig(latent_dim=0), ("latent_dim=0",)),
    (lambda: AttentionConfig(num_heads=5, num_kv_heads=2), ("num_heads=5", "kv_heads=2", "multiple")),
    (lambda: AttentionConfig(num_kv_heads=1, local_kv_heads=2), ("local_kv_heads=2", "1 stored", "num_kv_heads to 2")),
    (lambda: AttentionConfig(num_heads=6, num_kv_heads=3, global_kv_heads=4), ("global_kv_heads=4", "3 stored")),
    (lambda: AttentionConfig(sliding_window=0), ("sliding_window=0",)),
    (lambda: AttentionConfig(head_dim=6, rope_fraction=0.5), ("head_dim=6", "rope_fraction=0.5", "even")),
    (lambda: AttentionConfig(rope_fraction=1.5), ("rope_fraction=1.5", "[0, 1]")),
    (lambda: AttentionConfig(block_size=0), ("block_size=0",)),
    (lambda: ShortConvConfig(sites=(ConvSite.k, ConvSite.k)), ("sites", "twice")),
    (lambda: ShortConvConfig(kernel_size=0), ("kernel_size=0",)),
    (lambda: QuantileBalancingConfig(num_bins=0), ("num_bins=0",)),
    (lambda: MarinMoeConfig(gated_norm_rank=0), ("gated_norm_rank=0", "null")),
    (lambda: MarinMoeConfig(initializer_std=-1.0), ("initializer_std=-1.0",)),
    (lambda: MarinMoeConfig(num_layers=0), ("num_layers=0",)),
)


@pytest.mark.parametrize(("build", "words"), REFUSED, ids=[words[0] for _, words in REFUSED])
def test_config_that_cannot_work_is_refused_in_one_line(build, words):
    with pytest.raises(ValueError) as refusal:
        build()
    message = str(refusal.value)
    assert "\n" not in message
    for word in words:
        assert word in message


@pytest.mark.parametrize(("num_layers", "global_every"), ((8, 4), (6, 4), (3, 4), (1, 1), (5, 2)))
def test_layer_kinds_are_global_on_the_stride_and_at_the_end(num_layers, global_every):
    kinds = dataclasses.replace(MarinMoeConfig(), num_layers=num_layers, global_every=global_every).layer_kinds
    expected = [i for i in range(num_layers) if i % global_every == global_every - 1 or i == num_layers - 1]
    assert [i for i, kind in enumerate(kinds) if kind == "global"] == expected
    assert len(kinds) == num_layers
