# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""Context stages: one run whose sequence length grows on the way."""
