# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""Explains why draccus refused a config: which type, field or enum value does not exist, and which one is near.

Only called after a refusal, so draccus alone decides what is accepted.
"""

import dataclasses
import typing
from collections.abc import Iterator, Mapping
from typing import Any

from draccus.choice_types import CHOICE_TYPE_KEY
from draccus.parsers.decoding import has_custom_decoder
from draccus.utils import canonicalize_union, is_choice_type, is_dict, is_enum, is_list, is_tuple, is_union

from levanter_marin.cli.errors import did_you_mean, nearest_first

Path = tuple[str, ...]


def explain(annotation: Any, raw: Any, path: Path = ()) -> str | None:
    """One line about the first name in `raw` that `annotation` does not know.

    Args:
        annotation: type that `raw` was to be decoded into.
        raw: plain YAML value.
        path: keys that lead to `raw`.

    Returns:
        The line, or None when every name is known and the fault lies elsewhere.
    """
    annotation = canonicalize_union(annotation)
    if is_union(annotation):
        lines = [explain(member, raw, path) for member in typing.get_args(annotation) if _fits(member, raw)]
        return lines[0] if lines and all(lines) else None
    if not _fits(annotation, raw):
        return f"`{_dotted(path)}`: needs a mapping, not `{raw}`" if _needs_mapping(annotation) else None
    if is_enum(annotation):
        return _explain_enum(annotation, raw, path)
    if is_choice_type(annotation):
        name = raw.get(CHOICE_TYPE_KEY, annotation.default_choice_name())
        try:
            chosen = annotation.get_choice_class(name)
        except KeyError:
            known = ", ".join(nearest_first(str(name), annotation.get_known_choices()))
            if name is None:
                return f"`{_dotted(path)}`: needs a `{CHOICE_TYPE_KEY}`; known: {known}"
            return f"`{_dotted((*path, CHOICE_TYPE_KEY))}`: no type `{name}`; known, nearest first: {known}"
        return _explain_fields(chosen, {key: raw[key] for key in raw if key != CHOICE_TYPE_KEY}, path)
    if dataclasses.is_dataclass(annotation):
        return _explain_fields(annotation, raw, path)
    return next(
        filter(None, (explain(item, value, where) for item, value, where in _items(annotation, raw, path))), None
    )


def _fits(annotation: Any, raw: Any) -> bool:
    """Whether `raw` has the shape, mapping or sequence or atom, of something this module can look into."""
    if is_enum(annotation):
        return not isinstance(raw, Mapping | list)
    if has_custom_decoder(annotation):
        return False
    origin = typing.get_origin(annotation) or annotation
    if _needs_mapping(annotation) or is_dict(origin):
        return isinstance(raw, Mapping)
    return (is_list(origin) or is_tuple(origin)) and isinstance(raw, list)


def _needs_mapping(annotation: Any) -> bool:
    known = is_choice_type(annotation) or dataclasses.is_dataclass(annotation)
    return known and not has_custom_decoder(annotation)


def _items(annotation: Any, raw: Any, path: Path) -> Iterator[tuple[Any, Any, Path]]:
    arguments = [argument for argument in typing.get_args(annotation) if argument is not Ellipsis]
    if not arguments:
        return
    pairs = raw.items() if isinstance(raw, Mapping) else enumerate(raw)
    for key, value in pairs:
        yield arguments[-1], value, (*path, str(key))


def _explain_fields(cls: type, raw: Mapping[Any, Any], path: Path) -> str | None:
    names = [field.name for field in dataclasses.fields(cls)]
    for key in raw:
        if key not in names:
            hint = did_you_mean(str(key), names) or f"; its fields: {', '.join(nearest_first(str(key), names))}"
            return f"`{_dotted((*path, str(key)))}`: {cls.__name__} has no field `{key}`{hint}"
    hints = typing.get_type_hints(cls)
    return next(filter(None, (explain(hints[key], value, (*path, key)) for key, value in raw.items())), None)


def _explain_enum(cls: Any, raw: Any, path: Path) -> str | None:
    if raw in [member.value for member in cls] or raw in cls.__members__:
        return None
    known = ", ".join(nearest_first(str(raw), cls.__members__))
    quotes = "; YAML reads on, off, yes and no as booleans: put the word in quotes" if isinstance(raw, bool) else ""
    return f"`{_dotted(path)}`: no value `{raw}`; known, nearest first: {known}{quotes}"


def _dotted(path: Path) -> str:
    return ".".join(path)
