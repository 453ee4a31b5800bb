# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""What a layer remembers while it decodes: keys and values, and the last inputs of its short convolutions, in pages.

Levanter's inference engine hands out pages. A sequence owns a list of them, a clone shares the full ones of its parent
and gets a copy of the last, partly filled one, and a freed page goes to another sequence with its old content. State
that is stored by page follows the sequence through all of this without being told.
"""

import dataclasses
from typing import Self

import equinox as eqx
import haliax as hax
import jax.numpy as jnp
from haliax import Axis, AxisSpec, NamedArray
from levanter.inference.page_table import PageBatchInfo, PageTableSpec
from levanter.inference.utils import INVALID, is_valid
from levanter.layers.kv_cache import KvPageCache, PageCache

from levanter_marin import axes
from levanter_marin.config import ConvSite

PAGE = "page"
SLOT = "slot"
CONV_TAIL = "conv_tail"


class PagedTokens(eqx.Module):
    """The tokens of one step: of several sequences, each a run of consecutive positions, then padding.

    Attributes:
        batch: what the engine says about the step.
        sequence: row of `batch.page_indices` of each token, int32 {position}; 0 for padding.
        pos_ids: position of each token in its sequence, int32 {position}; 0 for padding.
        rank: tokens of the same sequence before it in this step, int32 {position}.
        behind: tokens of the same sequence after it in this step, int32 {position}.
        valid: bool {position}, False for padding.
    """

    batch: PageBatchInfo
    sequence: NamedArray
    pos_ids: NamedArray
    rank: NamedArray
    behind: NamedArray
    valid: NamedArray

    @staticmethod
    def create(batch: PageBatchInfo, pos_ids: NamedArray) -> "PagedTokens":
        Pos = pos_ids.resolve_axis(axes.POSITION)
        starts = batch.cu_q_lens.array
        index = jnp.arange(Pos.size, dtype=jnp.int32)
        sequence = jnp.searchsorted(starts, index, side="right").astype(jnp.int32) - 1
        valid = (sequence < batch.num_seqs) & is_valid(batch.new_token_dests.array)
        sequence = jnp.where(valid, sequence, 0)
        return PagedTokens(
            batch,
            hax.named(sequence, Pos),
            hax.named(jnp.where(valid, pos_ids.array, 0).astype(jnp.int32), Pos),
            hax.named(jnp.where(valid, index - starts[sequence], 0), Pos),
            hax.named(jnp.where(valid, starts[sequence + 1] - 1 - index, 0), Pos),
            hax.named(valid, Pos),
        )

    @property
    def page_size(self) -> int:
        return self.batch.page_size

    def page_of(self, position: NamedArray) -> NamedArray:
        """The page that holds `position` {position} of each token's own sequence; INVALID where there is none."""
        row = position.array // self.page_size
        rows = self.batch.page_indices.rearrange(("seq", PAGE)).array
        page = rows.at[self.sequence.array, jnp.where(row < 0, rows.shape[1], row)].get(
            mode="fill", fill_value=INVALID
        )
        return hax.named(jnp.where(self.valid.array, page, INVALID), position.axes)


class ConvPageCache(PageCache):
    """The last inputs of a short convolution in each page.

    The `taps - 1` inputs before any position lie in the page of that position or at the end of an earlier one, so
    only as many are kept of each page.

    Attributes:
        inputs: {page, conv_tail, channels...}; the input at position p of a sequence is entry `p % conv_tail` of the
            page of p, until the page's position p + conv_tail replaces it.
    """

    inputs: NamedArray

    @staticmethod
    def init(spec: PageTableSpec, Tap: Axis, Channels: AxisSpec, dtype: jnp.dtype) -> "ConvPageCache":
        Tail = Axis(CONV_TAIL, max(Tap.size - 1, 1))
        pages = hax.zeros((Axis(PAGE, spec.num_pages), Tail), dtype=dtype).broadcast_axis(Channels)
        return ConvPageCache(pages.rearrange((PAGE, CONV_TAIL, ...)))

    def read(self, tokens: PagedTokens, position: NamedArray) -> NamedArray:
        """The inputs {position, channels...} at `position` {position} of each token's sequence; zero where none is."""
        entry = position % self.inputs.axis_size(CONV_TAIL)
        return self.inputs.at[{PAGE: tokens.page_of(position), CONV_TAIL: entry}].get(mode="fill", fill_value=0)

    def write(self, tokens: PagedTokens, x: NamedArray) -> "ConvPageCache":
        """Keep the last of these inputs x {position, channels...} in each page that they reach."""
        tail, position = self.inputs.axis_size(CONV_TAIL), tokens.pos_ids
        left_in_page = tokens.page_size - 1 - position % tokens.page_size
        kept = hax.minimum(left_in_page, tokens.behind) < tail
        page = hax.where(kept, tokens.page_of(position), INVALID)
        entries = self.inputs.at[{PAGE: page, CONV_TAIL: position % tail}]
        return ConvPageCache(entries.set(x.astype(self.inputs.dtype), mode="drop"))

    def copy_page(self, src_page: int, dst_page: int) -> Self:
        copied = self.inputs.at[PAGE, dst_page].set(self.inputs[PAGE, src_page])
        return dataclasses.replace(self, inputs=copied)

    def reset(self) -> Self:
        return dataclasses.replace(self, inputs=hax.zeros_like(self.inputs))


class LayerPageCache(PageCache):
    """All that one layer remembers.

    Attributes:
        kv: keys and values, as they enter attention, of the heads that this layer uses.
        convs: one cache for each site of a short convolution.
    """

    kv: KvPageCache
    convs: dict[ConvSite, ConvPageCache]

    def with_conv(self, site: ConvSite, cache: ConvPageCache) -> "LayerPageCache":
        return LayerPageCache(self.kv, {**self.convs, site: cache})

    def with_keys_and_values(self, tokens: PagedTokens, k: NamedArray, v: NamedArray) -> "LayerPageCache":
        """Store k and v {position, kv_head, head_size} of this step's tokens."""
        k, v = (a.rearrange((axes.POSITION, axes.KV_HEAD, axes.HEAD_SIZE)) for a in (k, v))
        return LayerPageCache(self.kv.update(tokens.batch, k, v), self.convs)

    def copy_page(self, src_page: int, dst_page: int) -> "LayerPageCache":
        convs = {site: cache.copy_page(src_page, dst_page) for site, cache in self.convs.items()}
        return LayerPageCache(self.kv.copy_page(src_page, dst_page), convs)

    def reset(self) -> "LayerPageCache":
        return LayerPageCache(self.kv.reset(), {site: cache.reset() for site, cache in self.convs.items()})
