# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""Both estimators against NumPy statements of their rules, on one device and on eight."""

import contextlib
import functools
from collections.abc import Mapping
from pathlib import Path

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from levanter_marin.config import QuantileBalancingConfig, QuantileEstimator
from levanter_marin.moe.quantile_balancing import quantile_beta

GOLDENS = Path(__file__).parents[1] / "data" / "quantile_balancing.npz"

TOPK_ATOL = 1e-6
TOPK_GOLDEN_ATOL = 2e-5
# Of a bin. A margin within rounding of a bin edge may fall on either side; margins on bin centres may not.
HISTOGRAM_BINS = 1.0001
HISTOGRAM_CENTRED_BINS = 0.02

HISTOGRAM = QuantileBalancingConfig(QuantileEstimator.histogram, num_bins=1000)
TOPK = QuantileBalancingConfig(QuantileEstimator.topk)
ESTIMATORS = pytest.mark.parametrize("config", [HISTOGRAM, TOPK], ids=["histogram", "topk"])

# Mesh axes and the mapping of token axes to them.
MESHES = {
    "data8": ({"data": 8}, {"batch": "data"}),
    "replica2_data4": ({"replica": 2, "data": 4}, {"batch": ("replica", "data")}),
    "data4_model2": ({"data": 4, "model": 2}, {"batch": "data", "mlp": "model"}),
    "data4_context2": ({"data": 4, "context": 2}, {"batch": "data", "position": "context"}),
}
NO_MESH = ({}, {})


def histogram_oracle(margins: np.ndarray, valid: np.ndarray, num_selected: int, num_bins: int) -> np.ndarray:
    margins = margins[valid].astype(np.float64)
    num_valid, num_experts = margins.shape
    if num_valid == 0:
        return np.zeros(num_experts)
    low, high = margins.min(), max(margins.max(), margins.min() + 1e-6)
    bin_width, rank = (high - low) / num_bins, num_valid * num_selected / num_experts
    beta = np.zeros(num_experts)
    for expert in range(num_experts):
        count, _ = np.histogram(margins[:, expert], bins=num_bins, range=(low, high))
        count_top = np.cumsum(count[::-1])[::-1]
        b = max(i for i in range(num_bins) if count_top[i] >= rank)
        beta[expert] = low + b * bin_width + bin_width * (count_top[b] - rank) / max(count[b], 1)
    return beta


def topk_oracle(shards: list[tuple[np.ndarray, np.ndarray]], num_selected: int) -> np.ndarray:
    num_experts = shards[0][0].shape[-1]
    total, num_valid_total = np.zeros(num_experts), 0
    for margins, valid in shards:
        num_valid = int(valid.sum())
        rank = np.clip(num_valid * num_selected // num_experts, 1, max(1, valid.size * num_selected // num_experts))
        if num_valid > 0:
            total += num_valid * np.sort(margins[valid].astype(np.float64), axis=0)[::-1][rank - 1]
        num_valid_total += num_valid
    return total / max(num_valid_total, 1)


def shards_of(margins: np.ndarray, valid: np.ndarray, batch: int, position: int):
    return [
        (part[0].reshape(-1, margins.shape[-1]), part[1].reshape(-1))
        for rows in zip(np.split(margins, batch), np.split(valid, batch), strict=True)
        for part in zip(np.split(rows[0], position, axis=1), np.split(rows[1], position, axis=1), strict=True)
    ]


@contextlib.contextmanager
def on_mesh(mesh_axes: Mapping[str, int], mapping):
    if not mesh_axes:
        yield
        return
    devices = np.array(jax.devices()[: np.prod(list(mesh_axes.values()))]).reshape(tuple(mesh_axes.values()))
    with hax.partitioning.set_mesh(Mesh(devices, tuple(mesh_axes))), hax.axis_mapping(mapping):
        yield


@functools.cache
def jitted_beta(num_selected: int, config: QuantileBalancingConfig):
    return hax.named_jit(functools.partial(quantile_beta, num_experts_per_token=num_selected, config=config))


def estimate(margins, valid, num_selected: int, config: QuantileBalancingConfig, mesh=NO_MESH) -> np.ndarray:
    named = hax.named(jnp.asarray(margins), ("batch", "position", "router_experts"))
    token_valid = None if valid is None else hax.named(jnp.asarray(valid), ("batch", "position"))
    with on_mesh(*mesh):
        if mesh[0]:
            named, token_valid = hax.shard((named, token_valid))
        return np.asarray(jitted_beta(num_selected, config)(named, token_valid).array)


def random_case(name: str, num_experts: int = 8, batch: int = 8, position: int = 24):
    """Margins [batch, position, experts] and a padding mask; padding holds NaN and infinity."""
    rng = np.random.default_rng(len(name))
    margins = (rng.normal(size=(batch, position, num_experts)) + rng.normal(size=num_experts)).astype(np.float32)
    valid = np.ones((batch, position), bool)
    match name:
        case "tied":
            margins = np.round(margins * 2) / 2
        case "constant":
            margins = np.full_like(margins, 0.75)
        case "constant_far_from_zero":
            margins = np.full_like(margins, -3000.0)
        case "negative":
            margins = -np.abs(margins) - 1
        case "starved_expert":
            margins[..., 3] -= 100.0
        case "padded" | "padded_shard" | "one_valid":
            valid = rng.random(valid.shape) < 0.6
            if name == "padded_shard":
                valid[2] = False
            if name == "one_valid":
                valid[:] = False
                valid[5, 7] = True
            margins[~valid] = np.resize(np.array([np.nan, np.inf, -np.inf], np.float32), num_experts)
    return margins, valid


CASES = [
    "random",
    "tied",
    "constant",
    "constant_far_from_zero",
    "negative",
    "starved_expert",
    "padded",
    "padded_shard",
    "one_valid",
]


@pytest.mark.parametrize("name", CASES)
def test_histogram_beta_any_margins_matches_oracle(name):
    margins, valid = random_case(name)
    expected = histogram_oracle(margins, valid, 2, HISTOGRAM.num_bins)
    bin_width = max(np.ptp(margins[valid]), 1e-6) / HISTOGRAM.num_bins
    atol = HISTOGRAM_BINS * bin_width + np.spacing(np.abs(expected).max().astype(np.float32))
    np.testing.assert_allclose(estimate(margins, valid, 2, HISTOGRAM), expected, rtol=0, atol=atol)


@pytest.mark.parametrize("num_experts, num_selected", [(8, 2), (6, 4), (12, 1), (48, 7)])
def test_histogram_beta_margins_on_bin_centres_matches_oracle_within_a_bin(num_experts, num_selected):
    rng = np.random.default_rng(num_experts)
    cells = rng.integers(0, 100, size=(8, 25, num_experts))
    cells[0, 0, 0], cells[-1, -1, -1] = 0, 99
    # The grid runs from the smallest to the largest margin, so the two extremes stand on its edges.
    margins = cells + 0.5 + np.where(cells == 0, -0.5, 0) + np.where(cells == 99, 0.5, 0)
    valid = rng.random((8, 25)) < 0.8
    valid[0, 0] = valid[-1, -1] = True
    config = QuantileBalancingConfig(QuantileEstimator.histogram, num_bins=100)
    actual = estimate(margins.astype(np.float32), valid, num_selected, config)
    expected = histogram_oracle(margins, valid, num_selected, config.num_bins)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=HISTOGRAM_CENTRED_BINS)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("mesh_name", MESHES)
def test_histogram_beta_eight_devices_equals_one_device_bitwise(name, mesh_name):
    margins, valid = random_case(name)
    one = estimate(margins, valid, 2, HISTOGRAM)
    np.testing.assert_array_equal(estimate(margins, valid, 2, HISTOGRAM, MESHES[mesh_name]), one)


@pytest.mark.parametrize("name", CASES)
def test_topk_beta_one_shard_matches_oracle(name):
    margins, valid = random_case(name)
    expected = topk_oracle(shards_of(margins, valid, 1, 1), 2)
    np.testing.assert_allclose(estimate(margins, valid, 2, TOPK), expected, rtol=0, atol=TOPK_ATOL)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(
    "mesh_name, batch, position", [("data8", 8, 1), ("replica2_data4", 8, 1), ("data4_context2", 4, 2)]
)
def test_topk_beta_eight_shards_is_weighted_mean_of_shards(name, mesh_name, batch, position):
    margins, valid = random_case(name)
    expected = topk_oracle(shards_of(margins, valid, batch, position), 2)
    actual = estimate(margins, valid, 2, TOPK, MESHES[mesh_name])
    np.testing.assert_allclose(actual, expected, rtol=np.finfo(np.float32).eps, atol=TOPK_ATOL)


def test_topk_beta_mesh_axis_without_tokens_adds_no_shard():
    margins, valid = random_case("padded")
    expected = topk_oracle(shards_of(margins, valid, 4, 1), 2)
    actual = estimate(margins, valid, 2, TOPK, MESHES["data4_model2"])
    np.testing.assert_allclose(actual, expected, rtol=0, atol=TOPK_ATOL)


def test_topk_beta_fewer_tokens_than_experts_takes_the_largest_margin():
    margins, valid = random_case("random", num_experts=64, batch=1, position=5)
    np.testing.assert_array_equal(estimate(margins, valid, 2, TOPK), margins[0].max(axis=0))


@ESTIMATORS
def test_quantile_beta_batch_not_a_multiple_of_the_devices_equals_one_device(config):
    margins, valid = random_case("padded", batch=6)
    named = hax.named(jnp.asarray(margins), ("batch", "position", "router_experts"))
    token_valid = hax.named(jnp.asarray(valid), ("batch", "position"))
    with on_mesh(*MESHES["data8"]):
        beta = jitted_beta(2, config)(named, token_valid)
    np.testing.assert_array_equal(beta.array, estimate(margins, valid, 2, config))


@ESTIMATORS
def test_quantile_beta_appended_padding_changes_no_bit(config):
    margins, _ = random_case("random", batch=1, position=32)
    padded = np.concatenate([margins, np.full_like(margins, np.nan)], axis=1)
    valid = np.arange(64)[None] < 32
    without = estimate(margins, None, 2, config)
    assert np.ptp(without) > 0
    np.testing.assert_array_equal(estimate(padded, valid, 2, config), without)


@ESTIMATORS
def test_quantile_beta_mask_of_ones_equals_no_mask(config):
    margins, valid = random_case("random")
    np.testing.assert_array_equal(estimate(margins, valid, 2, config), estimate(margins, None, 2, config))


@ESTIMATORS
@pytest.mark.parametrize("mesh", [NO_MESH, MESHES["data8"]], ids=["one_device", "eight_devices"])
def test_quantile_beta_no_valid_token_is_zero(config, mesh):
    margins, valid = random_case("random")
    np.testing.assert_array_equal(estimate(margins * np.nan, valid & False, 2, config, mesh), np.zeros(8))


@ESTIMATORS
def test_quantile_beta_axis_order_and_integer_mask_change_nothing(config):
    margins, valid = random_case("padded")
    named = hax.named(jnp.asarray(margins), ("batch", "position", "router_experts"))
    mask = hax.named(jnp.asarray(valid, jnp.int32), ("batch", "position"))
    moved = jitted_beta(2, config)(
        named.rearrange(("router_experts", "position", "batch")), mask.rearrange(("position", "batch"))
    )
    straight = jitted_beta(2, config)(named, mask != 0)
    np.testing.assert_array_equal(moved.array, straight.array)


@ESTIMATORS
def test_quantile_beta_gradient_of_margins_is_zero(config):
    margins, valid = random_case("padded")
    margins = np.nan_to_num(margins, posinf=50, neginf=-50)
    mask = hax.named(jnp.asarray(valid), ("batch", "position"))

    def loss(raw):
        named = hax.named(raw, ("batch", "position", "router_experts"))
        beta = quantile_beta(named, mask, num_experts_per_token=2, config=config)
        return hax.sum(beta).scalar() + jnp.sum(raw**2)

    np.testing.assert_array_equal(jax.jit(jax.grad(loss))(jnp.asarray(margins)), 2 * margins)


@ESTIMATORS
def test_quantile_beta_as_threshold_gives_every_expert_its_share(config):
    margins, valid = random_case("random", num_experts=16)
    beta = estimate(margins, valid, 4, config)
    bin_width = np.ptp(margins) / HISTOGRAM.num_bins
    share = valid.sum() * 4 / 16
    flat = margins.reshape(-1, 16)
    assert ((flat >= beta - bin_width).sum(axis=0) >= share).all()
    assert ((flat > beta + bin_width).sum(axis=0) <= share).all()


@pytest.mark.parametrize("case", ["hero_tiny", "hero_tiny_padded"])
@pytest.mark.parametrize("layer", [0, 3])
@ESTIMATORS
def test_quantile_beta_published_margins_give_published_thresholds(case, layer, config):
    goldens = np.load(GOLDENS)
    margins, valid = goldens[f"{case}/block.{layer}/margins"], goldens[f"{case}/segment_ids"] >= 0
    expected = goldens[f"{case}/block.{layer}/beta.{config.estimator}"]
    atol = TOPK_GOLDEN_ATOL if config is TOPK else np.ptp(margins[valid]) / HISTOGRAM.num_bins
    np.testing.assert_allclose(estimate(margins, valid, 2, config), expected, rtol=0, atol=atol)
