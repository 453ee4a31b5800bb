# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""`levanter-marin export` and `import`, and Levanter's own commands on the same checkpoints."""

import dataclasses
import json
from pathlib import Path

import equinox as eqx
import jax
import numpy as np
import pytest
import yaml
from haliax import Axis
from levanter.checkpoint import load_checkpoint
from levanter.compat.hf_checkpoints import RepoRef
from levanter.main import export_hf_to_lm, export_lm_to_hf
from levanter.trainer import TrainerConfig
from levanter.utils.jax_utils import local_cpu_mesh
from test_train import ROOT, SOURCE, run, workplace, write_config  # noqa: F401

from levanter_marin import axes
from levanter_marin.cli.main import main
from levanter_marin.cli.run_config import find_run_config
from levanter_marin.cli.train_config import load_train_config
from levanter_marin.interop.folder import read_stored_tensors

PUBLISHED_TOTAL = 535_477_106_688
VOCAB_SIZE = 257
LOSS_ATOL = 1e-6  # of two evaluations of the same weights
CHANGES = {
    "model.gated_norm_rank": 128,
    "data.components.text.source.validation_urls": ["train.jsonl"],
    "hf_save_path": "hf",
    "hf_save_steps": 2,
}


def test_export_dry_run_of_the_published_model_lists_every_tensor_and_its_total(capsys):
    assert main(["export", "--dry-run", "--config", str(ROOT / "config/hero_535b_a23b.yaml")]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [line.split("  ") for line in lines if line.startswith(("model.", "lm_head."))]
    assert len(rows) == 1352
    assert sum(int(np.prod(json.loads(shape))) for _, shape, _, _ in rows) == PUBLISHED_TOTAL
    assert f"parameters  {PUBLISHED_TOTAL}, router biases included" in lines
    assert f"bytes       {sum(int(size) for *_, size in rows)}" in lines
    assert ["model.layers.47.mlp.experts.down_proj.weight", "[384, 3072, 3072]", "bfloat16", "7247757312"] in rows


MISTAKES = {
    "no_output": (["export", "runs"], "--output FOLDER says where to write"),
    "no_checkpoint": (["export", "--output", "out"], "name a CHECKPOINT"),
    "absent_checkpoint": (["export", "absent", "--output", "out"], "no checkpoint in absent"),
    "off_recipe": (["export", "--dry-run", "--config", "run.yaml"], "cannot say: gated_norm_rank=4 (needs 128)"),
    "schema": (
        ["export", "--dry-run", "--config", "full.yaml", "--schema", "1"],
        "schema 1, cannot say: global_every=2 (needs 4)",
    ),
    "shard_size": (["export", "runs", "--output", "out", "--shard-size", "0"], "--shard-size 0 must be positive"),
    "import_no_json": (["import", "broken", "--output", "out"], "is not a valid JSON file"),
    "import_folder": (["import", "tokenizer", "--output", "out"], "no config.json in tokenizer"),
    "import_output": (["import", "hf", "--output", "tokenizer"], "tokenizer exists and is not empty"),
    "import_config": (["import", "hf", "--output", "out"], "config.json: model_type='llama'"),
}


@pytest.mark.parametrize(("arguments", "expected"), MISTAKES.values(), ids=MISTAKES)
def test_export_and_import_tell_a_mistake_in_one_line(workplace, capsys, arguments, expected):  # noqa: F811
    write_config({})
    write_config({"model.gated_norm_rank": 128}, "full.yaml")
    Path("broken").mkdir()
    Path("broken/config.json").write_text("{")
    Path("hf").mkdir()
    Path("hf/config.json").write_text(json.dumps({"model_type": "llama"}))
    assert main(arguments) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert expected in line


def test_train_that_would_export_an_ablation_is_refused_before_the_run(workplace, capsys):  # noqa: F811
    assert main(["train", write_config({"hf_save_path": "hf"})]) == 2
    assert "cannot say: gated_norm_rank=4" in capsys.readouterr().err


@pytest.mark.slow
def test_checkpoints_of_a_run_go_through_every_command_and_back(workplace, monkeypatch):  # noqa: F811
    path = write_config(CHANGES)
    trained = run(["-m", "levanter_marin", "train", path, "--trainer.id", "run"])
    assert trained.returncode == 0, trained.stderr
    model_config = load_train_config(path, []).model
    shapes = eqx.filter_eval_shape(model_config.build, Axis(axes.VOCAB, VOCAB_SIZE), key=jax.random.PRNGKey(0))

    # during training: the folders of hf_save_path, the last with the final weights
    assert sorted(Path("hf/run").iterdir())[-1].name == "step-2"
    saved = read_stored_tensors(Path("hf/run/step-2"))

    # our export is the same, and upstream's export too
    native = "checkpoints/run/step-2"
    assert main(["export", native, "--config", path, "--output", "exported", "--dtype", "float32"]) == 0
    monkeypatch.setattr("levanter.utils.logging.init_logging", lambda *args, **kwargs: None)
    export_lm_to_hf.main(
        export_lm_to_hf.ConvertLmConfig(
            trainer=TrainerConfig(),
            checkpoint_path=native,
            output_dir="exported_by_levanter",
            model=model_config,
            tokenizer="tokenizer",
            use_cpu=True,
        )
    )
    original = Path("hf/run/step-2/model.safetensors").read_bytes()
    for folder in ("exported", "exported_by_levanter"):
        assert read_stored_tensors(Path(folder)).keys() == saved.keys()
        assert Path(folder, "model.safetensors").read_bytes() == original
        assert Path(folder, "tokenizer.json").exists()

    # back again, by our import and by upstream's, with every bit but the count of tokens behind a router bias
    assert main(["import", "exported", "--output", "imported"]) == 0
    imported_model = load_train_config(find_run_config("imported"), []).model
    assert imported_model == dataclasses.replace(model_config, initializer_std=model_config.init_std)
    export_hf_to_lm.main(
        export_hf_to_lm.ImportHfConfig(
            hf_checkpoint=RepoRef("exported"), output_path="imported_by_levanter", model=model_config, dtype="float32"
        )
    )
    with local_cpu_mesh():
        weights = _leaves(load_checkpoint(shapes, native, subpath="model"))
        ours = _leaves(load_checkpoint(shapes, "imported/step-0", subpath="model"))
        theirs = _leaves(load_checkpoint(shapes, "imported_by_levanter"))
    for found in (ours, theirs):
        assert [name for name in weights if not np.array_equal(weights[name], found[name])] == []

    # evaluation from either form
    losses = [_evaluate("checkpoint_path", native), _evaluate("hf_checkpoint", str(Path("exported").absolute()))]
    assert losses[0] == pytest.approx(losses[1], abs=LOSS_ATOL)

    # and training from it
    options = ["--trainer.id", "second", "--trainer.num_train_steps", "1", "--initialize_from_hf", "./exported"]
    started = run(["-m", "levanter_marin", "train", path, *options])
    assert started.returncode == 0, started.stderr


def _leaves(model) -> dict[str, np.ndarray]:
    leaves = jax.tree_util.tree_leaves_with_path(model)
    named = {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}
    return {name: value for name, value in named.items() if ".router.bias.weight" not in name}


def _evaluate(form: str, checkpoint: str) -> float:
    """Levanter's own eval_lm, which finds our type as in an installed environment."""
    raw = yaml.safe_load(Path("run.yaml").read_text())
    raw = {key: raw[key] for key in ("data", "trainer", "model")} | {form: checkpoint, "max_eval_length": 32}
    Path("eval.yaml").write_text(yaml.safe_dump(raw))
    code = (
        "import runpy, site, sys; sys.path.insert(0, sys.argv.pop()); site.addsitedir(sys.path[0]); "
        "runpy.run_module('levanter.main.eval_lm', run_name='__main__')"
    )
    result = run(["-c", code, "--config_path", "eval.yaml", str(SOURCE)])
    loss = [line for line in result.stdout.splitlines() if line.startswith("Loss:")]
    assert loss, result.stderr
    return float(loss[0].split()[1])
