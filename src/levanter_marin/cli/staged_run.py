# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""What `levanter-marin stages` does, in terms of `levanter_marin.schedule`."""

import dataclasses
import importlib
import importlib.util
import json
import os
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import draccus
from draccus import cfgparsing
from draccus.utils import DraccusException
from levanter.checkpoint import discover_checkpoint_candidates
from levanter.main.train_lm import TrainLmConfig

from levanter_marin.cli import misspellings, stage_tables
from levanter_marin.cli.errors import UserError
from levanter_marin.cli.preflight import check_data
from levanter_marin.cli.stage_evaluation import Evaluations
from levanter_marin.cli.train_config import STAGES_KEY, decode_train_config, load_raw_config
from levanter_marin.schedule.driver import RunInProgressError, children_of_run, drive
from levanter_marin.schedule.metrics import read_steps, summarize
from levanter_marin.schedule.reads import check_corpus
from levanter_marin.schedule.record import check_against_record, write_record
from levanter_marin.schedule.render import run_shape, stage_config, trackers
from levanter_marin.schedule.stages import Plan, Stage, StageConfig, check_batches, plan_stages
from levanter_marin.tracker import JsonLinesConfig


@dataclass(frozen=True)
class StagedRun:
    """A config with its stages, checked; nothing on disk or on a device has been looked at."""

    config_path: str
    raw: dict[str, Any]
    config: TrainLmConfig
    """The config without its stages."""
    plan: Plan
    run_id: str

    @cached_property
    def rendered(self) -> dict[int, dict[str, Any]]:
        """The config of every stage, by stage number."""
        return {s.number: stage_config(self.raw, self.config, self.plan, s, self.run_id) for s in self.plan.stages}

    @property
    def folder(self) -> Path:
        """Where the configs of the stages and what the driver keeps lie."""
        return self.config.trainer.log_dir / self.run_id / "stages"

    @property
    def checkpoints(self) -> str:
        return self.config.trainer.checkpointer.expanded_path(self.run_id)

    @property
    def metrics(self) -> Path:
        json_lines = next(one for one in trackers(self.raw) if one["type"] == "json_lines")
        fields = {key: value for key, value in json_lines.items() if key != "type"}
        return draccus.decode(JsonLinesConfig, fields).path(self.run_id)

    @property
    def data_settings(self) -> dict[str, Any]:
        """What decides about the order of data beside the stages."""
        return {
            "trainer.seed": self.config.trainer.seed,
            "data_seed": self.config.data_seed,
            "data.mixture_block_size": self.config.data.mixture_block_size,
            "data.components": list(self.config.data.components),
            "data.tokenizer": self.config.data.tokenizer,
        }

    def steps_done(self) -> int:
        """Steps in the newest committed checkpoint, or in the one that trainer.initialize_from names; else 0."""
        paths = self.config.trainer.checkpoint_search_paths(self.run_id)
        found = discover_checkpoint_candidates(*paths)
        if not found and self.config.trainer.initialize_from is not None:
            found = discover_checkpoint_candidates(self.config.trainer.initialize_from)
        return found[-1].step + 1 if found else 0


def load(config_path: str, overrides: list[str]) -> StagedRun:
    """Reads a config and resolves its stages.

    Raises:
        UserError: one line for whatever the config has wrong by itself.
    """
    raw = load_raw_config(config_path, overrides)
    if STAGES_KEY not in raw:
        raise UserError(f"{config_path} has no {STAGES_KEY}; a run of one length is `levanter-marin train`")
    described = raw.pop(STAGES_KEY)
    if described is None:
        raise UserError(f"{config_path}: {STAGES_KEY} is empty; list a stage for each sequence length")
    try:
        stages = draccus.decode(list[StageConfig], described)
    except DraccusException as error:
        line = misspellings.explain(list[StageConfig], described, (STAGES_KEY,)) or f"{STAGES_KEY}: {error}"
        raise UserError(f"{config_path}: {line}") from error
    config = decode_train_config(raw, config_path)
    with _refusals_of(config_path):
        first = stages[0].seq_len if stages else 0
        plan = plan_stages(stages, run_shape(config, first))
    run = StagedRun(config_path, raw, config, plan, config.trainer.id or Path(config_path).stem)
    for number, rendered in run.rendered.items():
        decode_train_config(rendered, f"{config_path}, stage {number}")
    return run


def show(run: StagedRun, as_json: bool) -> int:
    if as_json:
        print(json.dumps(stage_tables.plan_as_dict(run.plan), indent=2))
    else:
        stage_tables.print_plan(run.plan)
    return 0


def render(run: StagedRun, folder: Path) -> int:
    """Writes the configs of the stages and prints the command of each."""
    show(run, as_json=False)
    print("One command a stage, the same on every host, each when the one before is complete:")
    for path in write_configs(run, folder).values():
        print(f"  levanter-marin train {path}")
    return 0


def write_configs(run: StagedRun, folder: Path) -> dict[int, Path]:
    """`stage_<number>.yaml` in `folder` for every stage."""
    folder.mkdir(parents=True, exist_ok=True)
    return {number: write_yaml(folder / f"stage_{number}.yaml", rendered) for number, rendered in run.rendered.items()}


def write_yaml(path: Path, content: dict[str, Any]) -> Path:
    """Writes beside, then renames."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    with partial.open("w", encoding="utf-8") as file:
        cfgparsing.save_config(content, file, sort_keys=False)
    partial.replace(path)
    return path


def check(run: StagedRun) -> int:
    """Checks tokenizer, corpus and devices, building the caches of tokens that are missing.

    Raises:
        UserError: one line for what does not suffice.
    """
    first = decode_train_config(run.rendered[1], run.config_path)
    check_data(first.data)
    with _refusals_of(run.config_path):
        check_batches(run.plan, first.trainer.data_axis_size, _microbatch(first))
    caches = first.data.build_caches("train")
    tokenizer = first.data.the_tokenizer
    for name, cache in caches.items():
        metadata = cache.ledger.metadata.preprocessor_metadata or {}
        for field, ours in (("tokenizer", tokenizer.name_or_path), ("vocab_size", tokenizer.vocab_size)):
            theirs = metadata.get(field, ours)
            if theirs != ours and not (field == "tokenizer" and os.path.abspath(theirs) == os.path.abspath(ours)):
                raise UserError(
                    f"the cache of {name} was made with {field} {theirs}, data.tokenizer={first.data.tokenizer} has "
                    f"{ours}; set data.tokenizer back, or another data.cache_dir"
                )
    counts = {name: caches[name].flat_field_length("input_ids") for name in first.data.components if name in caches}
    with _refusals_of(run.config_path):
        found = check_corpus(run.plan, counts, first.data.mixture_block_size)
    stage_tables.print_reads(run.plan, found, counts)
    return 0


def _microbatch(config: TrainLmConfig) -> int | None:
    parallelism = config.trainer.per_device_parallelism
    return parallelism * config.trainer.data_axis_size if parallelism > 0 else None


def train(run: StagedRun, argv: Sequence[str], as_json: bool) -> int:
    """Runs every stage that is left, evaluates its checkpoints, and prints the closing table.

    Args:
        argv: of this command, for the check that runs in a process of its own.
    """
    _check_checkpoint_fields(run)
    done = run.steps_done()
    with _refusals_of(run.config_path):
        check_against_record(run.checkpoints, run.plan, run.data_settings, done)
    try:
        with children_of_run(run.folder) as children:
            stage_tables.print_plan(run.plan)
            if done < run.plan.num_steps:
                code = children.run(_command("stages", *argv, "--check"))
                if code:
                    return code if code > 0 else 128 - code
            paths = write_configs(run, run.folder)
            write_record(run.checkpoints, run.plan, run.data_settings)
            evaluations = Evaluations(run.folder, run.checkpoints, run.metrics, run.run_id, run.plan, run.rendered)
            code = drive(
                run.plan,
                {number: _command("train", str(path)) for number, path in paths.items()},
                children,
                run.steps_done,
                announce=lambda stage, steps: _announce(run.plan, stage, steps),
                at_border=lambda stage: evaluations.catch_up(stage, children),
            )
    except RunInProgressError as error:
        raise UserError(f"run {run.run_id} is in progress in process {error}; wait for it or end it") from error
    _report(run, as_json)
    if code == 0 and evaluations.failed:
        print(f"evaluation failed at steps {evaluations.failed}; the same command tries again")
        return 1
    return code


def _report(run: StagedRun, as_json: bool) -> None:
    done = run.steps_done()
    steps = read_steps(run.metrics)
    summaries = summarize(run.plan, steps, done)
    if as_json:
        print(json.dumps([dataclasses.asdict(summary) for summary in summaries]))
    else:
        if summaries:
            stage_tables.print_summaries(run.plan, summaries)
        print(f"metrics     {run.metrics}")
        if importlib.util.find_spec("matplotlib") is None:
            print("picture     none; pip install matplotlib")
        elif steps:
            picture = run.folder / "stages.png"
            # Imported only now: matplotlib is optional.
            module = importlib.import_module("levanter_marin.cli.stage_picture")
            module.draw(picture, f"{run.run_id}: {done} steps", run.plan, steps)
            print(f"picture     {picture}")
        print(f"configs     {run.folder}")
    if done < run.plan.num_steps:
        print(f"stopped after {done} of {run.plan.num_steps} steps; the same command continues", file=sys.stderr)


def _announce(plan: Plan, stage: Stage, done: int) -> None:
    print(
        f"\n=== stage {stage.number} of {len(plan.stages)}: {stage.batch} x {stage.seq_len} tokens a step, "
        f"steps {done} to {stage.end} of {plan.num_steps} ===",
        flush=True,
    )


def _check_checkpoint_fields(run: StagedRun) -> None:
    """Refuses paths without a checkpoint, from which a run would silently begin anew."""
    trainer = run.config.trainer
    if trainer.load_checkpoint is False:
        raise UserError("trainer.load_checkpoint: false would begin every stage anew; leave it out")
    if trainer.load_checkpoint_path is not None:
        raise UserError(
            f"trainer.load_checkpoint_path={trainer.load_checkpoint_path}: stages continue from {run.checkpoints}; "
            "set trainer.checkpointer.base_path and trainer.id, or trainer.initialize_from for that of another run"
        )
    paths = {
        "trainer.initialize_from": trainer.initialize_from,
        "initialize_from_checkpoint_path": run.config.initialize_from_checkpoint_path,
        "initialize_model_from_checkpoint_path": run.config.initialize_model_from_checkpoint_path,
    }
    if trainer.load_checkpoint is True:
        paths["trainer.load_checkpoint: true, but checkpointer.base_path/id"] = run.checkpoints
    for name, path in paths.items():
        if path is not None and not discover_checkpoint_candidates(path):
            raise UserError(f"{name}={path} holds no complete checkpoint (step-N with metadata.json)")


def _command(name: str, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "levanter_marin", name, *arguments]


@contextmanager
def _refusals_of(config_path: str) -> Generator[None]:
    try:
        yield
    except ValueError as error:
        raise UserError(f"{config_path}: {error}") from error
