"""How values are read, from YAML, JSON, a shell and Python alike, and what is said about wrong ones."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Hashable, Mapping
from pathlib import Path, PurePath
from typing import Annotated, Any, get_args, get_origin

import yaml
from pydantic import AfterValidator, BeforeValidator, ValidationError
from pydantic.fields import FieldInfo

from aitrain.errors import did_you_mean

# -- YAML, read and written by the same rules


class _Reader(yaml.SafeLoader):
    """YAML 1.1 as people mean it: 1e-6 is a number, a date is text, and no name stands twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        """PyYAML would quietly take the last of two equal names."""
        names = [key for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        for number, key in enumerate(names):
            if key.value in {earlier.value for earlier in names[:number]}:
                raise yaml.constructor.ConstructorError(None, None, f"{key.value} stands there twice", key.start_mark)
        return super().construct_mapping(node, deep)


class _Writer(yaml.SafeDumper):
    """Puts in quotes what _Reader would not read as text."""


_LINE_ENDS = {"\x85", "\u2028", "\u2029"}
"""Unicode's own, beside the usual ones."""
_EXPONENT = re.compile(r"^[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$")

for _kind in (_Reader, _Writer):
    _kind.yaml_implicit_resolvers = {
        letter: [resolver for resolver in resolvers if not resolver[0].endswith(":timestamp")]
        for letter, resolvers in _kind.yaml_implicit_resolvers.items()
    }
    _kind.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT, list("-+0123456789"))


def read_yaml(text: str) -> Any:
    """What a YAML text says.

    Raises:
        yaml.YAMLError: it is no YAML.
    """
    try:
        return yaml.load(text, _Reader)  # a SafeLoader
    except (RecursionError, ValueError) as error:  # nested too deep, or a number of thousands of digits
        raise yaml.YAMLError(str(error)) from None


def write_yaml(values: Mapping[str, Any]) -> str:
    """A table as YAML; `read_yaml` makes the same table of it."""
    text = yaml.dump(dict(values), Dumper=_Writer, sort_keys=False, allow_unicode=True)
    if not _LINE_ENDS & set(text):
        return text
    return yaml.dump(dict(values), Dumper=_Writer, sort_keys=False)  # escaped: PyYAML would fold them into spaces


# -- values that come in several forms

_EXAMPLE = '{"key": 1}'


def read_json_object(value: object) -> object:
    """A JSON object given as text or as @file.json, as a dict; a dict stays what it is.

    Raises:
        ValueError: it is anything else, or holds what JSON cannot hold.
    """
    where = ""
    if isinstance(value, str):
        where = f" (in {value[1:]})" if value.startswith("@") else ""
        value = _parsed(_read_text(Path(os.path.expanduser(value[1:]))) if where else value, where)
    if value is not None and not isinstance(value, dict):
        raise ValueError(f"must be a JSON object like {_EXAMPLE}, not {_json_kind(value)}{where}")
    return _writable(value)


def _parsed(text: str, where: str) -> object:
    try:
        parsed = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"is not valid JSON{where}: {error.msg} at character {error.pos + 1}\n"
            f"Put single quotes around it, and double ones around the words in it: '{_EXAMPLE}'"
        ) from None
    except (RecursionError, ValueError):
        raise ValueError(f"is nested too deep, or has a number of thousands of digits{where}") from None
    if parsed is None:
        raise ValueError(f"must be a JSON object like {_EXAMPLE}, not null{where}")
    return parsed


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise ValueError(f"names a file that cannot be read: {path}: {why}") from None


def _json_kind(value: object) -> str:
    kinds: dict[type, str] = {list: "a list", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
    return kinds.get(type(value), f"a {type(value).__name__}")


def _writable(value: object) -> object:
    """config.yaml and environment.json must be able to hold it."""
    try:
        json.dumps(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"must hold only what JSON can hold: {error}") from None
    return value


def _read_table(value: object) -> object:
    """`trl:` with nothing behind it is an empty table."""
    if value is not None and not isinstance(value, dict):
        raise ValueError(f"must be a table like {{scale_rewards: none}}, not {_json_kind(value)}")
    return _writable(value or {})


def _read_names(value: object) -> object:
    """A YAML list of names is the names with commas."""
    return ",".join(map(str, value)) if isinstance(value, (list, tuple)) else value


def _read_texts(value: object) -> object:
    """One text as it is, or several as a JSON list."""
    if isinstance(value, str):
        value = _parsed_list(value) if value.startswith("[") else [value]
    if value is None:
        return None
    if not (isinstance(value, (list, tuple)) and value and all(isinstance(text, str) and text for text in value)):
        raise ValueError(f"must be a text, or a list of texts that are not empty, not {_shown(value)}")
    return list(value)


def _parsed_list(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return [text]


def _read_address(value: str) -> str:
    """TRL hangs its own paths behind the address, `/v1` among them."""
    if not re.fullmatch(r"https?://[^/\s]\S*", value):
        raise ValueError(f"must be an address like http://127.0.0.1:8000, not {value}")
    return value.rstrip("/").removesuffix("/v1")


TRACKERS = ("wandb", "tensorboard", "trackio")


def _read_trackers(value: str) -> str:
    names = [name.strip() for name in value.split(",")]
    unknown = next((name for name in names if name not in (*TRACKERS, "none")), None)
    if unknown is not None:
        near = did_you_mean(unknown, TRACKERS)
        raise ValueError(f"must be none, or some of {', '.join(TRACKERS)} with commas, not {unknown or value}.{near}")
    if "none" in names and len(names) > 1:
        raise ValueError(f"none and others at the same time: {value}")
    return ",".join(dict.fromkeys(names))


ANY_SCORE = "any"


def _read_score_range(value: object) -> object:
    """In YAML and Python also a pair of numbers: [-1, 1]."""
    return ",".join(map(str, value)) if isinstance(value, (list, tuple)) else value


def _checked_score_range(value: str) -> str:
    if value != ANY_SCORE and score_bounds(value) is None:
        raise ValueError(f"must be LOW,HIGH with two numbers, the lower one first, such as -1,1, or any; not {value}")
    return value.replace(" ", "")


def score_bounds(text: str) -> tuple[float, float] | None:
    """The lowest and the highest score that `LOW,HIGH` allows; infinite ones for `any`; None where it is neither."""
    if text == ANY_SCORE:
        return -math.inf, math.inf
    try:
        low, high = map(float, text.split(","))
    except ValueError:
        return None
    return (low, high) if -math.inf < low < high < math.inf else None


JsonObject = Annotated[dict[str, Any], BeforeValidator(read_json_object)]
Table = Annotated[dict[str, Any], BeforeValidator(_read_table)]
Names = Annotated[str, BeforeValidator(_read_names)]
Texts = Annotated[list[str], BeforeValidator(_read_texts)]
Trackers = Annotated[str, BeforeValidator(_read_names), AfterValidator(_read_trackers)]
ScoreRange = Annotated[str, BeforeValidator(_read_score_range), AfterValidator(_checked_score_range)]
Address = Annotated[str, AfterValidator(_read_address)]


def as_meant(value: Any, annotation: Any) -> Any:
    """Any option's value before it is checked: paths are text, and pydantic must not take `true` for the number 1.

    Raises:
        ValueError: it is empty text or more than a line, or a switch where there is none.
    """
    if isinstance(value, bool) and not _allows(annotation, bool):
        if not value and _allows(annotation, "no"):
            return "no"  # YAML takes the word `no` for false
        raise ValueError(f"must be {_kind_of(annotation)}, not {str(value).lower()}")
    if isinstance(value, str) and not value.strip():
        raise ValueError("must not be empty")
    if isinstance(value, str) and _allows(annotation, str) and not value.isprintable():
        raise ValueError(f"must be one line of plain text, not {value[:60]!r}")
    return str(value) if isinstance(value, PurePath) else value


def _allows(annotation: Any, kind: Any) -> bool:
    """Whether a type, or one word of a Literal, is among those that an annotation allows."""
    if get_origin(annotation) is dict:
        return kind is dict  # the types of its keys and values are another matter
    return annotation == kind or any(_allows(part, kind) for part in get_args(annotation))


def _kind_of(annotation: Any) -> str:
    kinds = {int: "a whole number", float: "a number", str: "text", dict: "a table"}
    words = ", ".join(f"'{word}'" for word in get_args(annotation) if isinstance(word, str))
    return next((name for kind, name in kinds.items() if _allows(annotation, kind)), words)


# -- what is said about wrong ones

_EXPECTED = {
    "greater_than": "above {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than": "below {lt}",
    "less_than_equal": "at most {le}",
    "int_parsing": "a whole number",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_parsing": "a number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_parsing": "true or false",
    "bool_type": "true or false",
    "literal_error": "{expected}",
    "string_type": "text (in YAML: in quotes)",
}
"""pydantic's kinds of errors, in words for people."""


def refusal(error: ValidationError, fields: Mapping[str, FieldInfo]) -> str:
    """The first thing that is wrong: the option, what it must be, what was given; then what the option does."""
    first = error.errors(include_url=False)[0]
    name, *inside = [str(part) for part in first["loc"]] or [""]
    if not name:
        return _message(first)
    if first["type"] == "extra_forbidden":
        return f"{name}: there is no such option.{did_you_mean(name, fields)}"
    return f"{name}: {'its keys ' if inside else ''}{_message(first)}\n{fields[name].description}"


def _message(error: Any) -> str:
    if error["type"] == "value_error":  # one of our own
        return str(error["ctx"]["error"])
    message = f"must be {_expected(error)}, not {_shown(error['input'])}"
    if error["type"] == "literal_error":
        near = did_you_mean(str(error["input"]), re.findall("'(.+?)'", error["ctx"]["expected"]))
        message += f".{near}" if near else ""
    return message


def _expected(error: Any) -> str:
    """Bounds come as floats: `above 0.0` reads badly."""
    context = error.get("ctx", {})
    whole = {key: int(value) for key, value in context.items() if isinstance(value, float) and value.is_integer()}
    expected: str = _EXPECTED.get(error["type"], error["msg"])
    return expected.format(**context | whole)


def _shown(value: object) -> str:
    is_plain = isinstance(value, str) and value.isprintable()
    text = "null" if value is None else str(value) if is_plain else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
