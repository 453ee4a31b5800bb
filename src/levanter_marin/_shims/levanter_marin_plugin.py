# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""Found by draccus as a module of the extended Levanter package; see `levanter_marin._autoload`."""

import warnings

try:
    import levanter_marin.registration  # noqa: F401
except Exception as error:
    # Draccus imports this module for every config of the environment, so a fault here must not break the others.
    warnings.warn(
        f"levanter-marin types are not available: {type(error).__name__}: {error} "
        "(`python -c 'import levanter_marin.registration'` shows the traceback)",
        stacklevel=1,
    )
