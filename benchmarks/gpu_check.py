# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""One GPU: is the latent MoE layer right there, and how much of the GPU does it use?

Per shape: routed experts in bf16 against the dense oracle in fp32, with every gradient; then forward and backward of
the whole layer (router, latent projections, experts) in tokens a second, and as a share of what a large bf16 product
reaches in the same process. Both without an exchange and through the ragged exchange over an expert axis of size 1.
"""

import argparse
import dataclasses
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import jmp
import numpy as np
from haliax import Axis
from jax.sharding import AxisType, Mesh

from common import Compiled, compile_timed, machine, take_turns, write_json
from levanter_marin.config import DispatchConfig, DispatchImplementation, MoeConfig
from levanter_marin.models import presets
from levanter_marin.moe.dispatch.api import dispatch_experts
from levanter_marin.moe.latent_moe import LatentMoe

TOLERANCE = 2e-2  # bf16 against fp32, relative to the largest element
POLICY = jmp.get_policy("p=f32,c=bf16")
MAPPING = {"batch": ("data", "expert"), "experts": "expert"}
REPORTS = Path(__file__).parent / "reports"

IMPLEMENTATIONS = (DispatchImplementation.local, DispatchImplementation.ragged_all_to_all)


@dataclasses.dataclass(frozen=True)
class Case:
    name: str
    hidden_dim: int
    moe: MoeConfig
    tokens: int
    checked_tokens: int
    matmul_size: int

    @property
    def flops(self) -> int:
        """Of the products of one layer, forward and twice that backward."""
        moe, latent = self.moe, self.moe.Latent(self.Embed).size
        dense = self.hidden_dim * moe.num_experts + 2 * self.hidden_dim * latent
        experts = moe.num_experts_per_token * 3 * latent * moe.expert_dim
        return 6 * self.tokens * (dense + experts)

    @property
    def Embed(self) -> Axis:
        return Axis("embed", self.hidden_dim)

    def layer(self, implementation: DispatchImplementation) -> LatentMoe:
        moe = dataclasses.replace(self.moe, dispatch=DispatchConfig(implementation, capacity_factor=None))
        return LatentMoe.init(self.Embed, moe, 0.5 / self.hidden_dim**0.5, 1e-5, key=jax.random.PRNGKey(0))


def cases(small: bool) -> Iterator[Case]:
    if small:
        moe = MoeConfig(num_experts=16, num_experts_per_token=4, latent_dim=32, expert_dim=32)
        yield Case("small", 64, moe, tokens=512, checked_tokens=64, matmul_size=512)
        return
    for name, model in (("d1024", presets.d1024()), ("d2048", presets.d2048())):
        yield Case(name, model.hidden_dim, model.moe, tokens=32768, checked_tokens=256, matmul_size=8192)


def tokens(case: Case, count: int) -> hax.NamedArray:
    axes = (Axis("batch", 1), Axis("position", count), case.Embed)
    return hax.random.normal(jax.random.PRNGKey(1), axes)


def max_difference(case: Case, implementation: DispatchImplementation) -> float:
    """Of output and gradients of the routed experts, between bf16 and the dense fp32 oracle on the same routing."""
    layer = case.layer(implementation)
    x = tokens(case, case.checked_tokens)
    routing = layer.router(x)
    x = layer.to_latent(x, case.Embed)
    d_out = hax.random.normal(jax.random.PRNGKey(2), x.axes)

    def run(config: DispatchConfig, policy: jmp.Policy):
        def forward(differentiable):
            x, bank, weights = differentiable
            cast_x, cast_bank = policy.cast_to_compute((x, bank))
            out = dispatch_experts(cast_x, cast_bank, routing.selected_experts, weights, None, config)[0]
            return out.astype(jnp.float32)

        @eqx.filter_jit
        def value_and_gradients(*differentiable):
            out, vjp = eqx.filter_vjp(forward, differentiable)
            return out, vjp(d_out)[0]

        return value_and_gradients(x, layer.experts, routing.combine_weights)

    actual = run(layer.config.dispatch, POLICY)
    expected = run(DispatchConfig(DispatchImplementation.reference), jmp.get_policy("f32"))
    pairs = zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True)
    return max(float(jnp.max(jnp.abs(a - b)) / jnp.max(jnp.abs(b))) for a, b in pairs)


def compiled_layer(case: Case, implementation: DispatchImplementation) -> Compiled:
    """Forward and backward of one layer, weights kept in fp32 and used in bf16."""
    layer, x = case.layer(implementation), tokens(case, case.tokens).astype(jnp.bfloat16)
    arrays, static = eqx.partition(layer, eqx.is_array)

    def loss(differentiable):
        arrays, x = differentiable
        layer = POLICY.cast_to_compute(eqx.combine(arrays, static))
        return hax.sum(layer(x, None)[0].astype(jnp.float32) ** 2).scalar()

    return compile_timed(lambda arrays, x: jax.grad(loss)((arrays, x)), arrays, x)


def large_matmul(size: int) -> Compiled:
    a = jnp.ones((size, size), jnp.bfloat16)
    return compile_timed(jnp.matmul, a, a)


def check(case: Case, repeats: int) -> list[dict]:
    """One row for each implementation; the product and the layers take turns."""
    differences = {name: max_difference(case, name) for name in IMPLEMENTATIONS}
    contenders = {"matmul": large_matmul(case.matmul_size)}
    contenders |= {name: compiled_layer(case, name) for name in IMPLEMENTATIONS}
    timings = take_turns(contenders, repeats)
    peak = 2 * case.matmul_size**3 / timings["matmul"].min_ms * 1e3
    rows = []
    for name in IMPLEMENTATIONS:
        seconds = timings[name].median_ms / 1e3
        row = {
            "shape": case.name,
            "implementation": str(name),
            "tokens": case.tokens,
            "tokens_per_s": case.tokens / seconds,
            "share_of_matmul_peak": case.flops / seconds / peak,
            "matmul_tflops": peak / 1e12,
            "max_relative_difference": differences[name],
            "correct": differences[name] <= TOLERANCE,
            "compile_s": contenders[name].compile_s,
            "temp_bytes": contenders[name].temp_bytes,
            **dataclasses.asdict(timings[name]),
        }
        rows.append(row)
        print(
            f"{case.name:6} {name:18} {row['tokens_per_s']:12.0f} tokens/s  {row['share_of_matmul_peak']:6.1%} of "
            f"{row['matmul_tflops']:.2f} TFLOP/s  difference {differences[name]:.1e} "
            f"({'ok' if row['correct'] else f'WRONG, allowed {TOLERANCE:.0e}'})",
            flush=True,
        )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="a small shape, which runs on a CPU too")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--time-limit", type=float, default=420, help="seconds after which no shape is begun")
    parser.add_argument("--json", type=Path, help="where to write the results; default benchmarks/reports")
    args = parser.parse_args()
    start = time.perf_counter()
    device = jax.devices()[0]
    if device.platform == "cpu" and not args.small:
        print("no GPU: JAX found only a CPU; --small checks that the script runs", file=sys.stderr)
        return 2
    mesh = Mesh(np.asarray([device]).reshape(1, 1), ("data", "expert"), axis_types=(AxisType.Auto,) * 2)
    rows, skipped = [], []
    with hax.partitioning.set_mesh(mesh), hax.axis_mapping(MAPPING):
        for case in cases(args.small):
            if time.perf_counter() - start > args.time_limit:
                skipped.append(case.name)
                continue
            rows += check(case, args.repeats)
    notes = []
    if device.platform == "cpu":
        notes.append("ran on a CPU: says nothing about a GPU")
    if skipped:
        notes.append(f"out of time before {', '.join(skipped)}")
    path = args.json or REPORTS / f"gpu_check_{device.device_kind.replace(' ', '_')}.json"
    report = {"platform": device.platform, "notes": notes, "machine": machine(), "rows": rows}
    write_json(path, report | {"seconds": time.perf_counter() - start})
    print(*notes, f"written to {path}", sep="\n", flush=True)
    return 0 if not skipped and all(row["correct"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
