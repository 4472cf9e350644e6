"""Converts dataclasses to JSON values and back, as their annotations say."""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from typing import Any, get_args, get_origin, get_type_hints

from autopar.layout import Layout

_FEW = 3  # missing fields that an error message names
_NUMBERS: Mapping[type, Any] = {int: int, float: (int, float)}  # JSON may hold 1 for the float 1.0


def json_form(value: Any) -> Any:
    """The value in types that `json.dumps` takes; a Layout becomes its text."""
    if isinstance(value, Layout):
        return str(value)
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: json_form(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        return {key: json_form(item) for key, item in value.items()}
    return [json_form(item) for item in value] if isinstance(value, (tuple, list)) else value


def revived(kind: Any, value: Any, place: str = "") -> Any:
    """Convert a JSON value to the type `kind`, an annotation; unknown fields of dataclasses are ignored.

    Raises ValueError for a value of another type and for missing fields, LayoutError for an invalid layout.

    >>> revived(tuple[int, ...], [1, 2]), str(revived(Layout, "S0,R"))
    ((1, 2), 'S0,R')
    """
    origin, arguments = _parts(kind)
    if kind is Any:
        return value
    if origin is types.UnionType:
        [inner] = (argument for argument in arguments if argument is not types.NoneType)
        return None if value is None else revived(inner, value, place)
    if kind is Layout:
        return Layout.parse(_checked(str, value, place))
    if isinstance(kind, type) and is_dataclass(kind):
        hints, value = _hints(kind), _checked(dict, value, place)
        needed = [f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING]
        if missing := [name for name in needed if name not in value]:
            further = f" and {len(missing) - _FEW} more" if len(missing) > _FEW else ""
            raise ValueError(f"{f'one of {place}' if place else 'it'} lacks {', '.join(missing[:_FEW])}{further}")
        return kind(**{name: revived(hint, value[name], name) for name, hint in hints.items() if name in value})
    if origin is tuple:
        return tuple(revived(arguments[0], item, place) for item in _checked(list, value, place))
    if origin is Mapping:
        return {key: revived(arguments[1], item, place) for key, item in _checked(dict, value, place).items()}
    return _checked(kind, value, place)


def _checked(kind: type, value: Any, place: str) -> Any:
    if not isinstance(value, _NUMBERS.get(kind, kind)) or (kind in _NUMBERS and isinstance(value, bool)):
        raise ValueError(f"{place} holds {value!r:.60}, which is no {kind.__name__}")
    return value


@cache
def _parts(kind: Any) -> tuple[Any, tuple[Any, ...]]:
    return get_origin(kind), get_args(kind)


@cache
def _hints(kind: Any) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {f.name: hints[f.name] for f in fields(kind)}
