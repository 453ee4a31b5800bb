# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""Router, quantile balancing, experts and the latent MoE layer."""
