# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""Orthogonalization of matrices, or of whole stacks of them, by a Newton-Schulz iteration."""

import functools
import math
from enum import StrEnum
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jaxtyping import Array, Float

_CPU_BATCH_ELEMENTS = 2**21  # 2**18 and 2**22 are up to 25 percent slower


class Coefficients(StrEnum):
    """Which polynomial a step applies to the singular values.

    `quintic` is what the published run used, `simple` what Muon was introduced with, `polar_express` comes from
    arXiv:2505.16932. All four are those of Levanter. A set has one polynomial a step; more steps than it has begin
    again at the first.
    """

    simple = "simple"
    quintic = "quintic"
    polar_express = "polar_express"
    aol = "aol"


class NewtonSchulzDtype(StrEnum):
    """Dtype of the matrix products; norms are fp32 in both."""

    bf16 = "bf16"
    fp32 = "fp32"


# One (a, b, c) a step, for a*s + b*s^3 + c*s^5; values as in levanter.optim.util.NEWTON_SCHULZ_COEFFICIENTS.
COEFFICIENTS: dict[Coefficients, tuple[tuple[float, float, float], ...]] = {
    Coefficients.simple: ((3.4445, -4.7750, 2.0315),),
    Coefficients.quintic: (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
    Coefficients.polar_express: (
        (8.2051, -22.9019, 16.4607),
        (4.0664, -2.8612, 0.5184),
        (3.9096, -2.8234, 0.5250),
        (3.2856, -2.4153, 0.4853),
        (2.2779, -1.6198, 0.3985),
        (1.8726, -1.2307, 0.3585),
        (1.8564, -1.2132, 0.3568),
        (1.8750, -1.2500, 0.3750),
    ),
    Coefficients.aol: (
        (4.0098, -7.0585, 2.4635),
        (3.4585, -5.5479, 2.5959),
        (2.7573, -3.2939, 1.4254),
        (2.7215, -3.0494, 1.3169),
    ),
}


def orthogonalize(
    x: Float[Array, "*batch m n"],
    *,
    coefficients: Coefficients = Coefficients.quintic,
    num_steps: int = 5,
    dtype: NewtonSchulzDtype = NewtonSchulzDtype.bf16,
) -> Float[Array, "*batch m n"]:
    r"""Move the singular values of every matrix of a stack towards one, and keep its singular vectors.

    With X_0 = x / |x|_F, each step takes X <- a X + (b A + c A A) X, where A = X X^T, so that every singular value s
    becomes a s + b s^3 + c s^5. Tall matrices are transposed first, which makes A as small as it can be.

    The result does not depend on the scale of x: |x|_F is taken after dividing by the largest magnitude, so that
    1e-12 x gives what x gives. A matrix of zeros, or with no entry above the smallest normal number, gives zeros.
    Singular values far below |x|_F need more steps than are usual, and stay below one.

    Args:
        x: matrices in the last two dimensions, any number of dimensions before them; any floating dtype.
        coefficients: which polynomials.
        num_steps: how many of them.
        dtype: of the matrix products.

    Returns:
        the same shape and dtype. No gradient is meant to be taken through it. Memory: twice x in `dtype`, on CPU less.

    Reference: K. Jordan et al., Muon, 2024, https://kellerjordan.github.io/posts/muon/, where |x|_F + 1e-7 divides.
    """
    if x.ndim < 2:
        raise ValueError(f"orthogonalize takes matrices, but {x.ndim=}; give two dimensions or more")
    iterate = functools.partial(_iterate, polynomials=COEFFICIENTS[coefficients], num_steps=num_steps, dtype=dtype)
    batch_size = _batch_size(x)
    if batch_size is None:
        return iterate(x)
    return jax.lax.map(iterate, x.reshape(-1, *x.shape[-2:]), batch_size=batch_size).reshape(x.shape)


def _batch_size(x: Float[Array, "*batch m n"]) -> int | None:
    """How many matrices of a stack to take at a time; None takes all.

    A CPU is faster where the intermediate results stay in its cache: 512 matrices of 128 x 128 take 0.15 s instead of
    0.19 s. Where a partitioner may have cut the stack, a loop over it would gather the pieces.
    """
    if jax.default_backend() != "cpu":
        return None
    mesh: Any = jax.sharding.get_abstract_mesh()
    if not mesh.empty and any(kind != AxisType.Manual for kind in mesh.axis_types):
        return None
    batch_size = max(1, _CPU_BATCH_ELEMENTS // (x.shape[-2] * x.shape[-1]))
    return batch_size if batch_size < math.prod(x.shape[:-2]) else None


def _iterate(
    x: Float[Array, "*batch m n"],
    polynomials: tuple[tuple[float, float, float], ...],
    num_steps: int,
    dtype: NewtonSchulzDtype,
) -> Float[Array, "*batch m n"]:
    compute = jnp.bfloat16 if dtype is NewtonSchulzDtype.bf16 else jnp.float32
    # An accelerator would otherwise multiply fp32 in fewer bits.
    precision = jax.lax.Precision.HIGHEST if dtype is NewtonSchulzDtype.fp32 else None
    tall = x.shape[-2] > x.shape[-1]
    y = _normalized(x).astype(compute)
    if tall:
        y = y.mT

    identity = jnp.eye(y.shape[-2], dtype=compute)
    for step in range(num_steps):
        a, b, c = polynomials[step % len(polynomials)]
        gram = jnp.matmul(y, y.mT, precision=precision)
        # a y is part of the product: one pass over y less, and in bf16 one rounding
        polynomial = a * identity + b * gram + c * jnp.matmul(gram, gram, precision=precision)
        y = jnp.matmul(polynomial, y, precision=precision)

    return (y.mT if tall else y).astype(x.dtype)


def _normalized(x: Float[Array, "*batch m n"]) -> Float[Array, "*batch m n"]:
    """x over its Frobenius norm, in fp32; zeros where that is not a normal number."""
    x = x.astype(jnp.float32)
    largest = jnp.max(jnp.abs(x), axis=(-2, -1), keepdims=True)
    is_zero = largest < jnp.finfo(jnp.float32).tiny
    x = jnp.where(is_zero, 0.0, x / jnp.where(is_zero, 1.0, largest))
    norm = jnp.sqrt(jnp.sum(jnp.square(x), axis=(-2, -1), keepdims=True))
    return x / jnp.where(is_zero, 1.0, norm)
