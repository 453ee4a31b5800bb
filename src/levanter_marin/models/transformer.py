# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""The stack of layers, run as a scan over groups in which every position has a fixed kind."""

import dataclasses
from collections.abc import Callable
from typing import cast

import haliax as hax
import jax
from haliax import Axis, NamedArray, ScanCheckpointPolicy
from haliax.jax_utils import named_call, tree_checkpoint_name
from haliax.nn.scan import BlockSeq, Stacked

from levanter_marin.axes import LayerKind
from levanter_marin.layers.attention import AttentionContext
from levanter_marin.models.block import Block
from levanter_marin.moe.statistics import RoutingStatistics

GROUP = "layer_group"
MEMBER = "layer_in_group"


@named_call
def run_layers(
    layers: Stacked[Block] | BlockSeq[Block],
    kinds: tuple[LayerKind, ...],
    global_every: int,
    x: NamedArray,
    context: AttentionContext,
) -> tuple[NamedArray, RoutingStatistics]:
    """Apply every layer in turn.

    A scan needs one body for all its steps, and local and global layers differ in window, rotary embedding and
    key-value heads. So the scan runs over groups of `global_every` layers, with a remainder behind it; the stored
    parameters keep one `layer` axis. Each layer is its own gradient checkpoint, under the policy of `layers`.

    Returns:
        the last layer's output, and the statistics of all with a leading `layer` axis.
    """
    Layers = layers.Block
    policy = layers.gradient_checkpointing
    if isinstance(layers, BlockSeq):
        per_layer = []
        for block, kind in zip(layers.blocks, kinds, strict=True):
            x, statistics = _checkpointed(kind, policy)(x, block, context)
            per_layer.append(statistics)
        return x, _stack(Layers, per_layer)

    Group, Member = Axis(GROUP, Layers.size // global_every), Axis(MEMBER, global_every)
    num_grouped = Group.size * Member.size
    parts = []
    if Group.size > 0:
        members = _split_members(layers.stacked, Layers, Group, Member)

        def run_group(x: NamedArray, *blocks: Block) -> tuple[NamedArray, tuple[RoutingStatistics, ...]]:
            collected = []
            for block, kind in zip(blocks, kinds[: Member.size], strict=True):
                x, statistics = _checkpointed(kind, policy)(x, block, context)
                collected.append(statistics)
            return x, tuple(collected)

        if policy.nested:
            # layers are checkpointed one by one, so the scan itself keeps only the outer level
            x, by_member = hax.scan(run_group, Group, remat=dataclasses.replace(policy, disable=True))(x, *members)
        else:
            x, by_member = _scan(run_group, Group, x, members)
        grouped = _stack(Member, by_member)
        parts.append(
            hax.tree_util.tree_map(
                lambda a: a.rearrange((Group, Member, ...)).flatten_axes((Group, Member), Layers.resize(num_grouped)),
                grouped,
            )
        )
    if num_grouped < Layers.size:
        remainder = []
        for i in range(num_grouped, Layers.size):
            x, statistics = _checkpointed(kinds[i], policy)(x, layers.get_layer(i), context)
            remainder.append(statistics)
        parts.append(_stack(Layers.resize(len(remainder)), remainder))
    if len(parts) == 1:
        return x, parts[0]
    return x, hax.tree_util.tree_map(lambda *a: hax.concatenate(Layers, a), *parts)


def _checkpointed(kind: LayerKind, policy: ScanCheckpointPolicy) -> Callable:
    def run(x: NamedArray, block: Block, context: AttentionContext) -> tuple[NamedArray, RoutingStatistics]:
        x = tree_checkpoint_name(x, "layer__carry")
        block = tree_checkpoint_name(block, "layer__input")
        return block(x, kind, context)

    return policy.checkpoint("layer__carry", "layer__input", run)


def _scan(run_group: Callable, Group: Axis, x: NamedArray, members: list[Block]):
    """`hax.scan` without its checkpoint names, behind which the backward pass would keep a copy of all weights."""

    def step(x: NamedArray, blocks: list[Block]):
        return run_group(x, *hax.tree_util.tree_map(lambda a: hax.named(a.array, a.axis_names[1:]), blocks))

    x, by_member = jax.lax.scan(step, x, members)
    return x, hax.tree_util.tree_map(lambda a: hax.named(a.array, (Group, *a.axis_names)), by_member)


def _stack(axis: Axis, trees) -> RoutingStatistics:
    return cast(RoutingStatistics, hax.tree_util.tree_map(lambda *leaves: hax.stack(axis, leaves), *trees))


def _split_members(stacked: Block, Layers: Axis, Group: Axis, Member: Axis) -> list[Block]:
    """One tree per position in the group, each with a leading `Group` axis.

    `lax.split` transposes to one concatenation, where indexing would add up padded copies of the gradient.
    """
    leaves, structure = jax.tree.flatten(stacked, is_leaf=lambda leaf: isinstance(leaf, NamedArray))

    def split(leaf: NamedArray) -> list[NamedArray]:
        leaf = leaf.rearrange((Layers, ...))
        grouped = jax.lax.slice_in_dim(leaf.array, 0, Group.size * Member.size)
        grouped = grouped.reshape((Group.size, Member.size, *grouped.shape[1:]))
        pieces = jax.lax.split(grouped, (1,) * Member.size, axis=1)
        return [hax.named(piece.squeeze(1), (Group, *leaf.axes[1:])) for piece in pieces]

    by_leaf = [split(leaf) for leaf in leaves]
    return [jax.tree.unflatten(structure, pieces) for pieces in zip(*by_leaf, strict=True)]
