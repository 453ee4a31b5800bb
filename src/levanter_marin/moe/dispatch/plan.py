# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""Where assignments go, in integers only: no mesh, no floats. An assignment is one (token, expert) pair.

The contract of expert-parallel dispatch:
- Padding, a token that is not valid, is never sent, takes no capacity and gives zero.
- Each device sorts its assignments by expert, earlier tokens first. A receiver takes them chunk by chunk of its
  experts, in a chunk the experts in order, for an expert the senders in order, until the chunk's capacity is used up.
  So of each sender's group a prefix is accepted.
- The capacity of a receiver is ceil(factor * V / S), V being the valid assignments of all S devices, at least one row
  an expert and at most the rows of its buffers; a chunk has an equal share, rounded up.
- A dropped assignment adds nothing to its token, and the combine weights of the others stay as they are.
- Buffers have a static size. Rows of theirs that nothing was received into may hold anything.
- kept + sender-dropped + receiver-dropped + padding = tokens * K, exactly.

Letters: T tokens of a device, K experts of a token, A = T*K assignments of a device, numbered token-major, E experts,
S devices of the exchange, L = E/S experts of a device, C chunks, G = L/C experts of a chunk, P transfers of a device.
"""

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

import haliax as hax
import jax
import jax.numpy as jnp
from haliax import NamedArray
from jaxtyping import Array, Bool, Int

MAX_DENOMINATOR = 1000
_INT32_END = 2**31


class DispatchCounts(NamedTuple):
    """What became of the assignments of all devices: int32 scalars {}, whose sum is tokens * K exactly."""

    kept: NamedArray
    sender_dropped: NamedArray
    """Assignments that were never sent."""
    receiver_dropped: NamedArray
    """Assignments that found the receiver's buffer full."""
    padding: NamedArray
    """Assignments of tokens that are not valid."""


class SortedAssignments(NamedTuple):
    """Assignments sorted by expert, a stable order; those of padding come last and belong to no group."""

    assignment_of_row: Int[Array, " A"]
    row_of_assignment: Int[Array, "T K"]
    group_sizes: Int[Array, " E"]


def local_expert_count(num_experts: int, shards: int) -> int:
    """Experts of each device.

    Raises:
        ValueError: they do not divide over the devices.
    """
    if num_experts % shards != 0:
        raise ValueError(
            f"moe.num_experts={num_experts} does not divide over the {shards} devices of the mesh axis `expert`; "
            f"set the axis to {math.gcd(num_experts, shards)} or num_experts to "
            f"{math.ceil(num_experts / shards) * shards}"
        )
    return num_experts // shards


def dropless_counts(token_valid: NamedArray, num_experts_per_token: int) -> DispatchCounts:
    """The counts of a backend that computes every assignment of a valid token."""
    valid = hax.sum(token_valid.astype(jnp.int32))
    none = hax.zeros((), dtype=jnp.int32)
    return DispatchCounts(
        kept=valid * num_experts_per_token,
        sender_dropped=none,
        receiver_dropped=none,
        padding=(token_valid.array.size - valid) * num_experts_per_token,
    )


def sort_assignments(
    selected_experts: Int[Array, "T K"], token_valid: Bool[Array, " T"], num_experts: int
) -> SortedAssignments:
    """Sort by expert. Args and results are of one device; `assignment // K` is an assignment's token."""
    expert = jnp.where(token_valid[:, None], selected_experts, num_experts).reshape(-1)
    assignment_of_row = jnp.argsort(expert, stable=True).astype(jnp.int32)
    row = jnp.arange(expert.size, dtype=jnp.int32)
    # Inverting by scatter costs a twentieth of a second sort.
    row_of_assignment = jnp.zeros_like(row).at[assignment_of_row].set(row, unique_indices=True)
    group_sizes = jnp.bincount(expert, length=num_experts).astype(jnp.int32)
    return SortedAssignments(assignment_of_row, row_of_assignment.reshape(selected_experts.shape), group_sizes)


def prefix_rows(
    group_sizes: Int[Array, " E"], accepted_sizes: Int[Array, " E"], num_rows: int
) -> tuple[Bool[Array, " A"], Int[Array, " A"], Int[Array, " A"]]:
    """Of every sorted row: whether it is among the first `accepted_sizes` of its group, its group, its rank there.

    Group and rank are unspecified for rows past the last group.
    """
    group = jnp.repeat(jnp.arange(group_sizes.size, dtype=jnp.int32), group_sizes, total_repeat_length=num_rows)
    row = jnp.arange(num_rows, dtype=jnp.int32)
    rank = row - (jnp.cumsum(group_sizes) - group_sizes)[group]
    return (row < jnp.sum(group_sizes)) & (rank < accepted_sizes[group]), group, rank


@dataclass(frozen=True)
class ExchangeShape:
    """Static sizes of the exchange of one device.

    Attributes:
        shards: S.
        local_experts: L.
        chunks: C.
        chunk_rows: rows of the buffer of one chunk.
        capacity_factor: None is dropless.
        max_capacity: the most a receiver's capacity can be, over all chunks.
    """

    shards: int
    local_experts: int
    chunks: int
    chunk_rows: int
    capacity_factor: Fraction | None
    max_capacity: int

    @property
    def chunk_experts(self) -> int:
        return self.local_experts // self.chunks

    @staticmethod
    def create(
        *,
        tokens: int,
        num_experts_per_token: int,
        num_experts: int,
        shards: int,
        expert_chunks: int,
        capacity_factor: float | None,
    ) -> "ExchangeShape":
        """Of devices with `tokens` tokens each.

        Without a capacity factor a chunk has room for every row that could arrive: S * T * min(K, G), since the
        experts of a token are distinct. A factor never buys more than that.

        Raises:
            ValueError: `num_experts` is no multiple of `shards`.
        """
        local_experts = local_expert_count(num_experts, shards)
        chunks = expert_chunks if local_experts % expert_chunks == 0 else 1
        chunk_experts = local_experts // chunks
        could_arrive = shards * tokens * min(num_experts_per_token, chunk_experts)
        if capacity_factor is None:
            return ExchangeShape(shards, local_experts, chunks, could_arrive, None, chunks * could_arrive)
        factor = Fraction(capacity_factor).limit_denominator(MAX_DENOMINATOR)
        if factor.numerator * factor.denominator * shards >= _INT32_END:
            raise ValueError(
                f"dispatch.capacity_factor={capacity_factor} over {shards} devices needs integers beyond 32 bits; "
                "set it to a number with fewer digits"
            )
        max_capacity = max(local_experts, math.ceil(factor * tokens * num_experts_per_token))
        chunk_rows = min(max(chunk_experts, math.ceil(max_capacity / chunks)), could_arrive)
        return ExchangeShape(shards, local_experts, chunks, chunk_rows, factor, max_capacity)

    def chunk_capacity(self, valid_assignments: Int[Array, ""]) -> Int[Array, ""]:
        """Rows that a receiver takes in one chunk, when all senders together have so many valid assignments."""
        if self.capacity_factor is None:
            return jnp.asarray(self.chunk_rows, jnp.int32)
        numerator, denominator = self.capacity_factor.numerator, self.capacity_factor.denominator * self.shards
        # ceil(numerator * valid / denominator) in two parts, neither of which overflows
        whole, rest = valid_assignments // denominator, valid_assignments % denominator
        capacity = numerator * whole + -(-numerator * rest // denominator)
        capacity = jnp.clip(capacity, self.local_experts, self.max_capacity)
        return jnp.maximum(-(-capacity // self.chunks), self.chunk_experts)


def dropless_capacity_factor(shards: int, chunks: int, chunk_experts: int, num_experts_per_token: int) -> float:
    """The least capacity factor that never drops, with every token valid: all tokens may choose one chunk."""
    return shards * chunks * min(num_experts_per_token, chunk_experts) / num_experts_per_token


def accepted_group_sizes(group_sizes: Int[Array, "S E"], shape: ExchangeShape) -> Int[Array, "S E"]:
    """How many of each sender's rows each expert takes; `group_sizes` has a sender a row."""
    S, C, G = shape.shards, shape.chunks, shape.chunk_experts
    by_receiver = group_sizes.reshape(S, S, C, G).transpose(1, 2, 3, 0)
    wanted = by_receiver.reshape(S, C, G * S)
    capacity = shape.chunk_capacity(jnp.sum(group_sizes))
    before = jnp.cumsum(wanted, axis=2) - wanted
    accepted = jnp.minimum(wanted, jnp.maximum(capacity - before, 0))
    return accepted.reshape(by_receiver.shape).transpose(3, 0, 1, 2).reshape(group_sizes.shape).astype(jnp.int32)


class Transfer(NamedTuple):
    """The last four arguments of `jax.lax.ragged_all_to_all`: P/S contiguous pieces for each peer, peers in order."""

    input_offsets: Int[Array, " P"]
    send_sizes: Int[Array, " P"]
    output_offsets: Int[Array, " P"]
    """Where pieces start in the buffer of the device that receives them."""
    recv_sizes: Int[Array, " P"]


class ChunkPlan(NamedTuple):
    """One chunk of one device: one piece per (peer, expert of the chunk) each way, and what arrives."""

    there: Transfer
    """From the sorted rows of the senders, in place, to the receivers' buffers, sorted by expert and then sender."""
    back: Transfer
    """The mirror image: from the buffers to the same sorted rows."""
    group_sizes: Int[Array, " G"]


def chunk_plan(
    group_sizes: Int[Array, "S E"],
    accepted_sizes: Int[Array, "S E"],
    shard: int | Int[Array, ""],
    chunk: int,
    shape: ExchangeShape,
) -> ChunkPlan:
    """The plan of device `shard` for its experts of `chunk`."""
    S, C, G = shape.shards, shape.chunks, shape.chunk_experts

    def of_chunk(per_expert: Int[Array, "S E"]) -> Int[Array, "S S G"]:
        return per_expert.reshape(S, S, C, G)[:, :, chunk]

    rows = of_chunk(accepted_sizes)
    at_sender = of_chunk(jnp.cumsum(group_sizes, axis=1) - group_sizes)
    arriving = rows.transpose(1, 2, 0).reshape(S, G * S)
    at_receiver = (jnp.cumsum(arriving, axis=1) - arriving).reshape(S, G, S).transpose(2, 0, 1)
    there = Transfer(at_sender[shard], rows[shard], at_receiver[shard], rows[:, shard])
    back = Transfer(at_receiver[:, shard], rows[:, shard], at_sender[:, shard], rows[shard])
    there, back = jax.tree.map(lambda a: a.reshape(-1).astype(jnp.int32), (there, back))
    return ChunkPlan(there, back, jnp.sum(rows[:, shard], axis=0))
