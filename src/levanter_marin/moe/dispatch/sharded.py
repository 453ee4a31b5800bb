# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""Run the dispatch of one device on every device, as the current axis mapping shards tokens, experts and `mlp`.

Letters: T tokens of this device, K experts of a token, E experts (of this device), D latent width, F expert width.
"""

import math
from collections.abc import Callable

import haliax as hax
import jax
import jax.numpy as jnp
from haliax import NamedArray
from haliax.partitioning import current_thread_local_mapping
from jax.sharding import PartitionSpec
from jaxtyping import Array, Int

from levanter_marin import axes
from levanter_marin.moe.dispatch.plan import DispatchCounts
from levanter_marin.moe.experts import ExpertBank


def mesh_shape() -> dict[str, int]:
    """Sizes of the axes of the current mesh; empty without one."""
    return dict(jax.sharding.get_abstract_mesh().shape)


def mesh_axes(axis_name: str, *, min_size: int = 2) -> tuple[str, ...]:
    """The axes of the current mesh, small ones left out, that the current mapping gives a tensor axis."""
    names = (current_thread_local_mapping() or {}).get(axis_name)
    if names is None:
        return ()
    return tuple(n for n in ((names,) if isinstance(names, str) else names) if mesh_shape().get(n, 0) >= min_size)


def shard_count(names: tuple[str, ...]) -> int:
    sizes = mesh_shape()
    return math.prod(sizes[name] for name in names)


def token_mesh_axes(x: NamedArray, *, min_size: int = 2) -> tuple[tuple[str, ...], ...]:
    """The mesh axes of each token axis of `x`."""
    return tuple(mesh_axes(axis.name, min_size=min_size) for axis in hax.axis.without_axes(x.axes, axes.LATENT))


def counts_of_device(
    valid: Int[Array, ""], assignments: int, *, sender_dropped: int | Array = 0, receiver_dropped: int | Array = 0
) -> Int[Array, " 4"]:
    """Kept, sender-dropped, receiver-dropped and padding of a device with so many valid assignments of all."""
    sender, receiver = jnp.asarray(sender_dropped), jnp.asarray(receiver_dropped)
    return jnp.stack([valid - sender - receiver, sender, receiver, assignments - valid]).astype(jnp.int32)


def dispatch_sharded(
    body: Callable[..., tuple[Array, Array]],
    x: NamedArray,
    bank: ExpertBank,
    selected_experts: NamedArray,
    combine_weights: NamedArray,
    token_valid: NamedArray,
    *,
    experts_mesh_axis: str | None,
) -> tuple[NamedArray, DispatchCounts]:
    """The axes and arguments are those of `levanter_marin.moe.dispatch.api.dispatch_experts`.

    Args:
        body: x [T, D], w_gate [E, D, F], w_up [E, D, F], w_down [E, F, D], selected [T, K], weights [T, K], valid [T]
            of one device -> the sum of each token's experts [T, D] in fp32, over this device's part of F, and
            `counts_of_device`.
        experts_mesh_axis: over which the bank is split; None gives every device all experts.

    Raises:
        ValueError: a token axis or `mlp` does not divide over its mesh axes.
    """
    Top = selected_experts.resolve_axis(axes.TOP_EXPERTS)
    Latent, Mlp = bank.gate_proj.In, bank.gate_proj.Out
    token_axes = hax.axis.without_axes(x.axes, Latent)
    # Collectives over an axis of size 1 are needed only where the body names it.
    of_tokens = token_mesh_axes(x, min_size=2 if experts_mesh_axis is None else 1)
    used = tuple(name for names in of_tokens for name in names)
    # A mesh axis that splits the tokens can't also split the sum over `mlp`.
    of_mlp = tuple(name for name in mesh_axes(axes.MLP) if name not in used)
    for axis, names in zip((*token_axes, Mlp), (*of_tokens, of_mlp), strict=True):
        shards = shard_count(names)
        if axis.size % shards != 0:
            raise ValueError(
                f"axis {axis.name} of size {axis.size} does not divide over the {shards} devices of mesh axes "
                f"{names}; make {axis.name} a multiple of {shards}"
            )

    def on_device(x, w_gate, w_up, w_down, selected, weights, valid):
        D, K = x.shape[-1], selected.shape[-1]
        routed, counts = body(
            x.reshape(-1, D), w_gate, w_up, w_down, selected.reshape(-1, K), weights.reshape(-1, K), valid.reshape(-1)
        )
        if of_mlp:
            routed = jax.lax.psum(routed, of_mlp)
        if used:
            counts = jax.lax.psum(counts, used)
        return routed.reshape(x.shape).astype(x.dtype), counts

    if used or of_mlp:
        tokens = PartitionSpec(*(names or None for names in of_tokens))
        per_token = PartitionSpec(*tokens, None)
        mlp = of_mlp or None
        mlp_out = PartitionSpec(experts_mesh_axis, None, mlp)
        mlp_in = PartitionSpec(experts_mesh_axis, mlp, None)
        on_device = hax.shard_map(
            on_device,
            in_specs=(per_token, mlp_out, mlp_out, mlp_in, per_token, per_token, tokens),
            out_specs=(per_token, PartitionSpec()),
        )

    routed, counts = on_device(
        x.rearrange((*token_axes, Latent)).array,
        bank.gate_proj.weight.rearrange((axes.EXPERTS, axes.LATENT, axes.MLP)).array,
        bank.up_proj.weight.rearrange((axes.EXPERTS, axes.LATENT, axes.MLP)).array,
        bank.down_proj.weight.rearrange((axes.EXPERTS, axes.MLP, axes.LATENT)).array,
        selected_experts.rearrange((*token_axes, Top)).array,
        combine_weights.rearrange((*token_axes, Top)).array,
        token_valid.rearrange(token_axes).array,
    )
    routed = hax.named(routed, (*token_axes, Latent)).rearrange(x.axes)
    return routed, DispatchCounts(*(hax.named(count, ()) for count in counts))
