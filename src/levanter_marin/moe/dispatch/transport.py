# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""Ragged all-to-all with a gradient of its own, and an exact emulation of it on CPU.

Letters: S devices of the mesh axis, P transfers of a device, N rows of its operand, M rows of its output, D width.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from levanter_marin.moe.dispatch.plan import Transfer


def ragged_all_to_all(
    operand: Float[Array, "N D"],
    output: Float[Array, "M D"],
    transfer: Transfer,
    axis_name: str,
) -> Float[Array, "M D"]:
    """`jax.lax.ragged_all_to_all`; on CPU, where XLA has no such operation, the same result by an all-gather of rows.

    For use under `shard_map`. Rows of `output` that nothing is sent to stay. Not differentiable as it is: the
    operation's own transpose with respect to `output` is wrong where empty pieces share an offset.
    """
    native = functools.partial(jax.lax.ragged_all_to_all, axis_name=axis_name)
    emulation = functools.partial(_emulation, axis_name=axis_name)
    return jax.lax.platform_dependent(operand, output, *transfer, cpu=emulation, default=native)


def _emulation(operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name):
    del send_sizes
    S = jax.lax.axis_size(axis_name)
    N, M = operand.shape[0], output.shape[0]
    # What each sender says about its pieces for this device.
    offsets = jnp.stack([input_offsets, output_offsets]).reshape(2, S, -1)
    offsets = jax.lax.all_to_all(offsets, axis_name, split_axis=1, concat_axis=1)
    source = (offsets[0] + N * jnp.arange(S, dtype=jnp.int32)[:, None]).reshape(-1)
    target = offsets[1].reshape(-1)
    # Pieces do not overlap: a row belongs to the last one that starts at or before it, or to none.
    by_target = jnp.argsort(jnp.where(recv_sizes > 0, target, M))
    start = jnp.where(recv_sizes > 0, target, M)[by_target]
    row = jnp.arange(M, dtype=jnp.int32)
    piece = by_target[jnp.maximum(jnp.searchsorted(start, row, side="right") - 1, 0)]
    within = row - target[piece]
    written = (recv_sizes[piece] > 0) & (within >= 0) & (within < recv_sizes[piece])
    everyone = jax.lax.all_gather(operand, axis_name, tiled=True)
    received = jnp.take(everyone, jnp.where(written, source[piece] + within, 0), axis=0, mode="clip")
    return jnp.where(written[:, None], received, output)


def unwritten_rows(rows: int, like: Float[Array, "_ D"]) -> Float[Array, "rows D"]:
    """A buffer to receive into. Nothing may depend on what it holds."""
    return jnp.zeros((rows, like.shape[1]), like.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def send(
    rows: Float[Array, "N D"], into: Float[Array, "M D"], there: Transfer, back: Transfer, axis_name: str
) -> Float[Array, "M D"]:
    """Send rows as `there` says, into a buffer that keeps its other rows.

    Value: as `ragged_all_to_all`. Gradient: cotangents of rows that were sent come back along `back`, the mirror
    image of `there`; those of rows that were not sent hold anything, as `into` does, and have to be masked. The
    cotangent of `into` passes as it is: rows written here are not sent back a second time, because transfers into
    one buffer write to different rows.
    """
    return ragged_all_to_all(rows, into, there, axis_name)


def _send_fwd(rows, into, there, back, axis_name):
    shape_of_rows = jnp.zeros((rows.shape[0], 0), rows.dtype)
    return send(rows, into, there, back, axis_name), (shape_of_rows, back)


def _send_bwd(axis_name, residuals, d_out):
    shape_of_rows, back = residuals
    d_rows = ragged_all_to_all(d_out, unwritten_rows(shape_of_rows.shape[0], d_out), back, axis_name)
    return d_rows.astype(shape_of_rows.dtype), d_out, None, None


send.defvjp(_send_fwd, _send_bwd)
