# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""`levanter-marin describe` on the presets and on faulty configs."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from levanter_marin.cli.describe import main
from levanter_marin.cli.errors import UserError
from levanter_marin.models import presets
from levanter_marin.models.parameter_counts import flops_per_token

HERO_RTOL = 1e-14

CONFIG_DIR = Path(__file__).parents[2] / "config"


def _write(folder: Path, text: str) -> str:
    path = folder / "config.yaml"
    path.write_text(text)
    return str(path)


def _describe(capsys, *argv: str) -> dict:
    assert main([*argv, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    "name, total, active, training_flops",
    [
        ("d768", 1_591_848_448, 60_555_264, "2.6497e+19"),
        ("d1024", 3_980_116_480, 162_004_992, "1.7261e+20"),
        ("d1536", 11_534_398_464, 481_296_384, "1.3813e+21"),
        ("d2048", 27_742_902_528, 1_170_735_104, "7.7418e+21"),
        ("hero_535b_a23b", 535_477_106_688, 22_762_487_808, "2.6109e+24"),
    ],
)
def test_describe_published_config_prints_published_counts(capsys, name, total, active, training_flops):
    config = str(CONFIG_DIR / f"{name}.yaml")
    described = _describe(capsys, config, "--vocab-size", "128256")
    assert (described["total_parameters"], described["active_parameters"]) == (total, active)
    assert f"{described['training']['published_flops']:.4e}" == training_flops
    assert main([config, "--vocab-size", "128256"]) == 0
    text = capsys.readouterr().out
    assert str(total) in text and str(active) in text and training_flops in text


def test_describe_hero_config_resolves_the_published_hyperparameters(capsys):
    optimizer = _describe(capsys, str(CONFIG_DIR / "hero_535b_a23b.yaml"))["optimizer"]
    published = {
        "learning_rate": 0.003290470163258143,
        "adam_lr": 0.0007593392684441868,
        "beta2": 0.95,
        "epsilon": 6.044604247506697e-15,
    }
    assert optimizer == pytest.approx(published, rel=HERO_RTOL)


def test_describe_bare_model_type_counts_the_default_model(capsys, tmp_path):
    described = _describe(capsys, _write(tmp_path, "model: marin_moe\n"), "--vocab-size", "4096")
    assert described["flops_per_token"] == flops_per_token(presets.nano(), 4096, 256)
    assert described["training"] is None


def test_describe_batch_schedule_counts_tokens_of_every_phase(capsys, tmp_path):
    config = """
model: {type: marin_moe}
train_seq_len: 128
trainer:
  num_train_steps: 30
  train_batch_size: [{start: 0, value: 8}, {start: 10, value: 16}]
"""
    described = _describe(capsys, _write(tmp_path, config))
    assert described["training"]["tokens"] == (10 * 8 + 20 * 16) * 128


def test_describe_vocab_size_prefers_option_then_config_then_local_tokenizer(capsys, tmp_path):
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    Tokenizer(WordLevel({"a": 0, "b": 1, "[UNK]": 2}, unk_token="[UNK]")).save(str(folder / "tokenizer.json"))
    model = "model: {type: marin_moe}\n"

    local = _write(tmp_path, model + f"data: {{tokenizer: {folder}}}\n")
    assert _describe(capsys, local)["vocab_size"] == 3
    assert _describe(capsys, local, "--vocab-size", "7")["vocab_size"] == 7
    given = _write(tmp_path, model + f"data: {{tokenizer: {folder}, vocab_size: 5}}\n")
    assert _describe(capsys, given)["vocab_size"] == 5
    absent = _describe(capsys, _write(tmp_path, model + f"data: {{tokenizer: {tmp_path}/absent}}\n"))
    assert absent["vocab_size"] == 128256
    assert f"{tmp_path}/absent" in absent["vocab_size_source"]


@pytest.mark.parametrize(
    "text, words",
    [
        ("model: {type: marin_moe, hiden_dim: 64}", ["hiden_dim", "hidden_dim"]),
        ("model: {type: marin_moe, moe: {latent_dim: 4096}}", ["latent_dim=4096", "hidden_dim=128"]),
        ("model: {type: marin_moe, attention: {rope_pairing: adjacant}}", ["adjacant", "adjacent"]),
        ("model: {type: marin_moe, hidden_dim: wide}", ["hidden_dim", "wide"]),
        ("model: {type: llama}", ["marin_moe", "llama"]),
        ("trainer: {num_train_steps: 10}", ["model.type"]),
        ("model: [1, 2]", ["model", "[1, 2]"]),
        ("trainer: [1, 2]\nmodel: marin_moe", ["trainer", "[1, 2]"]),
        ("trainer: {num_train_steps: -1}\nmodel: marin_moe", ["trainer.num_train_steps", "-1"]),
        ("trainer: {num_train_steps: 1, train_batch_size: many}\nmodel: marin_moe", ["train_batch_size", "many"]),
        ("model: {type: marin_moe", ["YAML"]),
        ("- a\n- b", ["mapping"]),
    ],
)
def test_describe_faulty_config_is_refused_in_one_line(tmp_path, text, words):
    with pytest.raises(UserError) as refusal:
        main([_write(tmp_path, text)])
    assert all(word in str(refusal.value) for word in words), str(refusal.value)


def test_describe_broken_tokenizer_is_refused_with_its_path(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match="tokenizer.json.*--vocab-size"):
        main([_write(tmp_path, f"model: marin_moe\ndata: {{tokenizer: {tmp_path}}}")])


def test_describe_absent_config_is_refused_with_its_path(tmp_path):
    with pytest.raises(UserError, match="no_such.yaml"):
        main([str(tmp_path / "no_such.yaml")])
