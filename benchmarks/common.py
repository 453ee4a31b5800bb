# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""What every benchmark needs: compile apart from steady time, a yardstick, the machine, a JSON file.

Contenders take turns, so that other load on the machine meets all of them alike.
"""

import dataclasses
import datetime as dt
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

CPU_INFO = Path("/proc/cpuinfo")
PACKAGES = ("jax", "jaxlib", "equinox", "optax", "marin-levanter", "marin-haliax")
MATMUL_SIZE = 1024


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A compiled function with its arguments."""

    call: Callable[..., Any]
    args: tuple
    compile_s: float
    temp_bytes: int

    def run(self) -> Any:
        return jax.block_until_ready(self.call(*self.args))


@dataclasses.dataclass(frozen=True)
class Timing:
    """Of one call, in milliseconds. `cpu_ms` adds up all threads, and hardly feels other load."""

    median_ms: float
    min_ms: float
    cpu_ms: float
    repeats: int


def compile_timed(function: Callable[..., Any], *args: Any) -> Compiled:
    """Compile for `args`, which stay arguments: as constants they would be folded away."""
    start = time.perf_counter()
    compiled = jax.jit(function).lower(*args).compile()
    seconds = time.perf_counter() - start
    return Compiled(compiled, args, seconds, compiled.memory_analysis().temp_size_in_bytes)


def take_turns(contenders: Mapping[str, Compiled], repeats: int) -> dict[str, Timing]:
    """Time each contender `repeats` times, one after the other; the first round is a warm-up."""
    wall_s: dict[str, list[float]] = {name: [] for name in contenders}
    cpu_s: dict[str, list[float]] = {name: [] for name in contenders}
    for contender in contenders.values():
        contender.run()
    for _ in range(repeats):
        for name, contender in contenders.items():
            cpu, wall = time.process_time(), time.perf_counter()
            contender.run()
            wall_s[name].append(time.perf_counter() - wall)
            cpu_s[name].append(time.process_time() - cpu)
    return {
        name: Timing(
            median_ms=1e3 * statistics.median(wall_s[name]),
            min_ms=1e3 * min(wall_s[name]),
            cpu_ms=1e3 * statistics.median(cpu_s[name]),
            repeats=repeats,
        )
        for name in contenders
    }


def matmul(dtype: jnp.dtype = jnp.float32) -> Compiled:
    """A square product of `MATMUL_SIZE`, the yardstick of `gflops`."""
    a = jnp.ones((MATMUL_SIZE, MATMUL_SIZE), dtype)
    return compile_timed(jnp.matmul, a, a)


def gflops(milliseconds: float) -> float:
    """GFLOP/s of a `matmul` that took so long."""
    return 2 * MATMUL_SIZE**3 / milliseconds / 1e6


def machine() -> dict[str, Any]:
    """When, which commit, which hardware, which versions."""
    here = Path(__file__).parent
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False, cwd=here)
    changed = subprocess.run(["git", "status", "--porcelain"], capture_output=True, text=True, check=False, cwd=here)
    cpu_info = CPU_INFO.read_text().splitlines() if CPU_INFO.exists() else []
    models = [line.partition(":")[2].strip() for line in cpu_info if line.startswith("model name")]
    return {
        "time": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "commit": commit.stdout.strip(),
        "commit_is_clean": not changed.stdout.strip(),
        "devices": [device.device_kind for device in jax.devices()],
        "processor": models[0] if models else platform.processor(),
        "cores": os.cpu_count(),
        "load_average": os.getloadavg(),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in PACKAGES},
    }


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write beside, then rename: a reader never sees half a file."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(content, indent=2) + "\n")
    partial.replace(path)
