# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""The published rule from the size of a run to the hyperparameters of the Hyperball optimizer."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class ScaledHyperparameters:
    """What the rule gives: the learning rate of MuonH and AdamH, that of Adam, Adam's beta2 and epsilon."""

    learning_rate: float
    adam_lr: float
    beta2: float
    epsilon: float


MUONH_PER_ADAM_LR = 13 / 3
MAX_LEARNING_RATE = 0.05

_ADAM_LR_SCALE = 0.087571
_ADAM_LR_TOKENS_POWER = -0.3461
_ADAM_LR_HIDDEN_POWER = -0.3448
_BETA2_AT_UNIT = 0.999
_BETA2_UNIT_TOKENS = 131072
_BETA2_RANGE = (0.95, 0.9999)
_EPSILON_SCALE = 9.676e-18


@dataclass(frozen=True)
class ScaleFrom:
    """The size of a run.

    The width is a field, and not read off the model, since the learning rates then follow from the config alone:
    `levanter-marin describe` can print them and a schedule can be built before there are weights. The optimizer
    refuses a model of another width.
    """

    tokens: float = 0
    """Trained on in the whole run; of the ladder a whole number of steps."""
    tokens_per_batch: float = 0
    hidden_dim: int = 0


def scaled_hyperparameters(scale: ScaleFrom) -> ScaledHyperparameters:
    """The rule as published by the Marin project, for its ladder of widths 512 to 6144.

    adam_lr = 0.087571 tokens^-0.3461 hidden_dim^-0.3448 sqrt(tokens_per_batch) and 13/3 of it for MuonH and AdamH,
    both at most 0.05; beta2 = 0.999^(tokens_per_batch / 131072) within [0.95, 0.9999]; epsilon = 9.676e-18
    sqrt(tokens / tokens_per_batch).

    Raises:
        ValueError: a size is missing, or the run is shorter than one batch.
    """
    # Here and not in ScaleFrom, since draccus hides what an optional config refuses.
    for name in ("tokens", "tokens_per_batch", "hidden_dim"):
        if getattr(scale, name) <= 0:
            raise ValueError(
                f"optimizer.scale_from.{name}={getattr(scale, name)} must be positive; scale_from needs tokens, "
                "tokens_per_batch and hidden_dim"
            )
    if scale.tokens < scale.tokens_per_batch:
        raise ValueError(
            f"optimizer.scale_from.tokens={scale.tokens:g} is below "
            f"optimizer.scale_from.tokens_per_batch={scale.tokens_per_batch:g}; tokens are those of the whole run"
        )
    adam_lr = (
        _ADAM_LR_SCALE
        * scale.tokens**_ADAM_LR_TOKENS_POWER
        * scale.hidden_dim**_ADAM_LR_HIDDEN_POWER
        * math.sqrt(scale.tokens_per_batch)
    )
    lowest, highest = _BETA2_RANGE
    return ScaledHyperparameters(
        learning_rate=min(MUONH_PER_ADAM_LR * adam_lr, MAX_LEARNING_RATE),
        adam_lr=min(adam_lr, MAX_LEARNING_RATE),
        beta2=min(max(_BETA2_AT_UNIT ** (scale.tokens_per_batch / _BETA2_UNIT_TOKENS), lowest), highest),
        epsilon=_EPSILON_SCALE * math.sqrt(scale.tokens / scale.tokens_per_batch),
    )
