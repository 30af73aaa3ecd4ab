"""Interprets calls: user-defined functions by their source, others by the known effects of their names."""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from types import FunctionType, MethodType

from aitrain.environment.abstract_values import (
    APPENDS,
    EMPTY,
    SELF,
    UNKNOWN,
    Arguments,
    Value,
    bind_parameters,
    is_consumable,
    is_data_object,
    is_instance,
    is_library_object,
    is_lock,
    item_of,
    merge_exact,
    merge_values,
    owner_of,
    static_attribute,
    unwrap_function,
    use_of_receiver,
)
from aitrain.environment.access_log import CallFrame, merge_states
from aitrain.environment.attribute_reader import AttributeReader
from aitrain.environment.effects import (
    ARRAY_MUTATES_FIRST_ARGUMENT,
    BUILTIN_METHODS,
    CONTAINERS,
    INJECTIVE_CALLS,
    ITEM_METHODS,
    MUTATES_FIRST_ARGUMENT,
    MUTATING_METHODS,
    MUTATING_OBJECT_METHODS,
    PER_THREAD_TYPES,
    PURE_FUNCTIONS,
    VIEW_METHODS,
    is_query,
    process_wide_effect,
)
from aitrain.environment.source_code import function_node
from aitrain.environment.state_report import WriteSite
from aitrain.environment.state_watch import is_users_object
from aitrain.execution.user_code import is_users_file

MAX_CALLS = 2000
"""Maximum calls to interpret; the analysis of an environment with more calls is incomplete."""

MAX_DEPTH = 40


@dataclass(frozen=True)
class _CallSite:
    """A call in the source, with the values of its parts."""

    node: ast.Call
    callee: Value
    given: Arguments

    @property
    def method(self) -> str:
        """The name after the dot, empty for other calls."""
        return self.node.func.attr if isinstance(self.node.func, ast.Attribute) else ""

    @property
    def first(self) -> Value:
        return self.given.positional[0] if self.given.positional else Value()

    @property
    def receiver(self) -> Value:
        return self.callee.receiver or Value()


class CallReader(AttributeReader):
    """Interprets calls of user-defined functions and methods; ExpressionReader and EpisodeReader implement the rest."""

    def _block(self, statements: Sequence[ast.stmt], frame: CallFrame) -> None:
        raise NotImplementedError

    def _call_node(self, node: ast.Call, frame: CallFrame) -> Value:
        if isinstance(node.func, ast.Attribute):
            callee = self._attribute(node.func, frame, is_called=True, use=use_of_receiver(node.func.attr))
        else:
            callee = self._eval(node.func, frame)
        arguments = tuple(self._eval(argument, frame) for argument in node.args)
        keywords = {each.arg or "**": self._eval(each.value, frame) for each in node.keywords}
        has_star = any(isinstance(argument, ast.Starred) for argument in node.args)
        site = _CallSite(node, callee, Arguments(arguments, keywords, has_star))
        if "out" in keywords:
            self._change(keywords["out"].roots, "change")
        special = self._special_call(site) or self._known_call(site)
        if special is not None:
            return special
        if (site.method or getattr(callee.known, "__name__", "")) in INJECTIVE_CALLS:
            told = [*arguments, site.receiver]
            return Value(merge_values(told).sources, exact=merge_exact(told))
        return self._call(callee, site.given)

    def _special_call(self, site: _CallSite) -> Value | None:
        """Builtins that read and write attributes, and methods of namespaces."""
        callee, first, written = site.callee, site.first, site.node.args
        if site.receiver.is_namespace:
            if site.method in APPENDS | MUTATING_METHODS:
                self._store("self.?", Value(), False)
            return Value()
        is_method = site.method in ("__setattr__", "__delattr__")
        if is_method and not first.is_self:
            return self._set_by_name(site.receiver, written)
        if is_method or callee.known in (setattr, delattr):
            return self._set_by_name(first, written[1:])
        if callee.known is getattr and first.is_self:
            return self._get_by_name(written[1:])
        if callee.known is hasattr and first.is_self and isinstance(written[-1], ast.Constant):
            root = f"self.{written[-1].value!s}"
            self._note(root, "read")
            return Value(frozenset({f"={root}"}))
        if callee.known is vars and first.is_self:
            return Value(is_namespace=True)
        if callee.known is type and first.is_self:
            return Value(is_class=True, known=self.type)
        return None

    def _known_call(self, site: _CallSite) -> Value | None:
        """Functions with process-wide effects or that change their first argument, and methods of shared state."""
        callee, first, method = site.callee, site.first, site.method
        name = getattr(callee.known, "__name__", "") if callee.receiver is None or callee.roots == EMPTY else ""
        setting = process_wide_effect(callee)
        if setting is not None:
            self._change_process(setting)
            return Value()
        if name in ARRAY_MUTATES_FIRST_ARGUMENT and callee.receiver is not None and not callee.roots:
            self._change(first.roots, "change")
        if name in MUTATES_FIRST_ARGUMENT and first.roots:
            self._change(first.roots, "change")
            return item_of(first)
        if callee.known in (list, tuple, sorted, iter, reversed, enumerate, zip, filter, map, set, dict):
            whole = merge_values(site.given.positional)
            return Value(whole.sources, elements=whole.parts)
        if method in ("acquire", "release") and callee.receiver is not None:
            locks = is_lock(site.node.func.value, callee.receiver) if isinstance(site.node.func, ast.Attribute) else 0
            self.locks = max(0, self.locks + (locks if method == "acquire" else -locks))
        return self._method_of_state(site) if site.receiver.roots else None

    def _method_of_state(self, site: _CallSite) -> Value | None:
        """Interpret a method call on shared state."""
        receiver, method, known = site.receiver, site.method, site.callee.known
        whole = merge_values([receiver, *site.given.positional])
        held = receiver.known
        if isinstance(held, PER_THREAD_TYPES) or is_lock(None, receiver):
            return Value()
        if isinstance(known, FunctionType) and is_users_file(known.__code__.co_filename):
            return None
        if is_consumable(held) or (method in MUTATING_OBJECT_METHODS and not isinstance(held, CONTAINERS)):
            self._change(receiver.roots, "change")
        elif is_data_object(held):
            in_place = method.endswith("_") and not method.startswith("_")
            if in_place or method in MUTATING_METHODS | APPENDS:
                self._change(receiver.roots, "change")
            is_view = in_place or method in VIEW_METHODS
            return replace(receiver, receiver=None) if is_view else Value(whole.sources)
        elif method in ("execute", "executemany", "executescript") and not is_query(site.first):
            self._change(receiver.roots, "change")
        elif held is not UNKNOWN and not isinstance(held, CONTAINERS) and is_library_object(held):
            return Value(whole.sources)
        elif method == "setdefault" and len(site.given.positional) == 2:
            self._change(receiver.roots, "item", self._depends_on(receiver, *site.given.positional))
        elif method in APPENDS:
            self._change(receiver.roots, "append")
        elif method in MUTATING_METHODS:
            self._change(receiver.roots, "change")
        elif held is UNKNOWN and method not in BUILTIN_METHODS:  # it may read all state of the object
            for root in receiver.roots:
                self._note(f"{root}.*", "read")
        exact = receiver.exact if method in INJECTIVE_CALLS else EMPTY
        roots = receiver.parts if method in ITEM_METHODS else EMPTY
        return Value(whole.sources, exact, roots, elements=receiver.parts)

    def _call(self, callee: Value, given: Arguments) -> Value:
        receiver = callee.receiver
        whole = merge_values([*given.values, Value(receiver.sources) if receiver else Value()])
        plain, is_static, of_class = unwrap_function(callee.known)
        if plain is None:
            call = None if inspect.isclass(callee.known) else static_attribute(callee.known, "__call__")
            if isinstance(call, FunctionType) and is_users_file(call.__code__.co_filename):
                # a user-defined callable object
                return self._inline(call, Arguments((callee, *given.positional), given.keywords))
            self._call_unseen(callee, given.values)
            return Value(whole.sources, made=callee.known if inspect.isclass(callee.known) else None)
        is_own = receiver is not None and (receiver.is_self or receiver.is_class)
        if not is_own and not is_users_file(plain.__code__.co_filename):
            self._escape(given.values, plain.__name__)
            return Value(whole.sources)
        if isinstance(callee.known, MethodType):
            bound = self._of_object(callee.known.__self__)
            given = given.after(replace(bound, roots=receiver.roots if receiver else EMPTY))
        elif receiver is not None and not is_static:
            if of_class:
                kind = receiver.known if inspect.isclass(receiver.known) else type(receiver.known)
                is_environments = receiver.is_self or receiver.is_class or kind is object
                first = Value(is_class=True, known=self.type) if is_environments else self._of_object(kind)
                given = given.after(first)
            elif receiver.is_self:
                given = given.after(SELF)
            elif not receiver.is_class and is_instance(receiver.known):
                given = given.after(receiver)
        owner = callee.after or (owner_of(self.type, plain) if is_own else None)
        value = self._inline(plain, given, owner)
        if isinstance(callee.known, functools._lru_cache_wrapper):  # the cache returns the same object to all calls
            root = f"{plain.__name__}()"
            self._note(root, "read")
            return replace(value, roots=frozenset({root}), known=self._stand_in(root, value.made))
        return value

    def _call_unseen(self, callee: Value, arguments: list[Value]) -> None:
        is_own = callee.receiver is not None and callee.receiver.is_self
        if is_own and callee.known is not UNKNOWN and not inspect.isclass(callee.known):
            self.give_up(f"self.{getattr(callee.known, '__name__', '?')}")
        name = getattr(callee.known, "__name__", "what it is handed to")
        if callee.known in (exec, eval):
            self.give_up(name)
        if name not in PURE_FUNCTIONS:
            self._escape(arguments, name)

    def _escape(self, values: Iterable[Value], where: str) -> None:
        """Handle the environment being passed to code that is not interpreted."""
        if any(value.is_self or value.is_namespace for value in values):
            self.give_up(f"self, which {where} holds")

    def _inline(self, function: FunctionType, given: Arguments, owner: type | None = None) -> Value:
        """Interpret a call of a function by its source."""
        whole = merge_values(given.values)
        code, node = function.__code__, function_node(function)
        self.calls += 1
        if code in self.stack:
            return Value(whole.sources, roots=whole.parts)
        if node is None or self.calls > MAX_CALLS or len(self.stack) > MAX_DEPTH:
            self.give_up(f"the source of {code.co_name}")
            return Value(whole.sources)
        names = bind_parameters(node, given)
        for name, value in _mutable_defaults(function).items():
            if names.get(name) == Value():  # the default, which all calls share
                self._note(f"{function.__name__}.{name}", "read")
                names[name] = Value.at(f"{function.__name__}.{name}", value)
        frame = CallFrame(function, owner, names)
        before = self.place, self.locks, self.breaks
        self.place = WriteSite("", code.co_qualname, code.co_filename, code.co_firstlineno)
        self.breaks = []
        self.stack.append(code)
        read_before = len(self.accesses)
        if isinstance(node, ast.Lambda):
            result = self._eval(node.body, frame)
        else:
            self._block(node.body, frame)
            if self.state is not None:
                frame.returned.append((Value(), self.state))
            self.state = merge_states([state for _, state in frame.returned])
            values = [value for value, _ in frame.returned]
            result = values[0] if len(values) == 1 else merge_values(values)
        self.stack.pop()
        self.place, self.locks, self.breaks = before
        read = {f"={access.root}" for access in self.accesses[read_before:]}
        return Value(
            result.sources | read,
            result.exact,
            result.roots,
            result.elements,
            result.is_self,
            known=result.known if result.roots and is_users_object(result.known) else UNKNOWN,
            made=result.made,
        )


def _mutable_defaults(function: FunctionType) -> dict[str, object]:
    positional = function.__code__.co_varnames[: function.__code__.co_argcount]
    defaults = dict(zip(reversed(positional), reversed(function.__defaults__ or ()), strict=False))
    defaults |= function.__kwdefaults__ or {}
    return {name: value for name, value in defaults.items() if isinstance(value, CONTAINERS)}
