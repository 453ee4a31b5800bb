# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

r"""Quantile balancing: the margin at which an expert would take exactly its share of the tokens.

With K of E experts per token, the margin of token t for expert e is its unbiased router logit minus the
(K+1)-th largest biased logit of the token. The threshold :math:`\beta_e` is the upper K/E quantile of expert
e's margins over all valid tokens. Routing the next step with the bias :math:`-\beta_e` (centred over experts)
would give every expert K/E of the tokens if the margins stayed as they were, so the bias is replaced each step
and never accumulated, and no auxiliary loss is needed.

Both estimators select by counting instead of sorting or scattering: the wanted margin is mapped to an unsigned
integer key, and the key's bits are found from the top, each by one comparison and one sum over tokens. Memory
beyond the keys is one number per expert; the [experts, bins] histogram is never built.

The method is that of the Marin 535B-A23B run: https://github.com/marin-community/marin/issues/8435
"""

import math
from collections.abc import Callable

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from haliax import Axis, NamedArray
from haliax.partitioning import physical_axis_name
from jax.sharding import PartitionSpec

from levanter_marin.axes import ROUTER_EXPERTS
from levanter_marin.config import QuantileBalancingConfig, QuantileEstimator

# Below this range of margins the histogram grid stops shrinking.
MIN_MARGIN_RANGE = 1e-6

_SIGN_BIT = np.uint32(0x80000000)
_ALL_BITS = np.uint32(0xFFFFFFFF)
# Keys of valid tokens are at least 1.
_PADDING_KEY = 0


def quantile_beta(
    margins: NamedArray,
    token_valid: NamedArray | None,
    *,
    num_experts_per_token: int,
    config: QuantileBalancingConfig,
) -> NamedArray:
    """Estimates every expert's upper K/E quantile of the margins.

    `histogram` is the quantile of the global batch up to one bin, (max - min) / num_bins wide, linear within the
    bin; it does not depend on the number of devices. `topk` is the exact margin of rank floor(valid * K / E) on
    each shard of the token axes, averaged over shards with their numbers of valid tokens as weights; it depends on
    the number of shards. Shards are those of the current axis mapping and mesh; without either there is one.

    Args:
        margins: {token axes..., router_experts}, in logits; computed in fp32. Padding may hold anything.
        token_valid: {token axes...}, nonzero where a token counts; None counts every token.
        num_experts_per_token: K, the experts each token is sent to.
        config: which estimator, and the bins of the histogram.

    Returns:
        {router_experts}, fp32, in logits, replicated over the mesh; 0 without a valid token or with the estimator
        off. Its gradient with respect to the margins is zero.

    Raises:
        ValueError: `topk` with a token axis that does not divide into its shards.
    """
    margins = jax.lax.stop_gradient(margins).astype(jnp.float32)
    Experts = margins.resolve_axis(ROUTER_EXPERTS)
    Tokens = tuple(axis for axis in margins.axes if axis.name != ROUTER_EXPERTS)
    if token_valid is None:
        token_valid = hax.named(jnp.bool_(True), ())
    token_valid = hax.broadcast_to(token_valid != 0, Tokens)

    match config.estimator:
        case QuantileEstimator.off:
            return hax.zeros(Experts, dtype=jnp.float32)
        case QuantileEstimator.histogram:
            return _histogram_beta(margins, token_valid, num_experts_per_token, config.num_bins)
        case QuantileEstimator.topk:
            return _topk_beta(margins, token_valid, num_experts_per_token)


def _histogram_beta(margins: NamedArray, token_valid: NamedArray, num_selected: int, num_bins: int) -> NamedArray:
    Experts, tokens = margins.resolve_axis(ROUTER_EXPERTS), _token_axis_names(margins)
    num_valid = hax.sum(token_valid, dtype=jnp.int32)
    any_valid = num_valid > 0

    low = hax.where(any_valid, hax.min(hax.where(token_valid, margins, jnp.inf)), 0.0)
    high = hax.where(any_valid, hax.max(hax.where(token_valid, margins, -jnp.inf)), 0.0)
    # A floor on the range, not on `high`: low + 1e-6 rounds back to low once |low| exceeds 16.
    bin_width = hax.maximum(high - low, MIN_MARGIN_RANGE) / num_bins

    bins = hax.clip(hax.floor((margins - low) / bin_width), 0, num_bins - 1)
    keys = hax.where(token_valid, bins.astype(jnp.uint32) + 1, _PADDING_KEY)

    def count_from(key: NamedArray) -> NamedArray:
        return hax.sum(keys >= key, axis=tokens, dtype=jnp.int32)

    # The rank valid * K / E is a real number; whole and rest keep it exact where the product would overflow.
    whole, rest = (num_valid // Experts.size) * num_selected, (num_valid % Experts.size) * num_selected
    rank = whole + -(-rest // Experts.size)
    key = _largest_key_reaching(count_from, hax.maximum(rank, 1), num_bins.bit_length(), Experts)

    count_top = count_from(key)
    count = count_top - count_from(key + 1)
    excess = (count_top - whole).astype(jnp.float32) - rest.astype(jnp.float32) / Experts.size
    position = (key.astype(jnp.float32) - 1) + excess / hax.maximum(count, 1)
    return hax.where(any_valid, low + bin_width * position, 0.0)


def _topk_beta(margins: NamedArray, token_valid: NamedArray, num_selected: int) -> NamedArray:
    mesh_axes = _token_mesh_axes(token_valid.axes)

    def mean_of_shards(margins: NamedArray, token_valid: NamedArray) -> NamedArray:
        num_valid = hax.sum(token_valid, dtype=jnp.int32)
        total = hax.maximum(jax.lax.psum(num_valid, mesh_axes), 1)
        local = _shard_topk_beta(margins, token_valid, num_valid, num_selected)
        return jax.lax.psum(local * (num_valid.astype(jnp.float32) / total), mesh_axes)

    if not mesh_axes:
        return mean_of_shards(margins, token_valid)
    return hax.shard_map(mean_of_shards, out_specs=PartitionSpec())(margins, token_valid)


def _shard_topk_beta(
    margins: NamedArray, token_valid: NamedArray, num_valid: NamedArray, num_selected: int
) -> NamedArray:
    Experts, tokens = margins.resolve_axis(ROUTER_EXPERTS), _token_axis_names(margins)
    keys = hax.where(token_valid, _float_to_key(margins), _PADDING_KEY)
    whole, rest = (num_valid // Experts.size) * num_selected, (num_valid % Experts.size) * num_selected
    rank = hax.maximum(whole + rest // Experts.size, 1)
    key = _largest_key_reaching(lambda key: hax.sum(keys >= key, axis=tokens, dtype=jnp.int32), rank, 32, Experts)
    return hax.where(num_valid > 0, _key_to_float(key), 0.0)


def _largest_key_reaching(
    count_from: Callable[[NamedArray], NamedArray], rank: NamedArray, num_bits: int, Experts: Axis
) -> NamedArray:
    """The largest key with `count_from(key) >= rank`, per expert, uint32; 0 where none is."""

    def set_bit(i, key: NamedArray) -> NamedArray:
        candidate = key | (jnp.uint32(1) << (num_bits - 1 - i).astype(jnp.uint32))
        return hax.where(count_from(candidate) >= rank, candidate, key)

    return jax.lax.fori_loop(0, num_bits, set_bit, hax.zeros(Experts, dtype=jnp.uint32))


def _float_to_key(x: NamedArray) -> NamedArray:
    """Maps fp32 to uint32, keeping the order."""
    bits = jax.lax.bitcast_convert_type(x.array, jnp.uint32)
    return hax.named(jnp.where(bits >= _SIGN_BIT, bits ^ _ALL_BITS, bits ^ _SIGN_BIT), x.axes)


def _key_to_float(key: NamedArray) -> NamedArray:
    bits = jnp.where(key.array >= _SIGN_BIT, key.array ^ _SIGN_BIT, key.array ^ _ALL_BITS)
    return hax.named(jax.lax.bitcast_convert_type(bits, jnp.float32), key.axes)


def _token_axis_names(margins: NamedArray) -> tuple[str, ...]:
    return tuple(axis.name for axis in margins.axes if axis.name != ROUTER_EXPERTS)


def _token_mesh_axes(Tokens: tuple[Axis, ...]) -> tuple[str, ...]:
    """The mesh axes that shard the tokens under the current mapping; empty without a mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return ()
    mesh_axes: list[str] = []
    for axis in Tokens:
        physical = physical_axis_name(axis) or ()
        names = (physical,) if isinstance(physical, str) else tuple(physical)
        num_shards = math.prod(mesh.shape[name] for name in names)
        if axis.size % num_shards != 0:
            raise ValueError(
                f"top-k quantile balancing: axis {axis.name} of size {axis.size} does not divide into {num_shards} "
                f"shards; use a multiple of {num_shards}, or quantile_balancing.estimator: histogram"
            )
        mesh_axes.extend(names)
    return tuple(mesh_axes)
