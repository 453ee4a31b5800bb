# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""Ragged all-to-all with a gradient of its own, and an exact emulation of it on CPU.

Letters: S devices of the mesh axis, N rows of a device's operand, M rows of its output, D width, B rows of a block.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from levanter_marin.moe.dispatch.plan import Transfer


def ragged_all_to_all(
    operand: Float[Array, "N D"],
    output: Float[Array, "M D"],
    transfer: Transfer,
    axis_name: str,
) -> Float[Array, "M D"]:
    """`jax.lax.ragged_all_to_all`; on CPU, where XLA has no such operation, the same result by others.

    For use under `shard_map`. Rows of `output` that nothing is sent to stay. Not differentiable as it is: the
    operation's own transpose with respect to `output` is wrong where empty pieces share an offset.
    """
    native = functools.partial(jax.lax.ragged_all_to_all, axis_name=axis_name)
    emulation = functools.partial(_emulation, axis_name=axis_name)
    return jax.lax.platform_dependent(operand, output, *transfer, cpu=emulation, default=native)


# The emulation has blocks of so many times the rows that a balanced exchange needs.
_BLOCK_SLACK = 1.5


def _emulation(operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name):
    """All-to-all of equal blocks where everybody's rows for everybody else fit into them, all-gather where not."""
    S = jax.lax.axis_size(axis_name)
    N, M = operand.shape[0], output.shape[0]
    B = min(N, math.ceil(_BLOCK_SLACK * min(N, M) / S))
    input_offsets, send_sizes = input_offsets.reshape(S, -1), send_sizes.reshape(S, -1)
    pieces = send_sizes.shape[1]
    # What each sender says about its pieces for this device.
    offsets = jnp.stack([input_offsets, output_offsets.reshape(S, -1)])
    offsets = jax.lax.all_to_all(offsets, axis_name, split_axis=1, concat_axis=1)
    target = offsets[1].reshape(-1)
    # Pieces do not overlap: a row belongs to the last one that starts at or before it, or to none.
    start = jnp.where(recv_sizes > 0, target, M)
    by_start = jnp.argsort(start)
    row = jnp.arange(M, dtype=jnp.int32)
    piece = by_start[jnp.maximum(jnp.searchsorted(start[by_start], row, side="right") - 1, 0)]
    within = row - target[piece]
    written = (recv_sizes[piece] > 0) & (within >= 0) & (within < recv_sizes[piece])

    def received_from(rows, first_row_of_piece):
        return jnp.take(
            rows, jnp.where(written, first_row_of_piece.reshape(-1)[piece] + within, 0), axis=0, mode="clip"
        )

    sender = jnp.arange(S, dtype=jnp.int32)[:, None]

    def by_blocks():
        ends = jnp.cumsum(send_sizes, axis=1)
        place = jnp.arange(B, dtype=jnp.int32)
        of_place = jnp.minimum(jnp.sum(place[None, :, None] >= ends[:, None, :], axis=2), pieces - 1)
        source = jnp.take_along_axis(input_offsets - (ends - send_sizes), of_place, axis=1) + place
        blocks = jnp.take(operand, source.reshape(-1), axis=0, mode="clip").reshape(S, B, -1)
        blocks = jax.lax.all_to_all(blocks, axis_name, split_axis=0, concat_axis=0)
        sizes = recv_sizes.reshape(S, -1)
        return received_from(blocks.reshape(S * B, -1), B * sender + jnp.cumsum(sizes, axis=1) - sizes)

    def by_gathering():
        return received_from(jax.lax.all_gather(operand, axis_name, tiled=True), N * sender + offsets[0])

    largest = jax.lax.pmax(jnp.max(jnp.sum(send_sizes, axis=1)), axis_name)
    received = jax.lax.cond(largest <= B, by_blocks, by_gathering)
    return jnp.where(written[:, None], received, output)


def unwritten_rows(rows: int, like: Float[Array, "_ D"]) -> Float[Array, "rows D"]:
    """A buffer to receive into. Nothing may depend on what it holds."""
    return jnp.zeros((rows, like.shape[1]), like.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def send(
    rows: Float[Array, "N D"], into: Float[Array, "M D"], there: Transfer, back: Transfer, axis_name: str
) -> tuple[Float[Array, "N D"], Float[Array, "M D"]]:
    """Send rows as `there` says, into a buffer that keeps its other rows; returns `rows` as they are, and the buffer.

    The next transfer of the same rows takes those returned, and the next one into the same buffer takes that one. So
    the gradient is the mirror image: the cotangent of the buffer passes as it is, and its rows that were written here
    come back along `back` into the cotangent of the rows returned.

    Gradient: of rows that are sent by one of these transfers; of the others it holds what nothing may depend on, as a
    buffer does where nothing was written. Transfers in such a chain must send different rows to different places.
    """
    return rows, ragged_all_to_all(rows, into, there, axis_name)


def _send_fwd(rows, into, there, back, axis_name):
    return send(rows, into, there, back, axis_name), back


def _send_bwd(axis_name, back, cotangents):
    d_rows, d_buffer = cotangents
    return ragged_all_to_all(d_buffer, d_rows, back, axis_name), d_buffer, None, None


send.defvjp(_send_fwd, _send_bwd)
