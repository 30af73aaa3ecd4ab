"""YAML, read and written by the same rules."""

import re
from collections.abc import Hashable, Mapping

import yaml


class _Reader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]  # in C, a tenth of the time
    """YAML 1.1, except that 1e-6 is a number, a date is text, and a duplicate key is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, object]:
        """The mapping, or a ConstructorError for a duplicate key, of which PyYAML silently keeps the last."""
        seen = set[str]()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"duplicate key {key.value}", key.start_mark)
            seen.add(key.value)
        mapping: dict[Hashable, object] = super().construct_mapping(node, deep)
        return mapping


class _Writer(yaml.SafeDumper):
    """Quotes what _Reader would not read as text, and writes no aliases."""

    def ignore_aliases(self, data: object) -> bool:
        """Whether a value that occurs twice is written twice."""
        return True


_LINE_ENDS = {"\x85", "\u2028", "\u2029"}
"""Line separators of Unicode other than carriage return and line feed."""
_EXPONENT = re.compile(r"^[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$")

for _kind in (_Reader, _Writer):
    _kind.yaml_implicit_resolvers = {
        letter: [resolver for resolver in resolvers if not resolver[0].endswith(":timestamp")]
        for letter, resolvers in _kind.yaml_implicit_resolvers.items()
    }
    _kind.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT, list("-+0123456789"))


DEEPEST = 100
"""Levels of a YAML text."""


def read_yaml(text: str) -> object:
    """The value of a YAML text, which may be somebody else's: aliases, which can stand for much more than a text holds,
    and deep nesting are refused.

    Raises:
        ValueError: it is not YAML, or has these.
    """
    depth = 0
    try:
        for event in yaml.parse(text, _Reader):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > DEEPEST or isinstance(event, yaml.AliasEvent):
                raise ValueError("it has aliases, or is nested too deep")
        value: object = yaml.load(text, _Reader)  # a SafeLoader
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split()).replace(' in "<unicode string>"', "")) from None
    return value


def write_yaml(values: Mapping[str, object]) -> str:
    """A mapping as YAML; `read_yaml` returns the same mapping."""
    text = ""
    for is_readable in (True, False):
        text = yaml.dump(dict(values), Dumper=_Writer, sort_keys=False, allow_unicode=is_readable)
        if _LINE_ENDS.isdisjoint(text):  # which PyYAML would fold into spaces
            break
    return text
