# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""Initialisation of weights: a normal truncated at three standard deviations."""

import haliax as hax
import haliax.nn as hnn
from haliax import AxisSpec, NamedArray
from haliax.axis import concat_axes
from jaxtyping import PRNGKeyArray

TRUNCATION = 3.0
"""Standard deviations at which initial weights are cut."""


def truncated_normal(axes: AxisSpec, std: float, *, key: PRNGKeyArray) -> NamedArray:
    """fp32 samples of std * N(0, 1) truncated to +-3 std; their own standard deviation is 0.98658 std."""
    return hax.random.truncated_normal(key, axes, -TRUNCATION, TRUNCATION) * std


def truncated_normal_linear(In: AxisSpec, Out: AxisSpec, std: float, *, key: PRNGKeyArray) -> hnn.Linear:
    """A `haliax.nn.Linear` without bias whose weight has axes (Out, In) and standard deviation `std`."""
    return hnn.Linear(truncated_normal(concat_axes(Out, In), std, key=key), None, In, Out)
