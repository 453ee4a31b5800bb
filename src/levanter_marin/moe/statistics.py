# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""What the router did in one step: loads, entropy, auxiliary terms that are watched and never added to the loss."""

from typing import NamedTuple

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from levanter.metrics import Metric, ReductionType

from levanter_marin import axes
from levanter_marin.config import MoeConfig
from levanter_marin.moe.dispatch.plan import DispatchCounts
from levanter_marin.moe.routing import Routing

LOG_EPS = 1e-6


class RoutingStatistics(eqx.Module):
    """Statistics of one layer, or of all with a leading `layer` axis; fp32, no gradient, padding excluded.

    Attributes:
        expert_load: assignments of each expert {router_experts}.
        routing_entropy: -sum p log(p + 1e-6) over the shares p of expert_load; log(num_experts) when balanced.
        router_z_loss: mean over tokens of logsumexp(logits)^2.
        load_balancing_loss: num_experts * sum(load per token * mean softmax(logits)); num_experts_per_token when
            balanced.
        bias: the router bias that this step used {router_experts}.
        dispatch: where the assignments ended.
    """

    expert_load: NamedArray
    routing_entropy: NamedArray
    router_z_loss: NamedArray
    load_balancing_loss: NamedArray
    bias: NamedArray
    dispatch: DispatchCounts

    @staticmethod
    def measure(
        routing: Routing, bias: NamedArray, token_valid: NamedArray | None, counts: DispatchCounts, config: MoeConfig
    ) -> "RoutingStatistics":
        Experts = config.RouterExperts
        routing = jax.lax.stop_gradient(routing)
        token_axes = hax.axis.without_axes(routing.logits.axes, Experts)
        if token_valid is None:
            token_valid = hax.ones(token_axes, dtype=jnp.bool_)
        valid = token_valid.broadcast_to(token_axes).astype(jnp.float32)

        def total(per_token: NamedArray) -> NamedArray:
            return hax.sum(per_token * valid, axis=token_axes)

        chosen = hax.nn.one_hot(routing.selected_experts, Experts, dtype=jnp.float32)
        load = hax.sum(chosen * valid, axis=(*token_axes, config.TopExperts))
        share = load / hax.maximum(hax.sum(load), 1.0)
        num_valid = hax.maximum(hax.sum(valid), 1.0)
        probability = total(hax.nn.softmax(routing.logits, axis=Experts)) / num_valid
        load_balancing = hax.sum(share * probability) * (Experts.size * config.num_experts_per_token)
        return RoutingStatistics(
            expert_load=load,
            routing_entropy=-hax.sum(share * hax.log(share + LOG_EPS)),
            router_z_loss=total(hax.square(hax.nn.logsumexp(routing.logits, axis=Experts))) / num_valid,
            load_balancing_loss=load_balancing,
            bias=jax.lax.stop_gradient(bias),
            dispatch=counts,
        )


class _Reading(NamedTuple):
    """A per-layer quantity {layer}, how microbatches combine, and how layers do."""

    value: NamedArray
    over_microbatches: ReductionType
    over_layers: tuple[str, ...]


def training_metrics(
    statistics: RoutingStatistics, Layers: Axis, drop_warning_fraction: float = 1.0
) -> dict[str, Metric]:
    """Metrics of a step under `moe/...`, each per layer and over layers; scalars, no host callback.

    Drop fractions are over valid assignments, the padding fraction is over all. `layers_over_drop_warning` counts
    layers whose drop fraction is above `drop_warning_fraction`. `dead_experts` counts experts without a token in a
    microbatch.
    """
    load = statistics.expert_load
    mean_load = hax.maximum(hax.mean(load, axis=axes.ROUTER_EXPERTS), LOG_EPS)
    counts = statistics.dispatch
    num_valid = counts.kept + counts.sender_dropped + counts.receiver_dropped
    valid = hax.maximum(num_valid, 1).astype(jnp.float32)
    sender, receiver = (
        count.astype(jnp.float32) / valid for count in (counts.sender_dropped, counts.receiver_dropped)
    )
    padding = counts.padding.astype(jnp.float32) / hax.maximum(num_valid + counts.padding, 1).astype(jnp.float32)
    bias_range = hax.max(statistics.bias, axis=axes.ROUTER_EXPERTS) - hax.min(
        statistics.bias, axis=axes.ROUTER_EXPERTS
    )
    mean, largest = ReductionType.MEAN, ReductionType.MAX
    readings = {
        "max_over_mean_load": _Reading(hax.max(load, axis=axes.ROUTER_EXPERTS) / mean_load, mean, ("mean", "max")),
        "routing_entropy": _Reading(statistics.routing_entropy, mean, ("mean", "min")),
        "dead_experts": _Reading(
            hax.sum((load == 0).astype(jnp.float32), axis=axes.ROUTER_EXPERTS), mean, ("mean", "max")
        ),
        "drop_fraction": _Reading(sender + receiver, mean, ("mean", "max")),
        "sender_drop_fraction": _Reading(sender, mean, ("mean", "max")),
        "receiver_drop_fraction": _Reading(receiver, mean, ("mean", "max")),
        "padding_fraction": _Reading(padding, mean, ("mean", "max")),
        "router_z_loss": _Reading(statistics.router_z_loss, mean, ("mean", "max")),
        "load_balancing_loss": _Reading(statistics.load_balancing_loss, mean, ("mean", "max")),
        "bias_range": _Reading(bias_range, largest, ("mean", "max")),
    }
    reduce = {"mean": hax.mean, "max": hax.max, "min": hax.min}
    metrics = {}
    for name, reading in readings.items():
        for over in reading.over_layers:
            metrics[f"moe/{name}/{over}"] = (reduce[over](reading.value, axis=Layers), reading.over_microbatches)
        for i in range(Layers.size):
            metrics[f"moe/{name}/layer_{i:02d}"] = (reading.value[Layers, i], reading.over_microbatches)
    over_warning = hax.sum((sender + receiver > drop_warning_fraction).astype(jnp.float32), axis=Layers)
    metrics["moe/layers_over_drop_warning"] = (over_warning, largest)
    return {
        name: Metric.from_value(value.scalar().astype(jnp.float32), reduction)
        for name, (value, reduction) in metrics.items()
    }
