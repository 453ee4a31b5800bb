# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""`levanter-marin train`: one line for every mistake, an exit code that tells the truth, files where it says."""

import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import jax
import numpy as np
import pytest
import tensorstore
import yaml
from jax.sharding import Mesh
from levanter.data.dataset import ListAsyncDataset
from levanter.data.loader import DataLoader
from levanter.models.llama import LlamaConfig
from levanter.tracker.wandb import WandbConfig
from tokenizers import Tokenizer, models, pre_tokenizers

from levanter_marin.cli.main import main
from levanter_marin.cli.train_config import load_train_config
from levanter_marin.cli.training import close_data_loaders
from levanter_marin.models.marin_moe import MarinMoeConfig

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src"
TINY = yaml.safe_load((ROOT / "tests/data/tiny_train.yaml").read_text(encoding="utf-8"))


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    """An own working directory with a byte tokenizer and a training text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate(["<end>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(["<end>"])
    (tmp_path / "tokenizer").mkdir()
    tokenizer.save(str(tmp_path / "tokenizer/tokenizer.json"))
    (tmp_path / "tokenizer/tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
    text = Path(__file__).read_text(encoding="utf-8")
    (tmp_path / "train.jsonl").write_text(json.dumps({"text": text}) + "\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_config(changes, path="run.yaml"):
    """Writes TINY with dotted fields changed."""
    config = yaml.safe_load(yaml.safe_dump(TINY))
    for dotted, value in changes.items():
        *parents, key = dotted.split(".")
        holder = config
        for parent in parents:
            holder = holder[parent]
        holder[key] = value
    Path(path).write_text(yaml.safe_dump(config))
    return path


# Changes to the file, options, and what the line must contain.
MISTAKES = {
    "model_type": ({"model.type": "marin_mo"}, [], "no type `marin_mo`; known, nearest first: marin_moe, "),
    "model_name": ({"model": "marin_mo"}, [], "`model.type`: no type `marin_mo`"),
    "model_type_option": ({}, ["--model.type", "marin_mo"], "`model.type`: no type `marin_mo`"),
    "optimizer_type": ({"optimizer.type": "adm"}, [], "`optimizer.type`: no type `adm`; known, nearest first: adam, "),
    "tracker_type": (
        {"trainer.tracker": [{"type": "json_line"}]},
        [],
        "`trainer.tracker.0.type`: no type `json_line`",
    ),
    "model_field": ({"model.hiden_dim": 3}, [], "`model.hiden_dim`: MarinMoeConfig has no field"),
    "near_field": ({"model.hiden_dim": 3}, [], "did you mean `hidden_dim`?"),
    "nested_field": ({"model.moe.num_expert": 3}, [], "did you mean `num_experts`?"),
    "trainer_field": ({"trainer.num_train_step": 3}, [], "did you mean `num_train_steps`?"),
    "data_field": ({"data.components.text.sorce": 3}, [], "`data.components.text.sorce`: DatasetComponent has no"),
    "option": ({}, ["--model.hiden_dim=3"], "no option `--model.hiden_dim`; did you mean `--model.hidden_dim`?"),
    "option_without_value": ({}, ["--model.hidden_dim"], "--model.hidden_dim: expected one argument"),
    "enum": ({"model.moe.router_dtype": "fp23"}, [], "no value `fp23`; known, nearest first: fp32, bf16"),
    "number_for_mapping": ({"model.moe": 3}, [], "`model.moe`: needs a mapping, not `3`"),
    "word_for_number": ({"model.hidden_dim": "wide"}, [], "`model.hidden_dim`: Couldn't parse 'wide' into an int"),
    "null_for_number": ({"model.hidden_dim": None}, [], "MarinMoeConfig"),
    "refused_value": ({"model.moe.num_experts_per_token": 4}, [], "must be below moe.num_experts=4"),
    "tokenizer": ({"data.tokenizer": "no/such/folder"}, [], "data.tokenizer=no/such/folder is neither a folder here"),
    "tokenizer_folder": ({"data.tokenizer": "."}, [], "data.tokenizer=. is a folder without a readable"),
    "text": (
        {"data.components.text.source.train_urls": ["a*.jsonl"]},
        [],
        "no file a*.jsonl; `levanter-marin corpus`",
    ),
    "accelerator": ({"trainer.require_accelerator": True}, [], "set trainer.require_accelerator: false"),
    "mesh": (
        {
            "trainer.mesh": {
                "axes": {"expert": 8, "data": 1},
                "shared_mapping": {"experts": "expert"},
                "compute_mapping": {"batch": ["data", "expert"]},
            }
        },
        [],
        "model.moe.num_experts=4 does not divide over the 8 devices of the mesh axes expert; set it to 8",
    ),
    "no_batch": ({}, ["--trainer.train_batch_size", "0"], "trainer.train_batch_size=0 must be a positive number"),
    "no_steps": ({"trainer.num_train_steps": None}, [], "trainer.num_train_steps=None must be a positive number"),
    "length": ({"model.max_seq_len": 16, "train_seq_len": 32}, [], "train_seq_len=32 exceeds model.max_seq_len=16"),
    "batch": ({"trainer.per_device_parallelism": 3}, [], "train_batch_size (8) must be divisible by"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_train_with_mistake_tells_it_in_one_line(mistake, workplace, capsys):
    changes, options, expected = MISTAKES[mistake]
    assert main(["train", write_config(changes), *options]) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("levanter-marin: ")]
    assert len(lines) == 1
    assert expected in lines[0]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("a: [1\nb: 2\n", "bad.yaml is not readable as YAML"),
        ("", "bad.yaml holds no mapping"),
        (None, "did you mean `bed`?"),
    ],
)
def test_train_without_readable_config_tells_it_in_one_line(content, expected, workplace, capsys):
    write_config({}, "bed.yaml")
    if content is not None:
        Path("bad.yaml").write_text(content)
    assert main(["train", "bad.yaml"]) == 2
    assert expected in capsys.readouterr().err.strip()


def test_main_with_misspelt_command_names_the_nearest(capsys):
    assert main(["trian"]) == 2
    assert "did you mean `train`?" in capsys.readouterr().err


def test_train_config_with_bare_names_takes_their_defaults(workplace):
    path = write_config({"model": "marin_moe"})
    assert load_train_config(path, []).model == MarinMoeConfig()
    assert load_train_config(path, ["--model.num_layers", "3"]).model == MarinMoeConfig(num_layers=3)


def test_train_config_with_bare_name_option_replaces_the_mapping(workplace):
    path = write_config({"trainer.tracker.output_dir": "elsewhere"})
    assert load_train_config(path, ["--model", "llama"]).model == LlamaConfig()
    offline = ["--trainer.tracker", "{type: wandb, mode: offline}"]
    assert load_train_config(path, offline).trainer.tracker == WandbConfig(mode="offline")


def test_close_data_loaders_with_live_iterator_stops_its_thread():
    before = set(threading.enumerate())
    mesh = Mesh(jax.devices()[:1], ("data",))
    dataset = ListAsyncDataset(list(np.arange(64)))
    loader = DataLoader(dataset, 2, mesh=mesh, axis_resources={"batch": "data"}, max_buffered_batches=1)
    iterator = iter(loader)
    next(iterator)
    started = {thread for thread in threading.enumerate() if "_fill_queue" in thread.name} - before
    assert any(thread.is_alive() for thread in started)

    close_data_loaders()
    assert not any(thread.is_alive() for thread in started)


def run(command, **environment):
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "HF_HUB_OFFLINE": "1", "XLA_FLAGS": "", **environment}
    return subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_train_with_every_tracker_ends_well_and_leaves_their_files(workplace):
    trackers = [{"type": "json_lines"}, {"type": "wandb", "mode": "offline"}, {"type": "tensorboard"}]
    path = write_config({"trainer.tracker": trackers})
    result = run(["-m", "levanter_marin", "train", path, "--trainer.id", "run"])

    assert result.returncode == 0, result.stderr
    assert "Traceback" not in result.stderr
    with Path("logs/run/metrics.jsonl").open(encoding="utf-8") as file:
        records = [record for record in map(json.loads, file) if "train/loss" in record.get("metrics", {})]
    losses = {record["step"]: record["metrics"]["train/loss"] for record in records}
    assert sorted(losses) == [0, 1, 2]
    assert losses[2] < losses[0]
    assert list(Path("wandb").glob("offline-run-*/*.wandb"))
    assert list(Path("tblogs/run").glob("events.out.tfevents.*"))
    reported = dict(line.split(maxsplit=1) for line in result.stdout.splitlines())
    assert Path(reported["checkpoint"], "metadata.json").exists()
    assert Path(reported["log"]).exists()

    again = run(["-m", "levanter_marin", "train", path, "--trainer.id", "run"])
    assert again.returncode == 0, again.stderr
    assert "run has done 3 steps" in again.stdout


@pytest.mark.slow
def test_upstream_train_lm_with_our_model_trains_without_our_command(workplace):
    site_folder = workplace / "site"
    site_folder.mkdir()
    shutil.copy(SOURCE / "levanter_marin.pth", site_folder)
    upstream = "runpy.run_module('levanter.main.train_lm', run_name='__main__')"
    code = f"import runpy, site; site.addsitedir('site'); {upstream}"
    run(["-c", code, "--config_path", write_config({}), "--trainer.id", "run"])
    # Upstream's own exit code is not to be trusted after a complete run.
    assert (workplace / "checkpoints/run/step-2/metadata.json").exists()


def stored_arrays(checkpoint: str) -> dict[bytes, bytes]:
    """Every array of a checkpoint, as stored: parameters, optimizer state, router bias, random key, step."""
    spec = {"driver": "ocdbt", "base": Path(checkpoint).absolute().as_uri()}
    store = tensorstore.KvStore.open(spec).result()
    return {key: store.read(key).result().value for key in store.list().result()}


def losses_by_step(run_id: str) -> dict[int, float]:
    """Later records of a step replace earlier ones, as after a resume."""
    with Path(f"logs/{run_id}/metrics.jsonl").open(encoding="utf-8") as file:
        records = [record for record in map(json.loads, file) if "train/loss" in record.get("metrics", {})]
    return {record["step"]: record["metrics"]["train/loss"] for record in records}


@pytest.mark.slow
def test_train_resumed_at_step_3_equals_uninterrupted_run_bit_for_bit(workplace):
    # total_steps pins the schedule, which otherwise ends with the first run
    optimizer = {"type": "hyperball", "newton_schulz_dtype": "fp32", "total_steps": 6}
    path = write_config({"optimizer": optimizer, "trainer.num_train_steps": 6})
    for run_id, steps in (("straight", [6]), ("resumed", [3, 6])):
        for num_train_steps in steps:
            limit = ["--trainer.num_train_steps", str(num_train_steps)]
            result = run(["-m", "levanter_marin", "train", path, "--trainer.id", run_id, *limit])
            assert result.returncode == 0, result.stderr

    straight, resumed = (losses_by_step(run_id) for run_id in ("straight", "resumed"))
    assert sorted(straight) == list(range(6))
    assert resumed == straight
    expected, actual = (stored_arrays(f"checkpoints/{run_id}/step-5") for run_id in ("straight", "resumed"))
    assert expected.keys() == actual.keys()
    assert [name for name in expected if expected[name] != actual[name]] == []
