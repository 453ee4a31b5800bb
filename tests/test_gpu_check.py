# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""`make gpu-check`, as far as a CPU can tell."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "gpu_check.sh"


def run(*arguments, **variables):
    environment = {**os.environ, "PYTHON": sys.executable, **variables}
    return subprocess.run([SCRIPT, *arguments], env=environment, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_gpu_check_small_on_cpu_is_correct_and_says_that_it_was_a_cpu(tmp_path):
    with zipfile.ZipFile(tmp_path / "no_such_package-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("no_such_package.py", "")
    path = tmp_path / "report.json"
    done = run("--small", "--repeats", "2", "--json", str(path), WHEELS=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "no_such_package-1.0" in done.stdout
    assert "ran on a CPU" in done.stdout
    report = json.loads(path.read_text())
    assert report["platform"] == "cpu"
    assert [row["implementation"] for row in report["rows"]] == ["local", "ragged_all_to_all"]
    assert all(row["correct"] and row["tokens_per_s"] > 0 for row in report["rows"])


def test_gpu_check_refuses_wheels_over_the_limit(tmp_path):
    with (tmp_path / "large-1.0-py3-none-any.whl").open("wb") as wheel:
        wheel.truncate(64 * 1024 * 1024 + 1)
    done = run("--small", WHEELS=str(tmp_path))
    assert done.returncode == 2
    assert "67108865 bytes, allowed 67108864" in done.stderr


@pytest.mark.slow
def test_gpu_check_without_a_gpu_is_refused_in_one_line():
    done = run(JAX_PLATFORMS="cpu")
    assert done.returncode == 2
    assert "no GPU: JAX found only a CPU; --small checks that the script runs" in done.stderr
