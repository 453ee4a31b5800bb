# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""Every type that this package registers with Levanter; importing this module is the registration."""

import abc

from levanter.models.llama import LlamaLMHeadModel

from levanter_marin.eval_prefix import EvalPrefixConfig
from levanter_marin.models.marin_moe import MarinMoeConfig, MarinMoeLMHeadModel
from levanter_marin.optim.config import HyperballConfig
from levanter_marin.optim.horizon import HorizonConfig
from levanter_marin.tracker import JsonLinesConfig

REGISTERED_TYPES = (MarinMoeConfig, HyperballConfig, HorizonConfig, JsonLinesConfig, EvalPrefixConfig)

# `levanter.main.sample_lm` asserts that a model is Llama's, though all it uses are `initial_cache` and `decode`.
# Equinox switches registration off for its classes; Python's own has what that needs.
abc.ABCMeta.register(LlamaLMHeadModel, MarinMoeLMHeadModel)
