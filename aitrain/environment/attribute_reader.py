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
    SELF,
    UNKNOWN,
    Arguments,
    Use,
    Value,
    creates_items,
    find_in_mro,
    is_data_object,
    is_method,
    is_plain,
    methods_in,
    sample_of,
    static_attribute,
)
from aitrain.environment.access_log import AccessLog, CallFrame
from aitrain.environment.effects import PER_THREAD_TYPES
from aitrain.environment.state_watch import is_users_module, is_users_object


class AttributeReader(AccessLog):
    """Resolves names, attributes and items to shared state; CallReader and ExpressionReader implement the rest."""

    def _call(self, callee: Value, given: Arguments) -> Value:
        raise NotImplementedError

    def _inline(self, function: FunctionType, given: Arguments, owner: type | None = None) -> Value:
        raise NotImplementedError

    def _eval(self, node: ast.expr, frame: CallFrame, use: Use = "all") -> Value:
        raise NotImplementedError

    # -- reads

    def _name(self, name: str, frame: CallFrame, use: Use) -> Value:
        """Read a local variable, or one of an enclosing function that has returned, or a global one."""
        if name in frame.names:
            return frame.names[name]
        function = frame.function
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=False))
        if name not in cells and name not in function.__globals__:
            return Value(known=getattr(builtins, name, UNKNOWN))
        try:
            value = cells[name].cell_contents if name in cells else function.__globals__[name]
        except ValueError:
            return Value()
        is_code = inspect.isclass(value) or inspect.isroutine(value) or isinstance(value, ModuleType)
        if value is self.environment or is_code or (name in cells and frame.owner is not None):
            return self._of_object(value)
        if is_plain(value):
            self._note(name, "read")
            return Value(frozenset({f"={name}"}), known=UNKNOWN if value is None else value)
        if not isinstance(value, PER_THREAD_TYPES) and use != "none":
            self._read(name, use)
        return Value.at(name, value)

    def _of_object(self, value: object) -> Value:
        if value is self.environment:
            return SELF
        return Value(known=value, is_class=inspect.isclass(value) and value in self.type.__mro__[:-1])

    def _attribute(self, node: ast.Attribute, frame: CallFrame, is_called: bool = False, use: Use = "all") -> Value:
        called = node.value.func if isinstance(node.value, ast.Call) else None
        if isinstance(called, ast.Name) and called.id == "super":
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
            owner, found = find_in_mro(self.type, node.attr, base.after)
            if is_method(found):
                return Value(known=found, receiver=base, after=owner)
            self._note(f"{self.type.__name__}.{node.attr}", "read")
            return Value.at(f"{self.type.__name__}.{node.attr}", found)
        found = static_attribute(base.known, node.attr)
        if self._is_shared_namespace(base.known):
            if isinstance(found, (type, ModuleType)) or is_method(found) or inspect.isroutine(found):
                return replace(base, known=found, receiver=base)
            return self._state_at(f"{getattr(base.known, '__name__', '')}.{node.attr}", found, False, use)
        if found is self.environment:  # a helper that holds the environment
            return SELF
        if is_users_object(base.known):
            return self._attribute_of_held(node.attr, base, is_called, use)
        return replace(base, known=found, receiver=base)

    def _is_shared_namespace(self, known: object) -> TypeGuard[type | ModuleType | FunctionType]:
        """Whether a value is a user-defined class, module or function, whose attributes all calls share."""
        if isinstance(known, ModuleType):
            return is_users_module(known.__name__)
        return isinstance(known, (type, FunctionType)) and is_users_module(known.__module__)

    def _attribute_of_held(self, name: str, base: Value, is_called: bool, use: Use) -> Value:
        """Read an attribute of a shared user-defined object, which is state with its own path."""
        _, found = find_in_mro(type(base.known), name, None)
        own = vars(base.known)
        if isinstance(found, property) and isinstance(found.fget, FunctionType):
            return self._inline(found.fget, Arguments((base,)))
        if isinstance(found, functools.cached_property):
            return Value(base.sources, known=own.get(name, UNKNOWN))
        if name not in own and is_method(found):
            return replace(base, known=found, receiver=base)
        return self._state_at(f"{self._path_of(base)}.{name}", own.get(name, found), is_called, use)

    def _attribute_of_self(self, name: str, base: Value = SELF, is_called: bool = False, use: Use = "all") -> Value:
        owner, found = find_in_mro(self.type, name, base.after)
        own = getattr(self.environment, "__dict__", {})
        if isinstance(found, property) and isinstance(found.fget, FunctionType):
            return self._inline(found.fget, Arguments((SELF,)), owner)
        if isinstance(found, functools.cached_property):
            value = self._inline(found.func, Arguments((SELF,)), owner)  # type: ignore[arg-type]
            root = f"self.{name}"
            self._read(root, use)
            return replace(Value.at(root, own.get(name, self._stand_in(root, value.made))), sources=value.sources)
        if name in own and isinstance(own[name], MethodType) and own[name].__self__ is self.environment:
            found = own[name].__func__
        elif name in own or not is_method(found):
            return self._state_of_self(name, own.get(name, found), is_called, use)
        if not is_called:
            self._refer(name, Value(known=found, receiver=base, after=owner))
        return Value(known=found, receiver=replace(base, is_self=True), after=owner)

    def _state_of_self(self, name: str, value: object, is_called: bool, use: Use) -> Value:
        for held in methods_in(value, self.environment):
            self._refer(held.__name__, Value(known=held.__func__, receiver=SELF))
        if name in vars(self.type) or name not in getattr(self.environment, "__dict__", {}):
            self._read(f"{self.type.__name__}.{name}", use)
        return self._state_at(f"self.{name}", value, is_called, use)

    def _state_at(self, root: str, value: object, is_called: bool, use: Use) -> Value:
        if use != "none" and not (is_called and is_plain(value)):
            self._read(root, use)
        if value is None:  # it may be assigned later
            value = self._stand_in(root, self.made.get(root))
        is_own = self.state is not None and root in self.state
        if is_plain(value) and self.state is not None and not is_own:
            return Value.at(root, value)
        roots = frozenset({root, *self._aliases(value)})
        return Value(frozenset({f"={root}"}), roots=roots, known=UNKNOWN if is_own else value)

    def _refer(self, name: str, method: Value) -> None:
        """Record a method that is passed on, and may be called at any time or never."""
        if self.referenced is not None:
            self.referenced.add(name)
        else:
            with self._conditional():
                self._call(method, Arguments(is_entry=True))

    def _subscript(self, node: ast.Subscript, frame: CallFrame, use: Use) -> Value:
        container = self._eval(node.value, frame, "none" if use == "none" else "item")
        key = self._eval(node.slice, frame)
        if container.is_namespace:
            name = str(node.slice.value) if isinstance(node.slice, ast.Constant) else "?"
            return self._state_of_self(name, getattr(self.environment, name, UNKNOWN), False, use)
        sources = container.sources | key.sources
        if isinstance(node.slice, ast.Slice) and not is_data_object(container.known):  # a new list or string
            return Value(sources, elements=container.parts)
        if creates_items(container.known):
            return Value(sources)
        return Value(sources, roots=container.parts, known=sample_of(container.known))

    def _get_by_name(self, arguments: list[ast.expr]) -> Value:
        """`getattr(self, ...)`."""
        if arguments and isinstance(arguments[0], ast.Constant):
            return self._attribute_of_self(str(arguments[0].value))
        for name in dir(self.type):  # the name is computed: any method may be called
            if not name.startswith("__") and name not in ("build_dataset", "build_eval_dataset", "reference"):
                _, found = find_in_mro(self.type, name, None)
                if is_method(found):
                    self._refer(name, Value(known=found, receiver=SELF))
        return Value()

    # -- writes

    def _store_attribute(self, owner: Value, name: str, value: Value, is_new: bool) -> None:
        if owner.is_self or is_users_object(owner.known):
            kind = self.type if owner.is_self else type(owner.known)
            setter = getattr(inspect.getattr_static(kind, name, None), "fset", None)
            if isinstance(setter, FunctionType):
                first = SELF if owner.is_self else owner
                self._inline(setter, Arguments((first, value)), kind if owner.is_self else None)
            else:
                self._store(f"{'self' if owner.is_self else self._path_of(owner)}.{name}", value, is_new)
        elif owner.is_class or self._is_shared_namespace(owner.known):
            root = f"{(self.type if owner.is_class else owner.known).__name__}.{name}"  # type: ignore[attr-defined]
            self._note(root, "store", self._lazy_dependencies(root, value))
        elif isinstance(owner.known, ModuleType):  # such as sys.stdout, which the interpreter reads
            self._change_process(f"{owner.known.__name__}.{name}")
        elif not isinstance(owner.known, PER_THREAD_TYPES):
            self._change(owner.roots, "change")

    def _store_item(self, container: Value, key: Value, value: Value, written: ast.expr) -> None:
        if container.is_namespace:
            name = written.value if isinstance(written, ast.Constant) and isinstance(written.value, str) else "?"
            self._store(f"self.{name}", value, False)
            return
        if container.known is os.environ and value.known is UNKNOWN:
            self._change_process("os.environ")
        self._change(container.roots, "item", self._depends_on(container, key, value))

    def _set_by_name(self, owner: Value, arguments: list[ast.expr]) -> Value:
        """`setattr(owner, ...)` and `delattr`."""
        named = arguments[0].value if arguments and isinstance(arguments[0], ast.Constant) else "?"
        if owner.is_self or owner.is_class:
            self._store_attribute(owner, str(named), Value(), False)
        else:
            self._change(owner.roots, "change")
        return Value()
