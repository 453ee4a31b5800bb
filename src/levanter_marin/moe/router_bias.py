# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""The router bias as state that travels with the gradient.

The bias of the next step is known only after the forward pass, and the trainer offers no place for a model to
return state. `RouterBias` is therefore "differentiated": `record_bias` is the identity on an activation, and
its backward pass returns the new state where the cotangent of the old one belongs. Haliax's
`CustomGradientAccumulation` marks it, so the trainer assigns that cotangent to the model, keeps it out of the
optimizer, of clipping and of weight decay, and combines microbatches with `RouterBias.accumulate`.
"""

import dataclasses
from typing import Self

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from haliax.quantization import CustomGradientAccumulation

from levanter_marin.axes import ROUTER_EXPERTS

# Gradient and parameter norms in a trainer's logs include this state. Powers of two keep it exact and make it
# vanish there: a bias of order one per expert, or a token count, would be all that such a norm shows.
_BIAS_SCALE = 2.0**-32
_WEIGHT_SCALE = 2.0**-64

_UPPER_HALF = 0xFFFF0000


class Bf16Terms(eqx.Module):
    """An fp32 array as three terms that bf16 represents, so that casting the model to bf16 loses nothing.

    The 24 bits of the significand are cut into 8 + 8 + 8, and the sum of the terms, largest first, is the
    array bit for bit, for |x| in [2^-102, 2^128) and for 0. Terms have the axes of the array.
    """

    high: NamedArray
    middle: NamedArray
    low: NamedArray

    @staticmethod
    def from_value(x: NamedArray) -> "Bf16Terms":
        """Splits `x`, cast to fp32; the terms are fp32."""
        x = x.astype(jnp.float32)
        high = _clear_lower_half(x)
        middle = _clear_lower_half(x - high)
        return Bf16Terms(high, middle, (x - high) - middle)

    def value(self) -> NamedArray:
        """The sum in fp32, whether the terms are fp32 or bf16."""
        terms = [term.astype(jnp.float32) for term in (self.high, self.middle, self.low)]
        return (terms[0] + terms[1]) + terms[2]


def _clear_lower_half(x: NamedArray) -> NamedArray:
    # Bit arithmetic, since a compiler may drop a round trip of casts.
    bits = jax.lax.bitcast_convert_type(x.array, jnp.uint32) & jnp.uint32(_UPPER_HALF)
    return hax.named(jax.lax.bitcast_convert_type(bits, jnp.float32), x.axes)


class RouterBias(CustomGradientAccumulation):
    """Router bias of one layer, replaced after every training step; with a leading layer axis, of several.

    A model holds it as a field, reads `value()` when it selects experts, and passes an activation on the path to
    the loss through `record_bias`. Between steps it holds the bias of the next step, so evaluation and export use
    what training would use next.

    Casting to bf16 is exact. fp16 has too few exponent bits for it and is refused by `value()`. A linear average of
    states, as model averaging takes, holds the average of their biases, but bf16 rounds that to 8 bits.
    """

    bias: Bf16Terms
    weight: Bf16Terms
    """Valid tokens the bias was estimated from: the weight of a microbatch among microbatches."""

    @staticmethod
    def init(RouterExperts: Axis) -> "RouterBias":
        """Zero bias from zero tokens."""
        return RouterBias.from_value(hax.zeros(RouterExperts, dtype=jnp.float32), hax.named(jnp.float32(0), ()))

    @staticmethod
    def from_value(bias: NamedArray, weight: NamedArray) -> "RouterBias":
        """State holding `bias` {[layer], router_experts}, estimated from `weight` {[layer]} valid tokens.

        Both are taken as fp32. A bias that was not estimated here, as from a checkpoint, has weight 0.
        """
        bias, weight = bias.astype(jnp.float32), weight.astype(jnp.float32)
        return RouterBias(Bf16Terms.from_value(bias * _BIAS_SCALE), Bf16Terms.from_value(weight * _WEIGHT_SCALE))

    def value(self) -> NamedArray:
        """The bias {[layer], router_experts} in logits, fp32. Its gradient is zero."""
        if self.bias.high.dtype == jnp.float16:
            raise ValueError(
                "RouterBias is exact in float32 and bfloat16 but was cast to float16; set trainer.mp to compute in "
                "bfloat16 or float32"
            )
        return jax.lax.stop_gradient(self.bias.value() / _BIAS_SCALE)

    def num_valid(self) -> NamedArray:
        """The valid tokens {[layer]} that the bias was estimated from, fp32. Its gradient is zero."""
        return jax.lax.stop_gradient(self.weight.value() / _WEIGHT_SCALE)

    def accumulate(self, other: Self) -> Self:
        """Combines two microbatches: the mean of their biases weighted by valid tokens, and the sum of the tokens.

        Associative up to rounding. A side without tokens changes nothing, bit for bit, whatever its bias; two of
        them give zero. Terms keep the dtype of `self`.
        """
        mine, yours, mine_weight, yours_weight = self.value(), other.value(), self.num_valid(), other.num_valid()
        total = mine_weight + yours_weight
        share = yours_weight / hax.maximum(total, 1.0)
        mean = mine + (yours - mine) * share
        with_yours = hax.where(mine_weight > 0, mean, yours)
        bias = hax.where(yours_weight > 0, with_yours, hax.where(mine_weight > 0, mine, 0.0))
        combined = _cast_like(RouterBias.from_value(bias.rearrange(mine.axes), total), self)
        return dataclasses.replace(self, bias=combined.bias, weight=combined.weight)


def next_router_bias(beta: NamedArray) -> NamedArray:
    """The bias that thresholds {..., router_experts} ask for: -beta, centred over experts, in the dtype of beta."""
    return hax.mean(beta, axis=ROUTER_EXPERTS) - beta


def record_bias(x: NamedArray, state: RouterBias, next_bias: NamedArray, valid_count: NamedArray) -> NamedArray:
    """Returns `x` and makes (`next_bias`, `valid_count`) the cotangent of `state`.

    `x` must be on the path from the parameters to the loss, else no backward pass reaches it and the state stays
    zero. The cotangent of `x` passes unchanged, and none reaches `next_bias`. Without differentiation `next_bias`
    is not needed, and the compiler drops its computation.

    Args:
        x: any activation.
        state: this layer's state, in fp32 or bf16.
        next_bias: {router_experts}, the bias of the next step.
        valid_count: {}, the valid tokens `next_bias` was estimated from.
    """
    new_state = _cast_like(RouterBias.from_value(next_bias, valid_count), state)
    return _record(x, state, jax.lax.stop_gradient(new_state))


@jax.custom_vjp
def _record(x: NamedArray, state: RouterBias, new_state: RouterBias) -> NamedArray:
    return x


def _record_forward(x: NamedArray, state: RouterBias, new_state: RouterBias):
    return x, new_state


def _record_backward(new_state: RouterBias, cotangent: NamedArray):
    return cotangent, new_state, None


_record.defvjp(_record_forward, _record_backward)


def _cast_like(state: RouterBias, like: RouterBias) -> RouterBias:
    return jax.tree.map(lambda new, old: new.astype(old.dtype), state, like)
