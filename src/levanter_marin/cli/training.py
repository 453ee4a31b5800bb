# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""Runs Levanter's own `train_lm`, unchanged, and reports where its results are."""

import collections
import gc
import json
import os
from collections.abc import Iterator

import jax
from levanter.checkpoint import discover_latest_checkpoint
from levanter.data.loader import DataLoaderIterator
from levanter.main import train_lm
from levanter.tracker.tensorboard import TensorboardConfig
from levanter.tracker.wandb import WandbConfig
from levanter.trainer import TrainerConfig

from levanter_marin.cli.errors import UserError
from levanter_marin.cli.preflight import check_data, mistake_behind
from levanter_marin.cli.train_config import load_train_config
from levanter_marin.tracker import JsonLinesConfig


def run(config_path: str, overrides: list[str]) -> int:
    """Trains as `python -m levanter.main.train_lm --config_path CONFIG_PATH OVERRIDES` does.

    Returns:
        0 after a complete run, with its prefetching threads stopped.

    Raises:
        UserError: for the mistakes that `load_train_config`, `check_data` and `mistake_behind` know.
    """
    config = load_train_config(config_path, overrides)
    check_data(config.data)
    try:
        train_lm.main(config)
    except Exception as error:
        line = mistake_behind(error)
        if line is None:
            raise
        raise UserError(line) from error
    finally:
        close_data_loaders()
    if jax.process_index() == 0:
        print("\n".join(_report(config.trainer)), flush=True)
    return 0


def close_data_loaders() -> None:
    """Stops the threads that prefetch batches.

    Upstream leaves them to the garbage collector; one that still runs while the interpreter shuts down can abort it
    (exit code 134 or 139) after a complete run.
    """
    for candidate in gc.get_objects():
        if issubclass(type(candidate), DataLoaderIterator):
            candidate.close()


def _report(trainer: TrainerConfig) -> Iterator[str]:
    run_id = trainer.id
    checkpoint_roots = [
        trainer.checkpointer.expanded_path(run_id),
        trainer.checkpointer.expanded_temporary_path(run_id),
    ]
    checkpoint = discover_latest_checkpoint(*[root for root in checkpoint_roots if root is not None])
    yield f"checkpoint  {checkpoint or 'none'}"
    trackers = trainer.tracker if isinstance(trainer.tracker, tuple | list) else (trainer.tracker,)
    for tracker in trackers:
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
    yield f"run id      {run_id} (continue with --trainer.id {run_id} and a larger --trainer.num_train_steps)"
