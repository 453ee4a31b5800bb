# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""Eight virtual CPU devices and no network for every test; compiled programs freed after every file.

Both are set before JAX and huggingface_hub are imported, since each reads its variables once; processes that a test
starts inherit them.
"""

import gc
import os

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + (
    " --xla_force_host_platform_device_count=8"
    # tests compile far longer than they run; these two halve the compilation
    " --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
)
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["HF_HUB_OFFLINE"] = "1"

import jax
import pytest


@pytest.fixture(autouse=True, scope="module")
def free_compiled_programs():
    """XLA:CPU maps memory for each program, and a process that reaches vm.max_map_count (65,530) maps is aborted."""
    yield
    jax.clear_caches()
    gc.collect()
