# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""The acceptance rule and the exchange in plain NumPy loops: the oracle of the plan and of the transport."""

import math
from fractions import Fraction

import numpy as np


def accepted_assignments(
    selected: np.ndarray, valid: np.ndarray, num_experts: int, expert_chunks: int, factor: Fraction | None
) -> np.ndarray:
    """bool [shards, tokens, top] of selected [shards, tokens, top] and valid [shards, tokens]."""
    shards, tokens, top = selected.shape
    local = num_experts // shards
    chunks = expert_chunks if local % expert_chunks == 0 else 1
    accepted = np.zeros(selected.shape, bool)
    room = np.full(num_experts * chunks // local, shards * tokens * top)
    if factor is not None:
        most = max(local, math.ceil(factor * tokens * top))
        capacity = min(max(math.ceil(factor * int(valid.sum()) * top / shards), local), most)
        room[:] = max(math.ceil(capacity / chunks), local // chunks)
    for expert in range(num_experts):
        for s, t, k in np.ndindex(*selected.shape):
            if valid[s, t] and selected[s, t, k] == expert:
                chunk = expert * chunks // local
                accepted[s, t, k] = room[chunk] > 0
                room[chunk] -= accepted[s, t, k]
    return accepted


def ragged_all_to_all(operands, outputs, transfers):
    """What every device holds after `jax.lax.ragged_all_to_all`, given what each one passed to it."""
    outputs = [np.array(output) for output in outputs]
    shards = len(operands)
    for sender, (operand, (starts, sizes, targets, _)) in enumerate(zip(operands, transfers, strict=True)):
        pieces = len(starts) // shards
        for piece, (start, size, target) in enumerate(zip(starts, sizes, targets, strict=True)):
            receiver = piece // pieces
            assert transfers[receiver][3][sender * pieces + piece % pieces] == size
            assert start + size <= len(operand) and target + size <= len(outputs[receiver])
            outputs[receiver][target : target + size] = operand[start : start + size]
    return outputs
