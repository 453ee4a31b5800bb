# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""Layers of the model, each movable into Levanter on its own."""
