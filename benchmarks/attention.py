# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""Blockwise attention on the current device, forward and backward: speed, length scaling, memory.

1. Against Levanter's vanilla attention, at the shapes of two presets, results compared in the same run.
2. A local layer at growing lengths and a constant number of tokens; target: tokens/s within 25 % of each other.
3. Temporary memory of a global layer at growing lengths, from the compiler; target: bytes a token stay constant.

Contenders take turns, so that load on the machine meets all of them. Times are medians in milliseconds.
"""

import argparse
import dataclasses
import datetime as dt
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from haliax import Axis, NamedArray
from levanter.layers.attention import AttentionBackend, AttentionMask, dot_product_attention

from levanter_marin import axes
from levanter_marin.layers.blockwise_attention import blockwise_attention

MAX_DIFFERENCE = 1e-4  # between contenders, on results of order 1
MEAN_DOCUMENT = 100  # tokens
CPU_INFO = Path("/proc/cpuinfo")


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
}


@dataclasses.dataclass(frozen=True)
class Timing:
    name: str
    shape: Shape
    compile_s: float
    median_ms: float
    min_ms: float
    tokens_per_s: float
    temp_bytes: int


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


def compile_step(attend: Callable, shape: Shape):
    """Compiled output and gradients, and the seconds it took."""

    def step(q, k, v, g, ids):
        out, vjp = jax.vjp(lambda q, k, v: attend(q, k, v, ids, shape.window), q, k, v)
        return out, *vjp(g)

    start = time.perf_counter()
    compiled = jax.jit(step).lower(*jax.eval_shape(lambda: arguments(shape))).compile()
    return compiled, time.perf_counter() - start


def measure(contenders: dict[str, tuple[Callable, Shape]], repeats: int) -> dict[str, Timing]:
    compiled = {name: compile_step(*contender) for name, contender in contenders.items()}
    inputs = {shape: arguments(shape) for _, shape in contenders.values()}
    seconds = {name: [] for name in contenders}
    for repeat in range(repeats + 1):
        for name, (_, shape) in contenders.items():
            start = time.perf_counter()
            jax.block_until_ready(compiled[name][0](*inputs[shape]))
            if repeat > 0:  # the first is a warm-up
                seconds[name].append(time.perf_counter() - start)
    return {
        name: Timing(
            name=name,
            shape=shape,
            compile_s=compiled[name][1],
            median_ms=1e3 * statistics.median(seconds[name]),
            min_ms=1e3 * min(seconds[name]),
            tokens_per_s=shape.tokens / statistics.median(seconds[name]),
            temp_bytes=temp_bytes(compiled[name][0]),
        )
        for name, (_, shape) in contenders.items()
    }


def temp_bytes(compiled) -> int:
    return compiled.memory_analysis().temp_size_in_bytes


def max_difference(shape: Shape) -> float:
    given = arguments(shape)
    results = [jax.tree.leaves(compile_step(attend, shape)[0](*given)) for attend in (blockwise, vanilla)]
    return max(float(jnp.max(jnp.abs(a - b))) for a, b in zip(*results, strict=True))


def against_vanilla(repeats: int) -> list[dict]:
    rows = []
    for name, shape in SHAPES.items():
        difference = max_difference(shape)
        if difference > MAX_DIFFERENCE:
            raise AssertionError(f"{name}: blockwise and vanilla differ by {difference}, allowed {MAX_DIFFERENCE}")
        timings = measure({"blockwise": (blockwise, shape), "vanilla": (vanilla, shape)}, repeats)
        ours, theirs = timings["blockwise"], timings["vanilla"]
        speedup = theirs.median_ms / ours.median_ms
        print(
            f"{name:12} blockwise {ours.median_ms:8.1f} ms  vanilla {theirs.median_ms:8.1f} ms  speedup {speedup:5.1f}"
            f"  compile {ours.compile_s:.1f} / {theirs.compile_s:.1f} s  temp {ours.temp_bytes / 2**20:.1f} /"
            f" {theirs.temp_bytes / 2**20:.1f} MiB  difference {difference:.1e}",
            flush=True,
        )
        rows.append(
            {
                "name": name,
                "speedup": speedup,
                "difference": difference,
                "blockwise": dataclasses.asdict(ours),
                "vanilla": dataclasses.asdict(theirs),
            }
        )
    return rows


def local_lengths(lengths: Sequence[int], tokens: int, repeats: int) -> dict:
    shapes = [dataclasses.replace(SHAPES["nano local"], batch=max(1, tokens // n), length=n) for n in lengths]
    timings = measure({f"local {shape.length}": (blockwise, shape) for shape in shapes}, repeats)
    for timing in timings.values():
        print(f"{timing.name:12} {timing.median_ms:8.1f} ms  {timing.tokens_per_s:10.0f} tokens/s", flush=True)
    speeds = [timing.tokens_per_s for timing in timings.values()]
    spread = max(speeds) / min(speeds) - 1
    print(f"tokens/s differ by {spread:.0%}, target 25 %", flush=True)
    return {"spread": spread, "timings": [dataclasses.asdict(timing) for timing in timings.values()]}


def global_memory(lengths: Sequence[int]) -> list[dict]:
    rows = []
    for length in lengths:
        shape = dataclasses.replace(SHAPES["nano global"], batch=1, length=length)
        compiled, compile_s = compile_step(blockwise, shape)
        total = temp_bytes(compiled)
        print(f"global {length:6} temp {total / 2**20:8.1f} MiB  {total / length:8.0f} bytes/token", flush=True)
        rows.append({"length": length, "compile_s": compile_s, "temp_bytes": total, "bytes_per_token": total / length})
    return rows


def machine() -> dict:
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False, cwd=Path(__file__).parent
    )
    models = [line.partition(":")[2].strip() for line in _cpu_info() if line.startswith("model name")]
    return {
        "time": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "commit": commit.stdout.strip(),
        "devices": [str(device.device_kind) for device in jax.devices()],
        "processor": models[0] if models else platform.processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("jax", "jaxlib", "marin-levanter", "marin-haliax")},
    }


def _cpu_info() -> list[str]:
    return CPU_INFO.read_text().splitlines() if CPU_INFO.exists() else []


def write_json(path: Path, content: dict) -> None:
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(content, indent=2) + "\n")
    partial.replace(path)


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
