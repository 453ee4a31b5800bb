# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""Lets Levanter discover this package's types without being told about it.

Draccus finds the types of a config registry by importing every module on the `__path__` of one package
(`levanter.models`, `levanter.optim`, `levanter.tracker`); it knows no entry points. The wheel therefore installs
`levanter_marin.pth`, which calls `install` at interpreter start. `install` adds a finder that, whenever one of those
packages is imported, appends a folder of this package to its `__path__`. That folder holds one module, which imports
`levanter_marin.registration`.

Every interpreter of the environment pays for this module, so it imports the standard library only.
Set the environment variable LEVANTER_MARIN_NO_AUTOLOAD to switch it off.
"""

import os
import sys

_OFF_SWITCH = "LEVANTER_MARIN_NO_AUTOLOAD"
_SHIM_FOLDER = os.path.join(os.path.dirname(__file__), "_shims")
_DISCOVERED_PACKAGES = ("levanter.models", "levanter.optim", "levanter.tracker")


class _PathExtender:
    """Meta-path finder: the spec that the other finders give, with our folder as a last search location."""

    def __init__(self):
        self._in_progress: set[str] = set()

    def find_spec(self, fullname, path=None, target=None):
        # Another plugin's finder may do the same and ask us in turn.
        if fullname not in _DISCOVERED_PACKAGES or fullname in self._in_progress:
            return None
        self._in_progress.add(fullname)
        try:
            for finder in sys.meta_path:
                find_spec = getattr(finder, "find_spec", None)
                spec = None if find_spec is None else find_spec(fullname, path, target)
                if spec is not None:
                    break
            else:
                return None
        finally:
            self._in_progress.discard(fullname)
        if spec.submodule_search_locations is not None:
            spec.submodule_search_locations.append(_SHIM_FOLDER)
        return spec


def install() -> None:
    """Puts the finder in front of `sys.meta_path`, once; packages imported earlier are extended in place."""
    if _OFF_SWITCH in os.environ or any(isinstance(finder, _PathExtender) for finder in sys.meta_path):
        return
    sys.meta_path.insert(0, _PathExtender())
    for name in _DISCOVERED_PACKAGES:
        if name in sys.modules:
            sys.modules[name].__path__.append(_SHIM_FOLDER)
