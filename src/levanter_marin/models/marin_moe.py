# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""The Marin mixture-of-experts language model, registered with Levanter as `marin_moe`."""

import math
from dataclasses import dataclass

from haliax import Axis, ScanCheckpointPolicy
from levanter.models.lm_model import LmConfig

from levanter_marin import axes
from levanter_marin.config import AttentionConfig, MoeConfig, ShortConvConfig


@LmConfig.register_subclass("marin_moe")
@dataclass(frozen=True)
class MarinMoeConfig(LmConfig["MarinMoeLMHeadModel"]):
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
            raise ValueError(f"model.initializer_std={self.initializer_std} must be positive; null is 0.5/sqrt(hidden)")
        if self.moe.latent_dim is not None and self.moe.latent_dim > self.hidden_dim:
            raise ValueError(
                f"moe.latent_dim={self.moe.latent_dim} exceeds hidden_dim={self.hidden_dim}; "
                f"set it to {self.hidden_dim} or less, or to null for no latent space"
            )

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
