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

References: https://openathena.ai/blog/quantile-balancing/, https://kexue.fm/archives/11619; estimators compared in
https://github.com/marin-community/marin/issues/8033.
"""

import functools
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
    the number of shards. Shards are those of the current axis mapping and mesh; without either, or where a token
    axis does not divide into its shards, there is one.

    Args:
        margins: {token axes..., router_experts}, in logits; computed in fp32. Padding may hold anything.
        token_valid: {token axes...}, nonzero where a token counts; None counts every token.
        num_experts_per_token: K, the experts each token is sent to.
        config: which estimator, and the bins of the histogram.

    Returns:
        {router_experts}, fp32, in logits, replicated over the mesh; 0 without a valid token or with the estimator
        off. Its gradient with respect to the margins is zero.
    """
    margins = jax.lax.stop_gradient(margins).astype(jnp.float32)
    Experts = margins.resolve_axis(ROUTER_EXPERTS)
    Tokens = tuple(axis for axis in margins.axes if axis.name != ROUTER_EXPERTS)
    if token_valid is None:
        token_valid = hax.named(jnp.bool_(True), ())
    token_valid = hax.broadcast_to(token_valid != 0, Tokens)
    margins = margins.rearrange((*Tokens, Experts))

    match config.estimator:
        case QuantileEstimator.none:
            return hax.zeros(Experts, dtype=jnp.float32)
        case QuantileEstimator.histogram:
            estimate = functools.partial(_histogram_beta, num_bins=config.num_bins)
        case QuantileEstimator.topk:
            estimate = _topk_beta
    mesh_axes = _token_mesh_axes(Tokens)

    def beta_of_shards(margins: NamedArray, token_valid: NamedArray) -> NamedArray:
        # Sums over one flat axis compile to loops several times faster on CPU than sums over two.
        rows, valid = margins.array.reshape(-1, Experts.size), token_valid.array.reshape(-1)
        beta = estimate(rows, valid, num_experts_per_token, mesh_axes)
        return hax.named(beta, Experts)

    if not mesh_axes:
        return beta_of_shards(margins, token_valid)
    return hax.shard_map(beta_of_shards, out_specs=PartitionSpec())(margins, token_valid)


# Below, arrays are one shard's: T its tokens, E all experts; margins [T, E], valid [T], keys [T, E], beta [E].


def _histogram_beta(
    margins: jax.Array, valid: jax.Array, num_selected: int, mesh_axes: tuple[str, ...], *, num_bins: int
) -> jax.Array:
    num_experts = margins.shape[1]
    num_valid = jax.lax.psum(jnp.sum(valid, dtype=jnp.int32), mesh_axes)
    low = jax.lax.pmin(jnp.min(jnp.where(valid[:, None], margins, jnp.inf)), mesh_axes)
    high = jax.lax.pmax(jnp.max(jnp.where(valid[:, None], margins, -jnp.inf)), mesh_axes)
    # A floor on the range, not on `high`: low + 1e-6 rounds back to low once |low| exceeds 16.
    bin_width = jnp.maximum(high - low, MIN_MARGIN_RANGE) / num_bins

    bins = jnp.clip(jnp.floor((margins - low) / bin_width), 0, num_bins - 1).astype(jnp.uint32)
    keys = jnp.where(valid[:, None], bins + 1, _PADDING_KEY)

    def count_from(key: jax.Array) -> jax.Array:
        return jax.lax.psum(jnp.sum(keys >= key, axis=0, dtype=jnp.int32), mesh_axes)

    # The rank valid * K / E is a real number; its whole and its rest stay exact where the product would overflow.
    whole, rest = _share(num_valid, num_selected, num_experts)
    rank = whole + -(-rest // num_experts)
    key = _largest_key_reaching(count_from, rank, num_bins.bit_length(), num_experts)

    count_top = count_from(key)
    count = count_top - count_from(key + 1)
    excess = (count_top - whole).astype(jnp.float32) - rest.astype(jnp.float32) / num_experts
    position = (key - 1).astype(jnp.float32) + excess / jnp.maximum(count, 1)
    return jnp.where(num_valid > 0, low + bin_width * position, 0.0)


def _topk_beta(margins: jax.Array, valid: jax.Array, num_selected: int, mesh_axes: tuple[str, ...]) -> jax.Array:
    num_experts = margins.shape[1]
    num_valid = jnp.sum(valid, dtype=jnp.int32)
    keys = jnp.where(valid[:, None], _float_to_key(margins), _PADDING_KEY)

    def count_from(key: jax.Array) -> jax.Array:
        return jnp.sum(keys >= key, axis=0, dtype=jnp.int32)

    whole, rest = _share(num_valid, num_selected, num_experts)
    rank = jnp.maximum(whole + rest // num_experts, 1)
    beta = _key_to_float(_largest_key_reaching(count_from, rank, 32, num_experts))
    weight = num_valid / jnp.maximum(jax.lax.psum(num_valid, mesh_axes), 1)
    return jax.lax.psum(jnp.where(num_valid > 0, beta * weight, 0.0), mesh_axes)


def _share(num_valid: jax.Array, num_selected: int, num_experts: int) -> tuple[jax.Array, jax.Array]:
    """(whole, rest) with whole + rest / E = num_valid * K / E."""
    return num_valid // num_experts * num_selected, num_valid % num_experts * num_selected


def _largest_key_reaching(
    count_from: Callable[[jax.Array], jax.Array], rank: jax.Array, num_bits: int, num_experts: int
) -> jax.Array:
    """The largest key with `count_from(key) >= rank`, per expert, uint32; 0 where none is."""

    def set_bit(i, key: jax.Array) -> jax.Array:
        candidate = key | (jnp.uint32(1) << (num_bits - 1 - i).astype(jnp.uint32))
        return jnp.where(count_from(candidate) >= rank, candidate, key)

    return jax.lax.fori_loop(0, num_bits, set_bit, jnp.zeros(num_experts, jnp.uint32))


def _float_to_key(x: jax.Array) -> jax.Array:
    """Maps fp32 to uint32, keeping the order."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    return jnp.where(bits >= _SIGN_BIT, bits ^ _ALL_BITS, bits ^ _SIGN_BIT)


def _key_to_float(key: jax.Array) -> jax.Array:
    bits = jnp.where(key >= _SIGN_BIT, key ^ _SIGN_BIT, key ^ _ALL_BITS)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def _token_mesh_axes(Tokens: tuple[Axis, ...]) -> tuple[str, ...]:
    """The mesh axes that shard the tokens under the current mapping; none without a mesh or with uneven shards."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return ()
    mesh_axes: list[str] = []
    for axis in Tokens:
        physical = physical_axis_name(axis) or ()
        names = (physical,) if isinstance(physical, str) else tuple(physical)
        if axis.size % math.prod(mesh.shape[name] for name in names) != 0:
            return ()
        mesh_axes.extend(names)
    return tuple(mesh_axes)
