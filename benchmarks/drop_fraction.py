# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""Dropped assignments of a training run, step by step, under the rules of both all-to-alls, on the same routings.

The model trains on one device, where nothing is dropped. Each row of the batch stands for an expert shard: what its
tokens chose at a step, in every layer, is all that the capacity rules depend on. So the drop fractions are exact for
these routings; a run that really drops would route a little differently afterwards.
"""

import argparse
import dataclasses
import functools
from pathlib import Path
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from haliax import Axis
from levanter.data.loader import stack_tree
from levanter.main.train_lm import TrainLmConfig
from levanter.models.lm_model import LmExample
from levanter.schedule import BatchSchedule
from levanter.trainer_state import TrainerState

from common import machine, write_json
from levanter_marin import axes
from levanter_marin.analysis.plots import Panel, draw_panels
from levanter_marin.cli.train_config import load_train_config
from levanter_marin.config import QuantileBalancingConfig, QuantileEstimator
from levanter_marin.moe.dispatch.padded_all_to_all import block_rows
from levanter_marin.moe.dispatch.plan import ExchangeShape, accepted_group_sizes

CAPACITY_FACTOR = 1.15
RUNS = {"with quantile balancing": QuantileEstimator.histogram, "without": QuantileEstimator.none}
TRANSPORTS = ("ragged_all_to_all", "padded_all_to_all")


def batches(config: TrainLmConfig, num_steps: int) -> list[LmExample]:
    """The first batches of `levanter-marin train` with this config."""
    size = config.trainer.train_batch_size
    Pos = config.model.max_Pos.resize(config.train_seq_len)
    data_key = jax.random.split(jax.random.PRNGKey(config.trainer.seed), 4)[0]
    dataset = config.data.train_set(Pos, BatchSchedule(size), key=data_key).as_sync_dataset()
    examples = dataset.get_batch(range(num_steps * size))
    return [stack_tree(axes.BATCH, examples[i : i + size]) for i in range(0, len(examples), size)]


def drop_fractions(loads: np.ndarray, config: TrainLmConfig) -> dict[str, np.ndarray]:
    """Per layer, of the assignments that each expert got from each shard: loads [layers, shards, experts]."""
    moe, (_, shards, experts) = config.model.moe, loads.shape
    sizes = {"tokens": config.train_seq_len, "num_experts_per_token": moe.num_experts_per_token, "shards": shards}
    shape = ExchangeShape.create(
        num_experts=experts, expert_chunks=moe.dispatch.expert_chunks, capacity_factor=CAPACITY_FACTOR, **sizes
    )
    accepted = jax.vmap(lambda sizes: accepted_group_sizes(sizes, shape))(jnp.asarray(loads, jnp.int32))
    rows = block_rows(local_experts=shape.local_experts, capacity_factor=CAPACITY_FACTOR, **sizes)
    per_pair = loads.reshape(*loads.shape[:2], shards, shape.local_experts).sum(axis=3)
    total = loads.sum(axis=(1, 2))
    return {
        "ragged_all_to_all": 1 - np.asarray(accepted).sum(axis=(1, 2)) / total,
        "padded_all_to_all": 1 - np.minimum(per_pair, rows).sum(axis=(1, 2)) / total,
    }


def train(config: TrainLmConfig, estimator: QuantileEstimator, num_steps: int) -> dict[str, Any]:
    """Losses, and drop fractions by transport [steps, layers]."""
    balancing = QuantileBalancingConfig(estimator)
    moe = dataclasses.replace(config.model.moe, quantile_balancing=balancing)
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, moe=moe))
    Vocab = Axis(axes.VOCAB, len(config.data.the_tokenizer))
    key = jax.random.PRNGKey(config.trainer.seed)
    model = eqx.filter_jit(config.model.build)(Vocab, key=jax.random.split(key, 4)[2])
    state = TrainerState.init(config.optimizer.build(num_steps), model, key=key)

    @eqx.filter_jit
    def loads_of_rows(model, example):
        def of_row(row):
            return model.activations_and_statistics(row.tokens, row.attn_mask)[1].expert_load.array

        size = example.tokens.axis_size(axes.BATCH)
        return jnp.stack([of_row(row_of(example, i)) for i in range(size)], axis=1)

    @functools.partial(eqx.filter_jit, donate="all-except-first")
    def step(example, state):
        def loss(model):
            value, _ = model.compute_next_token_loss(example, key=key, logsumexp_weight=config.z_loss_weight)
            return value.scalar()

        value, gradient = eqx.filter_value_and_grad(loss)(state.model)
        return value, state.take_step(gradient, key=key)[0]

    losses, fractions = [], {name: [] for name in TRANSPORTS}
    for number, example in enumerate(batches(config, num_steps)):
        for name, of_layers in drop_fractions(np.asarray(loads_of_rows(state.model, example)), config).items():
            fractions[name].append(of_layers.tolist())
        value, state = step(example, state)
        losses.append(float(value))
        if number % 10 == 9:
            means = {name: f"{np.mean(values[-1]):.2e}" for name, values in fractions.items()}
            print(f"step {number + 1}: loss {losses[-1]:.4f}, dropped {means}", flush=True)
    return {"losses": losses, "drop_fractions": fractions}


def row_of(example: LmExample, i: int) -> LmExample:
    """One row of a batch, with its batch axis left out."""
    return hax.tree_util.tree_map(lambda a: a[axes.BATCH, i] if a.has_axis(axes.BATCH) else a, example)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", help="such as config/marin_moe_nano.yaml; other options go to it: --data.FIELD ...")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--output", type=Path, required=True, help="JSON report")
    parser.add_argument("--picture", type=Path, required=True, help="PNG")
    options, overrides = parser.parse_known_args()
    config = load_train_config(options.config, overrides)
    results = {}
    for name, estimator in RUNS.items():
        print(name, flush=True)
        results[name] = train(config, estimator, options.steps)
        shape = {"steps": options.steps, "shards": config.trainer.train_batch_size, "capacity_factor": CAPACITY_FACTOR}
        write_json(options.output, {"machine": machine(), "config": options.config, **shape, "runs": results})
    for name, result in results.items():
        for transport, values in result["drop_fractions"].items():
            last = np.asarray(values)[-1]
            print(f"{name}, {transport}: step {options.steps} mean {last.mean():.2e}, worst layer {last.max():.2e}")
    panels = [
        Panel(
            f"{transport}, %",
            {
                name: [(i + 1, 100 * float(np.mean(v))) for i, v in enumerate(result["drop_fractions"][transport])]
                for name, result in results.items()
            },
        )
        for transport in TRANSPORTS
    ]
    setting = f"{config.trainer.train_batch_size} shards, capacity {CAPACITY_FACTOR}"
    title = f"dropped assignments, mean of layers: {Path(options.config).stem}, {setting}"
    draw_panels(options.picture, title, "step", panels)


if __name__ == "__main__":
    main()
