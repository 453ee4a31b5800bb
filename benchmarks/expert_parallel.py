# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""Expert-parallel routed experts, forward and backward, on 8 virtual CPU devices: ours against Levanter's `moe_mlp`.

Same arrays, same routing, same capacity factor, in turns in one process. Levanter's needs a mesh of explicit axes,
ours one of automatic axes. Before timing, every contender is compared with the dense oracle, where nothing is dropped.
Target: ours takes at most half the time of Levanter's `ring` and of its `fixed_all_to_all`. 384 experts, 8 of them a
token, are those of the published model; 64 are those of the nano preset.
"""

import argparse
import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis
from haliax.nn import MoELinear
from haliax.partitioning import set_mesh
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from levanter.grug.grug_moe import moe_mlp

from common import Compiled, compile_timed, gflops, machine, matmul, take_turns, write_json
from levanter_marin.config import DispatchConfig, DispatchImplementation
from levanter_marin.moe.dispatch.api import dispatch_experts
from levanter_marin.moe.experts import ExpertBank

DEVICES = 8
TARGET_RATIO = 0.5
TOLERANCE = 1e-5  # relative to the largest element
OURS = "ours ragged_all_to_all"
UPSTREAM = ("ring", "fixed_all_to_all")


@dataclasses.dataclass(frozen=True)
class Shape:
    experts: int = 64
    tokens: int = 2048
    top: int = 8
    latent: int = 64
    width: int = 64
    capacity_factor: float = 1.15

    @property
    def gflop(self) -> float:
        """Of the three projections, forward and twice that backward, without recomputation."""
        return 18 * self.tokens * self.top * self.latent * self.width / 1e9


Arrays = dict[str, jax.Array]


def arrays(shape: Shape) -> Arrays:
    keys = iter(jax.random.split(jax.random.key(0), 8))
    E, D, F = shape.experts, shape.latent, shape.width
    scores = jax.random.gumbel(next(keys), (shape.tokens, E))
    return {
        "x": jax.random.normal(next(keys), (shape.tokens, D)),
        "selected": jax.lax.top_k(scores, shape.top)[1].astype(jnp.int32),
        "weights": jax.random.uniform(next(keys), (shape.tokens, shape.top)),
        "gate": jax.random.normal(next(keys), (E, D, F)) * D**-0.5,
        "up": jax.random.normal(next(keys), (E, D, F)) * D**-0.5,
        "down": jax.random.normal(next(keys), (E, F, D)) * F**-0.5,
        "d_out": jax.random.normal(next(keys), (shape.tokens, D)),
    }


def ours(implementation: DispatchImplementation, capacity_factor: float | None) -> Callable:
    config = DispatchConfig(implementation=implementation, capacity_factor=capacity_factor)

    def forward(x, gate, up, down, weights, selected):
        Token, Top, Latent = (
            Axis("batch", x.shape[0]),
            Axis("top_experts", weights.shape[1]),
            Axis("latent", x.shape[1]),
        )
        Experts, Mlp = Axis("experts", gate.shape[0]), Axis("mlp", gate.shape[2])
        bank = ExpertBank(
            MoELinear(hax.named(gate, (Experts, Latent, Mlp)), None, Experts, Latent, Mlp, use_gmm=False),
            MoELinear(hax.named(up, (Experts, Latent, Mlp)), None, Experts, Latent, Mlp, use_gmm=False),
            MoELinear(hax.named(down, (Experts, Mlp, Latent)), None, Experts, Mlp, Latent, use_gmm=False),
        )
        of_tokens = (hax.named(selected, (Token, Top)), hax.named(weights, (Token, Top)))
        return dispatch_experts(hax.named(x, (Token, Latent)), bank, *of_tokens, None, config)[0].array

    return forward


def upstream(implementation: str, capacity_factor: float) -> Callable:
    def forward(x, gate, up, down, weights, selected):
        fused = jnp.concatenate([gate, up], axis=-1)
        return moe_mlp(
            x, selected, weights, fused, down, implementation=implementation, capacity_factor=capacity_factor
        )

    return forward


def value_and_gradients(forward: Callable) -> Callable:
    def run(x, gate, up, down, weights, selected, d_out):
        out, vjp = jax.vjp(lambda *args: forward(*args, selected), x, gate, up, down, weights)
        return out, *vjp(d_out.astype(out.dtype))

    return run


@contextlib.contextmanager
def mesh(kind: AxisType) -> Iterator[jax.sharding.Mesh]:
    """One device for each expert shard; all axes that Levanter's meshes have."""
    names = ("replica_dcn", "replica", "data", "expert", "model")
    devices = jax.make_mesh((1, 1, 1, DEVICES, 1), names, axis_types=(kind,) * len(names))
    with set_mesh(devices), hax.axis_mapping({"batch": ("data", "expert"), "experts": "expert"}):
        yield devices


def placed(values: Arrays, devices: jax.sharding.Mesh) -> tuple[jax.Array, ...]:
    """Tokens and experts spread over the axis `expert`."""
    sharding = NamedSharding(devices, PartitionSpec(("data", "expert")))
    experts = NamedSharding(devices, PartitionSpec("expert"))
    order = ("x", "gate", "up", "down", "weights", "selected", "d_out")
    return tuple(jax.device_put(values[n], experts if n in ("gate", "up", "down") else sharding) for n in order)


def contender(forward: Callable, kind: AxisType, values: Arrays) -> Compiled:
    with mesh(kind) as devices:
        return compile_timed(value_and_gradients(forward), *placed(values, devices))


def max_difference(shape: Shape) -> dict[str, float]:
    """From the dense oracle, with a capacity that drops nothing, over output and all gradients."""
    small = dataclasses.replace(shape, tokens=8 * DEVICES)
    values = arrays(small)
    oracle = eqx.filter_jit(value_and_gradients(ours(DispatchImplementation.reference, None)))
    order = ("x", "gate", "up", "down", "weights", "selected", "d_out")
    expected = oracle(*(values[name] for name in order))
    enough = float(shape.experts)
    checked = {OURS: contender(ours(DispatchImplementation.ragged_all_to_all, None), AxisType.Auto, values)}
    checked |= {name: contender(upstream(name, enough), AxisType.Explicit, values) for name in UPSTREAM}
    return {
        name: max(
            float(jnp.max(jnp.abs(jax.device_get(a) - jax.device_get(b))) / jnp.max(jnp.abs(jax.device_get(b))))
            for a, b in zip(compiled.run(), expected, strict=True)
        )
        for name, compiled in checked.items()
    }


def run(shape: Shape, repeats: int) -> dict:
    print(shape)
    differences = max_difference(shape)
    if max(differences.values()) > TOLERANCE:
        raise AssertionError(f"a contender differs from the dense oracle by more than {TOLERANCE:.0e}: {differences}")
    values = arrays(shape)
    factor = shape.capacity_factor
    contenders = {
        "matmul": matmul(),
        OURS: contender(ours(DispatchImplementation.ragged_all_to_all, factor), AxisType.Auto, values),
        "ours padded_all_to_all": contender(
            ours(DispatchImplementation.padded_all_to_all, factor), AxisType.Auto, values
        ),
    }
    contenders |= {name: contender(upstream(name, factor), AxisType.Explicit, values) for name in UPSTREAM}
    timings = take_turns(contenders, repeats)
    own_matmul_ms = 1e3 * shape.gflop / gflops(timings["matmul"].median_ms)
    for name, timing in timings.items():
        print(
            f"{name:24} {timing.median_ms:8.1f} ms median {timing.min_ms:8.1f} ms best {timing.cpu_ms:8.1f} ms CPU"
            f"  compile {contenders[name].compile_s:4.1f} s",
            flush=True,
        )
    ratios = {name: timings[OURS].median_ms / timings[name].median_ms for name in UPSTREAM}
    cpu_ratios = {name: timings[OURS].cpu_ms / timings[name].cpu_ms for name in UPSTREAM}
    for name in UPSTREAM:
        verdict = "met" if ratios[name] <= TARGET_RATIO else "NOT met"
        print(
            f"{OURS} / {name}: {ratios[name]:.3f} median, {cpu_ratios[name]:.3f} processor time; "
            f"target {TARGET_RATIO}: {verdict}"
        )
    return {
        "shape": dataclasses.asdict(shape),
        "max_difference": differences,
        "own_matmul_ms": own_matmul_ms,
        "timings": {name: dataclasses.asdict(timing) for name, timing in timings.items()},
        "ratio_median": ratios,
        "ratio_processor_time": cpu_ratios,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for field in dataclasses.fields(Shape):
        several = {"nargs": "+", "default": [64, 384]} if field.name == "experts" else {"default": field.default}
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=type(field.default), **several)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--output", type=Path, help="JSON report")
    options = vars(parser.parse_args())
    repeats, output, experts = options.pop("repeats"), options.pop("output"), options.pop("experts")
    jax.config.update("jax_num_cpu_devices", DEVICES)
    runs = [run(Shape(experts=number, **options), repeats) for number in experts]
    if output is not None:
        write_json(output, {"machine": machine(), "devices": DEVICES, "target_ratio": TARGET_RATIO, "runs": runs})


if __name__ == "__main__":
    main()
