# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0
