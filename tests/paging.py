# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""Sequences in pages, as Levanter's engine keeps them, driven by hand; and continuation without any cache."""

from collections.abc import Callable, Mapping, Sequence

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from haliax.partitioning import set_mesh
from jax.sharding import AxisType
from levanter.inference.engine import GenState
from levanter.inference.jit_scheduler import DecodeState
from levanter.inference.page_table import PageTable, PageTableSpec
from levanter.inference.utils import INVALID
from levanter.layers.attention import AttentionMask
from levanter.layers.kv_cache import PageCache
from levanter.models.lm_model import LmHeadModel


class PagedSequences:
    """Slots of sequences and the cache behind them.

    `step(tokens, cache, batch_info, pos_ids)` returns (output {position, ...}, cache). `tokens` is what `feed` was
    given, of any dtype and trailing axes, behind each other and padded with `filler` to `step_size`.
    """

    def __init__(
        self,
        step: Callable,
        cache: Callable[[PageTableSpec], PageCache],
        *,
        page_size: int,
        max_seqs: int = 4,
        pages_per_seq: int = 8,
        max_pages: int = 24,
        step_size: int = 16,
        filler: float = INVALID,
    ):
        table = PageTable.init(max_pages, max_seqs, page_size, pages_per_seq)
        self.step, self.step_size, self.filler = step, step_size, filler
        self.state = GenState(cache(table.spec()), DecodeState.init(table))
        self.length: dict[int, int] = {}

    def new(self) -> int:
        decode_state, slot = self.state.decode_state.reserve_slot()
        self.state = GenState(self.state.cache, decode_state)
        self.length[int(slot)] = 0
        return int(slot)

    def fork(self, slot: int) -> int:
        self.state, child = self.state.clone_sequence(slot)
        self.length[int(child)] = self.length[slot]
        return int(child)

    def free(self, slot: int) -> None:
        self.state = GenState(self.state.cache, self.state.decode_state.free_pages(slot))
        del self.length[slot]

    def feed(self, runs: Mapping[int, np.ndarray]) -> dict[int, np.ndarray]:
        """One step: the next tokens of each slot [tokens, ...], in the mapping's order; returns the output of each."""
        count = sum(len(run) for run in runs.values())
        rows = np.concatenate(list(runs.values()))
        padding = np.full((self.step_size - count, *rows.shape[1:]), self.filler, rows.dtype)
        slots = np.concatenate([np.full(len(run), slot) for slot, run in runs.items()])
        positions = np.concatenate([self.length[slot] + np.arange(len(run)) for slot, run in runs.items()])

        def padded(ids: np.ndarray) -> hax.NamedArray:
            ids = np.concatenate([ids, np.full(self.step_size - count, INVALID)]).astype(np.int32)
            return hax.named(jnp.asarray(ids), "position")

        pos_ids = padded(positions)
        decode_state, batch = self.state.decode_state.allocate_for_seq(padded(slots), pos_ids)
        out, cache = self.step(jnp.concatenate([rows, padding]), self.state.cache, batch, pos_ids)
        self.state = GenState(cache, decode_state)
        outputs, start = {}, 0
        for slot, run in runs.items():
            outputs[slot] = np.asarray(out.array[start : start + len(run)])
            start += len(run)
            self.length[slot] += len(run)
        return outputs


def greedy_continuations(model: LmHeadModel, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """Each prompt and the `count` likeliest next tokens, by one full forward pass over all rows for each."""
    starts = np.asarray([len(prompt) for prompt in prompts])
    rows = np.zeros((len(prompts), starts.max() + count), np.int32)
    for row, prompt in zip(rows, prompts, strict=True):
        row[: len(prompt)] = prompt

    @eqx.filter_jit
    def next_tokens(model, rows, last):
        logits = model(hax.named(rows, ("batch", "position")), AttentionMask.causal())
        return jnp.argmax(logits.array[jnp.arange(len(last)), last], axis=-1)

    index = np.arange(len(prompts))
    for step in range(count):
        rows[index, starts + step] = next_tokens(model, jnp.asarray(rows), jnp.asarray(starts + step - 1))
    return [row[: start + count].tolist() for row, start in zip(rows, starts, strict=True)]


def one_device_mesh():
    """A mesh of the first device, for what reads or writes checkpoints."""
    return set_mesh(jax.make_mesh((1,), ("data",), devices=jax.devices()[:1], axis_types=(AxisType.Auto,)))
