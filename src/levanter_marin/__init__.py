# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""The Marin mixture-of-experts recipe as a plugin for Levanter.

Import the defining module: `levanter_marin.models.marin_moe`, `levanter_marin.moe.latent_moe`, and so on.
"""

__version__ = "0.1.0"
