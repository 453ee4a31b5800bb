# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""Expert parallelism over more than one process: the same losses, and checkpoints that move between set-ups."""

import json
import os
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml
from tokenizers import Tokenizer, models, pre_tokenizers

from levanter_marin.schedule.metrics import DROP_FRACTION, LOSS, read_steps

ROOT = Path(__file__).parents[2]
SAME_LOSS = 1e-4
SAME_NEXT_LOSS = 1e-5
TIMEOUT_S = 800

# Processes and devices of each. The mesh is 1 x 1 or 2 x 4.
SETUPS = {"one device": (1, 1), "8 devices": (1, 8), "2 processes": (2, 4)}


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """A byte tokenizer, a text and the tiny model, whose 4 experts are spread over 4 devices and never drop."""
    folder = tmp_path_factory.mktemp("processes")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(["<end>", *alphabet])}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(["<end>"])
    (folder / "tokenizer").mkdir()
    tokenizer.save(str(folder / "tokenizer/tokenizer.json"))
    (folder / "tokenizer/tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
    text = Path(__file__).read_text(encoding="utf-8")
    (folder / "train.jsonl").write_text(json.dumps({"text": text}) + "\n")
    content = yaml.safe_load((ROOT / "tests/data/tiny_train.yaml").read_text(encoding="utf-8"))
    content["model"]["moe"]["dispatch"] = {"capacity_factor": None}
    content["trainer"]["checkpointer"] = {"base_path": "checkpoints"}
    content["optimizer"]["lr_schedule"] = "constant"
    (folder / "run.yaml").write_text(yaml.safe_dump(content))
    return folder


def _mesh(devices):
    axes = {"data": 1, "expert": 1} if devices == 1 else {"data": 2, "expert": 4}
    return json.dumps(
        {
            "axes": axes,
            "shared_mapping": {"experts": "expert"},
            "compute_mapping": {"batch": ["data", "expert"]},
            "param_mapping": {"embed": ["data", "expert"]},
        }
    )


def _train(folder, setup, run_id, steps):
    """Losses by step of a run, continued if it has a checkpoint."""
    processes, devices = SETUPS[setup]
    command = [sys.executable, "-m", "levanter_marin", "train", "run.yaml", "--trainer.id", run_id]
    command += ["--trainer.num_train_steps", str(steps), "--trainer.mesh", _mesh(processes * devices)]
    command += ["--data.cache_dir", f"cache_{run_id}"]  # runs go on side by side
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT / "src"),
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices} --xla_backend_optimization_level=0"
        " --xla_llvm_disable_expensive_passes=true",
        "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
    }
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    running = []
    for process in range(processes):
        options = []
        if processes > 1:
            options = ["--trainer.distributed.coordinator_address", address]
            options += ["--trainer.distributed.num_processes", str(processes)]
            options += ["--trainer.distributed.process_id", str(process)]
        with (folder / f"{run_id}.{setup}.{process}.log").open("w") as log:
            running.append(subprocess.Popen([*command, *options], cwd=folder, env=environment, stdout=log, stderr=log))
    try:
        codes = [process.wait(timeout=TIMEOUT_S) for process in running]
    finally:
        for process in running:
            process.kill()
    logs = [(folder / f"{run_id}.{setup}.{process}.log").read_text()[-3000:] for process in range(processes)]
    assert codes == [0] * processes, "\n".join(logs)
    logged = read_steps(folder / "logs" / run_id / "metrics.jsonl")
    steps_done = {step: metrics for step, metrics in logged.items() if LOSS in metrics}
    assert all(metrics[DROP_FRACTION] == 0 for metrics in steps_done.values())
    return {step: metrics[LOSS] for step, metrics in steps_done.items()}


def _train_side_by_side(folder, runs):
    """Of several (set-up, run id, steps)."""
    with ThreadPoolExecutor() as pool:
        return list(pool.map(lambda run: _train(folder, *run), runs))


@pytest.mark.slow
def test_training_on_two_processes_gives_the_losses_of_one_and_checkpoints_move(config):
    names = list(SETUPS)
    losses = _train_side_by_side(config, [(setup, setup.replace(" ", "_"), 3) for setup in names])
    for of_setup in losses:
        assert sorted(of_setup) == [0, 1, 2]
        assert of_setup == pytest.approx(losses[0], rel=SAME_LOSS)
    # each set-up continues what another one has saved
    runs = [(setup, names[i - 1].replace(" ", "_"), 4) for i, setup in enumerate(names)]
    next_losses = [of_run[3] for of_run in _train_side_by_side(config, runs)]
    assert next_losses == pytest.approx([next_losses[0]] * 3, rel=SAME_NEXT_LOSS)
    assert next_losses[0] < losses[0][0]
