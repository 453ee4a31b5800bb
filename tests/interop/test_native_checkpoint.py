# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""Native checkpoints exported file by file: the bytes of an export from memory, and never more than a file at once."""

import dataclasses
import os

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
import yaml
from haliax import Axis
from hf_cases import ODD, ODD_VOCAB, random_model
from levanter.checkpoint import load_checkpoint, save_checkpoint
from levanter.utils.jax_utils import local_cpu_mesh

from levanter_marin import axes
from levanter_marin.cli.import_ import run_config
from levanter_marin.cli.main import main
from levanter_marin.config import ShortConvConfig
from levanter_marin.interop.converter import MarinMoeConverter
from levanter_marin.interop.native_checkpoint import NativeCheckpoint
from levanter_marin.interop.state_dict import ROUTER_BIAS, ExpertLayout
from levanter_marin.models.marin_moe import MarinMoeConfig

FILE_SIZE = 60_000
BIAS_TERMS = 60  # bytes that the stored terms of an odd model's router bias have beyond the bias itself
CONTAINERS = {"scanned": ODD, "unrolled": dataclasses.replace(ODD, scan_layers=False)}
DEEP = dataclasses.replace(ODD, num_layers=8)


def shapes_of(config, vocab_size=ODD_VOCAB):
    return eqx.filter_eval_shape(config.build, Axis(axes.VOCAB, vocab_size), key=jax.random.PRNGKey(0))


def write_run(folder, config):
    """A run folder with a checkpoint of random weights."""
    folder.mkdir()
    (folder / "config-000000.yaml").write_text(yaml.safe_dump(run_config(config, folder)))
    save_checkpoint({"model": random_model(config)}, 0, str(folder / "step-0"), is_temporary=False)
    return folder / "step-0"


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    root = tmp_path_factory.mktemp("native")
    return {name: write_run(root / name, config) for name, config in CONTAINERS.items()}


def contents(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.mark.parametrize("dtype", ("bfloat16", "float32"))
@pytest.mark.parametrize("layout", ExpertLayout)
@pytest.mark.parametrize("container", CONTAINERS)
def test_export_of_checkpoint_has_the_bytes_of_the_loaded_models(container, layout, dtype, checkpoints, tmp_path):
    native = checkpoints[container]
    options = ["--experts", layout, "--dtype", dtype, "--shard-size", str(FILE_SIZE), "--vocab-size", str(ODD_VOCAB)]
    assert main(["export", str(native), "--output", str(tmp_path / "lazy"), *options]) == 0

    with local_cpu_mesh():
        model = load_checkpoint(shapes_of(CONTAINERS[container]), native, subpath="model")
    MarinMoeConverter(MarinMoeConfig, experts=layout).save_pretrained(
        model, str(tmp_path / "whole"), dtype=jnp.dtype(dtype), max_shard_size=FILE_SIZE
    )
    lazy = contents(tmp_path / "lazy")
    assert sum(name.endswith(".safetensors") for name in lazy) > 3
    assert lazy == contents(tmp_path / "whole")


class RecordedCheckpoint(NativeCheckpoint):
    """Counts the bytes it reads."""

    num_read = 0

    def _read(self, *args):
        array = super()._read(*args)
        self.num_read += array.nbytes
        return array


def test_export_of_deep_checkpoint_reads_the_layers_of_a_file_and_holds_at_most_the_file_before_too(tmp_path):
    native = write_run(tmp_path / "run", DEEP)
    converter = MarinMoeConverter(MarinMoeConfig)
    shapes = shapes_of(DEEP)
    plan = converter.plan(shapes, jnp.float32, FILE_SIZE)
    sizes = [sum(leaf.num_bytes for leaf in leaves) for leaves in plan.files.values()]
    before = sum(array.nbytes for array in jax.live_arrays())
    held, read = [], []

    with local_cpu_mesh():
        checkpoint = RecordedCheckpoint(str(native), shapes)

        def load(leaves):
            read_before = checkpoint.num_read
            tensors = checkpoint.load(leaves)
            biases = sum(leaf.source.endswith(ROUTER_BIAS) for leaf in leaves)
            read.append(checkpoint.num_read - read_before - BIAS_TERMS * biases)
            held.append(sum(array.nbytes for array in jax.live_arrays()) - before)
            return tensors

        converter.save_leaves(plan, load, str(tmp_path / "hf"), max_concurrent_shards=1)

    assert len(sizes) > 20
    assert read == sizes
    # the writer's thread may still be about to free the file before
    for found, size, size_before in zip(held, sizes, [0, *sizes[:-1]], strict=True):
        assert size <= found <= size + size_before


def changed(moe=None, **fields):
    moe = ODD.moe if moe is None else dataclasses.replace(ODD.moe, **moe)
    return dataclasses.replace(ODD, moe=moe, **fields)


MISFITS = {
    "other_shape": (
        changed(moe={"latent_dim": 16}),
        r"model/transformer/layers/stacked/mlp/latent_norm/weight is \(3, 24\) where the config asks for \(3, 16\)",
    ),
    "layers": (changed(num_layers=4), r"input_layernorm/weight is \(3, 40\) where the config asks for \(4, 40\)"),
    "missing": (
        changed(moe={"num_shared_experts": 2}),
        "missing tensors: model/transformer/layers/stacked/shared_experts/1/gate_proj/weight",
    ),
    "unknown": (
        changed(short_conv=ShortConvConfig(sites=())),
        "tensors that the model does not have: model/transformer/layers/stacked/self_attn/sconv_k/weight",
    ),
    "container": (
        CONTAINERS["unrolled"],
        "missing tensors: model/transformer/layers/blocks/0/input_layernorm/weight",
    ),
}


@pytest.mark.parametrize(("config", "message"), MISFITS.values(), ids=MISFITS)
def test_checkpoint_that_does_not_fit_names_the_array_and_both_shapes(config, message, checkpoints):
    with pytest.raises(ValueError, match=message):
        NativeCheckpoint(str(checkpoints["scanned"]), shapes_of(config))


def test_export_tells_a_wrong_vocabulary_or_a_damaged_array_in_one_line(checkpoints, tmp_path, capsys):
    native = write_run(tmp_path / "run", ODD)
    options = ["export", str(native), "--output", str(tmp_path / "hf"), "--vocab-size"]
    assert main([*options, "50"]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "model/embeddings/token_embeddings/weight is (51, 40) where the config asks for (50, 40)" in line

    for file in (native / "d").iterdir():
        os.truncate(file, file.stat().st_size // 2)
    assert main([*options, str(ODD_VOCAB)]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "/weight cannot be read, a file of the checkpoint is missing or damaged; copy it again" in line
    assert not any(tmp_path.glob("hf*"))
