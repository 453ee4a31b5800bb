# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""No network, and a cache of its own for the code that transformers copies out of a checkpoint."""

import os
import tempfile

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_MODULES_CACHE"] = tempfile.mkdtemp(prefix="hf_modules_")

import torch

torch.set_num_threads(1)  # tiny models gain nothing from more, and spinning threads hinder each other
