# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""What the backward pass keeps of the forward pass, read off the traced program; nothing is compiled or computed."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jmp
from jax.extend.core import Jaxpr, JaxprEqn, Literal, jaxprs_in_params
from levanter.models.lm_model import LmExample
from levanter.models.loss import maybe_fused_next_token_loss

from levanter_marin import axes
from levanter_marin.config import DispatchImplementation
from levanter_marin.models.marin_moe import MarinMoeConfig


@dataclasses.dataclass(frozen=True)
class ActivationBytes:
    """Bytes of one device, without the routed experts' own rows, which `levanter_marin.analysis.exchange` counts.

    Attributes:
        saved: kept from the forward pass to the backward pass, all layers.
        recomputed: what the backward pass of one layer computes again because the gradient checkpoint did not keep it.
        layer: everything that one layer keeps for its backward pass without a checkpoint; the cotangents of that
            pass take at most as much.
        head: the largest piece of logits and its cotangent.
    """

    saved: int
    recomputed: int
    layer: int
    head: int

    @property
    def peak(self) -> int:
        """Either at the loss, or in the backward pass of a layer."""
        return self.saved + max(self.head, self.recomputed + self.layer)


def activation_bytes(
    model: MarinMoeConfig, vocab: hax.Axis, batch: LmExample, mp: jmp.Policy, z_loss_weight: float
) -> ActivationBytes:
    """Of a training step on `batch`, the rows of one device.

    The remat policy is the model's own. Kernels are those of the default backend: on CPU, attention in blocks, and
    experts that keep only their inputs.
    """
    dispatch = dataclasses.replace(model.moe.dispatch, implementation=DispatchImplementation.local)
    model = dataclasses.replace(model, moe=dataclasses.replace(model.moe, dispatch=dispatch))
    unchecked = dataclasses.replace(model, gradient_checkpointing=False)
    saved, everything = (_saved_by_loss(m, vocab, batch, mp, z_loss_weight) for m in (model, unchecked))
    layers = model.num_layers
    return ActivationBytes(
        saved=saved,
        recomputed=(everything - saved) // layers,
        layer=everything // layers,
        head=2 * _largest_logits(model, vocab, batch, mp, z_loss_weight),
    )


def saved_bytes(function: Callable[..., Any], weights: Any, *inputs: Any) -> int:
    """Bytes of what the gradient of `function(weights, *inputs)` by `weights` keeps from the forward pass.

    Only what depends on `inputs` counts: weights and their casts live whether or not there is a gradient. What is
    offloaded to the host does not count.
    """
    jaxpr, num_weights = _trace(lambda w, x: jax.vjp(lambda w: function(w, *x), w)[1], weights, inputs)
    depends = _depend(jaxpr, [i >= num_weights for i in range(len(jaxpr.invars))])
    kept = {v for v, needed in zip(jaxpr.outvars, depends, strict=True) if needed}
    return sum(_bytes(v.aval) for v in kept if v.aval.memory_space == jax.memory.Space.Device)


def _depend(jaxpr: Jaxpr, arguments: list[bool]) -> list[bool]:
    """Which results depend on one of the arguments that are marked."""
    depends = {v for v, marked in zip(jaxpr.invars, arguments, strict=True) if marked}

    def marks(variables) -> list[bool]:
        return [not isinstance(v, Literal) and v in depends for v in variables]

    for equation in jaxpr.eqns:
        results = _results_depend(equation, marks(equation.invars))
        depends.update(v for v, marked in zip(equation.outvars, results, strict=True) if marked)
    return marks(jaxpr.outvars)


def _results_depend(equation: JaxprEqn, arguments: list[bool]) -> list[bool]:
    inner = list(jaxprs_in_params(equation.params))
    if not any(arguments) or len(inner) != 1 or len(inner[0].invars) != len(arguments):
        return [any(arguments)] * len(equation.outvars)
    body = inner[0]
    if equation.primitive.name != "scan":
        results = _depend(body, arguments)
        return results if len(results) == len(equation.outvars) else [any(arguments)] * len(equation.outvars)
    # Constants and carries have the same shape inside; what is scanned over, and the results of all steps, do not.
    num_carries = sum(_same_shape(equation.outvars, body.outvars))
    end = sum(_same_shape(equation.invars, body.invars))
    carries = slice(end - num_carries, end)
    while True:
        results = _depend(body, arguments)
        after = [a or b for a, b in zip(arguments[carries], results[:num_carries], strict=True)]
        if after == arguments[carries]:
            return results
        arguments = [*arguments[: carries.start], *after, *arguments[end:]]


def _same_shape(outside: Sequence[Any], inside: Sequence[Any]) -> list[bool]:
    return [a.aval.shape == b.aval.shape for a, b in zip(outside, inside, strict=True)]


def _saved_by_loss(model, vocab, batch, mp, z_loss_weight) -> int:
    def loss(weights, batch):
        cast = mp.cast_to_compute(weights)
        # a key makes it the loss of training, with its metrics
        key = jax.random.PRNGKey(0)
        return cast.compute_next_token_loss(batch, key=key, logsumexp_weight=z_loss_weight)[0].scalar()

    return saved_bytes(loss, _weights(model, vocab), batch)


def _largest_logits(model, vocab, batch, mp, z_loss_weight) -> int:
    """Bytes of the largest intermediate result between final activations and loss, weights left out."""
    Pos = batch.tokens.resolve_axis(axes.POSITION)
    lm_head = _weights(model, vocab).get_lm_head()
    activations = eqx.filter_eval_shape(hax.zeros, (*batch.tokens.axes, model.Embed), dtype=mp.compute_dtype)

    def loss(lm_head, batch, activations):
        return maybe_fused_next_token_loss(
            Pos,
            model.Embed,
            vocab,
            activations,
            mp.cast_to_compute(lm_head),
            batch.tokens,
            loss_weight=batch.loss_weight,
            logsumexp_weight=z_loss_weight,
        ).scalar()

    jaxpr, _ = _trace(lambda w, x: jax.value_and_grad(loss)(w, *x), lm_head, (batch, activations))
    sizes = {eqn_out.aval.size: _bytes(eqn_out.aval) for eqn_out in _results(jaxpr)}
    return max(size for elements, size in sizes.items() if elements != lm_head.array.size)


def _results(jaxpr: Jaxpr) -> Iterator[Any]:
    for equation in jaxpr.eqns:
        yield from equation.outvars
        for inner in jaxprs_in_params(equation.params):
            yield from _results(inner)


def _weights(model: MarinMoeConfig, vocab: hax.Axis) -> Any:
    return eqx.filter_eval_shape(model.build, vocab, key=jax.random.PRNGKey(0))


def _trace(function: Callable[[Any, Any], Any], weights: Any, inputs: Any) -> tuple[Jaxpr, int]:
    """The jaxpr of `function(weights, inputs)`, and how many of its arguments are weights."""
    (weights, fixed_weights), (inputs, fixed_inputs) = (eqx.partition(t, _is_array) for t in (weights, inputs))

    def of_arrays(weights, inputs):
        return function(eqx.combine(weights, fixed_weights), eqx.combine(inputs, fixed_inputs))

    return jax.make_jaxpr(of_arrays)(weights, inputs).jaxpr, len(jax.tree.leaves(weights))


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, (jax.ShapeDtypeStruct, jax.Array))


def _bytes(aval: Any) -> int:
    return aval.size * aval.dtype.itemsize
