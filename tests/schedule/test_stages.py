# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""Context stages as arithmetic: borders, batches, tokens, qk_mult, and every refusal."""

import dataclasses

import pytest
from levanter.data.text.datasets import BlockShuffleConfig

from levanter_marin.schedule.stages import (
    Capacity,
    QkMult,
    Run,
    StageConfig,
    Until,
    check_batches,
    plan_stages,
    qk_mult_at,
)

PUBLISHED = Run(
    num_steps=390_251,
    batch=11264,
    max_seq_len=65536,
    train_weights={"text": 1.0},
    shuffle=BlockShuffleConfig(io_block_size=256, window_blocks=512),
    mixture_block_size=2048,
    qk_mult=1.3,
    capacity_factor=1.15,
)
PUBLISHED_STAGES = [
    StageConfig(4096, Until(fraction=0.5)),
    StageConfig(16384, Until(step=312_192)),
    StageConfig(65536),
]

SMALL = Run(
    num_steps=96,
    batch=16,
    max_seq_len=1024,
    train_weights={"text": 1.0},
    shuffle=BlockShuffleConfig(io_block_size=16, window_blocks=4),
    mixture_block_size=16,
    qk_mult=1.3,
    capacity_factor=1.15,
)
SMALL_STAGES = [StageConfig(64, Until(step=32)), StageConfig(256, Until(step=64)), StageConfig(1024)]


@pytest.mark.parametrize(("seq_len", "expected"), [(4096, 1.3), (8192, 1.3901), (16384, 1.4802), (65536, 1.6604)])
def test_qk_mult_by_the_rule_equals_the_published_values(seq_len, expected):
    assert qk_mult_at(1.3, seq_len, 4096) == pytest.approx(expected, abs=5e-5)


def test_plan_of_the_published_run_equals_its_numbers():
    plan = plan_stages(PUBLISHED_STAGES, PUBLISHED)
    assert [stage.batch for stage in plan.stages] == [11264, 2816, 704]
    assert {stage.tokens_per_step for stage in plan.stages} == {46_137_344}
    assert plan.num_steps == 390_251
    assert plan.tokens == 390_251 * 46_137_344
    assert f"{plan.tokens / 1e12:.3f}T" == "18.005T"
    # half of the steps is 195,125.5, rounded up to 8 steps, where blocks of 2048 sequences are whole at both batches
    assert [stage.end for stage in plan.stages] == [195_128, 312_192, 390_251]
    assert len(plan.notes) == 1


def test_plan_of_the_67b_precedent_equals_its_numbers():
    run = dataclasses.replace(PUBLISHED, batch=8192, num_steps=200_000)
    last = plan_stages([StageConfig(8192, Until(fraction=0.9)), StageConfig(65536)], run).stages[-1]
    assert (last.batch, last.tokens_per_step) == (1024, 67_108_864)
    assert last.qk_mult == pytest.approx(1.5703274, abs=1e-7)


def test_shuffle_blocks_of_every_stage_hold_the_same_tokens():
    stages = plan_stages(SMALL_STAGES, SMALL).stages
    assert [stage.shuffle.io_block_size for stage in stages] == [16, 4, 1]
    assert {stage.shuffle.io_block_size * stage.seq_len for stage in stages} == {1024}


@pytest.mark.parametrize(
    "until", [Until(step=32), Until(fraction=1 / 3), Until(tokens=32 * 1024), Until(tokens=32700)]
)
def test_stage_end_by_step_fraction_and_tokens_is_the_same(until):
    plan = plan_stages([StageConfig(64, until), *SMALL_STAGES[1:]], SMALL)
    assert plan.stages[0].end == plan.stages[1].start == 32
    assert not plan.notes


def test_stage_end_within_a_mixture_block_moves_up_to_its_end():
    plan = plan_stages([StageConfig(64, Until(step=33)), *SMALL_STAGES[1:]], SMALL)
    # batches of 16 and 4 in blocks of 16: every 4 steps
    assert plan.stages[0].end == 36
    assert "36 instead of 33" in plan.notes[0]


def test_stage_after_gives_the_stage_of_the_next_step():
    plan = plan_stages(SMALL_STAGES, SMALL)
    numbers = [getattr(plan.stage_after(done), "number", None) for done in (0, 31, 32, 63, 64, 95, 96)]
    assert numbers == [1, 1, 2, 2, 3, 3, None]


def test_stage_fields_override_those_of_the_config():
    changed = StageConfig(
        1024, batch=2, qk_mult=QkMult.unchanged, capacity_factor=2.0, optimizer={"learning_rate": 0.1}
    )
    last = plan_stages([*SMALL_STAGES[:2], changed], SMALL).stages[-1]
    assert (last.batch, last.qk_mult, last.capacity_factor) == (2, 1.3, 2.0)
    assert last.optimizer == {"learning_rate": 0.1}


def test_stage_without_capacity_limit_drops_nothing():
    last = plan_stages([*SMALL_STAGES[:2], StageConfig(1024, capacity_factor=Capacity.dropless)], SMALL).stages[-1]
    assert last.capacity_factor is None


def run(**changes):
    return dataclasses.replace(SMALL, **changes)


def stages(*configs):
    return [StageConfig(64, Until(step=32)), *configs]


REFUSED = {
    "one_stage": ([StageConfig(64)], SMALL, "has 1 of the 2 stages"),
    "none": ([], SMALL, "has 0 of the 2 stages"),
    "no_length": (stages(StageConfig()), SMALL, "seq_len=0"),
    "shorter": (stages(StageConfig(32)), SMALL, "seq_len=32 after 64"),
    "equal": (stages(StageConfig(64)), SMALL, "seq_len=64 after 64"),
    "max_seq_len": (
        stages(StageConfig(2048, batch=1)),
        SMALL,
        "model.max_seq_len=1024; set model.max_seq_len to 2048",
    ),
    "attention_block": (stages(StageConfig(1024)), run(attention_block_size=128), "seq_len=64, no multiple of"),
    "batch": (stages(StageConfig(768)), SMALL, "seq_len=768, which does not divide the 1024 tokens"),
    "no_batch": (stages(StageConfig(1024, batch=0)), SMALL, "batch=0"),
    "no_end": ([StageConfig(64), StageConfig(256)], SMALL, "stage 1 needs `until:"),
    "two_ends": ([StageConfig(64, Until(step=1, tokens=1)), StageConfig(256)], SMALL, "with step and tokens"),
    "fraction": ([StageConfig(64, Until(fraction=1.5)), StageConfig(256)], SMALL, "until.fraction=1.5"),
    "ends_shrink": (
        stages(StageConfig(256, Until(step=16)), StageConfig(1024)),
        SMALL,
        "stage 2 would end at step 16 and starts at 32",
    ),
    "beyond_the_run": (
        [StageConfig(64, Until(step=500)), StageConfig(256)],
        SMALL,
        "stage 1 ends at step 500, the run at trainer.num_train_steps=96; every stage but the last has to end before",
    ),
    "behind_the_border": (
        stages(StageConfig(256, Until(step=15)), StageConfig(1024)),
        SMALL,
        "stage 2 would end at step 15 and starts at 32; ends must grow, up to trainer.num_train_steps=96",
    ),
    "rounded_beyond": (
        [StageConfig(64, Until(step=33)), StageConfig(256)],
        run(mixture_block_size=2048),
        "set data.mixture_block_size below 2048",
    ),
    "total": (stages(StageConfig(256, Until(step=95))), SMALL, "step 95, the run at trainer.num_train_steps=96"),
    "full_shuffle": (stages(StageConfig(256)), run(shuffle=True), "data.shuffle: true"),
    "shuffle_block": (
        stages(StageConfig(1024)),
        run(shuffle=BlockShuffleConfig(8, 4)),
        "512 tokens of a shuffle block; make data.shuffle.io_block_size a multiple of 16",
    ),
    "sources_unshuffled": (
        stages(StageConfig(256)),
        run(shuffle=False, train_weights={"a": 1.0, "b": 1.0}),
        "take one source, not 2",
    ),
    "tokens_unshuffled": (stages(StageConfig(256, batch=2)), run(shuffle=False), "not 1024 and 512"),
    "source_dropped": (
        stages(StageConfig(256, train_weights={"a": 1.0, "b": 0.0})),
        run(train_weights={"a": 1.0, "b": 1.0}),
        "stage 2 draws from a, data.train_weights from a, b",
    ),
    "weight_without_sequence": (
        stages(StageConfig(256, train_weights={"a": 99.0, "b": 1.0})),
        run(train_weights={"a": 1.0, "b": 1.0}),
        "gives b 0.01 of its data, no sequence of a mixture block of 16; set data.mixture_block_size to 100",
    ),
    "qk_mult": (stages(StageConfig(256, qk_mult=0.0)), SMALL, "qk_mult=0.0"),
    "qk_mult_of_other_model": (stages(StageConfig(256, qk_mult=1.5)), run(qk_mult=None), "which this model lacks"),
    "capacity": (stages(StageConfig(256, capacity_factor=0.0)), SMALL, "capacity_factor=0.0"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_plan_that_cannot_be_is_refused_in_one_line(case):
    configs, shape, expected = REFUSED[case]
    with pytest.raises(ValueError) as refusal:
        plan_stages(configs, shape)
    assert expected in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_batch_that_the_mesh_cannot_share_out_is_refused():
    plan = plan_stages(SMALL_STAGES, SMALL)  # batches 16, 4, 1
    check_batches(plan, data_shards=1, microbatch=None)
    with pytest.raises(ValueError, match="stage 2 has a batch of 4 for 8 data shards"):
        check_batches(plan, data_shards=8, microbatch=None)
    with pytest.raises(ValueError, match="stage 3 has a batch of 1, no multiple of the 4"):
        check_batches(plan, data_shards=1, microbatch=4)
