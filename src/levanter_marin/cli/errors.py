# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""The exception that a command raises for a mistake of its user."""

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """Its text is the one line that the user sees: what is wrong and what to set instead. Exit code 2."""

    def __init__(self, message: str):
        super().__init__(" ".join(message.split()))


def nearest_first(word: str, known: Iterable[str]) -> list[str]:
    """`known` by falling likeness to `word`."""
    return sorted(known, key=lambda other: (-difflib.SequenceMatcher(None, word, other).ratio(), other))


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A clause that names the nearest of `known`, or the empty string when none is near."""
    matches = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"; did you mean `{matches[0]}`?" if matches else ""
