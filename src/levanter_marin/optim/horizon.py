# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""Any of Levanter's optimizers with its schedule pinned to a number of steps, registered as `horizon`.

Levanter stretches a schedule over `trainer.num_train_steps`, which under context stages is the end of the stage.
"""

import dataclasses
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import draccus
import optax
from levanter.optim.config import OptimizerConfig


@OptimizerConfig.register_subclass("horizon")
@dataclass(frozen=True)
class HorizonConfig(OptimizerConfig):
    """`{type: horizon, total_steps: 1000, optimizer: {type: adam, ...}}`.

    The fields that Levanter's optimizers share belong to the inner `optimizer`. Updates and state are the inner
    optimizer's own, so that a checkpoint fits a config with and without the wrapper.
    """

    total_steps: int = 0
    """Steps of the schedule: warm-up and decay of the inner optimizer are fractions of it."""
    # A field of type OptimizerConfig would send draccus into endless recursion over its own choices.
    optimizer: dict[str, Any] = field(default_factory=dict)
    """The inner optimizer, as its own section would be."""

    def __post_init__(self):
        if self.total_steps <= 0:
            raise ValueError(f"optimizer.total_steps={self.total_steps} must be positive")
        if "type" not in self.optimizer or self.optimizer["type"] == "horizon":
            raise ValueError("optimizer.optimizer of horizon needs the `type` of another optimizer")
        for shared in dataclasses.fields(OptimizerConfig):
            if getattr(self, shared.name) != shared.default:
                raise ValueError(
                    f"optimizer.{shared.name} has no effect in horizon; set optimizer.optimizer.{shared.name}"
                )
        _ = self.inner  # refuses what the inner optimizer refuses

    @cached_property
    def inner(self) -> OptimizerConfig:
        return draccus.decode(OptimizerConfig, self.optimizer)

    def build(self, num_train_steps: int) -> optax.GradientTransformation:
        """The inner optimizer, built for `total_steps`.

        Raises:
            ValueError: the trainer goes on beyond `total_steps`.
        """
        if num_train_steps > self.total_steps:
            raise ValueError(
                f"optimizer.total_steps={self.total_steps} is below the {num_train_steps} steps of the trainer; "
                f"set it to {num_train_steps} or more"
            )
        return self.inner.build(self.total_steps)
