# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""Training configs for plans, Levanter's train step traced on a mesh that does not exist, FLOPs of a jaxpr."""

import dataclasses
import math

import equinox as eqx
import haliax as hax
import jax
import jmp
from jax.extend.core import Jaxpr, jaxprs_in_params
from jax.sharding import AbstractMesh
from levanter.main.train_lm import TrainLmConfig
from levanter.optim.config import AdamConfig
from levanter.tracker import NoopConfig
from levanter.trainer import Trainer, TrainerConfig
from levanter.utils.mesh import MeshConfig

from levanter_marin.analysis.train_state import (
    EXPERT_PARALLEL_MAPPINGS,
    abstract_batch,
    abstract_state,
    with_shardings,
)
from levanter_marin.config import AttentionConfig, MoeConfig
from levanter_marin.models.marin_moe import MarinMoeConfig

VOCAB_SIZE = 64

EXPERT_PARALLEL = MeshConfig(**EXPERT_PARALLEL_MAPPINGS)


def toy_model(**overrides) -> MarinMoeConfig:
    """One group of a local and a global layer."""
    return MarinMoeConfig(
        **{
            "max_seq_len": 16,
            "hidden_dim": 32,
            "num_layers": 2,
            "global_every": 2,
            "gated_norm_rank": 8,
            "attention": AttentionConfig(num_heads=4, head_dim=8, num_kv_heads=2, global_kv_heads=1, sliding_window=6),
            "moe": MoeConfig(
                num_experts=8, num_experts_per_token=2, latent_dim=16, expert_dim=16, shared_expert_dim=16
            ),
            **overrides,
        }
    )


def train_config(model: MarinMoeConfig, mesh: MeshConfig, batch_size: int, **overrides) -> TrainLmConfig:
    trainer = TrainerConfig(
        **{
            "id": "toy",
            "mp": jmp.get_policy("f32"),
            "tracker": NoopConfig(),
            "train_batch_size": batch_size,
            "num_train_steps": 6,
            "mesh": mesh,
            "require_accelerator": False,
            **overrides,
        }
    )
    return TrainLmConfig(trainer=trainer, model=model, optimizer=AdamConfig(max_grad_norm=None), z_loss_weight=1e-4)


def loss(model, example, *, key=None):
    return model.compute_next_token_loss(example, key=key, logsumexp_weight=1e-4)


def trainer_of(config: TrainLmConfig) -> Trainer:
    optimizer = config.optimizer.build(config.trainer.num_train_steps)
    return Trainer(config.trainer, optimizer, loss, add_default_hooks=False)


def is_struct(leaf) -> bool:
    return isinstance(leaf, jax.ShapeDtypeStruct)


def trace_train_step(config: TrainLmConfig, vocab_size: int, mesh: AbstractMesh) -> jax.stages.Traced:
    """Levanter's own `Trainer._train_step`: loss, gradients, update, under the mappings of the config."""
    trainer = trainer_of(config)
    state = abstract_state(config, vocab_size, mesh)
    batch = abstract_batch(config.trainer.train_batch_size, config.train_seq_len or config.model.max_seq_len)
    batch = with_shardings(batch, config.trainer.compute_axis_mapping, mesh)
    arrays, static = eqx.partition((state, batch), is_struct)

    def step(arrays):
        state, batch = eqx.combine(arrays, static)
        result = trainer._train_step(state, (batch,), {}, _no_hooks=True)
        return eqx.filter((result.loss, result.new_state), eqx.is_array)

    with jax.sharding.use_abstract_mesh(mesh), hax.axis_mapping(config.trainer.parameter_axis_mapping):
        return jax.jit(step, donate_argnums=0).trace(arrays)


def dot_flops(jaxpr: Jaxpr) -> int:
    """Two FLOPs for every multiplication in a dot product; loops count as often as they run."""
    total = 0
    for equation in jaxpr.eqns:
        inner = [dot_flops(inner) for inner in jaxprs_in_params(equation.params)]
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            shape = equation.invars[0].aval.shape
            total += 2 * equation.outvars[0].aval.size * math.prod(shape[i] for i in contracted)
        elif equation.primitive.name == "scan":
            total += equation.params["length"] * sum(inner)
        elif equation.primitive.name == "while":
            assert not any(inner), "a loop without a known length computes dot products"
        else:
            total += max(inner, default=0) if equation.primitive.name == "cond" else sum(inner)
    return total


def replace_moe(model: MarinMoeConfig, **overrides) -> MarinMoeConfig:
    return dataclasses.replace(model, moe=dataclasses.replace(model.moe, **overrides))
