# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""Whole staged runs of a tiny model: killed anywhere, they end in the same bits as one that was left alone."""

import copy
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import tensorstore
import yaml
from tokenizers import Tokenizer, models, pre_tokenizers

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src"
TINY = yaml.safe_load((ROOT / "tests/data/tiny_train.yaml").read_text(encoding="utf-8"))
TINY["model"] |= {"max_seq_len": 64}
TINY["trainer"] |= {"num_train_steps": 72, "jax_config": {"jax_log_compiles": True}}
TINY["optimizer"] = {"type": "adam", "learning_rate": 0.01, "lr_schedule": "linear", "warmup": 0, "min_lr_ratio": 0.1}
TINY["data"] |= {"shuffle": {"io_block_size": 8, "window_blocks": 4}, "mixture_block_size": 8}
TINY["context_stages"] = [
    {"seq_len": 16, "until": {"step": 8}},
    {"seq_len": 32, "until": {"step": 64}},
    {"seq_len": 64},
]
LAST, BORDER = 71, 63  # names of checkpoints: the index of their last update
PER_STEP = ("train/loss", "optim/learning_rate", "throughput/total_tokens")
POLL_SECONDS = 0.002
PATIENCE_SECONDS = 3000


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """A byte tokenizer and 60 kB of text."""
    folder = tmp_path_factory.mktemp("corpus")
    vocabulary = {token: i for i, token in enumerate(["<end>", *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(["<end>"])
    (folder / "tokenizer").mkdir()
    tokenizer.save(str(folder / "tokenizer/tokenizer.json"))
    (folder / "tokenizer/tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
    texts = [path.read_text(encoding="utf-8") for path in sorted((SOURCE / "levanter_marin").rglob("*.py"))]
    (folder / "train.jsonl").write_text(json.dumps({"text": "".join(texts)[:60_000]}) + "\n")
    (folder / "validation.jsonl").write_text(json.dumps({"text": texts[-1][:2000]}) + "\n")
    return folder


def write_config(folder, corpus, changes=None, **trainer):
    config = copy.deepcopy(TINY) | (changes or {})
    config["data"] |= {"tokenizer": str(corpus / "tokenizer"), "cache_dir": str(corpus / "cache")}
    config["data"]["components"]["text"]["source"]["train_urls"] = [str(corpus / "train.jsonl")]
    config["trainer"] |= {
        "id": "run",
        "log_dir": str(folder / "logs"),
        "tracker": {"type": "json_lines", "output_dir": str(folder / "logs")},
        "checkpointer": {"base_path": str(folder / "checkpoints"), "keep": [{"every": 12}]},
        **trainer,
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(config))


def start(folder, command="stages", config="run.yaml", *options, devices=1):
    """A driver in a session of its own; its stages are in others."""
    flags = f"--xla_force_host_platform_device_count={devices}" if devices > 1 else ""
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "HF_HUB_OFFLINE": "1", "XLA_FLAGS": flags}
    with (folder / "output.txt").open("a") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "levanter_marin", command, str(folder / config), *options],
            env=environment,
            cwd=folder,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def finish(folder, *arguments, **keywords):
    code = start(folder, *arguments, **keywords).wait(PATIENCE_SECONDS)
    assert code == 0, (folder / "output.txt").read_text()[-3000:]


def kill_when(folder, path, devices=1):
    """Starts the driver and kills it and its stage, all with -9, as soon as `path` exists."""
    driver = start(folder, devices=devices)
    clock = threading.Event()
    while not path.exists():
        assert driver.poll() is None, (folder / "output.txt").read_text()[-3000:]
        clock.wait(POLL_SECONDS)
    for pid in [driver.pid, *processes_of(folder)]:
        os.kill(pid, signal.SIGKILL)
    driver.wait()


def processes_of(folder):
    """Living processes that name the folder on their command line."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes()
            except (FileNotFoundError, ProcessLookupError):
                continue  # it ended meanwhile
            if str(folder).encode() in command and b"levanter_marin" in command:
                found.append(int(entry.name))
    return found


def stored(checkpoint):
    """All bytes of all arrays of a checkpoint, by key."""
    store = tensorstore.KvStore.open({"driver": "ocdbt", "base": f"file://{checkpoint}/"}).result()
    return {key: store.read(key).result().value for key in store.list().result()}


def records_of_steps(folder, name):
    """Every recorded value of a metric, by step; a step done twice has two."""
    values = {}
    with (folder / "logs/run/metrics.jsonl").open(encoding="utf-8") as file:
        for record in map(json.loads, file):
            if record.get("event") == "log" and name in record["metrics"]:
                values.setdefault(record["step"], []).append(record["metrics"][name])
    return values


@pytest.fixture(scope="module")
def uninterrupted(corpus, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    write_config(folder, corpus)
    finish(folder)
    return folder


@pytest.mark.slow
def test_stages_left_alone_have_one_schedule_and_one_compilation_each(uninterrupted):
    rates = [values[0] for _, values in sorted(records_of_steps(uninterrupted, "optim/learning_rate").items())]
    assert len(rates) == LAST + 1
    # linear from the first step to a tenth at the last of the whole run: equal differences across borders
    differences = [later - earlier for earlier, later in itertools.pairwise(rates)]
    assert max(differences) - min(differences) < 1e-3 * abs(differences[0])
    tokens = records_of_steps(uninterrupted, "throughput/total_tokens")
    assert {step: values[0] for step, values in tokens.items()} == {step: 128 * (step + 1) for step in tokens}
    output = (uninterrupted / "output.txt").read_text()
    stages = output.split("=== stage ")[1:]
    assert [len(re.findall(r"Compiling jit\(_?train_step\w*\)", stage)) for stage in stages] == [1, 1, 1]


@pytest.mark.slow
def test_stages_killed_within_a_stage_and_around_a_border_end_in_the_same_bits(uninterrupted, corpus, tmp_path):
    write_config(tmp_path, corpus)
    checkpoints = tmp_path / "checkpoints/run"
    border = checkpoints / f"step-{BORDER}"

    kill_when(tmp_path, checkpoints / "step-24/metadata.json")
    assert not border.exists(), "too late: the stage had ended"

    kill_when(tmp_path, border)
    (border / "metadata.json").unlink(missing_ok=True)  # in case the commit was quicker than the signal

    kill_when(tmp_path, border / "metadata.json")
    assert not (checkpoints / f"step-{LAST}").exists()

    finish(tmp_path)
    assert stored(checkpoints / f"step-{LAST}") == stored(uninterrupted / f"checkpoints/run/step-{LAST}")
    for name in PER_STEP:
        found, expected = records_of_steps(tmp_path, name), records_of_steps(uninterrupted, name)
        assert {step: set(values) for step, values in found.items()} == {s: set(v) for s, v in expected.items()}
    assert max(len(values) for values in records_of_steps(tmp_path, "train/loss").values()) > 1  # some were repeated


EXPERT_MESH = {
    "axes": {"data": 2, "expert": 4},
    "shared_mapping": {"experts": "expert"},
    "compute_mapping": {"batch": ["replica_dcn", "replica", "data", "expert"]},
}
MESH_TOLERANCE = 1e-4  # relative, on losses of a few steps after the same checkpoint


@pytest.mark.slow
def test_stages_on_an_expert_mesh_go_on_alike_on_another_mesh(corpus, tmp_path):
    stages = [{"seq_len": 16, "until": {"step": 4}}, {"seq_len": 32, "until": {"step": 8}}, {"seq_len": 64}]
    write_config(
        tmp_path, corpus, {"context_stages": stages}, num_train_steps=12, train_batch_size=32, mesh=EXPERT_MESH
    )
    config = yaml.safe_load((tmp_path / "run.yaml").read_text())
    config["model"]["moe"]["dispatch"] = {"capacity_factor": 4.0}  # nothing is dropped
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))

    kill_when(tmp_path, tmp_path / "checkpoints/run/step-7/metadata.json", devices=8)
    shutil.copytree(tmp_path / "checkpoints", tmp_path / "copied")
    shutil.copy(tmp_path / "logs/run/stages/stage_3.yaml", tmp_path)
    finish(tmp_path, "stages", "run.yaml", "--trainer.mesh.axes", "{data: 8, expert: 1}", devices=8)
    changed = records_of_steps(tmp_path, "train/loss")
    assert sorted(changed) == list(range(12))

    copied = ["--trainer.checkpointer.base_path", str(tmp_path / "copied")]
    finish(tmp_path, "train", "stage_3.yaml", *copied, devices=8)
    both = {step: values for step, values in records_of_steps(tmp_path, "train/loss").items() if step >= 8}
    assert len(both) == 4
    for values in both.values():
        assert len(values) >= 2
        assert max(values) - min(values) < MESH_TOLERANCE * min(values)
