# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""Axis names and the local/global layer schedule.

Tensor axes are what a Levanter mesh mapping refers to. `EXPERTS` (the weight bank, mapped to the mesh axis
`expert`) and `ROUTER_EXPERTS` (logits and bias, never mapped) differ on purpose: router logits also carry the
token axes, which are sharded over (data, expert), and one mesh axis may not shard two axes of one array.
"""

from enum import StrEnum

BATCH = "batch"
POSITION = "position"
KEY_POSITION = "key_position"
LAYER = "layer"
EMBED = "embed"
VOCAB = "vocab"
HEADS = "heads"
KV_HEAD = "kv_head"
Q_HEADS_PER_GROUP = "q_heads_per_group"
HEAD_SIZE = "head_size"
GATE_RANK = "gate_rank"
CONV_TAP = "conv_tap"
MLP = "mlp"
LATENT = "latent"
EXPERTS = "experts"
ROUTER_EXPERTS = "router_experts"
TOP_EXPERTS = "top_experts"

EXPERT_MESH_AXIS = "expert"


class LayerKind(StrEnum):
    """What a layer attends to: the last `sliding_window` keys, or every earlier key."""

    LOCAL = "local"
    GLOBAL = "global"


def layer_kinds(num_layers: int, global_every: int) -> tuple[LayerKind, ...]:
    """The kind of every layer: each `global_every`-th one is global, and so is the last."""
    return tuple(
        LayerKind.GLOBAL if (i + 1) % global_every == 0 or i == num_layers - 1 else LayerKind.LOCAL
        for i in range(num_layers)
    )
