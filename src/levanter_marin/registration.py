# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""Imports every module that registers a type with Levanter. Importing this module is the registration."""
