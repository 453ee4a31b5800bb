# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""Levanter's own ways to use a trained model: inference engine, `sample_lm`, the OpenAI-style server, lm-eval."""

import json
import os
import subprocess
import sys
from pathlib import Path

import haliax as hax
import jax
import jax.numpy as jnp
import pytest
import toy
import yaml
from levanter.checkpoint import latest_checkpoint_path
from levanter.inference.engine import InferenceEngine, InferenceEngineConfig, Request
from levanter.inference.jit_scheduler import SeqDecodingParams
from levanter.layers.attention import AttentionMask
from levanter.model_loading import load_levanter_checkpoint
from levanter.tokenizers import load_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from levanter_marin import axes
from levanter_marin.cli.run_config import find_run_config
from levanter_marin.cli.train_config import load_train_config
from paging import greedy_continuations, one_device_mesh

ROOT = Path(__file__).parents[2]
STEPS, TOKENS = 30, 64
PROMPTS = ["def main(", "import os", "    return self.", '"""The', "class Test"]

LOG_LIKELIHOOD_ATOL = 1e-3  # of a sum over a few tokens

UPSTREAM_SAMPLE_LM = "runpy.run_module('levanter.main.sample_lm', run_name='__main__')"
UPSTREAM_EVAL_HARNESS = "runpy.run_module('levanter.eval_harness', run_name='__main__')"

pytestmark = pytest.mark.slow


def _run(folder, *command):
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "XLA_FLAGS": ""}
    result = subprocess.run(
        [sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr[-5000:]
    return result.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a byte tokenizer."""
    folder = tmp_path_factory.mktemp("inference")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(["<end>", *alphabet])}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    (folder / "tokenizer").mkdir()
    tokenizer.save(str(folder / "tokenizer/tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>"}
    (folder / "tokenizer/tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture(scope="module")
def workplace(folder):
    """The folder, after the nano model was trained in it on these tests for some steps."""
    texts = [path.read_text(encoding="utf-8") for path in sorted((ROOT / "tests").rglob("*.py"))]
    (folder / "train.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    config = yaml.safe_load((ROOT / "config/marin_moe_nano.yaml").read_text(encoding="utf-8"))
    config["data"]["tokenizer"] = "tokenizer"
    config["data"]["components"]["corpus"]["source"] = {"type": "url", "train_urls": ["train.jsonl"]}
    config["trainer"] |= {"id": "nano", "num_train_steps": STEPS}
    (folder / "train.yaml").write_text(yaml.safe_dump(config))
    _run(folder, "-m", "levanter_marin", "train", "train.yaml")
    return folder


@pytest.fixture(scope="module")
def trained(workplace):
    """The trained model and its tokenizer, loaded by the checkpoint's path alone."""
    checkpoint = latest_checkpoint_path(str(workplace / "runs/checkpoints/nano"))
    assert checkpoint.endswith(f"step-{STEPS - 1}")
    config = load_train_config(find_run_config(checkpoint), [])
    tokenizer = load_tokenizer(config.data.tokenizer)
    Vocab = hax.Axis(axes.VOCAB, len(tokenizer))
    with one_device_mesh():
        model = load_levanter_checkpoint(
            config.model, checkpoint, Vocab=Vocab, axis_mapping={}, key=jax.random.PRNGKey(0)
        )
    # on the default device alone
    return jax.tree.map(jnp.asarray, jax.device_get(model)), tokenizer


def _greedy_requests(prompts: list[list[int]], count: int, clones: int = 1) -> list[Request]:
    return [
        Request(
            prompt,
            i,
            SeqDecodingParams(
                max_num_tokens=jnp.asarray(len(prompt) + count),
                stop_tokens=None,
                temperature=jnp.asarray(0.0),
                top_p=jnp.asarray(1.0),
                key=jax.random.PRNGKey(i),
            ),
            clones,
        )
        for i, prompt in enumerate(prompts)
    ]


def test_engine_greedy_continuation_of_the_trained_nano_model_equals_repeated_full_forward_passes(trained):
    model, tokenizer = trained
    prompts = [tokenizer.encode(prompt) for prompt in PROMPTS]
    config = InferenceEngineConfig(
        max_seq_len=96, page_size=32, max_pages=30, max_seqs=10, max_rounds=TOKENS, compute_dtype=jnp.float32
    )
    engine = InferenceEngine.from_model_with_config(model, tokenizer, config)
    result = engine.generate(_greedy_requests(prompts, TOKENS, clones=2)).tokens
    expected = greedy_continuations(model, prompts, TOKENS)
    assert [prompt + tokens for prompt, tokens in zip(prompts, result[::2], strict=True)] == expected
    assert result[::2] == result[1::2]


TORCH_PYTHON = ROOT / ".venv-torch/bin/python"
TORCH_CODE = """
import json, sys, torch
from transformers import AutoModelForCausalLM
folder, prompts, count = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
options = {"max_new_tokens": count, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
for prompt in prompts:
    tokens = torch.tensor([prompt])
    print(json.dumps(model.generate(tokens, attention_mask=torch.ones_like(tokens), **options)[0].tolist()))
"""


def test_exported_pytorch_file_greedy_continuation_equals_repeated_full_forward_passes(trained, tmp_path):
    if not TORCH_PYTHON.exists():
        pytest.skip("needs the environment that `make test-torch` makes")
    model, tokenizer = trained
    prompts = [tokenizer.encode(prompt) for prompt in PROMPTS]
    with one_device_mesh():
        model.config.hf_checkpoint_converter().save_pretrained(model, str(tmp_path / "hf"), save_tokenizer=False)
    arguments = ["-c", TORCH_CODE, str(tmp_path / "hf"), json.dumps(prompts), str(TOKENS)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": str(tmp_path / "modules")}
    result = subprocess.run([TORCH_PYTHON, *arguments], env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-5000:]
    continuations = [json.loads(line) for line in result.stdout.splitlines()]
    assert continuations == greedy_continuations(model, prompts, TOKENS)


def test_sample_lm_of_the_trained_nano_model_prints_its_greedy_continuation(workplace, trained):
    model, tokenizer = trained
    trainer = {"mp": "f32", "require_accelerator": False, "tracker": {"type": "noop"}, "log_dir": "logs"}
    config = {
        "checkpoint_path": "runs/checkpoints/nano",
        "tokenizer": "tokenizer",
        "model": yaml.safe_load((workplace / "train.yaml").read_text(encoding="utf-8"))["model"],
        "trainer": trainer,
        "engine": {"max_seq_len": 32, "page_size": 8, "max_seqs": 2, "max_pages": 8, "max_queued_tokens": 16},
        "prompts": PROMPTS[:2],
        "stop_sequence": None,
        "max_new_tokens": 8,
        "temperature": 0.0,
        "n_rounds": 1,
    }
    config["engine"] |= {"max_seqs_in_prefill": 2, "max_rounds": 8}
    (workplace / "sample.yaml").write_text(yaml.safe_dump(config))
    # what the installed package's .pth file does
    code = f"import site; site.addsitedir({str(ROOT / 'src')!r}); import runpy; {UPSTREAM_SAMPLE_LM}"
    printed = _run(workplace, "-c", code, "--config_path", "sample.yaml")
    prompts = [tokenizer.encode(prompt) for prompt in PROMPTS[:2]]
    for i, tokens in enumerate(greedy_continuations(model, prompts, 8)):
        # the engine of sample_lm keeps its cache in bf16, so that only the first token is sure
        assert f"Tokens for sequence {i} (len: 8: [{tokens[len(prompts[i])]}, " in printed


def test_openai_style_server_completes_a_prompt_with_the_greedy_continuation(folder):
    server_module = pytest.importorskip(
        "levanter.inference.openai", reason="needs `pip install levanter-marin[serve]`"
    )
    client_module = pytest.importorskip("fastapi.testclient", reason="needs `pip install levanter-marin[serve]`")
    tokenizer = load_tokenizer(str(folder / "tokenizer"))
    model = toy.config(num_layers=2).build(hax.Axis(axes.VOCAB, len(tokenizer)), key=jax.random.PRNGKey(0))
    trainer = toy.trainer_config(folder / "server")
    engine = InferenceEngineConfig(
        max_seq_len=32, page_size=8, max_pages=8, max_seqs=2, max_rounds=8, max_queued_tokens=16,
        max_seqs_in_prefill=2, compute_dtype=jnp.float32,
    )  # fmt: skip
    config = server_module.InferenceServerConfig(trainer=trainer, service=engine)
    with trainer.use_device_mesh():
        server = server_module.InferenceServer.create(config, model, tokenizer)
    try:
        request = {"model": "levanter", "prompt": PROMPTS[0], "max_tokens": 8, "temperature": 0.0, "logprobs": 1}
        reply = client_module.TestClient(server.app).post("/v1/completions", json=request).json()
    finally:
        server.shutdown()
    prompt = tokenizer.encode(PROMPTS[0])
    expected = greedy_continuations(model, [prompt], 8)[0][len(prompt) :]
    assert reply["choices"][0]["text"] == tokenizer.decode(expected)
    assert reply["choices"][0]["logprobs"]["tokens"] == tokenizer.convert_ids_to_tokens(expected)


DOCUMENTS = [
    {"start": "def", "ends": ["__init__(", "99 9"], "gold": 0},
    {"start": "import", "ends": [")(]", "pytest"], "gold": 1},
    {"start": "    return", "ends": ["None", "%%%%"], "gold": 1},
    {"start": "from haliax", "ends": ["import", "((((((", "zzz"], "gold": 0},
]


def _log_likelihood(model, context: list[int], end: list[int]) -> float:
    tokens = hax.named(jnp.asarray(context + end), axes.POSITION)
    logits = jax.nn.log_softmax(model(tokens, AttentionMask.causal()).array)
    rows = range(len(context) - 1, len(context) + len(end) - 1)
    return sum(float(logits[row, token]) for row, token in zip(rows, end, strict=True))


def test_lm_eval_harness_with_a_local_task_scores_as_full_forward_passes_do(workplace, trained):
    pytest.importorskip("lm_eval", reason="needs `pip install levanter-marin[eval]`")
    model, tokenizer = trained
    (workplace / "task").mkdir()
    lines = "".join(json.dumps(document) + "\n" for document in DOCUMENTS)
    (workplace / "task/test.jsonl").write_text(lines)
    task = {
        "task": "local_code",
        "dataset_path": str(workplace / "task"),
        "output_type": "multiple_choice",
        "test_split": "test",
        "doc_to_text": "{{start}}",
        "doc_to_choice": "{{ends}}",
        "doc_to_target": "gold",
        "target_delimiter": " ",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }
    trainer = {"mp": "f32", "require_accelerator": False, "tracker": {"type": "noop"}, "log_dir": "logs"}
    config = {
        "eval_harness": {"task_spec": [task], "log_samples": True, "max_length": 32},
        "checkpoint_path": "runs/checkpoints/nano",
        "tokenizer": "tokenizer",
        "model": yaml.safe_load((workplace / "train.yaml").read_text(encoding="utf-8"))["model"],
        "trainer": {**trainer, "per_device_eval_parallelism": 4, "train_batch_size": 4},
    }
    (workplace / "eval.yaml").write_text(yaml.safe_dump(config))
    code = f"import levanter_marin.registration, runpy; {UPSTREAM_EVAL_HARNESS}"
    _run(workplace, "-c", code, "--config_path", "eval.yaml")

    results = json.loads((workplace / "lm_eval_harness_results.json").read_text(encoding="utf-8"))
    correct = []
    for document, sample in zip(DOCUMENTS, results["samples"]["local_code"], strict=True):
        context = tokenizer.encode(document["start"])
        rows = [tokenizer.encode(f"{document['start']} {end}") for end in document["ends"]]
        expected = [_log_likelihood(model, context, row[len(context) :]) for row in rows]
        scores = [response[0] for response in sample["filtered_resps"]]
        assert scores == pytest.approx(expected, abs=LOG_LIKELIHOOD_ATOL)
        correct.append(expected.index(max(expected)) == document["gold"])
    assert results["results"]["local_code"]["acc,none"] == sum(correct) / len(correct)
