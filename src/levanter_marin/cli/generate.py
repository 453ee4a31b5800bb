# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""`levanter-marin generate`: text from a checkpoint, by Levanter's inference engine."""

import argparse
import logging
import math
import os
from collections.abc import Callable
from typing import NamedTuple

import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis
from haliax.partitioning import ResourceMapping, round_axis_for_partitioning
from levanter.checkpoint import discover_latest_checkpoint
from levanter.inference.engine import InferenceEngine, InferenceEngineConfig, Request
from levanter.inference.jit_scheduler import SeqDecodingParams
from levanter.main.train_lm import TrainLmConfig
from levanter.model_loading import load_levanter_checkpoint
from levanter.models.lm_model import LmHeadModel
from levanter.tokenizers import MarinTokenizer, load_tokenizer
from levanter.trainer import TrainerConfig
from rigging.filesystem.storage_path import StoragePath

from levanter_marin import axes
from levanter_marin.cli.errors import UserError
from levanter_marin.cli.run_config import find_run_config
from levanter_marin.cli.train_config import decode_train_config, load_raw_config
from levanter_marin.interop.converter import MarinMoeConverter
from levanter_marin.interop.folder import CONFIG_NAME
from levanter_marin.models.marin_moe import MarinMoeConfig, MarinMoeLMHeadModel

DESCRIPTION = """Print a prompt and how the model continues it.

CHECKPOINT is what `levanter-marin train` names at its end: a folder `step-N`, or that of its run, for the newest; or a
folder in the Hugging Face format, with its config.json."""

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
    if not 0 <= options.temperature < math.inf:
        raise UserError(f"--temperature {options.temperature} must be 0 or more; 0 takes the likeliest token")
    if not 0 < options.top_p <= 1:
        raise UserError(f"--top-p {options.top_p} must be above 0 and at most 1; 1 samples from all tokens")

    # one warning for every component that the model lacks
    logging.getLogger("levanter.tensorstore_serialization").setLevel(logging.ERROR)
    is_hf = (StoragePath(options.checkpoint) / CONFIG_NAME).exists()
    find = _find_hf if is_hf else _find_native
    source = find(options.checkpoint, options.config, options.tokenizer)
    with source.trainer.use_device_mesh():
        try:
            model = source.load()
        except (ValueError, FileNotFoundError) as error:
            raise UserError(f"{options.checkpoint} cannot be loaded: {error}") from error
        text = generate(
            model,
            source.tokenizer,
            options.prompt,
            num_tokens=options.tokens,
            temperature=options.temperature,
            top_p=options.top_p,
            seed=options.seed,
            axis_resources=source.trainer.compute_axis_mapping,
        )
    print(text)
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
    axis_resources: ResourceMapping | None = None,
) -> str:
    """The prompt and up to `num_tokens` more, ended early by the tokenizer's end-of-text token.

    Args:
        model: in the precision to compute in, which is that of its cache too.
        axis_resources: how the cache is sharded over the current mesh.
    """
    end = tokenizer.eos_token_id
    tokens = tokenizer.encode(prompt, add_special_tokens=True) or [token for token in (end,) if token is not None]
    if not tokens:
        raise UserError("the prompt is empty and the tokenizer has no end-of-text token to start from; give a prompt")
    longest = model.Pos.size
    if len(tokens) + num_tokens > longest:
        raise UserError(
            f"{len(tokens)} tokens of the prompt and --tokens {num_tokens} exceed model.max_seq_len={longest}; "
            + (f"set --tokens to {longest - len(tokens)}" if len(tokens) < longest else "shorten the prompt")
        )
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
            compute_dtype=model.get_lm_head().dtype,
        ),
        axis_resources=axis_resources,
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


class _Source(NamedTuple):
    """A checkpoint that was found: `load` reads it under the device mesh of `trainer`."""

    trainer: TrainerConfig
    tokenizer: MarinTokenizer
    load: Callable[[], LmHeadModel]


def _find_native(checkpoint: str, config_path: str | None, tokenizer_path: str | None) -> _Source:
    newest = discover_latest_checkpoint(checkpoint)
    if newest is None:
        raise UserError(f"no checkpoint in {checkpoint}; `levanter-marin train` names one at its end")
    config = _read_config(config_path or find_run_config(newest))
    trainer = config.trainer
    tokenizer = _load_tokenizer(tokenizer_path or config.data.tokenizer)

    def load() -> LmHeadModel:
        mapping = trainer.parameter_axis_mapping
        Vocab = round_axis_for_partitioning(Axis(axes.VOCAB, len(tokenizer)), mapping)
        model = load_levanter_checkpoint(
            config.model, newest, Vocab=Vocab, axis_mapping=mapping, key=jax.random.PRNGKey(0)
        )
        return trainer.mp.cast_to_compute(model)

    return _Source(trainer, tokenizer, load)


def _find_hf(checkpoint: str, config_path: str | None, tokenizer_path: str | None) -> _Source:
    trainer = _read_config(config_path).trainer if config_path else TrainerConfig()

    def load() -> LmHeadModel:
        folder = os.path.abspath(checkpoint) if os.path.isdir(checkpoint) else checkpoint
        converter = MarinMoeConverter(MarinMoeConfig, reference_checkpoint=folder)
        return converter.load_pretrained(MarinMoeLMHeadModel, axis_mapping=trainer.parameter_axis_mapping)

    return _Source(trainer, _load_tokenizer(tokenizer_path or checkpoint), load)


def _read_config(path: str) -> TrainLmConfig:
    raw = load_raw_config(path, [])
    return decode_train_config({key: raw[key] for key in ("model", "data", "trainer") if key in raw}, path)


def _load_tokenizer(folder: str) -> MarinTokenizer:
    if not os.path.isfile(os.path.join(folder, "tokenizer.json")):
        raise UserError(f"no tokenizer.json in {folder}; name a tokenizer's folder with --tokenizer")
    return load_tokenizer(folder)
