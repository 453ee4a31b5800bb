# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""Blockwise attention on the current device, forward and backward: speed, length scaling, memory.

1. Against Levanter's vanilla attention, at the shapes of two presets and at 4k and 16k tokens, results compared in
   the same run.
2. A local layer at growing lengths and a constant number of tokens; target: tokens/s within 25 % of each other.
3. Temporary memory of a global layer at growing lengths, from the compiler; target: bytes a token stay constant.

Contenders take turns, so that load on the machine meets all of them. Times are medians in milliseconds.
"""

import argparse
import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from haliax import Axis, NamedArray
from levanter.layers.attention import AttentionBackend, AttentionMask, dot_product_attention

from common import compile_timed, machine, take_turns, write_json
from levanter_marin import axes
from levanter_marin.layers.blockwise_attention import blockwise_attention

MAX_DIFFERENCE = 1e-4  # between contenders, on results of order 1
MEAN_DOCUMENT = 100  # tokens


@dataclasses.dataclass(frozen=True)
class Shape:
    batch: int
    length: int
    kv_heads: int
    group: int
    window: int | None
    head_size: int = 32

    @property
    def tokens(self) -> int:
        return self.batch * self.length


SHAPES = {
    "d256 local": Shape(4, 512, 4, 2, 128),
    "d256 global": Shape(4, 512, 2, 4, None),
    "nano local": Shape(8, 256, 2, 2, 64),
    "nano global": Shape(8, 256, 1, 4, None),
    "4k local": Shape(1, 4096, 2, 2, 64),
    "4k global": Shape(1, 4096, 1, 4, None),
    # one head: vanilla attention holds several arrays of [heads, length, length]
    "16k local": Shape(1, 16384, 1, 1, 64),
    "16k global": Shape(1, 16384, 1, 1, None),
}


def blockwise(q, k, v, ids, window):
    return blockwise_attention(q, k, v, segment_ids=ids, sliding_window=window)


def vanilla(q, k, v, ids, window):
    rename = {axes.POSITION: axes.KEY_POSITION}
    mask = AttentionMask.causal(sliding_window=window).with_segment_ids(ids, ids.rename(rename))
    return dot_product_attention(
        axes.POSITION,
        axes.KEY_POSITION,
        axes.HEAD_SIZE,
        q,
        k.rename(rename),
        v.rename(rename),
        mask=mask,
        attn_backend=AttentionBackend.VANILLA,
    ).rearrange(q.axes)


def arguments(shape: Shape) -> tuple[NamedArray, ...]:
    """Query, key, value, gradient of the output, segment ids."""
    rng = np.random.default_rng(0)
    token = (Axis(axes.BATCH, shape.batch), Axis(axes.POSITION, shape.length))
    Kv, HeadSize = Axis(axes.KV_HEAD, shape.kv_heads), Axis(axes.HEAD_SIZE, shape.head_size)
    key_axes = (*token, Kv, HeadSize)
    query_axes = (*token, Kv, Axis(axes.Q_HEADS_PER_GROUP, shape.group), HeadSize)

    def normal(of):
        return hax.named(jnp.asarray(rng.standard_normal([a.size for a in of], dtype=np.float32)), of)

    starts = rng.random((shape.batch, shape.length)) < 1 / MEAN_DOCUMENT
    ids = hax.named(jnp.asarray(np.cumsum(starts, axis=1), jnp.int32), token)
    return normal(query_axes), normal(key_axes), normal(key_axes), normal(query_axes), ids


def step_of(attend: Callable, shape: Shape) -> Callable:
    """Output and gradients, from `arguments`."""

    def step(q, k, v, g, ids):
        out, vjp = jax.vjp(lambda q, k, v: attend(q, k, v, ids, shape.window), q, k, v)
        return out, *vjp(g)

    return step


def measure(contenders: dict[str, tuple[Callable, Shape]], repeats: int) -> dict[str, dict]:
    compiled = {
        name: compile_timed(step_of(attend, shape), *arguments(shape)) for name, (attend, shape) in contenders.items()
    }
    timings = take_turns(compiled, repeats)
    return {
        name: {
            "name": name,
            "shape": dataclasses.asdict(shape),
            "compile_s": compiled[name].compile_s,
            "tokens_per_s": 1e3 * shape.tokens / timings[name].median_ms,
            "temp_bytes": compiled[name].temp_bytes,
            **dataclasses.asdict(timings[name]),
        }
        for name, (_, shape) in contenders.items()
    }


def max_difference(shape: Shape) -> float:
    given = arguments(shape)
    results = [jax.tree.leaves(jax.jit(step_of(attend, shape))(*given)) for attend in (blockwise, vanilla)]
    return max(float(jnp.max(jnp.abs(a - b))) for a, b in zip(*results, strict=True))


def against_vanilla(repeats: int) -> list[dict]:
    rows = []
    for name, shape in SHAPES.items():
        difference = max_difference(shape)
        if difference > MAX_DIFFERENCE:
            raise AssertionError(f"{name}: blockwise and vanilla differ by {difference}, allowed {MAX_DIFFERENCE}")
        timings = measure({"blockwise": (blockwise, shape), "vanilla": (vanilla, shape)}, repeats)
        ours, theirs = timings["blockwise"], timings["vanilla"]
        speedup = theirs["median_ms"] / ours["median_ms"]
        temp = " / ".join(f"{timing['temp_bytes'] / 2**20:.1f}" for timing in (ours, theirs))
        print(
            f"{name:12} blockwise {ours['median_ms']:8.1f} ms  vanilla {theirs['median_ms']:8.1f} ms"
            f"  speedup {speedup:5.1f}  compile {ours['compile_s']:.1f} / {theirs['compile_s']:.1f} s"
            f"  temp {temp} MiB  difference {difference:.1e}",
            flush=True,
        )
        rows.append({"name": name, "speedup": speedup, "difference": difference, "blockwise": ours, "vanilla": theirs})
    return rows


def local_lengths(lengths: Sequence[int], tokens: int, repeats: int) -> dict:
    shapes = [dataclasses.replace(SHAPES["nano local"], batch=max(1, tokens // n), length=n) for n in lengths]
    timings = measure({f"local {shape.length}": (blockwise, shape) for shape in shapes}, repeats)
    for timing in timings.values():
        speed = timing["tokens_per_s"]
        print(f"{timing['name']:12} {timing['median_ms']:8.1f} ms  {speed:10.0f} tokens/s", flush=True)
    speeds = [timing["tokens_per_s"] for timing in timings.values()]
    spread = max(speeds) / min(speeds) - 1
    print(f"tokens/s differ by {spread:.0%}, target 25 %", flush=True)
    return {"spread": spread, "timings": list(timings.values())}


def global_memory(lengths: Sequence[int]) -> list[dict]:
    rows = []
    for length in lengths:
        shape = dataclasses.replace(SHAPES["nano global"], batch=1, length=length)
        compiled = compile_timed(step_of(blockwise, shape), *jax.eval_shape(lambda shape=shape: arguments(shape)))
        total = compiled.temp_bytes
        print(f"global {length:6} temp {total / 2**20:8.1f} MiB  {total / length:8.0f} bytes/token", flush=True)
        rows.append(
            {
                "length": length,
                "compile_s": compiled.compile_s,
                "temp_bytes": total,
                "bytes_per_token": total / length,
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--tokens", type=int, default=65536, help="tokens of a step of the local layer")
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 16384, 65536])
    parser.add_argument("--json", type=Path, help="where to write the results")
    args = parser.parse_args()
    results = {
        "against_vanilla": against_vanilla(args.repeats),
        "local_lengths": local_lengths(args.lengths, args.tokens, args.repeats),
        "global_memory": global_memory(args.lengths),
        "machine": machine(),
    }
    if args.json is not None:
        write_json(args.json, results)


if __name__ == "__main__":
    main()
