# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""Counts and reports computed from a config or a run."""
