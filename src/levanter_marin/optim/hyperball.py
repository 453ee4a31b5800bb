# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""Hyperball steps: MuonH and AdamH move every matrix on the sphere of its Frobenius norm."""

import warnings
from enum import StrEnum
from typing import Any

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import optax
from haliax import NamedArray

from levanter_marin.optim.newton_schulz import Coefficients, NewtonSchulzDtype, orthogonalize
from levanter_marin.optim.parameters import MatrixAxes, Parameter, map_parameters, parameters
from levanter_marin.optim.spreading import map_whole_matrices

NORM_FLOOR = 1e-10
"""Below it a direction's norm no longer divides."""

_TINY = float(jnp.finfo(jnp.float32).tiny)
_LARGEST_LOSS = -1 + float(jnp.finfo(jnp.float32).eps)  # a step through the origin: |p1| = 0
_RADIUS_BITS = 10
_ROUNDING_TRIALS = 3  # the norm of a 32x16 matrix in bf16 is then off by 5e-5 a step, within the 10 bits

_NO_PARAMETERS = "a hyperball step needs the parameters; call update(updates, state, params)"


type AxisNames = tuple[str, ...]


class NormScope(StrEnum):
    """What keeps one norm in an expert bank: all experts of a layer together, as published, or each expert."""

    all_experts = "all_experts"
    per_expert = "per_expert"


def hyperball_step(
    parameter: NamedArray,
    direction: NamedArray,
    learning_rate: float | jax.Array,
    matrix: AxisNames,
    shared: AxisNames = (),
) -> NamedArray:
    r"""The update that turns matrices against `direction` and keeps their norm.

    p1 = p - lr u |p| / max(|u|, 1e-10), p' = p1 |p| / |p1|, and the update is p' - p, so that |update| = lr |p| to
    first order. A matrix without direction stays exactly as it is, also among matrices that share a norm: these then
    keep the norm that they have without it. A norm of zero does not move either.

    |p1| is not summed but follows from p.u, since |p1|^2 - |p|^2 is small and can then be known to many more digits.
    The errors of fp32 sums would otherwise make the norm walk at random, by 1e-5 in a few hundred steps.

    Args:
        parameter: the current value; its norm is the radius, nothing is remembered. Rounding to bf16 makes that norm
            walk too, so for bf16 the radius is the norm rounded to 10 bits: within 5e-4 of it, and the same after
            every step.
        direction: with the axes of the parameter, of any scale.
        learning_rate: share of the norm by which to move.
        matrix: axes of one matrix.
        shared: axes that number matrices which together have one norm. Any other axis numbers independent ones.

    Returns:
        the update, with the axes and dtype of the parameter. Computed in fp32; a bf16 parameter plus its update is p'
        rounded once, but for entries that shrink to less than half, and p' scaled so that this has the radius.
    """
    p, u = parameter.astype(jnp.float32), direction.astype(jnp.float32)
    p_squares, u_squares, p_dot_u = (hax.sum(x, axis=matrix) for x in (p * p, u * u, p * u))
    has_direction = u_squares != 0  # also true of NaN, which is not to be hidden

    def total(squares: NamedArray) -> NamedArray:
        return hax.sum(squares, axis=shared)

    norm = hax.sqrt(total(p_squares))
    length = learning_rate * norm / hax.maximum(hax.sqrt(total(u_squares)), NORM_FLOOR)
    moving_squares = total(_zero_unless(has_direction, p_squares))
    growth = length * (length * total(u_squares) - 2 * total(p_dot_u)) / hax.maximum(moving_squares, _TINY)
    shrinkage = hax.expm1(-0.5 * hax.log1p(hax.maximum(growth, _LARGEST_LOSS)))  # |p| / |p1| - 1
    if parameter.dtype == jnp.float32:
        update = shrinkage * p - (1 + shrinkage) * length * u
    else:
        moved = (1 + shrinkage) * (p - length * u)
        rounded = _rounded(moved, hax.sqrt(moving_squares), has_direction, parameter.dtype, matrix, shared)
        update = rounded - parameter
    return _zero_unless(has_direction & (norm > 0), update.rearrange(parameter.axes))


def _rounded(
    moved: NamedArray, norm: NamedArray, counted: NamedArray, dtype: jnp.dtype, matrix: AxisNames, shared: AxisNames
) -> NamedArray:
    """`moved`, which has the given norm over the counted matrices, in `dtype` with that norm rounded to 10 bits."""
    radius = hax.named(jax.lax.reduce_precision(norm.array, 8, _RADIUS_BITS), norm.axes)
    scale = radius / hax.maximum(norm, _TINY)
    best_scale, best_error = scale, hax.full_like(norm, jnp.inf)
    for _ in range(_ROUNDING_TRIALS):
        rounded = (scale * moved).astype(dtype)
        rounded_norm = hax.sqrt(hax.sum(_zero_unless(counted, sum_of_squares(rounded, matrix)), axis=shared))
        error = hax.abs(rounded_norm - radius)
        is_better = (error < best_error).array
        best_scale = hax.named(jnp.where(is_better, scale.array, best_scale.array), scale.axes)
        best_error = hax.minimum(error, best_error)
        scale = scale * radius / hax.maximum(rounded_norm, _TINY)
    return (best_scale * moved).astype(dtype)


def sum_of_squares(x: NamedArray, axes: AxisNames) -> NamedArray:
    """Over `axes`, in fp32. A plain sum is right however x is sharded."""
    return hax.sum(hax.square(x.astype(jnp.float32)), axis=axes)


def scale_by_hyperball(
    learning_rate: float | jax.Array, norm_scope: NormScope = NormScope.all_experts
) -> optax.GradientTransformation:
    """`hyperball_step` on every weight of a linear layer, with the incoming updates as directions.

    Initialising warns once of weights whose norm is zero, since these never move.

    Args:
        learning_rate: share of its norm by which a matrix moves. The result is an update to add, with its sign.
        norm_scope: what keeps one norm in an expert bank.

    Returns:
        a transformation without state. It refuses parameters that are not weights of a `haliax.nn.Linear` or
        `MoELinear`.
    """

    def init(params: optax.Params) -> optax.EmptyState:
        _warn_of_zero_norms(params, norm_scope)
        return optax.EmptyState()

    def update(updates: optax.Updates, state: optax.EmptyState, params: optax.Params | None = None):
        if params is None:
            raise ValueError(_NO_PARAMETERS)

        def step(direction: Parameter, value: NamedArray) -> NamedArray:
            return hyperball_step(value, direction.value, learning_rate, *_norm_axes(direction, norm_scope))

        return map_parameters(step, updates, params), state

    return optax.GradientTransformation(init, update)


def orthogonalize_matrices(
    coefficients: Coefficients = Coefficients.quintic,
    num_steps: int = 5,
    dtype: NewtonSchulzDtype = NewtonSchulzDtype.bf16,
) -> optax.GradientTransformation:
    """`orthogonalize` on every weight of a linear layer: all its inputs against all its outputs, stacks at once.

    Under a mesh and an axis mapping, as in Levanter's trainer, stacked layers are spread over the devices meanwhile.
    """

    def apply(parameter: Parameter) -> NamedArray:
        return map_whole_matrices(
            lambda x: orthogonalize(x, coefficients=coefficients, num_steps=num_steps, dtype=dtype),
            parameter.value,
            _matrix_axes(parameter),
        )

    return optax.stateless(lambda updates, params: map_parameters(apply, updates))


def scale_by_muonh(
    learning_rate: float | jax.Array,
    momentum: float = 0.95,
    nesterov: bool = True,
    coefficients: Coefficients = Coefficients.quintic,
    num_steps: int = 5,
    newton_schulz_dtype: NewtonSchulzDtype = NewtonSchulzDtype.bf16,
    norm_scope: NormScope = NormScope.all_experts,
) -> optax.GradientTransformation:
    """Momentum, orthogonalized, as the direction of a hyperball step.

    buf <- momentum * buf + g; u = g + momentum * buf with `nesterov`, else buf. State: buf, in the dtype of the
    parameters. A changing learning rate comes through `optax.inject_hyperparams`.
    """
    return optax.chain(
        optax.trace(momentum, nesterov=nesterov),
        orthogonalize_matrices(coefficients, num_steps, newton_schulz_dtype),
        scale_by_hyperball(learning_rate, norm_scope),
    )


def scale_by_adamh(
    learning_rate: float | jax.Array,
    b1: float = 0.9,
    b2: float = 0.95,
    eps: float = 1e-8,
    norm_scope: NormScope = NormScope.all_experts,
) -> optax.GradientTransformation:
    """Adam's bias-corrected direction as that of a hyperball step. State: that of `optax.scale_by_adam`."""
    return optax.chain(optax.scale_by_adam(b1, b2, eps), scale_by_hyperball(learning_rate, norm_scope))


def _zero_unless(condition: NamedArray, x: NamedArray) -> NamedArray:
    # `hax.where` makes a branch of a condition without axes.
    return hax.named(jnp.where(condition.broadcast_to(x.axes).array, x.array, 0), x.axes)


def _matrix_axes(parameter: Parameter) -> MatrixAxes:
    matrix = parameter.matrix_axes
    if matrix is None:
        raise ValueError(
            f"{parameter.path} is not the weight of a haliax.nn.Linear or MoELinear, so it has no input and output "
            "axes; give it to another transformation"
        )
    return matrix


def _norm_axes(parameter: Parameter, norm_scope: NormScope) -> tuple[AxisNames, AxisNames]:
    """Axes of one matrix, and those along which matrices share a norm."""
    matrix = _matrix_axes(parameter)
    return (*matrix.inputs, *matrix.outputs), matrix.experts if norm_scope is NormScope.all_experts else ()


def _warn_of_zero_norms(params: Any, norm_scope: NormScope) -> None:
    """One warning with the paths of all weights that have a zero norm, also where init is being compiled."""
    found = parameters(params)
    if not found:
        return
    counts = []
    for parameter in found:
        matrix, shared = _norm_axes(parameter, norm_scope)
        counts.append(hax.sum(sum_of_squares(parameter.value, (*matrix, *shared)) == 0).array)
    paths = [parameter.path for parameter in found]
    stacked = jnp.stack(counts)
    if isinstance(stacked, jax.core.Tracer):
        jax.debug.callback(lambda counts: _warn(paths, counts), stacked)
    else:
        _warn(paths, stacked)


def _warn(paths: list[str], counts: Any) -> None:
    zeros = [f"{path} ({count})" for path, count in zip(paths, np.asarray(counts), strict=True) if count]
    if zeros:
        warnings.warn(
            f"weights with a norm of zero never move under hyperball: {', '.join(zeros)}; initialise them to other "
            "values, or give them to adam",
            stacklevel=2,
        )
