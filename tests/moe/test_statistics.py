# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import levanter.metrics
import numpy as np
import pytest
from haliax import Axis
from levanter.grug.grug_moe import moe_routing_stats

import compare
import oracles
from compare import normal, numpy
from levanter_marin.config import MoeConfig
from levanter_marin.moe.dispatch.plan import DispatchCounts, dropless_counts
from levanter_marin.moe.routing import select_experts
from levanter_marin.moe.statistics import RoutingStatistics, training_metrics

RTOL = 3e-6

Batch, Pos = Axis("batch", 8), Axis("position", 5)
CONFIG = MoeConfig(num_experts=8, num_experts_per_token=2)
RouterExperts = CONFIG.RouterExperts
BIAS = normal(RouterExperts, 9)
# Expert 7 is dead; its load counts in the entropy as 0.
LOGITS = normal((Batch, Pos, RouterExperts), 0, 1.5) - 40.0 * (hax.arange(RouterExperts) == 7)

VALID = {
    "all": None,
    "padding": hax.named(jnp.asarray(np.random.default_rng(0).random((8, 5)) < 0.6), (Batch, Pos)),
    "one": hax.named(jnp.arange(40).reshape(8, 5) == 17, (Batch, Pos)),
    "none": hax.zeros((Batch, Pos), dtype=jnp.bool_),
}


@eqx.filter_jit
def _measure(logits, valid) -> RoutingStatistics:
    mask = hax.ones((Batch, Pos), dtype=jnp.bool_) if valid is None else valid
    counts = dropless_counts(mask.broadcast_to((Batch, Pos)), 2)
    return RoutingStatistics.measure(select_experts(logits, BIAS, CONFIG), BIAS, valid, counts, CONFIG)


def _flat(valid) -> np.ndarray:
    mask = hax.ones((Batch, Pos), dtype=jnp.bool_) if valid is None else valid.broadcast_to((Batch, Pos))
    return np.asarray(mask.array).reshape(-1)


@pytest.mark.parametrize("which", VALID)
def test_routing_statistics_equal_oracle_and_upstream(which):
    valid = VALID[which]
    ours = _measure(LOGITS, valid)
    logits = np.asarray(LOGITS.array).reshape(-1, 8)
    selected = oracles.select_experts(logits.astype(np.float64), numpy(BIAS), top=2)[0]
    expected = oracles.routing_statistics(logits.astype(np.float64), selected, _flat(valid))
    theirs = moe_routing_stats(
        jnp.asarray(selected),
        jax.nn.softmax(logits),
        jnp.asarray(logits),
        jnp.asarray(_flat(valid)),
        num_experts=8,
        num_experts_per_token=2,
    )
    for name, value in expected.items():
        upstream = theirs["routing_counts" if name == "expert_load" else name]
        for other in (value, upstream):
            np.testing.assert_allclose(getattr(ours, name).array, other, rtol=RTOL, atol=RTOL, err_msg=name)
    np.testing.assert_array_equal(ours.bias.array, BIAS.array)
    assert float(ours.expert_load.array.sum()) == 2 * _flat(valid).sum()


def test_routing_statistics_of_a_balanced_router_are_the_documented_constants():
    """Equal logits give equal probabilities; a bias that turns with the token gives equal loads."""
    Tokens = Axis("position", 8)
    turn = (hax.arange(RouterExperts) - hax.arange(Tokens).broadcast_axis(RouterExperts)) % 8
    routing = select_experts(hax.zeros((Tokens, RouterExperts)), -turn.astype(jnp.float32), CONFIG)
    none = hax.named(jnp.int32(0), ())
    statistics = RoutingStatistics.measure(routing, BIAS, None, DispatchCounts(none, none, none, none), CONFIG)
    np.testing.assert_array_equal(statistics.expert_load.array, 2)
    np.testing.assert_allclose(statistics.routing_entropy.array, np.log(8), rtol=2e-5)
    np.testing.assert_allclose(statistics.load_balancing_loss.array, 2, rtol=RTOL)
    np.testing.assert_allclose(statistics.router_z_loss.array, np.log(8) ** 2, rtol=RTOL)


def test_routing_statistics_padding_of_any_content_is_left_out():
    valid = VALID["padding"]
    clean, dirty = _measure(LOGITS, valid), _measure(hax.where(valid, LOGITS, 9.0).rearrange(LOGITS.axes), valid)
    for a, b in zip(jax.tree.leaves(clean), jax.tree.leaves(dirty), strict=True):
        np.testing.assert_array_equal(a, b)


def test_routing_statistics_have_no_gradient():
    def loss(logits):
        statistics = _measure(logits, None)
        return (statistics.router_z_loss + statistics.load_balancing_loss + statistics.routing_entropy).scalar()

    np.testing.assert_array_equal(jax.grad(loss)(LOGITS).array, 0)


@pytest.mark.parametrize("mesh", compare.MESHES)
def test_routing_statistics_on_eight_devices_equal_one(mesh):
    expected = _measure(LOGITS, VALID["padding"])
    with compare.on_mesh(mesh, {"batch": "data"}):
        # a function of its own: the axis mapping is no part of the key of a jitted one
        measure = eqx.filter_jit(lambda logits, valid: _measure.__wrapped__(hax.auto_sharded(logits), valid))
        compiled = measure.lower(LOGITS, VALID["padding"]).compile()
        actual = compiled(LOGITS, VALID["padding"])
    assert not compare.rearranging_collectives(compiled.compiled.as_text())
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=RTOL, atol=RTOL)


# Metrics of a training step

Layers = Axis("layer", 3)


def _layers(seed: int) -> RoutingStatistics:
    """Statistics of three layers as a model stacks them, with drops, a dead expert and one layer without a token."""
    rng = np.random.default_rng(seed)
    load = rng.integers(1, 50, (3, 8)).astype(np.float32)
    load[1, 2], load[2] = 0, 0
    kept, sender, receiver = load.sum(1).astype(np.int32), np.int32([3, 0, 0]), np.int32([4, 1, 0])
    per_layer = [hax.named(jnp.asarray(a), Layers) for a in (kept, sender, receiver, np.int32([6, 0, 80]))]
    scalars = [hax.named(jnp.asarray(rng.random(3), jnp.float32), Layers) for _ in range(3)]
    experts = [
        hax.named(jnp.asarray(a, jnp.float32), (Layers, RouterExperts)) for a in (load, rng.normal(size=(3, 8)))
    ]
    return RoutingStatistics(experts[0], *scalars, experts[1], DispatchCounts(*per_layer))


def _readings_by_hand(statistics: RoutingStatistics) -> dict[str, np.ndarray]:
    """Per layer, what each metric reads."""
    load, bias, counts = numpy(statistics.expert_load), numpy(statistics.bias), statistics.dispatch
    sender, receiver = numpy(counts.sender_dropped), numpy(counts.receiver_dropped)
    valid = np.maximum(numpy(counts.kept) + sender + receiver, 1)
    padding = numpy(counts.padding)
    return {
        "max_over_mean_load": [layer.max() / layer.mean() if layer.any() else 0 for layer in load],
        "dead_experts": (load == 0).sum(1),
        "drop_fraction": (sender + receiver) / valid,
        "sender_drop_fraction": sender / valid,
        "receiver_drop_fraction": receiver / valid,
        "padding_fraction": padding / (numpy(counts.kept) + sender + receiver + padding),
        "bias_range": bias.max(1) - bias.min(1),
        **{
            name: numpy(getattr(statistics, name))
            for name in ("routing_entropy", "router_z_loss", "load_balancing_loss")
        },
    }


def test_training_metrics_aggregates_equal_the_mean_and_the_worst_of_the_layers():
    statistics = _layers(0)
    expected = {}
    for name, per_layer in _readings_by_hand(statistics).items():
        worst, reduction = ("min", np.min) if name == "routing_entropy" else ("max", np.max)
        expected |= {f"moe/{name}/layer_{i:02d}": value for i, value in enumerate(per_layer)}
        expected |= {f"moe/{name}/mean": np.mean(per_layer), f"moe/{name}/{worst}": reduction(per_layer)}
    dropping = expected["moe/drop_fraction/layer_01"]
    assert 0 < dropping < expected["moe/drop_fraction/layer_00"]
    expected["moe/layers_over_drop_warning"] = 1
    metrics = {name: float(m) for name, m in training_metrics(statistics, Layers, dropping).items()}
    assert metrics == pytest.approx(expected, rel=RTOL)


def test_training_metrics_of_microbatches_fold_to_their_mean_and_the_bias_range_to_its_largest():
    parts = [_layers(seed) for seed in range(3)]
    folded = None
    for statistics in parts:
        metrics = training_metrics(statistics, Layers)
        if folded is None:
            folded = metrics
        else:
            folded = {name: levanter.metrics.fold(folded[name], metrics[name]) for name in metrics}
    readings = [_readings_by_hand(statistics) for statistics in parts]
    for name in readings[0]:
        over_microbatches = np.max if name == "bias_range" else np.mean
        per_layer = np.stack([np.asarray(reading[name], np.float64) for reading in readings])
        for i in range(Layers.size):
            expected = over_microbatches(per_layer[:, i])
            assert float(folded[f"moe/{name}/layer_{i:02d}"]) == pytest.approx(expected, rel=RTOL)
        assert float(folded[f"moe/{name}/mean"]) == pytest.approx(over_microbatches(per_layer.mean(1)), rel=RTOL)


def test_training_metrics_are_fp32_scalars_of_one_trace():
    metrics = jax.eval_shape(lambda: training_metrics(_layers(0), Layers))
    assert {(leaf.shape, leaf.dtype.name) for m in metrics.values() for leaf in [m._value]} == {((), "float32")}
