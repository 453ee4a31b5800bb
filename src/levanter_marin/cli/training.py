# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""Runs Levanter's own `train_lm`, unchanged, and reports where its results are."""

import atexit
import collections
import gc
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
from levanter.checkpoint import CheckpointCandidate, discover_checkpoint_candidates
from levanter.data.loader import DataLoaderIterator
from levanter.main import train_lm
from levanter.main.train_lm import TrainLmConfig
from levanter.schedule import distinct_values
from levanter.tracker import wandb as levanter_wandb
from levanter.tracker.tensorboard import TensorboardConfig
from levanter.tracker.tracker import TrackerConfig
from levanter.tracker.wandb import WandbConfig
from levanter.trainer import TrainerConfig

from levanter_marin.cli.errors import UserError
from levanter_marin.cli.preflight import check_data, check_hf_export, check_mesh, check_sizes, mistake_behind
from levanter_marin.cli.run_config import check_same_weights, write_run_config
from levanter_marin.cli.train_config import load_raw_config, load_train_config
from levanter_marin.models.marin_moe import MarinMoeConfig
from levanter_marin.tracker import JsonLinesConfig


def run(config_path: str, overrides: list[str]) -> int:
    """Trains as `python -m levanter.main.train_lm --config_path CONFIG_PATH OVERRIDES` does.

    Returns:
        0 after a complete run, with its prefetching threads stopped, and for a run that was complete before.

    Raises:
        UserError: for the mistakes that `load_train_config`, the checks of `preflight`, `check_same_weights` and
            `mistake_behind` know.
    """
    config = load_train_config(config_path, overrides)
    check_sizes(config)
    checkpoint = _newest_checkpoint(config.trainer)
    done = 0 if checkpoint is None else checkpoint.step + 1
    if done >= config.trainer.num_train_steps:
        print(f"run {config.trainer.id} has done {done} steps; continue with a larger --trainer.num_train_steps")
        return 0

    check_hf_export(config)
    check_data(config.data)
    _check_model(config, checkpoint)
    raw = load_raw_config(config_path, overrides)
    _write_config(raw, config.trainer, done)  # before, so that a killed run has it
    try:
        train_lm.main(config)
    except Exception as error:
        line = mistake_behind(error)
        if line is None:
            raise
        raise UserError(line) from error
    finally:
        close_data_loaders()
        _write_config(raw, config.trainer, done)  # and after, since upstream names a run that has no id
    _tear_down_wandb(config.trainer)
    if jax.process_index() == 0:
        print("\n".join(_report(config.trainer)), flush=True)
    return 0


def _write_config(raw: Mapping[str, Any], trainer: TrainerConfig, done: int) -> None:
    if trainer.id is not None:
        write_run_config(raw, trainer.checkpointer.expanded_path(trainer.id), done)


def _check_model(config: TrainLmConfig, checkpoint: CheckpointCandidate | None) -> None:
    """Compares the model with the checkpoint to continue and with the mesh, where this process has all devices.

    More processes have to find each other before JAX is used at all; the model then refuses the mesh when its first
    step is traced.
    """
    trainer = config.trainer
    if trainer.distributed._is_distributed():
        return
    trainer._initialize_jax_config()
    if checkpoint is not None:
        check_same_weights(config.model, checkpoint.path)
    if not isinstance(config.model, MarinMoeConfig):
        return
    for batch_size in distinct_values(trainer.train_batch_size):
        check_mesh(
            trainer.mesh, config.model, batch_size, num_devices=jax.device_count(), num_slices=trainer.num_slices
        )


def close_data_loaders() -> None:
    """Stops the threads that prefetch batches.

    Upstream leaves them to the garbage collector; one that still runs while the interpreter shuts down can abort it
    (exit code 134 or 139) after a complete run.
    """
    for candidate in gc.get_objects():
        if issubclass(type(candidate), DataLoaderIterator):
            candidate.close()


def _newest_checkpoint(trainer: TrainerConfig) -> CheckpointCandidate | None:
    """The checkpoint from which a run with this id would continue."""
    if trainer.id is None or trainer.load_checkpoint is False:
        return None
    checkpoints = discover_checkpoint_candidates(*trainer.checkpoint_search_paths(trainer.id))
    return checkpoints[-1] if checkpoints else None


def _trackers(trainer: TrainerConfig) -> Sequence[TrackerConfig]:
    return trainer.tracker if isinstance(trainer.tracker, Sequence) else (trainer.tracker,)


def _tear_down_wandb(trainer: TrainerConfig) -> None:
    """Does now what upstream leaves to an exit handler, when Python 3.12 starts no more threads."""
    for tracker in _trackers(trainer):
        if isinstance(tracker, WandbConfig):
            atexit.unregister(levanter_wandb._teardown_wandb_service_bounded)
            levanter_wandb._teardown_wandb_service_bounded(tracker.service_teardown_timeout)


def _report(trainer: TrainerConfig) -> Iterator[str]:
    run_id = trainer.id
    roots = [trainer.checkpointer.expanded_path(run_id), trainer.checkpointer.expanded_temporary_path(run_id)]
    checkpoints = discover_checkpoint_candidates(*[root for root in roots if root is not None])
    yield f"checkpoint  {checkpoints[-1].path if checkpoints else 'none'}"
    for tracker in _trackers(trainer):
        if isinstance(tracker, JsonLinesConfig):
            path = tracker.path(run_id)
            yield f"metrics     {path}"
            with path.open(encoding="utf-8") as records:
                last = json.loads(collections.deque(records, maxlen=1)[0]).get("summary", {})
            losses = [f"{name} {last[name]:.4f}" for name in ("train/loss", "eval/loss") if name in last]
            if losses:
                yield f"last        {', '.join(losses)}, {last.get('global_step', -1) + 1} steps done"
        elif isinstance(tracker, TensorboardConfig):
            yield f"metrics     {os.path.join(tracker.logdir, run_id)} (tensorboard)"
        elif isinstance(tracker, WandbConfig):
            yield f"metrics     W&B project {tracker.project}, run {run_id}; local files under wandb/"
    for log in sorted(trainer.log_dir.glob(f"{run_id}*.log")):
        yield f"log         {log}"
    if checkpoints:
        yield f'text        levanter-marin generate {checkpoints[-1].path} "def main("'
    yield f"run id      {run_id} (continue with --trainer.id {run_id} and a larger --trainer.num_train_steps)"
