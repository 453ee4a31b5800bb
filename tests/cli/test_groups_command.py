# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""`levanter-marin groups` on a preset, an upstream model and faulty configs; what `describe` says of hyperball."""

import json
from pathlib import Path

import pytest

from levanter_marin.cli import describe
from levanter_marin.cli.errors import UserError
from levanter_marin.cli.groups import main

CONFIG_DIR = Path(__file__).parents[2] / "config"
HERO_TRAINABLE = 535_477_106_688 - 48 * 384  # all but the router biases

TINY_LLAMA = """
model: {type: llama, hidden_dim: 32, intermediate_dim: 48, num_layers: 2, num_heads: 4, num_kv_heads: 2}
optimizer: {type: hyperball, groups: {Attention.q_proj: adam}}
"""


def _write(folder: Path, text: str) -> str:
    path = folder / "config.yaml"
    path.write_text(text)
    return str(path)


def test_groups_of_the_hero_are_the_published_counts(capsys):
    config = str(CONFIG_DIR / "hero_535b_a23b.yaml")
    assert main([config, "--vocab-size", "128256", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["parameters"]
    counts = {group: sum(row["group"] == group for row in rows) for group in ("muonh", "adamh", "adam")}
    assert counts == {"muonh": 23, "adamh": 1, "adam": 11}
    assert sum(row["count"] for row in rows) == HERO_TRAINABLE
    assert sum(row["share"] for row in rows) == pytest.approx(1)
    (query,) = [row for row in rows if row["path"].endswith("q_proj.weight")]
    assert (query["axes"], query["shape"]) == (["layer", "heads", "head_size", "embed"], [48, 48, 128, 6144])
    assert (query["matrix"]["inputs"], query["matrix"]["outputs"]) == (["embed"], ["heads", "head_size"])
    assert query["matrix"]["shape"] == [6144, 6144]

    assert main([config, "--vocab-size", "128256"]) == 0
    assert str(sum(row["count"] for row in rows if row["group"] == "muonh")) in capsys.readouterr().out


def test_groups_of_an_upstream_model_follow_the_optimizer_of_the_config(capsys, tmp_path):
    assert main([_write(tmp_path, TINY_LLAMA), "--vocab-size", "64", "--json"]) == 0
    rows = {row["path"]: row["group"] for row in json.loads(capsys.readouterr().out)["parameters"]}
    layers = "transformer.layers.stacked"
    assert rows[f"{layers}.self_attn.q_proj.weight"] == "adam"
    assert rows[f"{layers}.self_attn.k_proj.weight"] == "muonh"
    assert rows["lm_head.weight"] == "adamh"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("Attention.q_proj", "Attention.q_porj"), "optimizer.groups names Attention.q_porj"),
        (("type: hyperball", "type: hyperbal"), "hyperball"),
        (("groups:", "grups:"), "groups"),
    ],
)
def test_groups_faulty_config_is_one_line(tmp_path, change, message):
    with pytest.raises(UserError, match=message) as caught:
        main([_write(tmp_path, TINY_LLAMA.replace(*change)), "--vocab-size", "64"])
    assert "\n" not in str(caught.value)


def test_describe_hyperball_with_a_rule_prints_what_it_comes_to(capsys, tmp_path):
    rule = "{tokens: 1.8005145e+13, tokens_per_batch: 46137344, hidden_dim: 6144}"
    config = _write(tmp_path, f"model: marin_moe\noptimizer: {{type: hyperball, adam_lr: 0.5, scale_from: {rule}}}\n")
    assert describe.main([config, "--json"]) == 0
    values = json.loads(capsys.readouterr().out)["optimizer"]
    assert values["learning_rate"] == pytest.approx(0.0032905, rel=1e-5)
    assert values["adam_lr"] == 0.5
    assert values["beta2"] == 0.95
    assert describe.main([config]) == 0
    assert "0.00329047" in capsys.readouterr().out
    with pytest.raises(UserError, match="hidden_dim=0 must be positive"):
        describe.main([_write(tmp_path, Path(config).read_text().replace("6144}", "0}"))])
