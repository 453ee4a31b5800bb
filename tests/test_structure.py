# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""What may import what, how long a file may be, and what importing the package may cost."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src"
PACKAGE = "levanter_marin"
MAX_LINES = 400

# Data flows downwards: a module imports only from lines above its own. A new module gets a line here.
IMPORT_ORDER = """
    axes
    whole_chunks
    config
    schedule.stages
    documents
    corpus
    tracker
    eval_prefix
    layers.linear
    layers.materialized
    layers.norms
    layers.rotary
    layers.embedding
    layers.page_cache
    layers.paged_attention
    layers.short_conv
    layers.exclusive_attention
    layers.blockwise_attention
    layers.attention
    layers.mlp
    moe.quantile_balancing
    moe.router_bias
    moe.routing
    moe.blocked_swiglu
    moe.grouped_matmul
    moe.experts
    moe.dispatch.plan
    moe.statistics
    moe.dispatch.reference
    moe.dispatch.rows
    moe.dispatch.transport
    moe.dispatch.sharded
    moe.dispatch.local
    moe.dispatch.expert_parallel
    moe.dispatch.ragged_all_to_all
    moe.dispatch.padded_all_to_all
    moe.dispatch.api
    moe.latent_moe
    models.block
    models.transformer
    models.parameter_counts
    interop.hf_code.configuration_marin_moe
    interop.hf_code.modeling_marin_moe
    interop.hf_config
    interop.state_dict
    interop.folder
    interop.export_plan
    interop.native_checkpoint
    interop.converter
    models.marin_moe
    models.evaluation
    models.presets
    optim.newton_schulz
    optim.parameters
    optim.spreading
    optim.hyperball
    optim.groups
    optim.scaling
    optim.config
    optim.horizon
    schedule.render
    schedule.reads
    schedule.record
    schedule.metrics
    schedule.driver
    analysis.counts
    analysis.plots
    analysis.train_state
    analysis.activations
    analysis.exchange
    analysis.device_plan
    registration
    _autoload
    _shims.levanter_marin_plugin
    cli.errors
    cli.misspellings
    cli.train_config
    cli.preflight
    cli.run_config
    cli.training
    cli.stage_tables
    cli.stage_picture
    cli.stage_evaluation
    cli.staged_run
    cli.corpus
    cli.describe
    cli.groups
    cli.export
    cli.import_
    cli.generate
    cli.plan
    cli.train
    cli.stages
    cli.main
    __main__
""".split()

# Packages that only one module may import, and the module.
SOLE_IMPORTERS = {"matplotlib": "analysis.plots"}


def modules() -> dict[str, Path]:
    """Every module of the package that is not a package itself, by its name below `levanter_marin`."""
    paths = sorted((SOURCE / PACKAGE).rglob("*.py"))
    names = {path: ".".join(path.relative_to(SOURCE / PACKAGE).with_suffix("").parts) for path in paths}
    return {name: path for path, name in names.items() if path.name != "__init__.py"}


def imported_names(path: Path) -> set[str]:
    """Dotted names that a file imports anywhere in it; for `from a import b` both `a` and `a.b`."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            # code shipped into checkpoints lives in their folder, not in this package
            assert node.level == 0 or path.parent.name == "hf_code", f"{path}:{node.lineno}: relative import"
            names |= {node.module or ""} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def test_import_order_names_every_module_once():
    assert sorted(IMPORT_ORDER) == sorted(set(IMPORT_ORDER))
    assert set(modules()) <= set(IMPORT_ORDER), "give a new module its line in IMPORT_ORDER"
    assert set(IMPORT_ORDER) <= set(modules()), "remove the lines of modules that are gone"


def test_modules_import_only_from_lines_above_their_own():
    upward = []
    for name, path in modules().items():
        imported = {
            full.removeprefix(f"{PACKAGE}.") for full in imported_names(path) if full.startswith(f"{PACKAGE}.")
        }
        above = set(IMPORT_ORDER[: IMPORT_ORDER.index(name)])
        upward += [f"{name} imports {other}" for other in sorted(imported & set(IMPORT_ORDER)) if other not in above]
    assert not upward


def test_package_init_files_import_nothing():
    imports = {str(path): imported_names(path) for path in (SOURCE / PACKAGE).rglob("__init__.py")}
    assert not {path: names for path, names in imports.items() if names}


@pytest.mark.parametrize(("package", "importer"), SOLE_IMPORTERS.items())
def test_heavy_package_has_one_importer(package, importer):
    found = {name for name, path in modules().items() if any(n.split(".")[0] == package for n in imported_names(path))}
    assert found <= {importer}


def test_no_written_file_is_over_the_line_limit():
    folders = [ROOT / name for name in ("src", "tests", "benchmarks", "examples")]
    lines = {path: len(path.read_text(encoding="utf-8").splitlines()) for f in folders for path in f.rglob("*.py")}
    assert not {str(path.relative_to(ROOT)): count for path, count in lines.items() if count > MAX_LINES}


def test_import_of_the_package_loads_no_jax():
    code = f"import sys, {PACKAGE}; print(*sorted({{name.split('.')[0] for name in sys.modules}}))"
    loaded = subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(SOURCE)},
    ).stdout.split()
    assert PACKAGE in loaded
    assert not {"jax", "jaxlib", "haliax", "levanter", "equinox", "numpy"} & set(loaded)
