# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""The Hyperball update against upstream's `muonH`, and Newton-Schulz of an expert bank against loops over it.

Targets: an update of a llama takes at most 1.05 times upstream's. Newton-Schulz of a bank [48, 16, 256, 256] takes at
most 1.1 times a compiled loop over upstream's function, compiles in at most 0.2 times the unrolled loop, and needs at
most 3 times the bank as temporary memory. Before timing, results are compared.
"""

import argparse
import dataclasses
import re
from collections.abc import Callable
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
from haliax import Axis
from levanter.models.llama import LlamaConfig
from levanter.optim.muonh import MuonHConfig
from levanter.optim.util import zeropower_via_newtonschulz5
from levanter.trainer_state import trainables_only

from common import Compiled, Timing, compile_timed, machine, take_turns, write_json
from levanter_marin.optim.config import HyperballConfig
from levanter_marin.optim.newton_schulz import NewtonSchulzDtype, orthogonalize

MAX_UPDATE_RATIO = 1.05
MAX_BANK_RATIO = 1.1
MAX_COMPILE_RATIO = 0.2
MAX_MEMORY_RATIO = 3.0
UPDATE_TOLERANCE = 1e-4  # relative to the largest: upstream adds 1e-8 to the norm of a gradient
NUM_TRAIN_STEPS = 100
SCHEDULE = {"learning_rate": 0.02, "adam_lr": 0.001, "warmup": 0, "lr_schedule": "constant", "epsilon": 1e-8}


def llama(hidden_dim: int, num_layers: int, vocab_size: int):
    """Parameters of a llama, and a gradient."""
    config = LlamaConfig(
        hidden_dim=hidden_dim,
        intermediate_dim=3 * hidden_dim,
        num_layers=num_layers,
        num_heads=hidden_dim // 32,
        num_kv_heads=hidden_dim // 64,
    )
    params = trainables_only(config.build(Axis("vocab", vocab_size), key=jax.random.key(0)), True)
    leaves, structure = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    gradient = [jax.random.normal(key, leaf.shape, leaf.dtype) for key, leaf in zip(keys, leaves, strict=True)]
    return params, structure.unflatten(gradient)


def contenders_for_update(params, gradient) -> dict[str, Compiled]:
    ours = HyperballConfig(**SCHEDULE, newton_schulz_dtype=NewtonSchulzDtype.fp32)
    upstream = MuonHConfig(**SCHEDULE, max_grad_norm=None, weight_decay=0.0)
    compiled = {}
    for name, config in (("hyperball", ours), ("upstream muonH", upstream)):
        optimizer = config.build(NUM_TRAIN_STEPS)

        def step(gradient, state, params, optimizer=optimizer):
            updates, state = optimizer.update(gradient, state, params)
            return eqx.apply_updates(params, updates), state

        compiled[name] = compile_timed(step, gradient, jax.jit(optimizer.init)(params), params)
    return compiled


def contenders_for_bank(bank: jax.Array, num_unrolled: int) -> dict[str, Compiled]:
    flat = bank.reshape(-1, *bank.shape[-2:])

    def unrolled(x: jax.Array) -> jax.Array:
        return jnp.stack([zeropower_via_newtonschulz5(matrix) for matrix in x])

    def ours(x: jax.Array) -> jax.Array:
        return orthogonalize(x, dtype=NewtonSchulzDtype.fp32)

    functions: dict[str, tuple[Callable[[jax.Array], jax.Array], jax.Array]] = {
        "orthogonalize": (ours, bank),
        "loop over upstream": (lambda x: jax.lax.map(zeropower_via_newtonschulz5, x), flat),
        f"{num_unrolled} unrolled": (unrolled, flat[:num_unrolled]),
    }
    return {name: compile_timed(function, x) for name, (function, x) in functions.items()}


def num_products(contender: Compiled) -> int:
    """Matrix products in the compiled program."""
    return len(re.findall(r"= \S+ dot\(", contender.call.as_text()))


def max_difference(a, b) -> float:
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return max(float(jnp.max(jnp.abs(x - y.reshape(x.shape))) / jnp.max(jnp.abs(y))) for x, y in pairs)


def report(name: str, contender: Compiled, timing: Timing) -> dict:
    print(
        f"{name:20} {timing.median_ms:9.1f} ms median {timing.min_ms:9.1f} ms best {timing.cpu_ms:9.1f} ms CPU"
        f"  compile {contender.compile_s:6.1f} s  temp {contender.temp_bytes / 2**20:8.1f} MiB",
        flush=True,
    )
    return {
        "name": name,
        **dataclasses.asdict(timing),
        "compile_s": contender.compile_s,
        "temp_bytes": contender.temp_bytes,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden-dim", type=int, default=256)
    parser.add_argument("--num-layers", type=int, default=8)
    parser.add_argument("--vocab-size", type=int, default=4096)
    parser.add_argument("--bank", type=int, nargs=4, default=[48, 16, 256, 256], metavar=("L", "E", "M", "N"))
    parser.add_argument("--unrolled", type=int, default=192, metavar="N", help="matrices of the unrolled loop")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help="where to write the results")
    options = parser.parse_args()

    params, gradient = llama(options.hidden_dim, options.num_layers, options.vocab_size)
    updates = contenders_for_update(params, gradient)
    ours, upstream = (updates[name] for name in ("hyperball", "upstream muonH"))
    update_difference = max_difference(ours.run()[0], upstream.run()[0])
    update_timings = take_turns(updates, options.repeats)
    rows = [report(name, updates[name], timing) for name, timing in update_timings.items()]
    update_ratio = update_timings["hyperball"].median_ms / update_timings["upstream muonH"].median_ms
    print(
        f"update: {update_ratio:.3f} times upstream's (target {MAX_UPDATE_RATIO}), difference {update_difference:.1e}"
    )

    bank = jax.random.normal(jax.random.key(2), options.bank)
    banks = contenders_for_bank(bank, options.unrolled)
    unrolled = banks.pop(f"{options.unrolled} unrolled")
    orthogonal, loop = banks["orthogonalize"], banks["loop over upstream"]
    bank_difference = max_difference(orthogonal.run(), loop.run())
    bank_timings = take_turns(banks, options.repeats)
    rows += [report(name, banks[name], timing) for name, timing in bank_timings.items()]
    ratios = {
        "update": update_ratio,
        "bank": bank_timings["orthogonalize"].median_ms / bank_timings["loop over upstream"].median_ms,
        "compile": orthogonal.compile_s / unrolled.compile_s,
        "memory": orthogonal.temp_bytes / bank.nbytes,
    }
    products = num_products(orthogonal)
    print(
        f"bank: {ratios['bank']:.3f} times the loop (target {MAX_BANK_RATIO}), difference {bank_difference:.1e}\n"
        f"compile: {ratios['compile']:.3f} times {options.unrolled} unrolled (target {MAX_COMPILE_RATIO}), "
        f"{products} batched products\n"
        f"temporary memory: {ratios['memory']:.2f} times the bank (target {MAX_MEMORY_RATIO})"
    )
    if options.json is not None:
        content = {"machine": machine(), "options": vars(options) | {"json": str(options.json)}, "rows": rows}
        content |= {"ratios": ratios, "products": products, "unrolled_compile_s": unrolled.compile_s}
        content |= {"differences": {"update": update_difference, "bank": bank_difference}}
        write_json(options.json, content)
    assert max(update_difference, bank_difference) < UPDATE_TOLERANCE


if __name__ == "__main__":
    main()
