# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

import math

import haliax as hax
import jax
import numpy as np
from haliax import Axis

from levanter_marin.config import MoeConfig
from levanter_marin.moe.experts import ExpertBank

STD = 0.02
# Norm of a standard normal truncated at +-3, over the root of its size.
TRUNCATED_STD = 0.98658


def test_expert_bank_init_has_truncated_normal_of_given_std_in_every_matrix():
    moe = MoeConfig(num_experts=16, num_experts_per_token=2, expert_dim=48, latent_dim=32)
    bank = ExpertBank.init(moe, Axis("latent", 32), STD, key=jax.random.key(0))
    shapes = {"gate_proj": ("latent", "mlp"), "up_proj": ("latent", "mlp"), "down_proj": ("mlp", "latent")}
    arrays = []
    for name, (In, Out) in shapes.items():
        projection = getattr(bank, name)
        assert tuple(a.name for a in projection.weight.axes) == ("experts", In, Out)
        assert (projection.In.name, projection.Out.name, projection.bias) == (In, Out, None)
        w = np.asarray(projection.weight.array, np.float64)
        assert np.abs(w).max() <= 3 * STD * (1 + 1e-6)
        norm = TRUNCATED_STD * STD * math.sqrt(w.size)
        assert abs(np.linalg.norm(w) / norm - 1) < 2.7 / math.sqrt(w.size)
        arrays.append(w.reshape(-1)[:100])
    assert len(np.unique(np.concatenate(arrays))) == 300


def test_expert_bank_init_without_latent_keeps_the_latent_name_at_model_width():
    moe = MoeConfig(num_experts=4, num_experts_per_token=1, expert_dim=8, latent_dim=None)
    bank = ExpertBank.init(moe, moe.Latent(Axis("embed", 24)), STD, key=jax.random.key(0))
    assert bank.gate_proj.In == bank.down_proj.Out == Axis("latent", 24)
    assert hax.axis_name(bank.up_proj.weight.axes) == ("experts", "latent", "mlp")
