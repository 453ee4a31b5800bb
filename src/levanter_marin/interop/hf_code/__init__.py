# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""Python files that every export carries, for `trust_remote_code=True`; they use nothing of this package."""
