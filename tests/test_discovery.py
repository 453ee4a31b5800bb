# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""Levanter finds the types of this package by itself, in an interpreter that only processed `levanter_marin.pth`."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src"

# What Python does with a .pth file in site-packages; draccus discovers plugins with the same loop.
START = "import site, sys; site.addsitedir(sys.argv[1])\n"
DISCOVER = """
import importlib, pkgutil, levanter.models
for module in pkgutil.iter_modules(levanter.models.__path__, "levanter.models."):
    print(importlib.import_module(module.name).__name__)
"""


@pytest.fixture
def site_folder(tmp_path):
    """A folder with the .pth file as the wheel installs it."""
    folder = tmp_path / "site"
    folder.mkdir()
    shutil.copy(SOURCE / "levanter_marin.pth", folder)
    return folder


@pytest.fixture
def stand_in(tmp_path):
    """A package `levanter.models` with one module, for what need not wait for the real one."""
    folder = tmp_path / "stand_in"
    models = folder / "levanter" / "models"
    models.mkdir(parents=True)
    for module in (folder / "levanter" / "__init__.py", models / "__init__.py", models / "own.py"):
        module.touch()
    return folder


def run(code, site_folder, *paths, **environment):
    search = os.pathsep.join(map(str, (*paths, SOURCE)))
    return subprocess.run(
        [sys.executable, "-c", START + code, str(site_folder)],
        env={**os.environ, "PYTHONPATH": search, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_autoload_at_interpreter_start_imports_only_itself(site_folder):
    code = "print([name for name in sys.modules if name.startswith(('levanter', 'jax', 'numpy'))])"
    result = run(code, site_folder)
    assert result.stdout.strip() == "['levanter_marin', 'levanter_marin._autoload']", result.stderr


def test_autoload_with_unimportable_plugin_warns_and_keeps_other_modules(site_folder, stand_in):
    code = "sys.modules['levanter_marin.registration'] = None" + DISCOVER
    result = run(code, site_folder, stand_in)
    assert "levanter.models.own" in result.stdout.split(), result.stderr
    assert result.returncode == 0
    assert "levanter-marin types are not available" in result.stderr


def test_autoload_switched_off_leaves_levanter_alone(site_folder, stand_in):
    result = run(DISCOVER, site_folder, stand_in, LEVANTER_MARIN_NO_AUTOLOAD="1")
    assert result.stdout.split() == ["levanter.models.own"], result.stderr


def test_autoload_beside_another_plugin_of_its_kind_extends_once(site_folder, stand_in):
    code = """
import levanter_marin._autoload as autoload
autoload.install()
sys.meta_path.insert(1, autoload._PathExtender())
"""
    result = run(code + "import levanter.models; print(len(levanter.models.__path__))", site_folder, stand_in)
    # Its own folder, and one from each finder: neither waits for the other for ever.
    assert result.stdout.strip() == "3", result.stderr


def test_levanter_config_with_our_types_decodes_without_importing_us(site_folder):
    code = """
import draccus
from levanter.main.train_lm import TrainLmConfig
raw = {"model": {"type": "marin_moe", "num_layers": 3}, "trainer": {"tracker": {"type": "json_lines"}}}
config = draccus.decode(TrainLmConfig, raw)
print(type(config.model).__module__, config.model.num_layers, type(config.trainer.tracker).__module__)
"""
    result = run(code, site_folder)
    assert result.stdout.split() == ["levanter_marin.models.marin_moe", "3", "levanter_marin.tracker"], result.stderr
