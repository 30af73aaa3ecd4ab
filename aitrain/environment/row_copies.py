"""Copies dataset rows for calls of the environment, so that a call cannot change the rows of others."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping

_IMMUTABLE = frozenset({str, int, float, bool, complex, bytes, type(None), type(Ellipsis), range, slice})

Memo = dict[int, object]
"""Copies by the id of their original, so that shared and cyclic references are kept."""


def copy_arguments(arguments: Mapping[str, object], shared: Collection[str] = ()) -> dict[str, object]:
    """Deep copies of the values, except those named in `shared`.

    Callables (functions, bound methods, models) and objects that cannot be copied (locks, clients, open files) are
    shared. Containers of immutable values are copied shallowly, which is fast for long lists.
    """
    memo: Memo = {}
    return {
        name: value if name in shared else _deep_copy(value, memo, _object_copy) for name, value in arguments.items()
    }


def copy_rows(rows: list[object]) -> list[object]:
    """Rows with copies of their lists, dicts and sets; other objects are shared, as they may be large."""
    memo: Memo = {}
    return [_deep_copy(row, memo, _shared) for row in rows]


def _deep_copy(value: object, memo: Memo, copy_object: Callable[[object, Memo], object]) -> object:
    try:
        return _copied(value, memo, copy_object)
    except RecursionError:  # nested deeper than the recursion limit
        return value


def _copied(value: object, memo: Memo, copy_object: Callable[[object, Memo], object]) -> object:
    kind = type(value)
    if kind in _IMMUTABLE:
        return value
    if id(value) in memo:
        return memo[id(value)]
    if kind is list and isinstance(value, list):
        items = memo[id(value)] = value.copy()
        if not _are_immutable(value):
            items[:] = [_copied(item, memo, copy_object) for item in value]
        return items
    if kind is dict and isinstance(value, dict):
        fields = memo[id(value)] = value.copy()
        if not _are_immutable(value.values()):
            fields.update((key, _copied(item, memo, copy_object)) for key, item in value.items())
        return fields
    if kind is tuple and isinstance(value, tuple):
        return value if _are_immutable(value) else tuple(_copied(item, memo, copy_object) for item in value)
    if kind in (set, frozenset) and isinstance(value, (set, frozenset)):
        return memo.setdefault(id(value), value.copy())  # members are hashable, so they are not changed in place
    return value if callable(value) else copy_object(value, memo)


def _are_immutable(values: Collection[object]) -> bool:
    return set(map(type, values)) <= _IMMUTABLE


def _object_copy(value: object, memo: Memo) -> object:
    attempt = dict(memo)  # a failed copy must not leave entries in the memo
    try:
        copied = copy.deepcopy(value, attempt)
    except Exception:
        copied = value
    memo[id(value)] = copied
    return copied


def _shared(value: object, _: Memo) -> object:
    return value
