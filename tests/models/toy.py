# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""A toy of the whole model, its batches, and a Trainer around it."""

import dataclasses
from collections.abc import Callable, Iterable
from pathlib import Path

import haliax as hax
import jax
import jax.numpy as jnp
import jmp
import numpy as np
from haliax import Axis
from levanter.callbacks.watch import WatchConfig
from levanter.checkpoint import CheckpointerConfig
from levanter.layers.attention import AttentionMask
from levanter.models.lm_model import LmExample
from levanter.optim.config import AdamConfig
from levanter.tracker import NoopConfig
from levanter.trainer import Trainer, TrainerConfig

from levanter_marin import axes
from levanter_marin.config import AttentionConfig, MoeConfig, QuantileBalancingConfig, QuantileEstimator
from levanter_marin.models.marin_moe import MarinMoeConfig, MarinMoeLMHeadModel

VOCAB_SIZE = 64
Z_LOSS_WEIGHT = 1e-4


def config(**overrides) -> MarinMoeConfig:
    """Two groups of (local, global) layers and a remainder of one."""
    return MarinMoeConfig(
        **{
            "max_seq_len": 16,
            "hidden_dim": 32,
            "num_layers": 5,
            "global_every": 2,
            "gated_norm_rank": 8,
            # far above the default: every gradient is then well above rounding
            "initializer_std": 0.2,
            "attention": AttentionConfig(num_heads=4, head_dim=8, num_kv_heads=2, global_kv_heads=1, sliding_window=6),
            "moe": MoeConfig(
                num_experts=8, num_experts_per_token=2, latent_dim=16, expert_dim=16, shared_expert_dim=16
            ),
            **overrides,
        }
    )


def with_estimator(model: MarinMoeConfig, estimator: QuantileEstimator) -> MarinMoeConfig:
    return dataclasses.replace(
        model, moe=dataclasses.replace(model.moe, quantile_balancing=QuantileBalancingConfig(estimator, 100))
    )


def Vocab() -> Axis:
    return Axis(axes.VOCAB, VOCAB_SIZE)


def build(model: MarinMoeConfig, seed: int = 0) -> MarinMoeLMHeadModel:
    return model.build(Vocab(), key=jax.random.PRNGKey(seed))


def batch(batch_size: int, seed: int = 0, seq_len: int = 16, padded_rows: int = 0) -> LmExample:
    """Random tokens in packed documents; the last `padded_rows` rows are padding, a few tokens of others too."""
    rng = np.random.default_rng(seed)
    Batch, Pos = Axis(axes.BATCH, batch_size), Axis(axes.POSITION, seq_len)
    segments = np.cumsum(rng.random((batch_size, seq_len)) < 0.15, axis=1)
    if padded_rows:
        segments[-padded_rows:] = -1
        segments[0, -3:] = -1
    weight = np.where(segments >= 0, 1.0, 0.0).astype(np.float32)
    mask = AttentionMask.causal().with_segment_ids(hax.named(jnp.asarray(segments), (Batch, Pos)))
    tokens = hax.named(jnp.asarray(rng.integers(0, VOCAB_SIZE, (batch_size, seq_len))), (Batch, Pos))
    return LmExample(tokens, hax.named(jnp.asarray(weight), (Batch, Pos)), mask)


def loss(model: MarinMoeLMHeadModel, example: LmExample, *, key=None):
    return model.compute_next_token_loss(example, key=key, logsumexp_weight=Z_LOSS_WEIGHT)


def trainer_config(path: Path, **overrides) -> TrainerConfig:
    return TrainerConfig(
        **{
            "id": "toy",
            "mp": jmp.get_policy("f32"),
            "tracker": NoopConfig(),
            "num_train_steps": 6,
            "train_batch_size": 16,
            "log_dir": path / "logs",
            "checkpointer": CheckpointerConfig(base_path=str(path / "checkpoints"), save_interval=None, keep=[]),
            "require_accelerator": False,
            "log_jaxprs": False,
            "log_xla_hlo": False,
            "watch": WatchConfig(watch_targets=[]),
            **overrides,
        }
    )


def optimizer(num_train_steps: int = 6):
    """Adam with everything that must not touch the router bias: decay, clipping, a moving learning rate."""
    return AdamConfig(learning_rate=1e-2, weight_decay=0.1, max_grad_norm=1.0, warmup=2, lr_schedule="linear").build(
        num_train_steps
    )


def train(
    trainer: TrainerConfig,
    model: MarinMoeConfig,
    batches: Iterable[LmExample],
    *,
    stop_after: int | None = None,
    after_step: Callable[[Trainer, LmExample, object], None] | None = None,
    optimizer_transform=None,
):
    """Run Levanter's Trainer on `batches`, from its newest checkpoint if there is one.

    Returns:
        (final state, losses). With `stop_after` it stops after that many steps, having written a checkpoint.
    """
    losses = []
    trainer._validate_and_set_defaults()
    with Trainer(trainer, optimizer_transform or optimizer(trainer.num_train_steps), loss) as running:
        state = running.initial_state(jax.random.PRNGKey(1), model_init=lambda: build(model))
        info = None
        for example in list(batches)[int(state.step) :]:
            example = hax.shard(example, running.compute_axis_mapping)
            info = running.train_step(state, example)
            state = info.state
            losses.append(info.loss)
            if after_step is not None:
                after_step(running, example, state)
            if len(losses) == stop_after:
                break
        running.run_hooks(info, force=True)
    return state, losses
