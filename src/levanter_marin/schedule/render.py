# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""From one config with `context_stages:` to an ordinary Levanter config for each stage.

The configs are rendered from the mapping as read, because draccus does not write every value as it reads it. Each is
complete: `python -m levanter.main.train_lm --config_path STAGE.yaml` trains that stage by hand.
"""

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any

from levanter.data.text.datasets import (
    BlockShuffleConfig,
    DatasetComponent,
    LmDataConfig,
    TextLmDatasetFormat,
)
from levanter.main.train_lm import TrainLmConfig

from levanter_marin.models.marin_moe import MarinMoeConfig
from levanter_marin.optim.config import HyperballConfig
from levanter_marin.optim.horizon import HorizonConfig
from levanter_marin.schedule.stages import Plan, Run, Stage

IN_RUN_EVAL = "eval_{length}"


def run_shape(config: TrainLmConfig, first_seq_len: int) -> Run:
    """What the config says about the run that its stages cut.

    Raises:
        ValueError: in one line, for what stages cannot continue: a schedule of batches or of data weights in the
            config itself, packed components, another `train_seq_len`.
    """
    batch, data = config.trainer.train_batch_size, config.data
    if not isinstance(batch, int) or batch <= 0:
        raise ValueError(f"trainer.train_batch_size={batch} under context_stages must be the one of the first stage")
    if config.train_seq_len not in (None, first_seq_len):
        raise ValueError(
            f"train_seq_len={config.train_seq_len} and the first of context_stages has seq_len={first_seq_len}; "
            "leave train_seq_len out"
        )
    _check_data(data)
    model = config.model
    marin = isinstance(model, MarinMoeConfig)
    return Run(
        num_steps=config.trainer.num_train_steps,
        batch=batch,
        max_seq_len=model.max_seq_len,
        train_weights=dict(data.train_weights),  # pyrefly: ignore[no-matching-overload]
        shuffle=data.shuffle,
        mixture_block_size=data.mixture_block_size,
        qk_mult=model.attention.qk_mult if marin else None,
        capacity_factor=model.moe.dispatch.capacity_factor if marin else None,
        attention_block_size=model.attention.block_size if marin else None,
    )


def _check_data(data: LmDataConfig) -> None:
    if not data.components:
        raise ValueError("data.components is empty; context_stages need a source to read on from")
    if not isinstance(data.train_weights, dict):
        raise ValueError("data.train_weights is a schedule; under context_stages give each stage its train_weights")
    if data.prior_context_phases:
        raise ValueError("data.prior_context_phases follow from context_stages; leave them out")
    for name, component in data.components.items():
        if data.train_weights.get(name, 0) <= 0:
            continue
        if not isinstance(component, DatasetComponent) or not isinstance(component.format, TextLmDatasetFormat):
            raise ValueError(f"data.components.{name} is no plain text, which alone context_stages can read on in")
        if component.pack:
            raise ValueError(
                f"data.components.{name}.pack={component.pack} packs documents anew at every length; under "
                "context_stages set it to false: documents then follow one another, attention kept apart by data."
                "block_cross_document_attention"
            )


def stage_config(raw: Mapping[str, Any], config: TrainLmConfig, plan: Plan, stage: Stage, run_id: str) -> dict:
    """The config of one stage.

    Args:
        raw: the whole config as read, bare type names expanded.
        config: `raw` decoded, without its stages.
    """
    rendered = copy.deepcopy({key: value for key, value in raw.items() if key != "context_stages"})
    rendered["train_seq_len"] = stage.seq_len
    _render_model(rendered, stage)
    _render_data(rendered, plan, stage)
    rendered["optimizer"] = _optimizer(rendered.get("optimizer") or {}, config, plan, stage)
    trainer = rendered.setdefault("trainer", {})
    trainer |= {"id": run_id, "train_batch_size": stage.batch, "num_train_steps": stage.end}
    trainer["tracker"] = [
        {"type": "eval_prefix", "prefix": IN_RUN_EVAL.format(length=stage.seq_len), "tracker": tracker}
        for tracker in trackers(rendered)
    ]
    return rendered


def trackers(raw: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The trackers of a config, with one of `json_lines` among them: the driver reads it."""
    given = (raw.get("trainer") or {}).get("tracker") or []
    given = given if isinstance(given, list) else [given]
    return given if any(one.get("type") == "json_lines" for one in given) else [*given, {"type": "json_lines"}]


def eval_config(rendered: Mapping[str, Any], first: Stage, checkpoint: str, run_id: str, output_dir: str) -> dict:
    """A config of Levanter's `eval_lm`: the checkpoint of a later stage, at the length and batch of the first.

    Args:
        rendered: config of the stage that the checkpoint is from; its qk_mult belongs to the weights.
        run_id: of the evaluation, whose metrics go to `<output_dir>/<run_id>/metrics.jsonl`.
    """
    trainer = copy.deepcopy(rendered["trainer"])
    trainer |= {
        "id": run_id,
        "train_batch_size": first.batch,
        "num_train_steps": 1,
        "tracker": {"type": "json_lines", "output_dir": output_dir},
    }
    data = {key: value for key, value in rendered["data"].items() if key != "prior_context_phases"}
    return {
        "checkpoint_path": checkpoint,
        "max_eval_length": first.seq_len,
        "trainer": trainer,
        "data": data,
        "model": rendered["model"],
    }


def _render_model(rendered: dict, stage: Stage) -> None:
    model = rendered.setdefault("model", {})
    if stage.qk_mult is not None:  # a marin_moe
        model.setdefault("attention", {})["qk_mult"] = stage.qk_mult
        model.setdefault("moe", {}).setdefault("dispatch", {})["capacity_factor"] = stage.capacity_factor


def _render_data(rendered: dict, plan: Plan, stage: Stage) -> None:
    data = rendered.setdefault("data", {})
    data["train_weights"] = dict(stage.train_weights)
    data["shuffle"] = _shuffle(stage)
    if isinstance(stage.shuffle, BlockShuffleConfig) and stage.number > 1:
        data["prior_context_phases"] = [
            {
                "end_step": prior.end,
                "seq_len": prior.seq_len,
                "batch_size": prior.batch,
                "train_weights": [[0, dict(prior.train_weights)]],
                "shuffle": _shuffle(prior),
            }
            for prior in plan.stages[: stage.number - 1]
        ]


def _shuffle(stage: Stage) -> bool | dict[str, Any]:
    return stage.shuffle if isinstance(stage.shuffle, bool) else dataclasses.asdict(stage.shuffle)


def _optimizer(raw: Mapping[str, Any], config: TrainLmConfig, plan: Plan, stage: Stage) -> dict[str, Any]:
    """The optimizer with its schedule over the whole run, and the stage's own fields in it."""
    given = {"type": config.optimizer.get_choice_name(type(config.optimizer)), **raw}
    if isinstance(config.optimizer, HyperballConfig):
        return {"total_steps": plan.num_steps, **given, **stage.optimizer}
    if isinstance(config.optimizer, HorizonConfig):
        return {**given, "optimizer": {**config.optimizer.optimizer, **stage.optimizer}}
    return {"type": "horizon", "total_steps": plan.num_steps, "optimizer": {**given, **stage.optimizer}}
