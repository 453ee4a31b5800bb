# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""Eight virtual CPU devices for every test; set before JAX is imported, since it reads them once."""

import os

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
os.environ.setdefault("JAX_PLATFORMS", "cpu")
