# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""Token embedding, normalised and gated."""

import dataclasses

import equinox as eqx
import haliax.nn as hnn
from haliax import Axis, NamedArray
from haliax.jax_utils import maybe_rng_split, named_call
from jaxtyping import PRNGKeyArray

from levanter_marin.layers.linear import truncated_normal
from levanter_marin.layers.norms import GatedNorm, RmsNorm


class NormedEmbedding(eqx.Module):
    """gated_norm(rms_norm(weight[token])), with no scale factor."""

    token_embeddings: hnn.Embedding
    norm: RmsNorm
    gated_norm: GatedNorm | None

    @staticmethod
    def init(
        Vocab: Axis, Embed: Axis, gated_norm_rank: int | None, norm_eps: float, std: float, *, key: PRNGKeyArray
    ) -> "NormedEmbedding":
        k_embed, k_gate = maybe_rng_split(key, 2)
        gate = None if gated_norm_rank is None else GatedNorm.init(Embed, gated_norm_rank, std, key=k_gate)
        weight = truncated_normal((Vocab, Embed), std, key=k_embed)
        return NormedEmbedding(
            hnn.Embedding(weight, Vocab, Embed), RmsNorm.init(Embed, norm_eps, use_bias=False), gate
        )

    @named_call
    def __call__(self, input_ids: NamedArray) -> NamedArray:
        """input_ids: integers {batch..., position} -> {batch..., position, embed}."""
        x = self.norm(self.token_embeddings(input_ids))
        return x if self.gated_norm is None else self.gated_norm(x)

    def resize_embeddings(self, new_size: int, key: PRNGKeyArray | None = None) -> "NormedEmbedding":
        return dataclasses.replace(self, token_embeddings=self.token_embeddings.resize_embeddings(new_size, key=key))
