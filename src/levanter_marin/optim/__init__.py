# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""The Hyperball optimizer: MuonH for matrices, AdamH for the LM head, Adam for the rest."""
