# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""Which tokens of a source each stage reads, and the refusal of a corpus that a run would outlast.

Under a block shuffle Levanter lets every source skip, at a border, the unread rest of its shuffle window. Without
shuffle the stages read on where the last one stopped.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from levanter.data.mixture import MixtureDataset
from levanter.data.text.datasets import BlockShuffleConfig, ContextPhase, skip_to_window_offsets
from levanter.schedule import BatchSchedule

from levanter_marin.schedule.stages import Plan, Stage

MIN_WINDOWS = 20  # shuffle windows in a source: what a border may skip of it is then at most 5 percent


@dataclass(frozen=True)
class Read:
    """What a stage reads of a source: tokens [start, end) in the order of its shuffle windows, of one epoch."""

    start: int
    end: int


def reads(plan: Plan, token_counts: Mapping[str, int], mixture_block_size: int) -> list[dict[str, Read]]:
    """For every stage and source, what is read of it; a mixture block begun counts as read whole.

    Args:
        token_counts: tokens of every source, in the order in which the config lists them.
        mixture_block_size: sequences.
    """
    phases = [_phase(stage) for stage in plan.stages]
    found = []
    for i, stage in enumerate(plan.stages):
        offsets = dict.fromkeys(token_counts, 0)
        if i > 0 and isinstance(stage.shuffle, BlockShuffleConfig):
            offsets = skip_to_window_offsets(
                datasets=dict.fromkeys(token_counts),  # only the names matter
                token_counts=token_counts,
                phases=phases[: i + 1],
                block_size=mixture_block_size,
                window_tokens=_window_tokens(stage, stage.shuffle),
                key=0,
            )
        mixture = MixtureDataset(
            datasets=dict.fromkeys(token_counts), weights=stage.train_weights, block_size=mixture_block_size, key=0
        )
        first = mixture.sequence_counts_before_block(stage.start * stage.batch // mixture_block_size)
        last = mixture.sequence_counts_before_block(-(-stage.end * stage.batch // mixture_block_size))
        found.append(
            {
                name: Read((first[name] + offset) * stage.seq_len, (last[name] + offset) * stage.seq_len)
                for name, offset in offsets.items()
            }
        )
    return found


def check_corpus(plan: Plan, token_counts: Mapping[str, int], mixture_block_size: int) -> list[dict[str, Read]]:
    """Refuses a source that the run would read twice, or that is small beside its shuffle window.

    Returns:
        What `reads` returns.

    Raises:
        ValueError: one line with the two numbers that disagree and what to set instead.
    """
    shuffle = plan.stages[0].shuffle
    if isinstance(shuffle, BlockShuffleConfig):
        window = _window_tokens(plan.stages[0], shuffle)
        for name, tokens in token_counts.items():
            if window * MIN_WINDOWS > tokens:
                raise ValueError(
                    f"data.shuffle has windows of {window} tokens ({shuffle.window_blocks} blocks of "
                    f"{window // shuffle.window_blocks}), above 1/{MIN_WINDOWS} of the {tokens} tokens of {name}; set "
                    f"data.shuffle.window_blocks to {tokens * shuffle.window_blocks // (window * MIN_WINDOWS)} or less"
                )
    found = reads(plan, token_counts, mixture_block_size)
    for name, tokens in token_counts.items():
        for stage, read in zip(plan.stages, found, strict=True):
            whole = tokens // stage.seq_len * stage.seq_len
            if read[name].end > whole:
                raise ValueError(
                    f"stage {stage.number} would read {name} up to token {read[name].end} of {whole}, the run is "
                    f"longer than its corpus; lower trainer.num_train_steps={plan.num_steps} or give more text"
                )
    return found


def _window_tokens(stage: Stage, shuffle: BlockShuffleConfig) -> int:
    return shuffle.io_block_size * shuffle.window_blocks * stage.seq_len


def _phase(stage: Stage) -> ContextPhase:
    return ContextPhase(stage.start, stage.seq_len, BatchSchedule(stage.batch), [(0, stage.train_weights)])
