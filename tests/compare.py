# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""Compare a function of named arrays with its fp64 oracle: value, and gradient by finite differences of the oracle."""

import contextlib
import re
from collections.abc import Callable, Mapping, Sequence

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from haliax import AxisSpec, NamedArray
from haliax.partitioning import set_mesh
from jax.sharding import AxisType

RELATIVE_STEP = 1e-5
DIRECTIONS = 4
MESHES: Mapping[str, Mapping[str, int]] = {"data8": {"data": 8}, "data4_model2": {"data": 4, "model": 2}}


def normal(axes: AxisSpec, seed: int, scale: float = 1.0, dtype=jnp.float32) -> NamedArray:
    return hax.random.normal(jax.random.key(seed), axes).astype(dtype) * scale


def numpy(x: NamedArray | jax.Array) -> np.ndarray:
    return np.asarray(x.array if isinstance(x, NamedArray) else x, np.float64)


@contextlib.contextmanager
def on_mesh(name: str | None, mapping: Mapping[str, str]):
    """Eight devices as `MESHES` has them, and `mapping` without the mesh axes it lacks; None is one device."""
    if name is None:
        yield
        return
    shape = MESHES[name]
    mesh = jax.make_mesh(tuple(shape.values()), tuple(shape), axis_types=(AxisType.Auto,) * len(shape))
    with set_mesh(mesh), hax.axis_mapping({k: v for k, v in mapping.items() if v in shape}):
        yield


def rearranging_collectives(hlo: str) -> list[str]:
    """Instructions of compiled HLO that move arrays between devices without reducing them."""
    return re.findall(r"= (.*(?:all-gather|all-to-all|collective-permute)(?:-start)?)\(", hlo)


def assert_close(actual, expected: np.ndarray, tolerance: float, message: str = "") -> None:
    """Within `tolerance` of the largest magnitude expected."""
    actual = numpy(actual)
    assert actual.shape == expected.shape, f"{message}: {actual.shape} for {expected.shape}"
    error, scale = np.abs(actual - expected).max(initial=0), np.abs(expected).max(initial=0)
    assert error <= tolerance * scale, f"{message}: off by {error:.3g} at a scale of {scale:.3g}"


def assert_matches_oracle(
    ours: Callable[..., NamedArray],
    oracle: Callable[..., np.ndarray],
    arrays: Sequence[NamedArray],
    tolerance: float,
    *,
    mesh: str | None = None,
    mapping: Mapping[str, str] | None = None,
) -> str:
    """Value and gradient with respect to every array, cast to their own dtype; returns the compiled HLO.

    The gradient is compared along random directions. With directions of unit variance the mean square of the
    errors estimates the square of the Frobenius norm of the gradient's error, which must stay below `tolerance` of
    the gradient's own norm.
    """
    rng = np.random.default_rng(0)
    inputs = [numpy(a) for a in arrays]
    expected = oracle(*inputs)
    cotangent = rng.normal(size=expected.shape)

    @jax.jit
    def run(arrays, cotangent):
        out, vjp = jax.vjp(ours, *arrays)
        return out, vjp(hax.named(cotangent.astype(out.dtype), out.axes))

    with on_mesh(mesh, mapping or {}):
        arrays = [hax.shard(a) for a in arrays] if mesh else arrays
        compiled = run.lower(arrays, jnp.asarray(cotangent, jnp.float32)).compile()
        out, gradients = compiled(arrays, jnp.asarray(cotangent, jnp.float32))

    assert out.dtype == arrays[0].dtype
    assert_close(out, expected, tolerance, "value")
    for i, gradient in enumerate(gradients):
        assert gradient.axes == arrays[i].axes and gradient.dtype == arrays[i].dtype
        gradient, errors = numpy(gradient), []
        step = RELATIVE_STEP * np.sqrt(np.mean(inputs[i] ** 2))
        for _ in range(DIRECTIONS):
            direction = rng.normal(size=gradient.shape)
            moved = [oracle(*inputs[:i], inputs[i] + h * direction, *inputs[i + 1 :]) for h in (step, -step)]
            slope = (cotangent * (moved[0] - moved[1])).sum() / (2 * step)
            errors.append((gradient * direction).sum() - slope)
        error, norm = np.sqrt(np.mean(np.square(errors))), np.linalg.norm(gradient)
        assert norm > 0 and error <= tolerance * norm, f"gradient of array {i}: off by {error:.3g} of {norm:.3g}"
    return compiled.as_text()
