# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""A toy model that routes and holds router-bias state, and the rule of its next bias in NumPy."""

import functools

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import jmp
import numpy as np
from haliax import Axis, NamedArray
from haliax.nn.scan import BlockSeq, Stacked

from levanter_marin.config import QuantileBalancingConfig, QuantileEstimator
from levanter_marin.moe.quantile_balancing import quantile_beta
from levanter_marin.moe.router_bias import RouterBias, next_router_bias, record_bias

Batch, Pos, Embed, RouterExperts = Axis("batch", 64), Axis("position", 6), Axis("embed", 16), Axis("router_experts", 8)
Layers = Axis("layer", 2)
NUM_SELECTED = 2
BALANCING = QuantileBalancingConfig(QuantileEstimator.topk)
BF16 = jmp.get_policy("params=float32,compute=bfloat16,output=float32")
FP32 = jmp.get_policy("float32")


class Layer(eqx.Module):
    """The least that routes: experts are scalars, chosen by biased logits and mixed by unbiased ones."""

    router: NamedArray
    expert_scale: NamedArray
    state: RouterBias

    @staticmethod
    def init(key) -> "Layer":
        router_key, scale_key = jax.random.split(key)
        return Layer(
            hax.random.normal(router_key, (Embed, RouterExperts)) * 0.5,
            hax.random.normal(scale_key, RouterExperts),
            RouterBias.init(RouterExperts),
        )

    def __call__(self, x: NamedArray, token_valid: NamedArray) -> NamedArray:
        logits = hax.dot(x, self.router, axis=Embed).astype(jnp.float32)
        biased = logits + self.state.value()
        ordered = hax.sort(biased, axis=RouterExperts)
        alpha = ordered[RouterExperts.name, RouterExperts.size - NUM_SELECTED - 1]
        beta = quantile_beta(logits - alpha, token_valid, num_experts_per_token=NUM_SELECTED, config=BALANCING)
        x = record_bias(x, self.state, next_router_bias(beta), hax.sum(token_valid.astype(jnp.int32)))
        chosen = jax.lax.stop_gradient(biased > alpha)
        weight = hax.nn.sigmoid(logits) * chosen
        return x + x * hax.tanh(hax.dot(weight, self.expert_scale, axis=RouterExperts)).astype(x.dtype)


call_layer = eqx.filter_jit(Layer.__call__)


class Model(eqx.Module):
    embed_scale: NamedArray
    layers: Stacked | BlockSeq

    @staticmethod
    def init(key, container=Stacked, remat=False) -> "Model":
        layers = container.init(Layers, Layer, gradient_checkpointing=remat)(jax.random.split(key, Layers.size))
        return Model(hax.ones(Embed), layers)

    def __call__(self, x: NamedArray, token_valid: NamedArray) -> NamedArray:
        return self.layers.fold(x * self.embed_scale, token_valid)


def loss_fn(model: Model, x: NamedArray, token_valid: NamedArray, *, mp: jmp.Policy = FP32, key=None):
    model, x = mp.cast_to_compute((model, x))
    out = model(x, token_valid).astype(jnp.float32)
    return hax.mean(out * out, where=token_valid).scalar(), {}


def batch_of(step: int, padding: bool = True) -> tuple[NamedArray, NamedArray]:
    """Inputs and a padding mask whose valid share grows along the batch, so that microbatches weigh differently."""
    x = hax.random.normal(jax.random.PRNGKey(100 + step), (Batch, Pos, Embed))
    share = np.linspace(0.1, 1.0, Batch.size)[:, None]
    valid = np.random.default_rng(step).random((Batch.size, Pos.size)) < share
    return x, hax.named(jnp.asarray(valid if padding else np.ones_like(valid)), (Batch, Pos))


@functools.cache
def gradient_fn(mp: jmp.Policy = FP32):
    return eqx.filter_jit(eqx.filter_grad(functools.partial(loss_fn, mp=mp), has_aux=True))


def gradient(model: Model, *batch, mp: jmp.Policy = FP32) -> Model:
    return gradient_fn(mp)(model, *batch)[0]


def biases(model: Model) -> np.ndarray:
    """[layer, expert], from a scanned or an unrolled model, or a gradient of one."""
    if isinstance(model.layers, Stacked):
        return np.asarray(model.layers.stacked.state.value().array)
    return np.stack([np.asarray(layer.state.value().array) for layer in model.layers.blocks])


def next_biases_by_hand(model: Model, x: NamedArray, token_valid: NamedArray) -> np.ndarray:
    """[layer, expert]: the rule in NumPy on each layer's own input, without any gradient."""
    rows = []
    x = x * model.embed_scale
    for layer in model.layers.unstacked():
        logits = np.asarray(hax.dot(x, layer.router, axis=Embed).array)[np.asarray(token_valid.array)]
        biased = logits + np.asarray(layer.state.value().array)
        margins = np.sort(logits - np.sort(biased, axis=1)[:, [-NUM_SELECTED - 1]], axis=0)[::-1]
        beta = margins[max(len(margins) * NUM_SELECTED // RouterExperts.size, 1) - 1]
        rows.append(beta.mean() - beta)
        x = call_layer(layer, x, token_valid)
    return np.stack(rows)


def state_of(bias, weight) -> RouterBias:
    return RouterBias.from_value(hax.named(jnp.asarray(bias), RouterExperts), hax.named(jnp.float32(weight), ()))


def assert_same_state(actual: RouterBias, expected: RouterBias):
    jax.tree.map(np.testing.assert_array_equal, actual, expected)
