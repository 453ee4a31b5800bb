# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""`levanter-marin plan` as a user calls it."""

import json
from pathlib import Path

import pytest

from levanter_marin.cli import plan
from levanter_marin.cli.errors import UserError

CONFIG = str(Path(__file__).parents[2] / "config" / "marin_moe_nano.yaml")
# the smallest model that has everything: less to trace
SMALL = ("--model.num_layers", "4", "--seq", "64", "--vocab-size", "512")


def planned(capsys, *arguments):
    assert plan.main([CONFIG, *SMALL, "--json", *arguments]) == 0
    return json.loads(capsys.readouterr().out)


def test_plan_of_a_mesh_spreads_state_and_says_whether_it_fits(capsys):
    one = planned(capsys)
    eight = planned(capsys, "--mesh", "data=2,expert=4", "--memory", "0.001")
    assert one["num_devices"] == 1
    assert eight["num_devices"] == 8
    assert one["all_to_all"]["bytes_per_step"] == 0
    # embed is spread over 8 devices, the experts over 4
    assert one["bytes"]["parameters"] / 8 < eight["bytes"]["parameters"] < one["bytes"]["parameters"] / 3
    assert eight["bytes"]["gradients"] == eight["bytes"]["parameters"]
    # a row of 64 tokens x 8 experts x 64 fp32 numbers, there and back three times, in 4 layers
    assert eight["all_to_all"]["bytes_per_step"] == 64 * 8 * 64 * 4 * 6 * 4
    assert eight["memory"]["fits"] is False
    assert eight["flops"] == one["flops"]


def test_plan_of_microbatches_keeps_traffic_and_needs_fewer_activations(capsys):
    whole = planned(capsys, "--mesh", "expert=2")
    halves = planned(capsys, "--mesh", "expert=2", "--trainer.per_device_parallelism", "2")
    assert (whole["microbatches"], halves["microbatches"]) == (1, 2)
    assert halves["all_to_all"] == whole["all_to_all"]
    assert halves["bytes"]["activations"]["peak"] < whole["bytes"]["activations"]["peak"]
    assert halves["bytes"]["gradient_accumulator"] == whole["bytes"]["gradients"]


def test_plan_prints_tables(capsys):
    assert plan.main([CONFIG, *SMALL, "--mesh", "expert=2", "--memory", "80"]) == 0
    out = capsys.readouterr().out
    for part in ("2 devices: expert 2", "optimizer state", "ragged_all_to_all", "with recomputation", "fits 80 GiB"):
        assert part in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    (
        (("--mesh", "expert"), r"--mesh expert: `expert` is no AXIS=SIZE"),
        (("--mesh", "data=0"), r"`data=0` is no AXIS=SIZE"),
        (("--mesh", "modle=2"), r"mesh axis modle=2 shards nothing.*did you mean `model`\?"),
        (("--mesh", "data=3"), r"train_batch_size=8 does not divide over the 3 devices.*multiple of 3"),
        (("--mesh", "expert=8", "--model.moe.num_experts", "12"), r"experts of size 12 .*8 devices.*multiple of 8"),
        (
            ("--mesh", "data=4", "--trainer.per_device_parallelism", "3", "--batch", "32"),
            r"=32 is no multiple of .*=3",
        ),
        (("--model.moe.dispatch.implementation", "ragged_all_to_all"), r"no axis `expert`"),
        (("--mesh", "data=2", "--batch", "-8"), r"trainer.train_batch_size=-8 must be positive"),
    ),
)
def test_plan_of_a_mistake_is_refused_in_one_line(arguments, message):
    with pytest.raises(UserError, match=message):
        plan.main([CONFIG, *SMALL, *arguments])
