# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""Routed experts, forward and backward: does the cost grow with tokens x k, and not with the number of experts?

Target: from 8 to 384 experts, at the same tokens and k, at most 1.3 times the time. Beside it the same with an Adam
step for the experts, which has to grow with their number. Before timing, results and gradients are compared with the
dense oracle on the first tokens.
"""

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import optax
from haliax import Axis, NamedArray
from haliax.nn import MoELinear

from common import Compiled, Timing, compile_timed, gflops, machine, matmul, take_turns, write_json
from levanter_marin.config import DispatchConfig, DispatchImplementation
from levanter_marin.moe.dispatch.api import dispatch_experts
from levanter_marin.moe.experts import ExpertBank

TARGET_RATIO = 1.3
TOLERANCE = 1e-5  # relative to the largest element
CHECKED_TOKENS = 256


@dataclasses.dataclass(frozen=True)
class Shape:
    experts: int
    tokens: int
    top: int
    latent: int
    width: int

    @property
    def gflop(self) -> float:
        """Of the three projections, forward and twice that backward, without recomputation."""
        return 18 * self.tokens * self.top * self.latent * self.width / 1e9


def arguments(shape: Shape, skew: float) -> tuple[NamedArray, ExpertBank, NamedArray, NamedArray, NamedArray]:
    """x, bank, selected experts, combine weights, gradient of the output."""
    k_x, k_skew, k_score, k_weight, k_out, *k_bank = jax.random.split(jax.random.key(0), 8)
    Token, Top = Axis("position", shape.tokens), Axis("top_experts", shape.top)
    Latent, Mlp, Experts = Axis("latent", shape.latent), Axis("mlp", shape.width), Axis("experts", shape.experts)
    in_out = ((Latent, Mlp), (Latent, Mlp), (Mlp, Latent))
    bank = ExpertBank(
        *(MoELinear.init(Experts, *io, use_bias=False, key=k) for io, k in zip(in_out, k_bank, strict=True))
    )
    scores = jax.random.gumbel(k_score, (shape.tokens, shape.experts))
    scores += skew * jax.random.normal(k_skew, (shape.experts,))
    selected = hax.named(jax.lax.top_k(scores, shape.top)[1], (Token, Top))
    weights = hax.random.uniform(k_weight, (Token, Top))
    x, d_out = (hax.random.normal(key, (Token, Latent)) for key in (k_x, k_out))
    return x, bank, selected, weights, d_out


def value_and_gradients(implementation: DispatchImplementation):
    """Of one dispatch: output, gradient of x, of the bank, of the combine weights."""
    config = DispatchConfig(implementation=implementation)

    def run(x, bank, selected, weights, d_out):
        def forward(differentiable):
            x, bank, weights = differentiable
            return dispatch_experts(x, bank, selected, weights, None, config)[0]

        out, vjp = eqx.filter_vjp(forward, (x, bank, weights))
        return out, *vjp(d_out)[0]

    return run


def with_adam(optimizer: optax.GradientTransformation):
    """The same, and an update of the bank."""
    run = value_and_gradients(DispatchImplementation.auto)

    def step(x, bank, selected, weights, d_out, state):
        out, d_x, d_bank, d_weights = run(x, bank, selected, weights, d_out)
        updates, state = optimizer.update(d_bank, state, bank)
        return out, d_x, d_weights, eqx.apply_updates(bank, updates), state

    return step


def max_difference(shape: Shape, skew: float) -> float:
    """From the dense oracle on the first tokens, relative to the largest element, over output and all gradients.

    All tokens are dispatched, but the gradient comes from the first ones only.
    """
    x, bank, selected, weights, d_out = arguments(shape, skew)
    first = {"position": slice(0, CHECKED_TOKENS)}
    masked = hax.where(hax.arange(d_out.resolve_axis("position")) < CHECKED_TOKENS, d_out, 0.0).rearrange(d_out.axes)
    auto = value_and_gradients(DispatchImplementation.auto)
    reference = value_and_gradients(DispatchImplementation.reference)
    out, d_x, d_bank, d_weights = eqx.filter_jit(auto)(x, bank, selected, weights, masked)
    few = (x[first], bank, selected[first], weights[first], d_out[first])
    expected = eqx.filter_jit(reference)(*few)
    actual = (out[first], d_x[first], d_bank, d_weights[first])
    pairs = zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True)
    return max(float(jnp.max(jnp.abs(a - b)) / jnp.max(jnp.abs(b))) for a, b in pairs)


def report(name: str, shape: Shape, contender: Compiled, timing: Timing, matmul_ms: float) -> dict:
    own_matmul_ms = 1e3 * shape.gflop / gflops(matmul_ms)
    print(
        f"{name:20} {timing.median_ms:8.1f} ms median {timing.min_ms:8.1f} ms best {timing.cpu_ms:8.1f} ms CPU"
        f"  {timing.median_ms / own_matmul_ms:4.1f}x its matmul FLOPs  compile {contender.compile_s:4.1f} s"
        f"  temp {contender.temp_bytes / 2**20:6.1f} MiB",
        flush=True,
    )
    return {
        "name": name,
        **dataclasses.asdict(shape),
        **dataclasses.asdict(timing),
        "gflop": shape.gflop,
        "matmul_multiple": timing.median_ms / own_matmul_ms,
        "compile_s": contender.compile_s,
        "temp_bytes": contender.temp_bytes,
    }


def run(shapes: Sequence[Shape], skew: float, repeats: int) -> dict:
    optimizer = optax.adam(1e-3)
    differences, contenders, shape_of = {}, {"matmul": matmul()}, {}
    for shape in shapes:
        differences[shape.experts] = max_difference(shape, skew)
        if differences[shape.experts] > TOLERANCE:
            raise AssertionError(
                f"{shape.experts} experts: dispatch and its oracle differ by {differences[shape.experts]:.1e}, "
                f"allowed {TOLERANCE:.0e}"
            )
        given = arguments(shape, skew)
        layer, step = f"{shape.experts} experts", f"{shape.experts} experts + Adam"
        contenders[layer] = compile_timed(value_and_gradients(DispatchImplementation.auto), *given)
        contenders[step] = compile_timed(with_adam(optimizer), *given, optimizer.init(given[1]))
        shape_of |= {layer: shape, step: shape}
    timings = take_turns(contenders, repeats)
    yardstick = timings["matmul"]
    print(f"matmul {gflops(yardstick.median_ms):.0f} GFLOP/s median, {gflops(yardstick.min_ms):.0f} best", flush=True)
    rows = [
        report(name, shape, contenders[name], timings[name], yardstick.median_ms) for name, shape in shape_of.items()
    ]
    ratios = {}
    for kind in ("experts", "experts + Adam"):
        few, many = timings[f"{shapes[0].experts} {kind}"], timings[f"{shapes[-1].experts} {kind}"]
        ratios[kind] = {f: getattr(many, f) / getattr(few, f) for f in ("median_ms", "min_ms", "cpu_ms")}
        print(
            f"{shapes[-1].experts} over {shapes[0].experts} {kind}: {ratios[kind]['median_ms']:.2f} median,"
            f" {ratios[kind]['min_ms']:.2f} best, {ratios[kind]['cpu_ms']:.2f} CPU",
            flush=True,
        )
    met = ratios["experts"]["median_ms"] < TARGET_RATIO
    print(f"target {TARGET_RATIO}: {'met' if met else 'NOT met'}", flush=True)
    return {
        "timings": rows,
        "ratios": ratios,
        "target_ratio": TARGET_RATIO,
        "target_met": met,
        "max_relative_difference": differences,
        "matmul_gflops": {"median": gflops(yardstick.median_ms), "best": gflops(yardstick.min_ms)},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experts", type=int, nargs="+", default=[8, 64, 384])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--top", type=int, default=8)
    parser.add_argument("--latent", type=int, default=128)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--skew", type=float, default=0.0, help="spread of the experts' popularity; 0 is balanced")
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--json", type=Path, help="where to write the results")
    args = parser.parse_args()
    shapes = [Shape(experts, args.tokens, args.top, args.latent, args.width) for experts in args.experts]
    results = {"machine": machine(), "skew": args.skew, **run(shapes, args.skew, args.repeats)}
    if args.json is not None:
        write_json(args.json, results)


if __name__ == "__main__":
    main()
