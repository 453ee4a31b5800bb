# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""What Levanter writes into a checkpoint is what it reads, for arrays of the shapes of expert banks."""

import haliax as hax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis
from levanter.checkpoint import load_checkpoint, save_checkpoint

import levanter_marin.models.marin_moe  # noqa: F401
from compare import on_mesh

# More than 2^20 elements each; of the first two TensorStore's own inner grid divides three axes.
SHAPES = {"nano": (8, 64, 64, 64), "wide": (8, 128, 64, 64), "many_experts": (4, 384, 64, 128), "matrix": (2048, 1024)}
NAMES = ("layer", "experts", "latent", "mlp")


@pytest.mark.parametrize("dtype", (jnp.float32, jnp.bfloat16))
@pytest.mark.parametrize("shape", SHAPES)
def test_checkpoint_of_large_array_reads_back_bit_for_bit(shape, dtype, tmp_path):
    axes = tuple(Axis(name, size) for name, size in zip(NAMES, SHAPES[shape], strict=False))
    values = np.random.default_rng(0).standard_normal(SHAPES[shape], np.float32)
    bank = hax.named(jnp.asarray(values, dtype), axes)
    save_checkpoint({"bank": bank}, step=0, checkpoint_path=str(tmp_path / "step-0"))
    with on_mesh("data8", {"experts": "data"}):
        restored = load_checkpoint({"bank": hax.zeros(axes, dtype)}, str(tmp_path / "step-0"))["bank"]
    np.testing.assert_array_equal(np.asarray(restored.array), np.asarray(bank.array))
