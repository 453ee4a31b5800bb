# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""The `context_stages:` of a config, checked as a whole and resolved to steps, batches and tokens.

Nothing here reads a file or a device. Sequence lengths grow from stage to stage; the tokens of a step stay constant
unless a stage sets its batch, so learning rate, betas and schedule need no change (Marin 535B: 4096 -> 16k -> 65k).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from levanter.data.text.datasets import BlockShuffleConfig

# Enum members are lower case because draccus decodes an enum by its member name.

QK_MULT_GROWTH = 0.1  # of the factor on queries, per e-fold of the sequence length


class QkMult(StrEnum):
    """`rule`: the model's qk_mult times 0.1 ln(seq_len / seq_len of the first stage) + 1; `unchanged`: the model's."""

    rule = "rule"
    unchanged = "unchanged"


class Capacity(StrEnum):
    """`unchanged`: the model's capacity_factor; `dropless`: no limit, its null."""

    unchanged = "unchanged"
    dropless = "dropless"


@dataclass(frozen=True)
class Until:
    """Where a stage ends; exactly one of the three."""

    step: int | None = None
    """Optimizer steps done, from the start of the run."""
    fraction: float | None = None
    """Of trainer.num_train_steps."""
    tokens: float | None = None
    """Tokens seen, from the start of the run."""


@dataclass(frozen=True)
class StageConfig:
    """One entry of `context_stages:`."""

    seq_len: int = 0
    until: Until = Until()
    """Left out in the last stage, which ends with the run."""
    batch: int | None = None
    """Sequences a step; None keeps the tokens of a step of the first stage, whose own is trainer.train_batch_size."""
    qk_mult: float | QkMult = QkMult.rule
    capacity_factor: float | Capacity = Capacity.unchanged
    train_weights: dict[str, float] | None = None
    """None is data.train_weights."""
    optimizer: dict[str, Any] = field(default_factory=dict)
    """Fields of the optimizer to change in this stage alone, `learning_rate` for one. The schedule goes on."""


@dataclass(frozen=True)
class Run:
    """What the rest of the config says about the run that is cut into stages."""

    num_steps: int
    batch: int
    """Sequences a step in the first stage."""
    max_seq_len: int
    train_weights: Mapping[str, float]
    shuffle: bool | BlockShuffleConfig
    """A block shuffle counts in sequences of the first stage."""
    mixture_block_size: int
    """Sequences, in every stage."""
    qk_mult: float | None = None
    """None: another model than marin_moe, without qk_mult and capacity_factor."""
    capacity_factor: float | None = None
    """None: dropless."""
    attention_block_size: int | None = None


@dataclass(frozen=True)
class Stage:
    """A stage resolved: steps [start, end) at `batch` sequences of `seq_len` tokens."""

    number: int
    seq_len: int
    start: int
    end: int
    batch: int
    qk_mult: float | None
    capacity_factor: float | None
    train_weights: dict[str, float]
    shuffle: bool | BlockShuffleConfig
    """A block shuffle counts in sequences of this stage: the same tokens a block in every stage."""
    optimizer: dict[str, Any]

    @property
    def steps(self) -> int:
        return self.end - self.start

    @property
    def tokens_per_step(self) -> int:
        return self.batch * self.seq_len

    @property
    def tokens(self) -> int:
        return self.steps * self.tokens_per_step


@dataclass(frozen=True)
class Plan:
    """All stages of a run and what was rounded to get them."""

    stages: tuple[Stage, ...]
    notes: tuple[str, ...]

    @property
    def num_steps(self) -> int:
        return self.stages[-1].end

    @property
    def tokens(self) -> int:
        return sum(stage.tokens for stage in self.stages)

    def stage_after(self, steps_done: int) -> Stage | None:
        """The stage of the next step; None when the run is complete."""
        return next((stage for stage in self.stages if steps_done < stage.end), None)


def qk_mult_at(base: float, seq_len: int, first_seq_len: int) -> float:
    """The factor on queries at a longer context: base * (0.1 ln(seq_len / first_seq_len) + 1)."""
    return base * (QK_MULT_GROWTH * math.log(seq_len / first_seq_len) + 1)


def plan_stages(configs: Sequence[StageConfig], run: Run) -> Plan:
    """Resolves and checks the stages of a run.

    A border moves up to the next step at which both neighbours have read whole mixture blocks, which the plan's notes
    say.

    Raises:
        ValueError: one line with the two numbers that disagree and what to set instead.
    """
    if len(configs) < 2:
        raise ValueError(
            f"context_stages has {len(configs)} of the 2 stages that it takes; one length alone is "
            "`train_seq_len` of an ordinary run with `levanter-marin train`"
        )
    _check_lengths(configs, run)
    batches = _batches(configs, run)
    weights = [_weights(number, config, run) for number, config in enumerate(configs, 1)]
    shuffles = _shuffles(configs, batches, weights, run)
    ends, notes = _ends(configs, batches, run)
    stages = tuple(
        Stage(
            number=i + 1,
            seq_len=config.seq_len,
            start=ends[i - 1] if i else 0,
            end=ends[i],
            batch=batches[i],
            qk_mult=_qk_mult(i + 1, config, configs[0].seq_len, run),
            capacity_factor=_capacity_factor(i + 1, config, run),
            train_weights=weights[i],
            shuffle=shuffles[i],
            optimizer=dict(config.optimizer),
        )
        for i, config in enumerate(configs)
    )
    return Plan(stages, tuple(notes))


def check_batches(plan: Plan, data_shards: int, microbatch: int | None) -> None:
    """Refuses a stage whose batch the mesh cannot share out.

    Args:
        data_shards: product of the mesh axes over which the batch is spread.
        microbatch: sequences of a forward pass on all devices, where the config fixes it.

    Raises:
        ValueError: as `plan_stages`.
    """
    for stage in plan.stages:
        if stage.batch % data_shards:
            raise ValueError(
                f"context_stages: stage {stage.number} has a batch of {stage.batch} for {data_shards} data shards of "
                f"the mesh; keep the batch a multiple, or make the data axis of trainer.mesh.axes smaller"
            )
        if microbatch is not None and stage.batch % microbatch:
            raise ValueError(
                f"context_stages: stage {stage.number} has a batch of {stage.batch}, no multiple of the {microbatch} "
                "sequences that trainer.per_device_parallelism gives all devices; lower it"
            )


def _check_lengths(configs: Sequence[StageConfig], run: Run) -> None:
    previous = 0
    for number, config in enumerate(configs, 1):
        length = config.seq_len
        if length <= 0:
            raise ValueError(f"context_stages: stage {number} has seq_len={length}; set it to 1 or more")
        if length <= previous:
            raise ValueError(
                f"context_stages: stage {number} has seq_len={length} after {previous}; lengths must grow, "
                "changes within one length belong to the config itself"
            )
        if run.attention_block_size is not None and length % run.attention_block_size:
            raise ValueError(
                f"context_stages: stage {number} has seq_len={length}, no multiple of "
                f"model.attention.block_size={run.attention_block_size}; set it to null"
            )
        previous = length
    if previous > run.max_seq_len:
        raise ValueError(
            f"context_stages: the last stage has seq_len={previous}, above model.max_seq_len={run.max_seq_len}; "
            f"set model.max_seq_len to {previous}"
        )


def _batches(configs: Sequence[StageConfig], run: Run) -> list[int]:
    first = run.batch if configs[0].batch is None else configs[0].batch
    tokens = first * configs[0].seq_len
    batches = []
    for number, config in enumerate(configs, 1):
        if config.batch is None and tokens % config.seq_len:
            raise ValueError(
                f"context_stages: stage {number} has seq_len={config.seq_len}, which does not divide the "
                f"{tokens} tokens of a step ({first} x {configs[0].seq_len}); change trainer.train_batch_size or "
                "give the stage a `batch`"
            )
        batch = tokens // config.seq_len if config.batch is None else config.batch
        if batch <= 0:
            raise ValueError(f"context_stages: stage {number} has batch={batch}; set it to 1 or more")
        batches.append(batch)
    return batches


def _weights(number: int, config: StageConfig, run: Run) -> dict[str, float]:
    """Normalised, positive for every source of the run: another set of sources would change all shuffles."""
    weights = dict(run.train_weights if config.train_weights is None else config.train_weights)
    positive = {name for name, weight in weights.items() if weight > 0}
    expected = {name for name, weight in run.train_weights.items() if weight > 0}
    if positive != expected:
        raise ValueError(
            f"context_stages: stage {number} draws from {', '.join(sorted(positive))}, data.train_weights from "
            f"{', '.join(sorted(expected))}; every stage needs a positive weight for the same sources"
        )
    total = sum(weights.values())
    for name in positive:
        share = weights[name] / total
        if int(share * run.mixture_block_size) == 0:
            raise ValueError(
                f"context_stages: stage {number} gives {name} {share:.3g} of its data, no sequence of a mixture block "
                f"of {run.mixture_block_size}; set data.mixture_block_size to {math.ceil(1 / share)} or more"
            )
    return weights


def _shuffles(
    configs: Sequence[StageConfig], batches: Sequence[int], weights: Sequence[Mapping[str, float]], run: Run
) -> list[bool | BlockShuffleConfig]:
    shuffle = run.shuffle
    if shuffle is True:
        raise ValueError(
            "context_stages cannot continue data.shuffle: true, which permutes whole sequences anew at each length; "
            "set data.shuffle: {io_block_size: ..., window_blocks: ...} or false"
        )
    if shuffle is False:
        if len(weights[0]) > 1:
            raise ValueError(
                f"context_stages with data.shuffle: false take one source, not {len(weights[0])}; set a block shuffle"
            )
        tokens = [batch * config.seq_len for batch, config in zip(batches, configs, strict=True)]
        if len(set(tokens)) > 1:
            raise ValueError(
                f"context_stages with data.shuffle: false need constant tokens a step, not {tokens[0]} and "
                f"{next(n for n in tokens if n != tokens[0])}; leave `batch` out or set a block shuffle"
            )
        return [False] * len(configs)
    block_tokens = shuffle.io_block_size * configs[0].seq_len
    for number, config in enumerate(configs, 1):
        if block_tokens % config.seq_len:
            raise ValueError(
                f"context_stages: stage {number} has seq_len={config.seq_len}, which does not divide the "
                f"{block_tokens} tokens of a shuffle block; make data.shuffle.io_block_size a multiple of "
                f"{math.lcm(config.seq_len, configs[0].seq_len) // configs[0].seq_len}"
            )
    return [
        BlockShuffleConfig(block_tokens // config.seq_len, shuffle.window_blocks, shuffle.perm_type)
        for config in configs
    ]


def _ends(configs: Sequence[StageConfig], batches: Sequence[int], run: Run) -> tuple[list[int], list[str]]:
    ends: list[int] = []
    notes: list[str] = []
    tokens_before = asked_start = 0
    block = run.mixture_block_size
    for i, config in enumerate(configs):
        number, start = i + 1, ends[-1] if ends else 0
        tokens_per_step = batches[i] * config.seq_len
        end = _asked_end(number, config.until, start, tokens_before, tokens_per_step, run.num_steps)
        if i == len(configs) - 1:
            if end is not None and end != run.num_steps:
                raise ValueError(
                    f"context_stages: the last stage ends at step {end}, the run at trainer.num_train_steps="
                    f"{run.num_steps}; leave its `until` out"
                )
            asked = end = run.num_steps
        elif end is None:
            raise ValueError(f"context_stages: stage {number} needs `until: {{step, fraction or tokens}}`")
        elif end >= run.num_steps:
            raise ValueError(
                f"context_stages: stage {number} ends at step {end}, the run at trainer.num_train_steps="
                f"{run.num_steps}; every stage but the last has to end before"
            )
        else:
            asked = end
            quantum = math.lcm(*(_steps_of_whole_blocks(n, run.mixture_block_size) for n in batches[i : i + 2]))
            rounded = -(-end // quantum) * quantum
            if rounded != end:
                notes.append(
                    f"stage {number} ends at step {rounded} instead of {end}: the next multiple of {quantum} steps, "
                    f"where mixture blocks of {run.mixture_block_size} sequences are whole"
                )
                end = rounded
        if end <= start:
            raise ValueError(
                f"context_stages: stage {number} would end at step {asked} and starts at {start}; ends must grow, up "
                f"to trainer.num_train_steps={run.num_steps}"
                + (f" (rounded up: set data.mixture_block_size below {block})" if asked > asked_start else "")
            )
        ends.append(end)
        asked_start = asked
        tokens_before += (end - start) * tokens_per_step
    return ends, notes


def _asked_end(
    number: int, until: Until, start: int, tokens_before: int, tokens_per_step: int, num_steps: int
) -> int | None:
    given = {name: value for name, value in vars(until).items() if value is not None}
    if len(given) > 1:
        raise ValueError(f"context_stages: stage {number} has `until` with {' and '.join(given)}; set one of them")
    if until.step is not None:
        return until.step
    if until.fraction is not None:
        if not 0 < until.fraction <= 1:
            raise ValueError(
                f"context_stages: stage {number} has until.fraction={until.fraction}; set it within (0, 1]"
            )
        return round(until.fraction * num_steps)
    if until.tokens is not None:
        return start + max(0, math.ceil((until.tokens - tokens_before) / tokens_per_step))
    return None


def _steps_of_whole_blocks(batch: int, block: int) -> int:
    """Steps after which a whole number of mixture blocks has been read."""
    return block // math.gcd(batch, block)


def _qk_mult(number: int, config: StageConfig, first_seq_len: int, run: Run) -> float | None:
    if run.qk_mult is None:
        if isinstance(config.qk_mult, float):
            raise ValueError(f"context_stages: stage {number} has qk_mult={config.qk_mult}, which this model lacks")
        return None
    if config.qk_mult is QkMult.rule:
        return qk_mult_at(run.qk_mult, config.seq_len, first_seq_len)
    if config.qk_mult is QkMult.unchanged:
        return run.qk_mult
    if config.qk_mult <= 0:
        raise ValueError(f"context_stages: stage {number} has qk_mult={config.qk_mult}; set it above 0")
    return float(config.qk_mult)


def _capacity_factor(number: int, config: StageConfig, run: Run) -> float | None:
    if config.capacity_factor is Capacity.unchanged:
        return run.capacity_factor
    if run.qk_mult is None:
        raise ValueError(
            f"context_stages: stage {number} has capacity_factor={config.capacity_factor}, which this model lacks"
        )
    if config.capacity_factor is Capacity.dropless:
        return None
    if config.capacity_factor <= 0:
        raise ValueError(
            f"context_stages: stage {number} has capacity_factor={config.capacity_factor}; set it above 0"
        )
    return float(config.capacity_factor)
