# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""Short convolution (SConv): a depthwise causal convolution over a few tokens of one document."""

import equinox as eqx
import haliax as hax
import jax.numpy as jnp
from haliax import Axis, AxisSpec, NamedArray
from haliax.jax_utils import named_call

from levanter_marin import axes
from levanter_marin.config import ConvSite
from levanter_marin.layers.materialized import materialized
from levanter_marin.layers.page_cache import ConvPageCache, LayerPageCache, PagedTokens


class ShortConv(eqx.Module):
    r"""out[t] = sum_{lag < taps} weight[lag] * x[t - lag], channel by channel.

    A tap that reaches before the row or into another document of a packed row contributes zero, in value and in
    gradient. Computed in fp32 and cast back to the input's dtype.

    Attributes:
        weight: {conv_tap, channels...}; row 0 multiplies the current token. The initial value, 1 for row 0 and
            0 elsewhere, is the identity.
    """

    weight: NamedArray
    Tap: Axis = eqx.field(static=True)

    @staticmethod
    def init(Tap: Axis, Channels: AxisSpec) -> "ShortConv":
        weight = (hax.arange(Tap) == 0).astype(jnp.float32).broadcast_axis(Channels)
        return ShortConv(weight.rearrange((Tap, ...)), Tap)

    @named_call
    def __call__(self, x: NamedArray, segment_ids: NamedArray | None = None) -> NamedArray:
        """Convolve along `position`.

        Args:
            x: {..., position, channels...}.
            segment_ids: integers {..., position}; equal ids are one document. None is one document a row.
        """
        Pos = x.resolve_axis(axes.POSITION)
        position = hax.arange(Pos)
        x32 = materialized(x).astype(jnp.float32)
        weight = self.weight.astype(jnp.float32)
        out = x32 * weight[self.Tap, 0]
        for lag in range(1, min(self.Tap.size, Pos.size)):
            reached = position >= lag
            if segment_ids is not None:
                reached = reached & (segment_ids == hax.roll(segment_ids, lag, Pos))
            out = out + hax.where(reached, hax.roll(x32, lag, Pos), 0.0) * weight[self.Tap, lag]
        return materialized(out.rearrange(x.axes).astype(x.dtype))

    @named_call
    def decode(self, x: NamedArray, cache: ConvPageCache, tokens: PagedTokens) -> tuple[NamedArray, ConvPageCache]:
        """Convolve the next tokens of several sequences: as `__call__` over each whole sequence. No gradient.

        Args:
            x: {position, channels...}.
            cache: the inputs before them; what is returned beside the result holds theirs too.
        """
        Pos = x.resolve_axis(axes.POSITION)
        x32 = x.astype(jnp.float32)
        weight = self.weight.astype(jnp.float32)
        out = x32 * weight[self.Tap, 0]
        for lag in range(1, self.Tap.size):
            stored = cache.read(tokens, tokens.pos_ids - lag).astype(jnp.float32)
            earlier = hax.where(tokens.rank >= lag, hax.roll(x32, lag, Pos), stored)
            out = out + earlier * weight[self.Tap, lag]
        return out.rearrange(x.axes).astype(x.dtype), cache.write(tokens, x)


def decode_at_site(
    site: ConvSite, conv: ShortConv | None, x: NamedArray, cache: LayerPageCache, tokens: PagedTokens
) -> tuple[NamedArray, LayerPageCache]:
    """`conv.decode` with the layer's cache of this site; without a convolution x and the cache as they are."""
    if conv is None:
        return x, cache
    out, conv_cache = conv.decode(x, cache.convs[site], tokens)
    return out, cache.with_conv(site, conv_cache)
