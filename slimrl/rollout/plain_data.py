"""Values of the user's as plain data, which any checkpoint can hold: numbers, text, lists, tuples and dicts.

Subclasses (numpy's float64, enumerations, defaultdict) and scalars of numpy and torch become what they stand for;
anything else is refused by its place. Pure; used where groups of samples become part of a checkpoint.
"""

from __future__ import annotations

from typing import Any


def plain_data(value: Any) -> Any:
    """An independent copy. Raises TypeError, which says where, for what is none and stands for none."""
    return _plain(value, "")


def _plain(value: Any, place: str) -> Any:
    if value is None or isinstance(value, bool):
        return value
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind.__str__(value) if kind is str else kind(value)
    if isinstance(value, dict):
        return {_key(key, place): _plain(one, f"{place}[{key!r}]") for key, one in value.items()}
    if isinstance(value, list | tuple):
        made = [_plain(one, f"{place}[{number}]") for number, one in enumerate(value)]
        return made if isinstance(value, list) else tuple(made)
    if getattr(value, "shape", None) == () and callable(getattr(value, "item", None)):
        return _plain(value.item(), place)
    kind = type(value)
    raise TypeError(f"{place or 'it'} is of type {kind.__module__}.{kind.__qualname__}")


def _key(key: Any, place: str) -> Any:
    return _plain(key, f"{place}, whose key {key!r}")
