"""Abstract values of the state analysis, and predicates on the objects that it meets."""

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
from dataclasses import dataclass, field, replace
from types import FunctionType, MethodType, ModuleType
from typing import Literal

from aitrain.environment.source_code import FunctionNode
from aitrain.environment.state_watch import is_users_object
from aitrain.execution.user_code import is_users_file

Use = Literal["all", "item", "none"]
"""Why an expression is evaluated: for its whole value, for one item, or only to change it in place."""

_PLAIN = (str, bytes, int, float, complex, bool, type(None), frozenset, range, re.Pattern, ModuleType, FunctionType)
_FUNCTIONS = (FunctionType, MethodType, staticmethod, classmethod)
APPENDS = {"append", "add", "extend", "update", "appendleft", "extendleft", "insert", "write", "writelines", "put"}

MAX_SAMPLED = 100
"""Items of a container that are inspected."""

UNKNOWN = object()
EMPTY: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Value:
    """What the analysis knows about the value of an expression."""

    sources: frozenset[str] = EMPTY
    """Parameters, local variables and shared state (`=self.x`) from which it is computed."""
    exact: frozenset[str] = EMPTY
    """The sources that it determines: if two such values are equal, so are these sources."""
    roots: frozenset[str] = EMPTY
    """Shared state that it is or is part of, so that changing it in place changes that state."""
    elements: frozenset[str] = EMPTY
    """The same for its elements, if it is a shallow copy such as `list(self.rows)`."""
    is_self: bool = False
    is_class: bool = False
    is_namespace: bool = False
    """True for `self.__dict__`."""
    after: type | None = None
    """For `super()`: the class after which methods are looked up in the MRO."""
    known: object = UNKNOWN
    """The concrete object, if known."""
    receiver: Value | None = None
    """The object to which a method is bound."""
    made: type | None = None
    """The class, if it is a newly created object."""

    @classmethod
    def at(cls, root: str, known: object) -> Value:
        """The shared state with this path."""
        return cls(frozenset({f"={root}"}), roots=EMPTY if is_plain(known) else frozenset({root}), known=known)

    @property
    def parts(self) -> frozenset[str]:
        """Shared state to which its elements belong."""
        return self.roots | self.elements


SELF = Value(is_self=True)
"""The environment."""


@dataclass(frozen=True)
class Arguments:
    """What a function is called with."""

    positional: tuple[Value, ...] = ()
    keywords: Mapping[str, Value] = field(default_factory=dict)
    """Values by name; `**` for a mapping of unknown names."""
    has_star: bool = False
    is_entry: bool = False
    """Whether the episode enters here, so that parameters are their own sources."""

    @property
    def values(self) -> list[Value]:
        """All of them."""
        return [*self.positional, *self.keywords.values()]

    def after(self, first: Value) -> Arguments:
        """The same with another first argument, which a method is bound to."""
        return replace(self, positional=(first, *self.positional))


def merge_values(values: Iterable[Value]) -> Value:
    """Value that is computed from several values, or is one of them."""
    values = list(values)
    return Value(
        frozenset().union(*(value.sources for value in values)),
        roots=frozenset().union(*(value.roots for value in values)),
        elements=frozenset().union(*(value.elements for value in values)),
        is_self=any(value.is_self for value in values),
    )


def merge_scopes(outcomes: list[dict[str, Value]]) -> dict[str, Value]:
    """Local variables after a branch, given those of each path."""
    names = dict.fromkeys(name for outcome in outcomes for name in outcome)
    values = {name: [outcome[name] for outcome in outcomes if name in outcome] for name in names}
    return {
        name: each[0] if all(one == each[0] for one in each) else merge_values(each) for name, each in values.items()
    }


def merge_exact(values: Iterable[Value]) -> frozenset[str]:
    """Sources determined by a value composed of unchanged parts, such as a tuple."""
    return frozenset().union(*(value.exact for value in values))


def use_of_receiver(method: str) -> Use:
    """How a method call uses its receiver."""
    return "none" if method in APPENDS else "item" if method in ("get", "setdefault") else "all"


def item_of(value: Value) -> Value:
    """Value of an item of a container."""
    known = sample_of(value.known) if value.roots else UNKNOWN
    return Value(value.sources, roots=value.parts, elements=value.elements, known=known)


def sample_of(known: object) -> object:
    """An item of a container whose inspected items all have the same user-defined class, else UNKNOWN."""
    items = list(known.values()) if isinstance(known, dict) else known if isinstance(known, (list, tuple)) else ()
    kinds = {type(item) for item in items[:MAX_SAMPLED]}
    return items[0] if len(kinds) == 1 and is_users_object(items[0]) else UNKNOWN


def expressions(node: ast.AST) -> Iterator[ast.expr]:
    """Direct subexpressions of a node."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.expr):
            yield child
        else:
            yield from expressions(child)


def names_self(node: ast.AST, names: Mapping[str, Value]) -> bool:
    """Whether code refers to the environment by a name."""
    own = {name for name, value in names.items() if value.is_self}
    return any(isinstance(each, ast.Name) and each.id in own for each in ast.walk(node))


def is_plain(value: object) -> bool:
    """Whether an object is immutable, or a module or function."""
    return isinstance(value, _PLAIN) or (isinstance(value, tuple) and all(map(is_plain, value)))


def is_method(found: object) -> bool:
    """Whether a class attribute is a method."""
    return isinstance(found, _FUNCTIONS) or (callable(found) and hasattr(found, "__wrapped__"))


def methods_in(value: object, environment: object) -> list[MethodType]:
    """Bound methods of the environment in a list or dict."""
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    few = items if len(items) <= 100 else ()
    return [item for item in few if isinstance(item, MethodType) and item.__self__ is environment]


def is_instance(known: object) -> bool:
    """Whether a known object is an instance, not a module or class."""
    return known is not UNKNOWN and not isinstance(known, (ModuleType, type))


def is_consumable(held: object) -> bool:
    """Whether reading changes the object: iterators and random number generators."""
    is_iterator = hasattr(type(held), "__next__") and not hasattr(type(held), "write")
    return is_iterator or isinstance(held, random.Random) or type(held).__module__.startswith("numpy.random")


def is_library_object(held: object) -> bool:
    """Whether an object is a library's, whose methods are assumed to be thread-safe: clients, tokenizers, models."""
    module = sys.modules.get(type(held).__module__)
    return not is_users_file(getattr(module, "__file__", None) or "<frozen")


def is_data_object(held: object) -> bool:
    """Whether an object is an array, a tensor or an in-memory buffer."""
    kind = type(held)
    is_array = kind.__module__ == "numpy" and hasattr(held, "tobytes") and hasattr(held, "flags")
    is_tensor = kind.__module__ == "torch" and kind.__name__ == "Tensor"
    return is_array or is_tensor or isinstance(held, (io.StringIO, io.BytesIO, array.array))


def creates_items(held: object) -> bool:
    """Whether a library's container creates items on access, as datasets do."""
    is_store = isinstance(held, (list, tuple, dict, set, deque)) or is_data_object(held) or is_users_object(held)
    is_table = type(held).__module__.partition(".")[0] == "pandas"  # items may be views
    return held is not UNKNOWN and not is_store and not is_table and is_library_object(held)


def is_lock(node: ast.expr | None, value: Value) -> bool:
    """Whether a value is a mutual exclusion lock; a semaphore with more than one permit is not."""
    held = value.known
    if held is UNKNOWN:
        return node is not None and bool(re.search(r"(?<![a-z])(r?lock|mutex)(?![a-z])", ast.unparse(node), re.I))
    has_methods = all(callable(getattr(held, name, None)) for name in ("acquire", "release"))
    is_semaphore = "Semaphore" in type(held).__name__
    return has_methods and (not is_semaphore or getattr(held, "_value", 0) == 1)


def imported_object(node: ast.Import | ast.ImportFrom, alias: ast.alias) -> object:
    """The object that an import statement inside a function binds."""
    if isinstance(node, ast.Import):
        return sys.modules.get(alias.name if alias.asname else alias.name.partition(".")[0], UNKNOWN)
    module = sys.modules.get(node.module or "")
    return getattr(module, alias.name, UNKNOWN) if node.level == 0 else UNKNOWN


def static_attribute(known: object, name: str) -> object:
    """An attribute, looked up without running a user-defined property or `__getattr__`."""
    if known is UNKNOWN:
        return UNKNOWN
    if isinstance(known, ModuleType):
        return vars(known).get(name, UNKNOWN)
    found = inspect.getattr_static(known, name, UNKNOWN)
    return UNKNOWN if isinstance(found, property) else found


def find_in_mro(kind: type, name: str, after: type | None) -> tuple[type | None, object]:
    """The class in the MRO that defines an attribute, and the attribute; for `super()`, only classes after `after`."""
    order = kind.__mro__
    for owner in order[order.index(after) + 1 :] if after in order else order:
        if name in vars(owner):
            return owner, vars(owner)[name]
    return None, UNKNOWN


def owner_of(kind: type, function: FunctionType) -> type | None:
    """The class that defines a method."""
    return next((owner for owner in kind.__mro__ if function in vars(owner).values()), None)


def unwrap_function(found: object) -> tuple[FunctionType | None, bool, bool]:
    """The innermost user-defined function, whether it is a static method, and whether it is a class method.

    Decorators of libraries (retries, caches, torch.no_grad) are unwrapped; user-defined ones are interpreted.
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


def bind_parameters(node: FunctionNode, given: Arguments) -> dict[str, Value]:
    """Values of a function's parameters; parameters of an entry point are their own sources."""
    positional = [each.arg for each in (*node.args.posonlyargs, *node.args.args)]
    rest = merge_values(given.values)
    default = Value(rest.sources, elements=rest.parts) if given.has_star or "**" in given.keywords else Value()
    every = [*positional, *(each.arg for each in node.args.kwonlyargs)]
    own = {name: Value(frozenset({name}), exact=frozenset({name})) for name in every}
    names = own if given.is_entry else dict.fromkeys(every, default)
    names |= dict(zip(positional, given.positional, strict=False))
    names |= {name: value for name, value in given.keywords.items() if name in names}
    if node.args.vararg is not None:
        left = merge_values(given.positional[len(positional) :])
        names[node.args.vararg.arg] = replace(item_of(left), is_self=left.is_self)
    if node.args.kwarg is not None:
        names[node.args.kwarg.arg] = Value(frozenset({"**"} if given.is_entry else rest.sources))
    return names
