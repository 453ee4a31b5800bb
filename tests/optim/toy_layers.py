# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""Linear layers around given arrays, for tests of what an optimizer does to them."""

import haliax as hax
import haliax.nn as hnn
import jax.numpy as jnp
import numpy as np
from haliax import Axis


def matrix(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def linear(array, *, dtype=jnp.float32) -> hnn.Linear:
    """A linear layer with weight {[layer], out, in}."""
    *stacked, Out, In = _axes(array, "layer", "out", "in")
    return hnn.Linear(hax.named(jnp.asarray(array, dtype), (*stacked, Out, In)), None, In, Out)


def bank(array, *, dtype=jnp.float32) -> hnn.MoELinear:
    """An expert bank with weight {[layer], experts, in, out}."""
    *stacked, Experts, In, Out = _axes(array, "layer", "experts", "in", "out")
    weight = hax.named(jnp.asarray(array, dtype), (*stacked, Experts, In, Out))
    return hnn.MoELinear(weight, None, Experts, In, Out, use_gmm=False)


def layer_of(array, **kwargs) -> hnn.Linear | hnn.MoELinear:
    """A bank from four dimensions, a linear layer from fewer."""
    return bank(array, **kwargs) if np.ndim(array) == 4 else linear(array, **kwargs)


def array_of(layer) -> np.ndarray:
    return np.asarray(layer.weight.array, np.float32)


def _axes(array, *names: str) -> tuple[Axis, ...]:
    shape = np.shape(array)
    return tuple(Axis(name, size) for name, size in zip(names[-len(shape) :], shape, strict=True))
