# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""The levanter-marin command, one file a subcommand."""
