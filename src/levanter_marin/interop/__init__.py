# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""Hugging Face checkpoints of the model family, in and out."""
