# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""Exclusive Self Attention (XSA): what a head returns is orthogonal to the token's own value."""

import haliax as hax
import jax.numpy as jnp
from haliax import Axis, NamedArray

OWN_VALUE_EPS = 1e-6


def exclude_own_value(output: NamedArray, value: NamedArray, HeadSize: Axis) -> NamedArray:
    """z = y - (y . v) / (v . v + 1e-6) * v over `HeadSize`, in fp32, cast back.

    Args:
        output: attention output y, {..., position, kv_head, q_heads_per_group, head_size}.
        value: the token's own value v of the group, {..., position, kv_head, head_size}; broadcast over the queries
            of its group.

    Returns:
        z with the axes and dtype of `output`. A zero value leaves y as it is.
    """
    y, v = output.astype(jnp.float32), value.astype(jnp.float32).broadcast_to(output.axes)
    # not hax.dot, whose fp32 products an accelerator may take in less
    share = hax.sum(y * v, axis=HeadSize) / (hax.sum(v * v, axis=HeadSize) + OWN_VALUE_EPS)
    return (y - share * v).rearrange(output.axes).astype(output.dtype)
