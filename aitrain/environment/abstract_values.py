"""Values as the reader of an environment's source knows them, and what it asks of objects that it meets."""

from __future__ import annotations

import array
import ast
import inspect
import io
import random
import re
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import FunctionType, MethodType, ModuleType
from typing import Any, Literal

from aitrain.environment.loader import is_users_file
from aitrain.environment.source_code import FunctionNode
from aitrain.environment.state_watch import is_users_object

Use = Literal["all", "item", "none"]
"""What an expression is evaluated for: its whole value, one item of it by a key, or only to be changed in place."""

_PLAIN = (str, bytes, int, float, complex, bool, type(None), frozenset, range, re.Pattern, ModuleType, FunctionType)
_FUNCTIONS = (FunctionType, MethodType, staticmethod, classmethod)
APPENDS = {"append", "add", "extend", "update", "appendleft", "extendleft", "insert", "write", "writelines", "put"}

MAX_SAMPLED = 100
"""Items of a container that are looked at."""

UNKNOWN = object()
EMPTY: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Value:
    """What is known of the value of an expression."""

    sources: frozenset[str] = EMPTY
    """Parameters, local variables and shared state (`=self.x`) that it is computed from."""
    exact: frozenset[str] = EMPTY
    """Of those, the ones whose values it tells: two equal ones have equal ones of those."""
    roots: frozenset[str] = EMPTY
    """Shared state that it is, or is a part of: changing it in place changes that."""
    elements: frozenset[str] = EMPTY
    """The same for its elements, where it is a copy: `list(self.rows)`."""
    is_self: bool = False
    is_class: bool = False
    is_namespace: bool = False
    """`self.__dict__`."""
    after: type | None = None
    """`super()`: methods are looked up behind this class."""
    known: Any = UNKNOWN
    """The object itself, where it is known."""
    receiver: Value | None = None
    """What a method is called on."""
    made: type | None = None
    """The class, where it is a new object of one."""

    @property
    def parts(self) -> frozenset[str]:
        """What its elements belong to."""
        return self.roots | self.elements


def merge_values(values: Iterable[Value]) -> Value:
    """What is known of a value that is made of several, or is one of them."""
    values = list(values)
    return Value(
        frozenset().union(*(value.sources for value in values)),
        roots=frozenset().union(*(value.roots for value in values)),
        elements=frozenset().union(*(value.elements for value in values)),
        is_self=any(value.is_self for value in values),
    )


def merge_scopes(outcomes: list[dict[str, Value]]) -> dict[str, Value]:
    """Local variables after code that has gone one of several ways."""
    names = dict.fromkeys(name for outcome in outcomes for name in outcome)
    values = {name: [outcome[name] for outcome in outcomes if name in outcome] for name in names}
    return {
        name: each[0] if all(one == each[0] for one in each) else merge_values(each) for name, each in values.items()
    }


def merge_exact(values: Iterable[Value]) -> frozenset[str]:
    """What a value tells that is put together of others as they are."""
    return frozenset().union(*(value.exact for value in values))


def use_of_receiver(method: str) -> Use:
    """What the object is read for that a method is called on."""
    return "none" if method in APPENDS else "item" if method in ("get", "setdefault") else "all"


def item_of(value: Value) -> Value:
    """An item of a value."""
    known = sample_of(value.known) if value.roots else UNKNOWN
    return Value(value.sources, roots=value.parts, elements=value.elements, known=known)


def sample_of(known: Any) -> Any:
    """An item of a container, where all of its items are objects of one class of the user's."""
    items = list(known.values()) if isinstance(known, dict) else known if isinstance(known, (list, tuple)) else ()
    kinds = {type(item) for item in items[:MAX_SAMPLED]}
    return items[0] if len(kinds) == 1 and is_users_object(items[0]) else UNKNOWN


def expressions(node: ast.AST) -> Iterator[ast.expr]:
    """The expressions right below a node."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.expr):
            yield child
        else:
            yield from expressions(child)


def names_self(node: ast.AST, names: Mapping[str, Value]) -> bool:
    """Whether code names the environment."""
    own = {name for name, value in names.items() if value.is_self}
    return any(isinstance(each, ast.Name) and each.id in own for each in ast.walk(node))


def is_super(node: ast.Call) -> bool:
    """Whether this is `super()`."""
    return isinstance(node.func, ast.Name) and node.func.id == "super"


def is_plain(value: Any) -> bool:
    """An object that cannot be changed in place."""
    return isinstance(value, _PLAIN) or (isinstance(value, tuple) and all(map(is_plain, value)))


def is_method(found: Any) -> bool:
    """Whether an attribute of a class is called, and not a value."""
    return isinstance(found, _FUNCTIONS) or (callable(found) and hasattr(found, "__wrapped__"))


def methods_in(value: Any, environment: Any) -> list[MethodType]:
    """Methods of the environment that it keeps in a list or dict."""
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    few = items if len(items) <= 100 else ()
    return [item for item in few if isinstance(item, MethodType) and item.__self__ is environment]


def is_instance(known: Any) -> bool:
    """Whether this is an object that methods are bound to."""
    return known is not UNKNOWN and not isinstance(known, (ModuleType, type))


def is_consumable(held: Any) -> bool:
    """An iterator or a random number generator: each call gets the next one."""
    is_iterator = hasattr(type(held), "__next__") and not hasattr(type(held), "write")
    return is_iterator or isinstance(held, random.Random) or type(held).__module__.startswith("numpy.random")


def is_library_object(held: Any) -> bool:
    """One whose methods are taken to bear several threads: clients, tokenizers, loggers, models."""
    module = sys.modules.get(type(held).__module__)
    return not is_users_file(getattr(module, "__file__", None) or "<frozen")


def is_data_object(held: Any) -> bool:
    """An array, a tensor or a buffer in memory: objects of libraries that hold data, and that methods change."""
    kind = type(held)
    is_array = kind.__module__ == "numpy" and hasattr(held, "tobytes") and hasattr(held, "flags")
    is_tensor = kind.__module__ == "torch" and kind.__name__ == "Tensor"
    return is_array or is_tensor or isinstance(held, (io.StringIO, io.BytesIO, array.array))


def creates_items(held: Any) -> bool:
    """Whether a library's object makes its items when they are asked for, as datasets do."""
    is_store = isinstance(held, (list, tuple, dict, set, deque)) or is_data_object(held) or is_users_object(held)
    is_table = type(held).__module__.partition(".")[0] == "pandas"  # its items may be views
    return held is not UNKNOWN and not is_store and not is_table and is_library_object(held)


def is_lock(node: ast.expr | None, value: Value) -> bool:
    """What only one call can hold; a semaphore that several can hold is none."""
    held = value.known
    if held is UNKNOWN:
        return node is not None and bool(re.search(r"(?<![a-z])(r?lock|mutex)(?![a-z])", ast.unparse(node), re.I))
    has_methods = all(callable(getattr(held, name, None)) for name in ("acquire", "release"))
    is_semaphore = "Semaphore" in type(held).__name__
    return has_methods and (not is_semaphore or getattr(held, "_value", 0) == 1)


def imported_object(node: ast.Import | ast.ImportFrom, alias: ast.alias) -> Any:
    """What an import statement inside of a function brings."""
    if isinstance(node, ast.Import):
        return sys.modules.get(alias.name if alias.asname else alias.name.partition(".")[0], UNKNOWN)
    module = sys.modules.get(node.module or "")
    return getattr(module, alias.name, UNKNOWN) if node.level == 0 else UNKNOWN


def static_attribute(known: Any, name: str) -> Any:
    """An attribute, without running a property or a `__getattr__` of the user's."""
    if known is UNKNOWN:
        return UNKNOWN
    if isinstance(known, ModuleType):
        return vars(known).get(name, UNKNOWN)
    found = inspect.getattr_static(known, name, UNKNOWN)
    return UNKNOWN if isinstance(found, property) else found


def find_in_mro(kind: type, name: str, after: type | None) -> tuple[type | None, Any]:
    """The class of the MRO that has an attribute, and the attribute; behind a class, for `super()`."""
    order = kind.__mro__
    for owner in order[order.index(after) + 1 :] if after in order else order:
        if name in vars(owner):
            return owner, vars(owner)[name]
    return None, UNKNOWN


def owner_of(kind: type, function: FunctionType) -> type | None:
    """The class that a method was written in."""
    return next((owner for owner in kind.__mro__ if function in vars(owner).values()), None)


def unwrap_function(found: Any) -> tuple[FunctionType | None, bool, bool]:
    """The function that does the work, whether it is static, and whether it is the class's.

    The user's own decorators are read as they are; those of libraries (retries, caches, torch.no_grad) are passed by.
    """
    is_static, of_class = isinstance(found, staticmethod), isinstance(found, classmethod)
    if isinstance(found, (staticmethod, classmethod, MethodType)):
        found = found.__func__
    while not (isinstance(found, FunctionType) and is_users_file(found.__code__.co_filename)):
        wrapped = getattr(found, "__wrapped__", None)
        if wrapped is None:
            break
        found = wrapped
    return found if isinstance(found, FunctionType) else None, is_static, of_class


def _own_parameter(name: str) -> Value:
    return Value(frozenset({name}), exact=frozenset({name}))


def bind_parameters(
    node: FunctionNode, arguments: list[Value], keywords: dict[str, Value], binding: str
) -> dict[str, Value]:
    """The parameters of a function; those of an entry stand for themselves."""
    positional = [each.arg for each in (*node.args.posonlyargs, *node.args.args)]
    rest = merge_values([*arguments, *keywords.values()])
    default = Value(rest.sources, elements=rest.parts) if binding == "star" or "**" in keywords else Value()
    every = [*positional, *(each.arg for each in node.args.kwonlyargs)]
    names = {name: _own_parameter(name) if binding == "entry" else default for name in every}
    names |= dict(zip(positional, arguments, strict=False))
    names |= {name: value for name, value in keywords.items() if name in names}
    if node.args.vararg is not None:
        left = merge_values(arguments[len(positional) :])
        names[node.args.vararg.arg] = replace(item_of(left), is_self=left.is_self)
    if node.args.kwarg is not None:
        names[node.args.kwarg.arg] = Value(frozenset({"**"} if binding == "entry" else rest.sources))
    return names
