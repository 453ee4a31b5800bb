# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""`levanter-marin export`: a Hugging Face folder from a checkpoint of a run, read back before it counts."""

import argparse
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from haliax import Axis
from levanter.checkpoint import discover_latest_checkpoint
from levanter.utils.jax_utils import local_cpu_mesh

from levanter_marin import axes
from levanter_marin.cli.describe import vocab_size_and_source
from levanter_marin.cli.errors import UserError
from levanter_marin.cli.run_config import find_run_config
from levanter_marin.cli.train_config import decode_train_config, load_raw_config
from levanter_marin.interop.converter import MarinMoeConverter
from levanter_marin.interop.export_plan import ExportPlan, check_values
from levanter_marin.interop.folder import check_replaceable
from levanter_marin.interop.hf_config import ArtifactSchema
from levanter_marin.interop.native_checkpoint import NativeCheckpoint
from levanter_marin.interop.state_dict import ExpertLayout
from levanter_marin.models.marin_moe import MarinMoeConfig

DESCRIPTION = """Write a checkpoint as Hugging Face reads it: safetensors, config.json, tokenizer and PyTorch code.

CHECKPOINT is what `levanter-marin train` names at its end: a folder `step-N`, or that of its run, for the newest. It
is read for one file of the export after another, and again to compare every tensor with what was written; main memory
holds about three times --shard-size. --dry-run only lists the tensors."""

_DTYPES = ("bfloat16", "float32")


def main(argv: list[str]) -> int:
    """Run the command; returns its exit code, or raises `UserError`."""
    parser = argparse.ArgumentParser(
        prog="levanter-marin export", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", nargs="?", metavar="CHECKPOINT", help="not with --dry-run --config CONFIG")
    parser.add_argument("--output", metavar="FOLDER", help="new folder, or an earlier export to replace")
    parser.add_argument("--config", metavar="CONFIG", help="training config, if there is none beside the checkpoint")
    parser.add_argument("--tokenizer", metavar="FOLDER", help="instead of the config's data.tokenizer")
    parser.add_argument("--vocab-size", type=int, metavar="N", help="where no tokenizer tells it")
    parser.add_argument("--dtype", choices=_DTYPES, default=_DTYPES[0], help="(%(default)s); router biases are fp32")
    parser.add_argument(
        "--experts", choices=[str(layout) for layout in ExpertLayout], default="bank", help="(%(default)s)"
    )
    parser.add_argument("--schema", type=int, choices=(1, 2), help="format; default: the oldest that fits the model")
    parser.add_argument("--shard-size", type=int, default=5 * 10**9, metavar="BYTES", help="of a file (%(default)s)")
    parser.add_argument("--dry-run", action="store_true", help="list tensors, shapes and bytes, and write nothing")
    options = parser.parse_args(argv)
    if options.shard_size < 1:
        raise UserError(f"--shard-size {options.shard_size} must be positive; it is the bytes of a file")
    if options.output is None and not options.dry_run:
        raise UserError("--output FOLDER says where to write; --dry-run only lists the tensors")
    if options.checkpoint is None and not (options.dry_run and options.config):
        raise UserError("name a CHECKPOINT; without one, --dry-run --config CONFIG lists what an export would hold")

    checkpoint = None
    if options.checkpoint is not None:
        checkpoint = discover_latest_checkpoint(options.checkpoint)
        if checkpoint is None:
            raise UserError(f"no checkpoint in {options.checkpoint}; `levanter-marin train` names one at its end")
    raw = load_raw_config(options.config or find_run_config(str(checkpoint)), [])
    config = decode_train_config(
        {key: raw[key] for key in ("model", "data") if key in raw}, options.config or "config"
    )
    if not isinstance(config.model, MarinMoeConfig):
        raise UserError(f"export writes models of `type: marin_moe`; this one is {type(config.model).__name__}")

    tokenizer = options.tokenizer or raw.get("data", {}).get("tokenizer")
    if options.tokenizer is not None and not Path(options.tokenizer).is_dir():
        raise UserError(f"no tokenizer folder {options.tokenizer}")
    has_tokenizer = tokenizer is not None and Path(tokenizer).is_dir()
    vocab_size, source = vocab_size_and_source({"data": {"tokenizer": tokenizer}}, options.vocab_size)
    converter = MarinMoeConverter(
        MarinMoeConfig,
        tokenizer=tokenizer if has_tokenizer else None,
        experts=ExpertLayout(options.experts),
        schema=None if options.schema is None else ArtifactSchema(options.schema),
    )
    dtype = jnp.dtype(options.dtype)
    shapes = eqx.filter_eval_shape(config.model.build, Axis(axes.VOCAB, vocab_size), key=jax.random.PRNGKey(0))
    try:
        plan = converter.plan(shapes, dtype, options.shard_size)
    except ValueError as error:
        raise UserError(str(error)) from error
    if options.dry_run:
        print_manifest(plan)
        print(f"vocabulary  {vocab_size} ({source})")
        return 0
    if not has_tokenizer and options.vocab_size is None:
        raise UserError(f"no tokenizer folder {tokenizer}; give --tokenizer FOLDER, or --vocab-size N to do without")
    write(shapes, str(checkpoint), converter, plan, options.output)
    print_summary(plan, options.output)
    return 0


def write(shapes: Any, checkpoint: str, converter: MarinMoeConverter, plan: ExportPlan, output: str) -> None:
    """Write a native checkpoint on the CPU, one file after another, and compare every stored tensor with it.

    Raises:
        UserError: the output is taken by something else, the checkpoint does not fit its config or cannot be read.
    """
    try:
        check_replaceable(Path(output))
        with local_cpu_mesh():
            stored = NativeCheckpoint(checkpoint, shapes)
            converter.save_leaves(plan, stored.load, output, max_concurrent_shards=1)
            check_values(Path(output), plan, stored.load)
    except ValueError as error:
        raise UserError(str(error)) from error


def print_manifest(plan: ExportPlan) -> None:
    for name, spec in plan.stored().items():
        print(f"{name}  {list(spec.shape)}  {spec.dtype}  {spec.size * spec.dtype.itemsize}")
    print_totals(plan)


def print_totals(plan: ExportPlan) -> None:
    print(f"tensors     {len(plan.stored())} in {len(plan.files)} file{'s' if len(plan.files) > 1 else ''}")
    print(f"parameters  {plan.num_parameters}, router biases included")
    print(f"bytes       {plan.num_bytes}")
    print(f"format      schema {plan.format.schema.value}, experts as {plan.format.experts}")


def print_summary(plan: ExportPlan, output: str) -> None:
    print(f"written     {output}, every tensor read back and equal")
    print_totals(plan)
    print(f'use         AutoModelForCausalLM.from_pretrained("{output}", trust_remote_code=True)')
