# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""`levanter-marin generate`: text from a checkpoint, by Levanter's inference engine."""

import argparse
import logging
import os

import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis
from haliax.partitioning import round_axis_for_partitioning
from levanter.checkpoint import discover_latest_checkpoint
from levanter.inference.engine import InferenceEngine, InferenceEngineConfig, Request
from levanter.inference.jit_scheduler import SeqDecodingParams
from levanter.main.train_lm import TrainLmConfig
from levanter.model_loading import load_levanter_checkpoint
from levanter.models.lm_model import LmHeadModel
from levanter.tokenizers import MarinTokenizer, load_tokenizer

from levanter_marin import axes
from levanter_marin.cli.errors import UserError
from levanter_marin.cli.run_config import find_run_config
from levanter_marin.cli.train_config import decode_train_config, load_raw_config

DESCRIPTION = """Print a prompt and how the model continues it.

CHECKPOINT is what `levanter-marin train` names at its end: a folder `step-N`, or that of its run, for the newest."""

_PAGE_SIZE = 32


def main(argv: list[str]) -> int:
    """Run the command; returns its exit code, or raises `UserError`."""
    parser = argparse.ArgumentParser(
        prog="levanter-marin generate", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", metavar="CHECKPOINT")
    parser.add_argument("prompt", metavar="PROMPT", help='text to continue; "" starts a document')
    parser.add_argument("--tokens", type=int, default=64, metavar="N", help="tokens to add at most (%(default)s)")
    parser.add_argument(
        "--temperature", type=float, default=0.7, metavar="T", help="0 takes the likeliest token (%(default)s)"
    )
    parser.add_argument("--top-p", type=float, default=1.0, metavar="P", help="nucleus to sample from (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="(%(default)s)")
    parser.add_argument("--config", metavar="CONFIG", help="training config, if there is none beside the checkpoint")
    parser.add_argument("--tokenizer", metavar="FOLDER", help="instead of the config's data.tokenizer")
    options = parser.parse_args(argv)
    if options.tokens < 1:
        raise UserError(f"--tokens {options.tokens} must be positive; set it to 1 or more")
    if options.temperature < 0:
        raise UserError(f"--temperature {options.temperature} must not be negative; 0 takes the likeliest token")
    if not 0 < options.top_p <= 1:
        raise UserError(f"--top-p {options.top_p} must be above 0 and at most 1; 1 samples from all tokens")

    # one warning for every component that the model lacks
    logging.getLogger("levanter.tensorstore_serialization").setLevel(logging.ERROR)
    checkpoint = discover_latest_checkpoint(options.checkpoint)
    if checkpoint is None:
        raise UserError(f"no checkpoint in {options.checkpoint}; `levanter-marin train` names one at its end")
    config_path = options.config or find_run_config(checkpoint)
    raw = load_raw_config(config_path, [])
    config = decode_train_config({key: raw[key] for key in ("model", "data", "trainer") if key in raw}, config_path)
    tokenizer = _load_tokenizer(options.tokenizer or config.data.tokenizer)
    with config.trainer.use_device_mesh():
        model = _load_model(checkpoint, config, tokenizer)
        continuation = generate(
            model,
            tokenizer,
            options.prompt,
            num_tokens=options.tokens,
            temperature=options.temperature,
            top_p=options.top_p,
            seed=options.seed,
            config=config,
        )
    print(continuation)
    return 0


def generate(
    model: LmHeadModel,
    tokenizer: MarinTokenizer,
    prompt: str,
    *,
    num_tokens: int,
    temperature: float,
    top_p: float,
    seed: int,
    config: TrainLmConfig,
) -> str:
    """The prompt and up to `num_tokens` more, ended early by the tokenizer's end-of-text token.

    Args:
        model: in compute precision, under its device mesh.
        config: says the dtype of the cache and how arrays are sharded.
    """
    end = tokenizer.eos_token_id
    tokens = tokenizer.encode(prompt, add_special_tokens=True) or [token for token in (end,) if token is not None]
    if not tokens:
        raise UserError("the prompt is empty and the tokenizer has no end-of-text token to start from; give a prompt")
    pages = -(-(len(tokens) + num_tokens) // _PAGE_SIZE)
    engine = InferenceEngine.from_model_with_config(
        model=model,
        tokenizer=tokenizer,
        config=InferenceEngineConfig(
            max_seq_len=pages * _PAGE_SIZE,
            page_size=_PAGE_SIZE,
            max_pages=pages,
            max_seqs=1,
            max_seqs_in_prefill=1,
            max_queued_tokens=1,
            max_rounds=num_tokens,  # of one call, of which the engine makes max_seq_len // max_rounds
            max_stop_seqs=1,
            max_stop_tokens=1,
            compute_dtype=config.trainer.mp.compute_dtype,
        ),
        axis_resources=config.trainer.compute_axis_mapping,
    )
    stop = None if end is None else hax.named(jnp.asarray([[end]], jnp.int32), ("stop_seq", axes.POSITION))
    params = SeqDecodingParams(
        max_num_tokens=jnp.asarray(len(tokens) + num_tokens, jnp.int32),
        stop_tokens=stop,
        temperature=jnp.asarray(temperature, jnp.float32),
        top_p=jnp.asarray(top_p, jnp.float32),
        key=jax.random.PRNGKey(seed),
    )
    result = engine.generate([Request(prompt_tokens=tokens, request_id=0, decode_params=params, n_generations=1)])
    return tokenizer.decode([*tokens, *result.tokens[0]], skip_special_tokens=True)


def _load_tokenizer(path: str) -> MarinTokenizer:
    if not os.path.isdir(path):
        raise UserError(f"no tokenizer folder {path}; name one with --tokenizer")
    return load_tokenizer(path)


def _load_model(checkpoint: str, config: TrainLmConfig, tokenizer: MarinTokenizer) -> LmHeadModel:
    trainer = config.trainer
    Vocab = round_axis_for_partitioning(Axis(axes.VOCAB, len(tokenizer)), trainer.parameter_axis_mapping)
    key = jax.random.PRNGKey(0)
    try:
        model = load_levanter_checkpoint(
            config.model, checkpoint, Vocab=Vocab, axis_mapping=trainer.parameter_axis_mapping, key=key
        )
    except (ValueError, FileNotFoundError, KeyError) as error:
        raise UserError(f"{checkpoint} does not fit its config and a vocabulary of {Vocab.size}: {error}") from error
    return trainer.mp.cast_to_compute(model)
