# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""What stages read of a corpus whose tokens are all different: nothing twice, nothing early, also after a restart."""

import copy
import shutil

import numpy as np
import pytest
import yaml

from levanter_marin.cli import staged_run
from levanter_marin.cli.errors import UserError
from levanter_marin.schedule.reads import Read, check_corpus, reads
from marked_corpus import tokens_of_steps, write_marked_corpus

SOURCES = {"a": 6000, "b": 5000}
BLOCK_SHUFFLE = {"io_block_size": 4, "window_blocks": 3}  # 192 tokens
STAGES = [{"seq_len": 16, "until": {"step": 8}}, {"seq_len": 32, "until": {"step": 16}}, {"seq_len": 64}]
CONFIG = {
    "model": {"type": "marin_moe", "max_seq_len": 64},
    "trainer": {"train_batch_size": 8, "num_train_steps": 24, "tracker": {"type": "json_lines"}, "seed": 3},
    "context_stages": STAGES,
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_marked_corpus(tmp_path_factory.mktemp("marked"), SOURCES)


@pytest.fixture
def load(corpus, tmp_path):
    """A staged run of CONFIG and its stages' configs, decoded, with fields of `data` and stages replaced."""

    def loaded(data, stages=STAGES, sources=tuple(SOURCES), trainer=None):
        config = copy.deepcopy(CONFIG) | {"context_stages": stages}
        config["trainer"] |= trainer or {}
        config["data"] = corpus | data
        config["data"]["components"] = {name: corpus["components"][name] for name in sources}
        config["data"].setdefault("train_weights", None)
        weights = data.get("train_weights") or dict.fromkeys(sources, 1.0)
        config["data"]["train_weights"] = weights
        path = tmp_path / "run.yaml"
        path.write_text(yaml.safe_dump(config))
        run = staged_run.load(str(path), [])
        return run, {n: staged_run.decode_train_config(raw, "") for n, raw in run.rendered.items()}

    return loaded


def read_of_each_stage(run, configs):
    return [tokens_of_steps(configs[stage.number], stage, stage.start, stage.end) for stage in run.plan.stages]


def assert_no_token_twice(tokens):
    assert len(np.unique(tokens)) == tokens.size


def test_block_shuffled_stages_read_every_token_at_most_once(load):
    run, configs = load({"shuffle": BLOCK_SHUFFLE}, sources=("a",))
    read = read_of_each_stage(run, configs)
    assert [steps.size for steps in read] == [8 * 128] * 3
    assert_no_token_twice(np.concatenate(read))


def test_two_sources_with_changing_weights_read_every_token_at_most_once(load):
    stages = [
        STAGES[0] | {"train_weights": {"a": 3.0, "b": 1.0}},
        STAGES[1] | {"train_weights": {"a": 1.0, "b": 1.0}},
        STAGES[2] | {"train_weights": {"a": 1.0, "b": 3.0}},
    ]
    run, configs = load({"shuffle": BLOCK_SHUFFLE}, stages)
    read = read_of_each_stage(run, configs)
    assert_no_token_twice(np.concatenate(read))
    assert [float(np.mean(steps < SOURCES["a"])) for steps in read] == [0.75, 0.5, 0.25]


def test_batch_that_grows_at_a_border_reads_every_token_at_most_once(load):
    stages = [STAGES[0], STAGES[1] | {"batch": 8}, STAGES[2] | {"batch": 1}]
    run, configs = load({"shuffle": BLOCK_SHUFFLE}, stages, trainer={"train_batch_size": 4})
    read = read_of_each_stage(run, configs)
    assert [steps.shape[1] for steps in read] == [64, 256, 64]
    assert_no_token_twice(np.concatenate([steps.ravel() for steps in read]))


def test_unshuffled_stages_read_their_own_part_and_no_token_early(load):
    run, configs = load({"shuffle": False}, sources=("a",))
    for number, steps in enumerate(read_of_each_stage(run, configs)):
        # marked by stage: the first 1024 tokens are the first stage's, and so on
        np.testing.assert_array_equal(np.unique(steps), np.arange(number * 1024, (number + 1) * 1024))


@pytest.mark.parametrize("shuffle", [BLOCK_SHUFFLE, False])
def test_stage_restarted_within_reads_the_same_on(load, shuffle):
    run, configs = load({"shuffle": shuffle}, sources=("a",))
    stage = run.plan.stages[1]
    whole = tokens_of_steps(configs[2], stage, stage.start, stage.end)
    np.testing.assert_array_equal(tokens_of_steps(configs[2], stage, stage.start + 3, stage.end), whole[3:])


def test_reads_predict_how_much_of_each_source_is_used(load):
    weights = {"a": 5.0, "b": 3.0}
    run, configs = load({"shuffle": BLOCK_SHUFFLE, "train_weights": weights})
    predicted = reads(run.plan, SOURCES, mixture_block_size=8)
    for stage, steps in zip(predicted, read_of_each_stage(run, configs), strict=True):
        assert stage["a"].end - stage["a"].start == np.sum(steps < SOURCES["a"])
        assert stage["b"].end - stage["b"].start == np.sum(steps >= SOURCES["a"])
    # at a border each source goes on at its next window of 192 tokens
    assert [stage["a"] for stage in predicted] == [Read(0, 640), Read(768, 1408), Read(1536, 2176)]


def test_run_longer_than_its_corpus_is_refused(load):
    run, _ = load({"shuffle": BLOCK_SHUFFLE}, sources=("a",), trainer={"num_train_steps": 48})
    with pytest.raises(ValueError, match=r"stage 3 would read a up to token \d+ of 5952, the run is longer than its"):
        check_corpus(run.plan, {"a": 6000}, mixture_block_size=8)


def test_shuffle_window_above_a_twentieth_of_a_source_is_refused(load):
    run, _ = load({"shuffle": {"io_block_size": 4, "window_blocks": 5}}, sources=("a",))
    with pytest.raises(ValueError, match="windows of 320 tokens .* of the 6000 tokens of a; set .* to 4 or less"):
        check_corpus(run.plan, {"a": 6000}, mixture_block_size=8)


ONE_SHARD = {"mesh": {"axes": {"data": 1, "model": -1}}}  # of the eight devices


def test_check_tells_what_the_stages_read_and_skip(load, capsys):
    run, _ = load({"shuffle": BLOCK_SHUFFLE}, sources=("a",), trainer=ONE_SHARD)
    assert staged_run.check(run) == 0
    # windows of 192 tokens: 1024 tokens a stage leave 128 of the last one unread
    assert "a: 6,001 tokens, the 3 stages read 3,072, borders skip 256" in capsys.readouterr().out


def test_check_with_another_tokenizer_than_the_cache_is_refused(load, corpus, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(corpus["tokenizer"], other)
    run, _ = load({"shuffle": BLOCK_SHUFFLE, "tokenizer": str(other)}, sources=("a",), trainer=ONE_SHARD)
    with pytest.raises(UserError, match="the cache of a was made with tokenizer .*; set data.tokenizer back"):
        staged_run.check(run)


def test_check_with_more_data_shards_than_sequences_is_refused(load):
    run, _ = load({"shuffle": BLOCK_SHUFFLE}, sources=("a",))
    with pytest.raises(UserError, match="stage 2 has a batch of 4 for 8 data shards"):
        staged_run.check(run)
