"""Interprets expressions: what values depend on, and which shared state they are part of."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import replace

from aitrain.environment.abstract_values import (
    EMPTY,
    UNKNOWN,
    Use,
    Value,
    expressions,
    is_data_object,
    item_of,
    merge_exact,
    merge_values,
)
from aitrain.environment.access_log import CallFrame, merge_states
from aitrain.environment.call_reader import CallReader
from aitrain.environment.effects import CONTAINERS, is_display
from aitrain.environment.source_code import FunctionNode


class ExpressionReader(CallReader):
    """Evaluates expressions to abstract values, and assigns them."""

    def _all(self, nodes: Iterable[ast.AST], frame: CallFrame) -> Value:
        return merge_values([self._eval(node, frame) for node in nodes if isinstance(node, ast.expr)])

    def _eval(self, node: ast.expr, frame: CallFrame, use: Use = "all") -> Value:
        """Evaluate an expression and record its accesses."""
        match node:
            case ast.Name():
                return self._name(node.id, frame, use)
            case ast.Attribute():
                return self._attribute(node, frame, use=use)
            case ast.Subscript():
                return self._subscript(node, frame, use)
            case ast.Call():
                return self._call_node(node, frame)
            case ast.Lambda():
                self._nested(node, frame)
                return Value()
            case ast.Await() | ast.YieldFrom() | ast.Starred() | ast.FormattedValue():
                return self._eval(node.value, frame)
            case ast.NamedExpr():
                value = self._eval(node.value, frame)
                self._assign(node.target, value, frame, False)
                return value
            case ast.IfExp():
                test = self._eval(node.test, frame)
                with self._conditional():
                    chosen = merge_values([self._eval(node.body, frame), self._eval(node.orelse, frame)])
                return replace(chosen, sources=chosen.sources | test.sources)
            case ast.BoolOp():
                first = self._eval(node.values[0], frame)
                with self._conditional():
                    return merge_values([first, *(self._eval(value, frame) for value in node.values[1:])])
            case _:
                return self._new_value(node, frame)

    def _new_value(self, node: ast.expr, frame: CallFrame) -> Value:
        """Value of an expression that creates an object."""
        match node:
            case ast.Yield():
                value = self._eval(node.value, frame) if node.value else Value()
                self.at_yield = merge_states([self.at_yield, self.state])
                self._escape([value], "a yield")
                return Value(frozenset({"reply"}))
            case ast.ListComp() | ast.SetComp() | ast.GeneratorExp() | ast.DictComp():
                return self._comprehension(node, frame)
            case ast.List() | ast.Tuple() | ast.Set():
                items = [self._eval(item, frame) for item in node.elts]
                self._escape(items, "a list")
                whole = merge_values(items)
                return Value(whole.sources, exact=merge_exact(items), elements=whole.parts)
            case ast.Dict():
                items = [self._eval(item, frame) for item in (*node.keys, *node.values) if item is not None]
                self._escape(items, "a dict")
                whole = merge_values(items)
                return Value(whole.sources, elements=whole.parts)
            case ast.Compare():
                is_membership = self.is_test and all(isinstance(each, (ast.In, ast.NotIn)) for each in node.ops)
                how: Use = "item" if is_membership else "all"  # a membership test in a condition reads one item
                compared = [self._eval(node.left, frame), *(self._eval(each, frame, how) for each in node.comparators)]
                return Value(merge_values(compared).sources)
            case ast.Constant():
                return Value(known=node.value)
            case ast.JoinedStr():
                texts = [self._eval(value, frame) for value in expressions(node)]
                return Value(merge_values(texts).sources, exact=merge_exact(texts))
            case _:  # operators compute new values
                return Value(self._all(expressions(node), frame).sources)

    def _comprehension(
        self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp, frame: CallFrame
    ) -> Value:
        sources: list[Value] = []
        with self._conditional():
            for each in node.generators:
                iterated = self._eval(each.iter, frame)
                sources.append(iterated)
                self._assign(each.target, item_of(iterated), frame, False)
                sources += [self._eval(test, frame) for test in each.ifs]
            made = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
            values = [self._eval(value, frame) for value in made]
        whole = merge_values(values)
        return Value(whole.sources | merge_values(sources).sources, elements=whole.roots)

    def _nested(self, node: FunctionNode, frame: CallFrame) -> None:
        """Interpret a nested function, which may be called any number of times from here on."""
        arguments = node.args
        every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
        names = {**frame.names, **{each.arg: Value() for each in every if each is not None}}
        inner = CallFrame(frame.function, frame.owner, names, declared_global=set(frame.declared_global))
        place, breaks, at_yield = self.place, self.breaks, self.at_yield
        self._all([*arguments.defaults, *(default for default in arguments.kw_defaults if default)], frame)
        with self._conditional():
            if isinstance(node, ast.Lambda):
                self._eval(node.body, inner)
            else:
                self._block(node.body, inner)
        self.place, self.breaks, self.at_yield = place, breaks, at_yield

    # -- assignments

    def _assign(self, target: ast.expr, value: Value, frame: CallFrame, is_new: bool) -> None:
        match target:
            case ast.Name():
                self._assign_name(target.id, value, frame)
            case ast.Tuple() | ast.List():
                for each in target.elts:
                    self._assign(each, item_of(value), frame, is_new)
            case ast.Starred():
                self._assign(target.value, item_of(value), frame, is_new)
            case ast.Attribute():
                self._store_attribute(self._eval(target.value, frame, use="none"), target.attr, value, is_new)
            case ast.Subscript():
                key = self._eval(target.slice, frame)
                container = self._eval(target.value, frame, use="none")
                self._store_item(container, key, value, target.slice)

    def _assign_name(self, name: str, value: Value, frame: CallFrame) -> None:
        if name in frame.declared_global:
            self._note(name, "store", self._lazy_dependencies(name, value))
            return
        symbol = f"{name}#{len(self.computed_from)}"
        self.computed_from[symbol] = value.sources
        frame.names[name] = replace(value, sources=frozenset({symbol}), exact=value.exact | {symbol})

    def _augment(self, node: ast.AugAssign, frame: CallFrame) -> None:
        value = self._eval(node.value, frame)
        before = self._eval(node.target, frame)
        if isinstance(node.target, ast.Name) and node.target.id not in frame.declared_global:
            if is_data_object(before.known):
                self._change(before.roots, "change")
            elif isinstance(before.known, CONTAINERS) or (before.known is UNKNOWN and is_display(node.value)):
                self._change(before.roots, "append")
            frame.names[node.target.id] = replace(before, sources=before.sources | value.sources)
        elif isinstance(node.target, ast.Name):
            self._note(node.target.id, "read")
            self._note(node.target.id, "store")
        elif isinstance(node.target, ast.Attribute):
            self._store_attribute(self._eval(node.target.value, frame), node.target.attr, value, False)
        else:
            assert isinstance(node.target, ast.Subscript)
            container = self._eval(node.target.value, frame)
            self._change(container.roots | (before.roots if is_display(node.value) else EMPTY), "change")

    def _delete(self, target: ast.expr, frame: CallFrame) -> None:
        if isinstance(target, ast.Attribute):
            owner = self._eval(target.value, frame)
            if owner.is_self:
                root = f"self.{target.attr}"
                self._note(root, "read")
                self._note(root, "store")
                self.state = self.state - {root, root + "!"} if self.state is not None else None
            else:
                self._change(owner.roots, "change")
        elif isinstance(target, ast.Subscript):
            self._change(self._eval(target.value, frame).roots, "change")
        elif isinstance(target, (ast.Tuple, ast.List)):
            for each in target.elts:
                self._delete(each, frame)
