# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""Forward and backward of a whole model, as a multiple of the time that its own matmul FLOPs take on this machine.

Its own matmul FLOPs are those of a forward pass and twice that backward, without what gradient checkpointing computes
again: recomputation counts as overhead. Target for d256 on CPU: at most 4 times.
"""

import argparse
from pathlib import Path

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from haliax import Axis
from levanter.layers.attention import AttentionMask
from levanter.models.lm_model import LmExample

from common import compile_timed, gflops, machine, matmul, take_turns, write_json
from levanter_marin import axes
from levanter_marin.models import presets

TARGET_MULTIPLE = 4.0
VOCAB_SIZE = 4096
BATCH_SIZE = {"nano": 8, "d256": 4}
MEAN_DOCUMENT = 256


def packed_batch(batch_size: int, seq_len: int) -> LmExample:
    rng = np.random.default_rng(0)
    Batch, Pos = Axis(axes.BATCH, batch_size), Axis(axes.POSITION, seq_len)
    tokens = hax.named(jnp.asarray(rng.integers(0, VOCAB_SIZE, (batch_size, seq_len))), (Batch, Pos))
    documents = np.cumsum(rng.random((batch_size, seq_len)) < 1 / MEAN_DOCUMENT, axis=1)
    mask = AttentionMask.causal().with_segment_ids(hax.named(jnp.asarray(documents), (Batch, Pos)))
    return LmExample(tokens, hax.ones((Batch, Pos)), mask)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=sorted(BATCH_SIZE), default="d256")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()

    config = getattr(presets, arguments.preset)()
    model = eqx.filter_jit(config.build)(Axis(axes.VOCAB, VOCAB_SIZE), key=jax.random.PRNGKey(0))
    example = packed_batch(BATCH_SIZE[arguments.preset], config.max_seq_len)
    weights, rest = eqx.partition(model, eqx.is_inexact_array)

    def step(weights, example):
        def loss(weights):
            model = eqx.combine(weights, rest)
            value, metrics = model.compute_next_token_loss(example, key=jax.random.PRNGKey(0), logsumexp_weight=1e-4)
            return value.scalar(), metrics

        return jax.value_and_grad(loss, has_aux=True)(weights)

    contenders = {"step": compile_timed(step, weights, example), "matmul": matmul()}
    (loss, _), gradient = contenders["step"].run()
    largest = max(float(jnp.max(jnp.abs(leaf))) for leaf in jax.tree.leaves(gradient))
    if not np.isfinite(loss) or not 0 < largest < np.inf:
        raise SystemExit(f"the step is wrong: loss {loss}, largest gradient {largest}")
    timings = take_turns(contenders, arguments.repeats)

    tokens = BATCH_SIZE[arguments.preset] * config.max_seq_len
    gflop = 3 * tokens * config.flops_per_token(VOCAB_SIZE, config.max_seq_len) / 1e9
    own_ms = 1e3 * gflop / gflops(timings["matmul"].median_ms)
    multiple = timings["step"].median_ms / own_ms
    result = {
        "preset": arguments.preset,
        "tokens": tokens,
        "gflop": gflop,
        "matmul_gflops": gflops(timings["matmul"].median_ms),
        "step_ms": timings["step"].median_ms,
        "step_min_ms": timings["step"].min_ms,
        "step_cpu_ms": timings["step"].cpu_ms,
        "multiple_of_own_matmul": multiple,
        "target": TARGET_MULTIPLE,
        "compile_s": contenders["step"].compile_s,
        "temp_mib": contenders["step"].temp_bytes / 2**20,
        "loss": float(loss),
    }
    for name, value in result.items():
        print(f"{name:24} {value:.4g}" if isinstance(value, float) else f"{name:24} {value}")
    if arguments.json is not None:
        write_json(arguments.json, {"machine": machine(), "model_step": result})


if __name__ == "__main__":
    main()
