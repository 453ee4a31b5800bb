# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""Rotary embedding of the first part of a head, in either pairing of dimensions."""

import haliax as hax
import jax.numpy as jnp
from haliax import Axis, NamedArray

from levanter_marin.config import RopePairing


def partial_rotary(
    x: NamedArray, pos_ids: NamedArray, HeadSize: Axis, rope_dim: int, theta: float, pairing: RopePairing
) -> NamedArray:
    """Rotate the first `rope_dim` dimensions of `HeadSize`; the rest pass unchanged.

    Plane i < rope_dim / 2 turns by pos * theta^(-2 i / rope_dim). Its two dimensions are (2i, 2i + 1) or
    (i, i + rope_dim / 2). Angles and rotation in fp32, cast back.

    Args:
        x: queries or keys {..., position, ..., head_size}.
        pos_ids: absolute position in the row, {position} or {batch..., position}.
    """
    if rope_dim == 0:
        return x
    Plane, Side = Axis("rotary_plane", rope_dim // 2), Axis("rotary_side", 2)
    planes = (Plane, Side) if pairing is RopePairing.adjacent else (Side, Plane)
    rotated = x[HeadSize, :rope_dim].astype(jnp.float32).unflatten_axis(HeadSize.resize(rope_dim), planes)
    inv_freq = theta ** -(hax.arange(Plane, dtype=jnp.float32) / Plane.size)
    angle = pos_ids.astype(jnp.float32).broadcast_axis(Plane) * inv_freq
    cos, sin = hax.cos(angle), hax.sin(angle)
    first, second = rotated[Side, 0], rotated[Side, 1]
    turned = hax.stack(Side, (first * cos - second * sin, second * cos + first * sin))
    turned = turned.flatten_axes(planes, HeadSize.resize(rope_dim)).astype(x.dtype)
    if rope_dim == HeadSize.size:
        return turned.rearrange(x.axes)
    rest = x[HeadSize, rope_dim:]
    return hax.concatenate(HeadSize, (turned.rearrange(rest.axes), rest)).rearrange(x.axes)
