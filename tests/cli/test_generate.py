# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""`levanter-marin generate`: the model's own continuation, found by the checkpoint's path alone."""

import dataclasses
import json
import shutil
from pathlib import Path

import haliax as hax
import jax
import pytest
import yaml
from levanter.checkpoint import save_checkpoint
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from levanter_marin import axes
from levanter_marin.cli.errors import UserError
from levanter_marin.cli.main import main
from levanter_marin.cli.run_config import check_same_weights, find_run_config, write_run_config
from levanter_marin.cli.train_config import decode_train_config
from paging import greedy_continuations, one_device_mesh

TINY = yaml.safe_load((Path(__file__).parents[1] / "data/tiny_train.yaml").read_text(encoding="utf-8"))
PROMPT, TOKENS = "a prompt longer than the window of eight", 6


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run folder with a checkpoint of an untrained model, its config beside it, and a byte tokenizer."""
    folder = tmp_path_factory.mktemp("generate")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(["<end>", *alphabet])}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    (folder / "tokenizer").mkdir()
    tokenizer.save(str(folder / "tokenizer/tokenizer.json"))
    (folder / "tokenizer/tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
    changes = {"max_seq_len": 64, "initializer_std": 0.2, "gated_norm_rank": 128}
    config = {**TINY, "model": {**TINY["model"], **changes}}
    config["data"] = {**TINY["data"], "tokenizer": str(folder / "tokenizer")}
    write_run_config(config, str(folder / "run"), 0)
    Vocab = hax.Axis(axes.VOCAB, tokenizer.get_vocab_size())
    model = decode_train_config(config, "config").model.build(Vocab, key=jax.random.PRNGKey(0))
    save_checkpoint({"model": model}, 2, str(folder / "run/step-2"))
    return folder / "run", model, tokenizer


@pytest.fixture(params=("native", "hf"))
def checkpoint(request, run):
    """The run's folder, or its model in the Hugging Face format."""
    folder, model, _ = run
    if request.param == "hf":
        folder = folder.parent / "hf"
        with one_device_mesh():
            model.config.hf_checkpoint_converter().save_pretrained(model, str(folder), save_tokenizer=False)
        for file in (folder.parent / "tokenizer").iterdir():
            shutil.copy(file, folder)
    return str(folder)


@pytest.mark.slow
def test_generate_greedy_prints_the_prompt_and_what_full_forward_passes_continue_with(checkpoint, run, capsys):
    _, model, tokenizer = run
    assert main(["generate", checkpoint, PROMPT, "--tokens", str(TOKENS), "--temperature", "0"]) == 0
    expected = greedy_continuations(model, [tokenizer.encode(PROMPT).ids], TOKENS)[0]
    printed = capsys.readouterr().out.removesuffix("\n")
    assert printed == tokenizer.decode(expected)
    assert printed.startswith(PROMPT) and len(printed) > len(PROMPT)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    (
        (["run", "x", "--tokens", "0"], "--tokens 0 must be positive"),
        (["run", "x", "--temperature", "-1"], "--temperature -1.0 must be 0 or more"),
        (["run", "x", "--temperature", "nan"], "--temperature nan must be 0 or more"),
        (["run", "x", "--tokens", "100000"], "exceed model.max_seq_len="),
        (["run", "x", "--top-p", "1.5"], "--top-p 1.5 must be above 0"),
        (["nowhere", "x"], "no checkpoint in nowhere; `levanter-marin train` names one"),
        (["run", "x", "--tokenizer", "nowhere"], "no tokenizer.json in nowhere; name a tokenizer's folder with"),
        (["run", "x", "--config", "nowhere.yaml"], "no config file nowhere.yaml"),
    ),
    ids=lambda case: case if isinstance(case, str) else " ".join(case[2:]) or case[0],
)
def test_generate_with_mistake_tells_it_in_one_line(arguments, expected, run, capsys, monkeypatch):
    monkeypatch.chdir(run[0].parent)
    assert main(["generate", *arguments]) == 2
    assert expected in capsys.readouterr().err.splitlines()[-1]


def test_generate_with_another_tokenizer_than_trained_with_is_refused_in_one_line(run, tmp_path, capsys):
    vocabulary = {"<end>": 0, "x": 1}
    Tokenizer(models.BPE(vocab=vocabulary, merges=[])).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert main(["generate", str(run[0]), "x", "--tokenizer", str(tmp_path)]) == 2
    assert f"{run[0]} cannot be loaded: " in capsys.readouterr().err


@pytest.mark.parametrize(("checkpoint", "start"), (("step-9", 0), ("step-10", 10), ("step-25", 20), ("", 20)))
def test_run_config_of_a_checkpoint_is_the_last_that_started_before_it(checkpoint, start, tmp_path):
    for begun in (20, 0, 10):
        write_run_config({"model": {"num_layers": begun}}, str(tmp_path), begun)
    found = yaml.safe_load(Path(find_run_config(str(tmp_path / checkpoint))).read_text(encoding="utf-8"))
    assert found["model"]["num_layers"] == start
    assert {path.suffix for path in tmp_path.iterdir()} == {".yaml"}


def test_model_of_other_weights_than_the_checkpoint_is_refused_with_the_fields(tmp_path):
    write_run_config(TINY, str(tmp_path), 0)
    trained = decode_train_config(TINY, "config").model
    check_same_weights(dataclasses.replace(trained, max_seq_len=2 * trained.max_seq_len), str(tmp_path / "step-2"))
    other = dataclasses.replace(trained, hidden_dim=2 * trained.hidden_dim)
    expected = rf"model\.hidden_dim={other.hidden_dim} \(checkpoint: {trained.hidden_dim}\); take over"
    with pytest.raises(UserError, match=expected):
        check_same_weights(other, str(tmp_path / "step-2"))


def test_run_config_of_a_checkpoint_before_any_is_refused(tmp_path):
    write_run_config({}, str(tmp_path), 10)
    with pytest.raises(UserError, match="give the training config with --config"):
        find_run_config(str(tmp_path / "step-9"))
