"""Interprets reads and writes of names, attributes and items as accesses to shared state."""

from __future__ import annotations

import ast
import builtins
import functools
import inspect
import os
from dataclasses import replace
from types import FunctionType, MethodType, ModuleType
from typing import TypeGuard

from aitrain.environment.abstract_values import (
    EMPTY,
    UNKNOWN,
    Use,
    Value,
    creates_items,
    find_in_mro,
    is_data_object,
    is_method,
    is_plain,
    is_super,
    methods_in,
    sample_of,
    static_attribute,
)
from aitrain.environment.access_log import AccessLog, CallFrame
from aitrain.environment.effects import (
    PER_THREAD_TYPES,
)
from aitrain.environment.state_watch import is_users_module, is_users_object


class AttributeReader(AccessLog):
    """Resolves names, attributes and items to shared state."""

    # -- implemented by CallReader and ExpressionReader

    def _call(self, callee: Value, arguments: list[Value], keywords: dict[str, Value], binding: str = "given") -> Value:
        raise NotImplementedError

    def _inline(
        self,
        function: FunctionType,
        arguments: list[Value],
        keywords: dict[str, Value],
        owner: type | None = None,
        binding: str = "given",
    ) -> Value:
        raise NotImplementedError

    def _eval(self, node: ast.expr, frame: CallFrame, use: Use = "all") -> Value:
        raise NotImplementedError

    # -- reads

    def _name(self, name: str, frame: CallFrame, use: Use) -> Value:
        if name in frame.names:
            return frame.names[name]
        cells = dict(zip(frame.function.__code__.co_freevars, frame.function.__closure__ or (), strict=False))
        if name in cells:
            try:
                value = cells[name].cell_contents
                return self._enclosed(name, value, use) if frame.owner is None else self._of_object(value)
            except ValueError:
                return Value()
        if name in frame.function.__globals__:
            value = frame.function.__globals__[name]
            if value is self.environment:
                return Value(is_self=True)
            if is_plain(value) or inspect.isclass(value) or inspect.isroutine(value):
                if inspect.isclass(value) or inspect.isroutine(value) or isinstance(value, ModuleType):
                    return self._of_object(value)
                return self._plain_variable(name, value)
            if not isinstance(value, PER_THREAD_TYPES) and use != "none":
                self._note(name, "look" if use == "all" else "read")
            return Value(frozenset({f"={name}"}), roots=frozenset({name}), known=value)
        return Value(known=getattr(builtins, name, UNKNOWN))

    def _plain_variable(self, name: str, value: object) -> Value:
        """Read an immutable global or closure variable."""
        self._note(name, "read")
        return Value(frozenset({f"={name}"}), known=UNKNOWN if value is None else value)

    def _enclosed(self, name: str, value: object, use: Use) -> Value:
        """Read a variable of an enclosing function that has returned."""
        if value is self.environment or inspect.isclass(value) or inspect.isroutine(value):
            return self._of_object(value)
        if is_plain(value):
            return self._plain_variable(name, value)
        if not isinstance(value, PER_THREAD_TYPES) and use != "none":
            self._note(name, "look" if use == "all" else "read")
        return Value(frozenset({f"={name}"}), roots=frozenset({name}), known=value)

    def _of_object(self, value: object) -> Value:
        if value is self.environment:
            return Value(is_self=True)
        return Value(known=value, is_class=inspect.isclass(value) and value in self.type.__mro__[:-1])

    def _attribute(self, node: ast.Attribute, frame: CallFrame, is_called: bool, use: Use = "all") -> Value:
        if isinstance(node.value, ast.Call) and is_super(node.value):
            first = next(iter(frame.names.values()), Value())
            base = Value(is_self=first.is_self, is_class=first.is_class, after=frame.owner)
        else:
            base = self._eval(node.value, frame, use)
        if base.is_self and node.attr == "__dict__":
            return Value(is_namespace=True)
        if base.is_self and node.attr == "__class__":
            return Value(is_class=True, known=self.type)
        if base.is_self:
            return self._attribute_of_self(node.attr, base, is_called, use)
        if base.is_class:
            return self._attribute_of_class(node.attr, base)
        if self._is_shared_namespace(base.known):
            return self._attribute_of_namespace(base, node.attr, use)
        found = static_attribute(base.known, node.attr)
        if found is self.environment:  # a helper that holds the environment
            return Value(is_self=True)
        if is_users_object(base.known):
            return self._attribute_of_held(node.attr, base, is_called, use)
        return replace(base, known=found, receiver=base)

    def _attribute_of_held(self, name: str, base: Value, is_called: bool, use: Use) -> Value:
        """Read an attribute of a shared user-defined object, which is state with its own path."""
        _, found = find_in_mro(type(base.known), name, None)
        own = vars(base.known)
        if isinstance(found, property) and isinstance(found.fget, FunctionType):
            return self._inline(found.fget, [base], {})
        if isinstance(found, functools.cached_property):
            return Value(base.sources, known=own.get(name, UNKNOWN))
        if name not in own and is_method(found):
            return replace(base, known=found, receiver=base)
        return self._state_at(f"{self._path_of(base)}.{name}", own.get(name, found), is_called, use)

    def _is_shared_namespace(self, known: object) -> TypeGuard[type | ModuleType | FunctionType]:
        """Whether a value is a user-defined class, module or function, whose attributes all calls share."""
        if isinstance(known, ModuleType):
            return is_users_module(known.__name__)
        return isinstance(known, (type, FunctionType)) and is_users_module(known.__module__)

    def _attribute_of_namespace(self, base: Value, name: str, use: Use) -> Value:
        found = static_attribute(base.known, name)
        if isinstance(found, (type, ModuleType)) or is_method(found) or inspect.isroutine(found):
            return replace(base, known=found, receiver=base)
        return self._state_at(f"{getattr(base.known, '__name__', '')}.{name}", found, False, use)

    def _attribute_of_self(self, name: str, base: Value, is_called: bool, use: Use = "all") -> Value:
        owner, found = find_in_mro(self.type, name, base.after)
        own = getattr(self.environment, "__dict__", {})
        if isinstance(found, property) and isinstance(found.fget, FunctionType):
            return self._inline(found.fget, [Value(is_self=True)], {}, owner=owner)
        if isinstance(found, functools.cached_property):
            value = self._inline(found.func, [Value(is_self=True)], {}, owner=owner)  # type: ignore[arg-type]
            root = f"self.{name}"
            self._note(root, "look" if use == "all" else "read")
            known = own.get(name, self._stand_in(root, value.made))
            return Value(value.sources, roots=EMPTY if is_plain(known) else frozenset({root}), known=known)
        if name in own and isinstance(own[name], MethodType) and own[name].__self__ is self.environment:
            found = own[name].__func__
        elif name in own or not is_method(found):
            return self._state_of_self(name, own.get(name, found), is_called, use)
        if not is_called:
            self._refer(name, Value(known=found, receiver=base, after=owner))
        return Value(known=found, receiver=replace(base, is_self=True), after=owner)

    def _state_of_self(self, name: str, value: object, is_called: bool, use: Use) -> Value:
        for held in methods_in(value, self.environment):
            self._refer(held.__name__, Value(known=held.__func__, receiver=Value(is_self=True)))
        if name in vars(self.type) or name not in getattr(self.environment, "__dict__", {}):
            self._note(f"{self.type.__name__}.{name}", "look" if use == "all" else "read")
        return self._state_at(f"self.{name}", value, is_called, use)

    def _state_at(self, root: str, value: object, is_called: bool, use: Use) -> Value:
        if use != "none" and not (is_called and is_plain(value)):
            self._note(root, "look" if use == "all" else "read")
        if value is None:  # it may be assigned later
            value = self._stand_in(root, self.made.get(root))
        if is_plain(value) and self.state is not None and root not in self.state:
            return Value(frozenset({f"={root}"}), known=value)
        is_own = self.state is not None and root in self.state
        roots = frozenset({root, *self._aliases(value)})
        return Value(frozenset({f"={root}"}), roots=roots, known=UNKNOWN if is_own else value)

    def _attribute_of_class(self, name: str, base: Value) -> Value:
        owner, found = find_in_mro(self.type, name, base.after)
        if is_method(found):
            return Value(known=found, receiver=base, after=owner)
        root = f"{self.type.__name__}.{name}"
        self._note(root, "read")
        return Value(frozenset({f"={root}"}), roots=EMPTY if is_plain(found) else frozenset({root}), known=found)

    def _refer(self, name: str, method: Value) -> None:
        """Record a method that is passed on, and may be called at any time or never."""
        if self.referenced is not None:
            self.referenced.add(name)
        else:
            with self._conditional():
                self._call(method, [], {}, binding="entry")

    def _subscript(self, node: ast.Subscript, frame: CallFrame, use: Use) -> Value:
        container, key = (
            self._eval(node.value, frame, "none" if use == "none" else "item"),
            self._eval(node.slice, frame),
        )
        if container.is_namespace:
            name = node.slice.value if isinstance(node.slice, ast.Constant) else "?"
            return self._state_of_self(str(name), getattr(self.environment, str(name), UNKNOWN), False, use)
        sources = container.sources | key.sources
        if isinstance(node.slice, ast.Slice) and not is_data_object(container.known):  # a new list or string
            return Value(sources, elements=container.parts)
        if creates_items(container.known):
            return Value(sources)
        return Value(sources, roots=container.parts, known=sample_of(container.known))

    # -- writes

    def _assign_name(self, name: str, value: Value, frame: CallFrame) -> None:
        if name in frame.declared_global:
            self._note(name, "store", self._lazy_dependencies(name, value))
            return
        symbol = f"{name}#{len(self.computed_from)}"
        self.computed_from[symbol] = value.sources
        frame.names[name] = replace(value, sources=frozenset({symbol}), exact=value.exact | {symbol})

    def _store_attribute(self, owner: Value, name: str, value: Value, is_new: bool) -> None:
        if owner.is_self:
            setter = getattr(inspect.getattr_static(self.type, name, None), "fset", None)
            if isinstance(setter, FunctionType):
                self._inline(setter, [Value(is_self=True), value], {}, owner=self.type)
            else:
                self._store(f"self.{name}", value, is_new)
        elif owner.is_class:
            root = f"{self.type.__name__}.{name}"
            self._note(root, "store", self._lazy_dependencies(root, value))
        elif self._is_shared_namespace(owner.known):
            root = f"{owner.known.__name__}.{name}"
            self._note(root, "store", self._lazy_dependencies(root, value))
        elif isinstance(owner.known, ModuleType):  # such as sys.stdout, which the interpreter reads
            self._change_process(f"{owner.known.__name__}.{name}")
        elif is_users_object(owner.known):
            self._store_held(owner, name, value, is_new)
        elif not isinstance(owner.known, PER_THREAD_TYPES):
            self._change(owner.roots, "change")

    def _store_held(self, owner: Value, name: str, value: Value, is_new: bool) -> None:
        setter = getattr(inspect.getattr_static(type(owner.known), name, None), "fset", None)
        if isinstance(setter, FunctionType):
            self._inline(setter, [owner, value], {})
        else:
            self._store(f"{self._path_of(owner)}.{name}", value, is_new)

    def _store_item(self, container: Value, key: Value, value: Value, written: ast.expr) -> None:
        if container.is_namespace:
            name = written.value if isinstance(written, ast.Constant) and isinstance(written.value, str) else "?"
            self._store(f"self.{name}", value, False)
            return
        if container.known is os.environ and value.known is UNKNOWN:
            self._change_process("os.environ")
        self._change(container.roots, "item", self._depends_on(container, key, value))
