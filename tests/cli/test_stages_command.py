# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""`levanter-marin stages` before anything runs: what it prints, what it renders, what it refuses in one line."""

import copy
import json
from pathlib import Path

import draccus
import pytest
import yaml
from levanter.data.text.datasets import BlockShuffleConfig
from levanter.optim.config import OptimizerConfig

from levanter_marin.cli.main import main
from levanter_marin.cli.train_config import load_train_config
from levanter_marin.optim.config import HyperballConfig

ROOT = Path(__file__).parents[2]
TINY = yaml.safe_load((ROOT / "tests/data/tiny_train.yaml").read_text(encoding="utf-8"))
TINY["model"]["max_seq_len"] = 128
TINY["trainer"] |= {"num_train_steps": 24}
TINY["data"] |= {"shuffle": {"io_block_size": 8, "window_blocks": 2}, "mixture_block_size": 8}
TINY["context_stages"] = [
    {"seq_len": 16, "until": {"step": 8}},
    {"seq_len": 64, "until": {"fraction": 0.66666}, "qk_mult": "unchanged", "capacity_factor": 2.0},
    {"seq_len": 128, "optimizer": {"learning_rate": 0.001}},
]


def write_config(changes, path):
    config = copy.deepcopy(TINY)
    for dotted, value in changes.items():
        *parents, key = dotted.split(".")
        holder = config
        for parent in parents:
            holder = holder.setdefault(parent, {})
        holder[key] = value
    path.write_text(yaml.safe_dump(config))
    return str(path)


def test_dry_run_of_the_published_run_prints_its_numbers(capsys):
    assert main(["stages", str(ROOT / "config/stages/hero_535b_a23b.yaml"), "--dry-run", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert [stage["batch"] for stage in plan["stages"]] == [11264, 2816, 704]
    assert [stage["seq_len"] for stage in plan["stages"]] == [4096, 16384, 65536]
    assert [round(stage["qk_mult"], 4) for stage in plan["stages"]] == [1.3, 1.4802, 1.6604]
    assert {stage["tokens_per_step"] for stage in plan["stages"]} == {46_137_344}
    assert (plan["num_steps"], plan["tokens"]) == (390_251, 390_251 * 46_137_344)


def test_rendered_stage_is_a_config_that_plain_train_lm_reads(tmp_path, capsys):
    path = write_config({}, tmp_path / "run.yaml")
    assert main(["stages", path, "--render", str(tmp_path / "out"), "--trainer.num_train_steps", "48"]) == 0
    assert capsys.readouterr().out.count("levanter-marin train ") == 3
    second, third = (load_train_config(str(tmp_path / f"out/stage_{n}.yaml"), []) for n in (2, 3))
    assert (second.train_seq_len, second.trainer.train_batch_size, second.trainer.num_train_steps) == (64, 2, 32)
    assert (second.model.attention.qk_mult, second.model.moe.dispatch.capacity_factor) == (1.3, 2.0)
    assert second.trainer.id == third.trainer.id == "run"
    assert third.data.shuffle == BlockShuffleConfig(1, 2)
    assert [(phase.end_step, phase.seq_len) for phase in third.data.prior_context_phases] == [(8, 16), (32, 64)]
    # the schedule spans the run in every stage, and the override holds in its stage alone
    assert second.optimizer.inner == draccus.decode(OptimizerConfig, TINY["optimizer"])
    assert (second.optimizer.total_steps, third.optimizer.total_steps) == (48, 48)
    assert third.optimizer.inner.learning_rate == 0.001


def test_rendered_hyperball_carries_the_steps_of_the_run(tmp_path):
    path = write_config({"optimizer": {"type": "hyperball"}}, tmp_path / "run.yaml")
    assert main(["stages", path, "--render", str(tmp_path / "out")]) == 0
    assert load_train_config(str(tmp_path / "out/stage_1.yaml"), []).optimizer == HyperballConfig(total_steps=24)


STAGES = TINY["context_stages"]
PACKED = {"text": {"source": {"type": "url", "train_urls": ["train.jsonl"]}, "pack": True}}
MISTAKES = {
    "none": ({"context_stages": []}, "has 0 of the 2 stages that it takes"),
    "one_stage": ({"context_stages": STAGES[2:]}, "has 1 of the 2 stages that it takes"),
    "shorter": ({"context_stages": [STAGES[1], STAGES[0], STAGES[2]]}, "stage 2 has seq_len=16 after 64"),
    "field": ({"context_stages": [{"seq_lne": 16}]}, "`context_stages.0.seq_lne`: StageConfig has no field `seq_lne`"),
    "until": ({"context_stages": [{"seq_len": 16, "until": 8}]}, "`context_stages.0.until`: needs a mapping, not `8`"),
    "qk_mult": ({"context_stages": [{"seq_len": 16, "qk_mult": "rules"}]}, "context_stages"),
    "packed": ({"data.components": PACKED}, "data.components.text.pack=True packs documents anew"),
    "full_shuffle": ({"data.shuffle": True}, "context_stages cannot continue data.shuffle: true"),
    "weights": ({"data.train_weights": [[0, {"text": 1.0}]]}, "data.train_weights is a schedule"),
    "batches": ({"trainer.train_batch_size": [{"start": 0, "value": 8}]}, "must be the one of the first stage"),
    "train_seq_len": ({"train_seq_len": 32}, "train_seq_len=32 and the first of context_stages has seq_len=16"),
    "no_source": ({"data.components": {}}, "data.components is empty"),
    "optimizer": (
        {"context_stages": [*STAGES[:2], {"seq_len": 128, "optimizer": {"learning_rte": 1}}]},
        "stage 3",
    ),
    "initialize_from": ({"trainer.initialize_from": "no/such"}, "no/such holds no complete checkpoint"),
    "load_path": ({"trainer.load_checkpoint_path": "no/such"}, "trainer.load_checkpoint_path=no/such"),
    "load_false": ({"trainer.load_checkpoint": False}, "would begin every stage anew"),
    "load_true": ({"trainer.load_checkpoint": True}, "holds no complete checkpoint"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_stages_with_mistake_tells_it_in_one_line(mistake, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    changes, expected = MISTAKES[mistake]
    assert main(["stages", write_config(changes, tmp_path / "run.yaml")]) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("levanter-marin: ")]
    assert len(lines) == 1
    assert expected in lines[0]


def test_stages_and_train_name_each_other_for_the_wrong_config(tmp_path, capsys):
    path = write_config({}, tmp_path / "run.yaml")
    assert main(["train", path]) == 2
    assert f"run it with `levanter-marin stages {path}`" in capsys.readouterr().err
    config = {key: value for key, value in TINY.items() if key != "context_stages"}
    (tmp_path / "flat.yaml").write_text(yaml.safe_dump(config))
    assert main(["stages", str(tmp_path / "flat.yaml")]) == 2
    assert "has no context_stages" in capsys.readouterr().err
