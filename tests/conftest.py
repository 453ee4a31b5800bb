# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""Eight virtual CPU devices and no network for every test.

Both are set before JAX and huggingface_hub are imported, since each reads its variables once; processes that a test
starts inherit them.
"""

import atexit
import os
import shutil
import tempfile

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + (
    " --xla_force_host_platform_device_count=8"
    # tests compile far longer than they run; these two halve the compilation
    " --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
)
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["HF_HUB_OFFLINE"] = "1"

# One cache of compiled programs for the session and its worker processes: several Trainers compile the same step.
if "PYTEST_XDIST_WORKER" not in os.environ:
    _COMPILATION_CACHE = tempfile.mkdtemp(prefix="levanter-marin-tests-")
    atexit.register(shutil.rmtree, _COMPILATION_CACHE, ignore_errors=True)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = _COMPILATION_CACHE
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "1"
