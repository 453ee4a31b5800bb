# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""Every type that this package registers with Levanter; importing this module is the registration."""

from levanter_marin.eval_prefix import EvalPrefixConfig
from levanter_marin.models.marin_moe import MarinMoeConfig
from levanter_marin.optim.config import HyperballConfig
from levanter_marin.optim.horizon import HorizonConfig
from levanter_marin.tracker import JsonLinesConfig

REGISTERED_TYPES = (MarinMoeConfig, HyperballConfig, HorizonConfig, JsonLinesConfig, EvalPrefixConfig)
