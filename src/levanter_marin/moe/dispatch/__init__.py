# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""Ways to bring tokens to their experts and back."""
