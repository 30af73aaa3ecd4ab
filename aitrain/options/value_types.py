"""Types of option values: bounds, and values that come in several forms from YAML, JSON, a shell or Python."""

from __future__ import annotations

import json
import math
import os
import re
from pathlib import Path, PurePath
from typing import Annotated, get_args, get_origin

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema

from aitrain.errors import did_you_mean

PositiveInt = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
FiniteFloat = Annotated[float, Field(allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1)]
PositiveFraction = Annotated[float, Field(gt=0, le=1)]
ProperFraction = Annotated[float, Field(ge=0, lt=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
"""The range that vLLM accepts."""
ZeroOrOne = Annotated[int, Field(ge=0, le=1)]
TwoOrMore = Annotated[int, Field(ge=2)]
Seed = Annotated[int, Field(ge=0, lt=2**32)]
LoggingSteps = Annotated[int, WithJsonSchema({"type": "integer", "anyOf": [{"const": -1}, {"minimum": 1}]})]
_NOT_IN_NAMES = r"\s!-*,/:-@\[-^`{-~"
"""All but letters, digits and `_.+-`: in JavaScript a word character is ASCII only."""
ProjectName = Annotated[str, WithJsonSchema({"type": "string", "pattern": rf"^(?!\.+$)[^{_NOT_IN_NAMES}]{{1,100}}$"})]

TABLES = {"trl": "scale_rewards=none", "vllm_args": "max_num_seqs=64"}
"""Options that are tables, given as KEY=VALUE and repeated; each with an example."""
REPEATED = (*TABLES, "rl_env")
"""Options whose flag may be repeated."""

_EXAMPLE = '{"key": 1}'


def read_json_object(value: object) -> object:
    """A JSON object given as text or as @file.json, as a dict; a dict is returned unchanged.

    Raises:
        ValueError: it is anything else, or holds what JSON cannot hold.
    """
    where = ""
    if isinstance(value, str):
        where = f" (in {value[1:]})" if value.startswith("@") else ""
        if where:
            path = Path(os.path.expanduser(value[1:]))
            try:
                value = path.read_text(encoding="utf-8-sig")
            except (OSError, UnicodeDecodeError) as error:
                why = getattr(error, "strerror", None) or "it is not UTF-8 text"
                raise ValueError(f"names a file that cannot be read: {path}: {why}") from None
        value = _parsed(value, where)
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


def _json_kind(value: object) -> str:
    kinds: dict[type, str] = {list: "a list", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
    return kinds.get(type(value), f"a {type(value).__name__}")


def _writable(value: object) -> object:
    """The value, if config.yaml and environment.json can hold it."""
    try:
        json.dumps(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"must hold only what JSON can hold: {error}") from None
    return value


def _read_table(value: object) -> object:
    """`trl:` without a value is an empty table."""
    if value is not None and not isinstance(value, dict):
        raise ValueError(f"must be a table like {{scale_rewards: none}}, not {_json_kind(value)}")
    return _writable(value or {})


def _read_names(value: object) -> object:
    """A list of names or numbers, joined with commas."""
    return ",".join(map(str, value)) if isinstance(value, (list, tuple)) else value


def _read_texts(value: object) -> object:
    """One text, or several as a JSON list."""
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.startswith("[") else [value]
        except ValueError:
            value = [value]
    if value is None:
        return None
    if not (isinstance(value, (list, tuple)) and value and all(isinstance(text, str) and text for text in value)):
        raise ValueError(f"must be a text, or a list of texts that are not empty, not {shown(value)}")
    return list(value)


def _read_environments(value: object) -> object:
    """One place, or a list of several; a list of one is that one."""
    if not isinstance(value, (list, tuple)):
        return value
    places = [str(one) if isinstance(one, PurePath) else one for one in value]
    if not places or not all(isinstance(one, str) and one.strip() and one.isprintable() for one in places):
        raise ValueError(f"must be the place of an environment, or a list of places, not {shown(value)}")
    return places[0] if len(places) == 1 else places


def _read_addresses(value: str) -> str:
    """The addresses without `/v1`: clients append their own paths."""
    addresses = [one.strip().rstrip("/").removesuffix("/v1") for one in value.split(",")]
    wrong = next((one for one in addresses if not re.fullmatch(r"https?://[^/\s]\S*", one)), None)
    if wrong is not None:
        raise ValueError(f"must be an address like http://127.0.0.1:8000, not {wrong}")
    if twice := next((one for one in addresses if addresses.count(one) > 1), None):
        raise ValueError(f"has {twice} twice")
    return ",".join(addresses)


RAY_WORKERS = "ray:"
"""Beginning of a number of concurrent calls that run in a Ray cluster."""


def _read_workers(value: object) -> object:
    """A number, or a text such as ray:64."""
    text = str(int(value) if isinstance(value, float) and value.is_integer() else value).strip()
    if not re.fullmatch(rf"({RAY_WORKERS})?[0-9]{{1,4000}}", text) or not int(text.removeprefix(RAY_WORKERS)):
        raise ValueError(f"must be a whole number, at least 1, or ray:N, not {shown(value)}")
    return text if text.startswith(RAY_WORKERS) else int(text)


TRACKERS = ("wandb", "tensorboard", "trackio")


def _read_trackers(value: str) -> str:
    names = [name.strip() for name in value.split(",")]
    unknown = next((name for name in names if name not in (*TRACKERS, "none")), None)
    if unknown is not None:
        near = did_you_mean(unknown, TRACKERS)
        raise ValueError(f"must be none, or some of {', '.join(TRACKERS)} with commas, not {unknown or value}.{near}")
    if "none" in names and len(names) > 1:
        raise ValueError(f"none cannot be combined with a tracker: {value}")
    return ",".join(dict.fromkeys(names))


ANY_SCORE = "any"


def _checked_score_range(value: str) -> str:
    if value != ANY_SCORE and score_bounds(value) is None:
        raise ValueError(f"must be LOW,HIGH with two numbers, the lower one first, such as -1,1, or any; not {value}")
    return value.replace(" ", "")


def score_bounds(given: object) -> tuple[float, float] | None:
    """The lowest and the highest score of `LOW,HIGH` or a list; infinite ones for `any`; None for anything else."""
    if given == ANY_SCORE:
        return -math.inf, math.inf
    try:
        low, high = map(float, given if isinstance(given, (list, tuple)) else str(given).split(","))
    except (ValueError, TypeError):
        return None
    return (low, high) if -math.inf < low < high < math.inf else None


def _checked_function(value: str) -> str:
    module, _, function = value.rpartition(":")
    if not (module and function.isidentifier()):
        raise ValueError(f"must be module:function or file.py:function, not {shown(value)}")
    return value


def _checked_functions(value: str) -> str:
    return ",".join(_checked_function(one.strip()) for one in value.split(","))


def weights_of(text: str) -> list[float]:
    """The numbers of `2,1`; empty for any other text."""
    try:
        found = [float(one) for one in text.split(",")]
    except ValueError:
        return []
    return found if all(0 < one < math.inf for one in found) else []


def _checked_weights(value: str) -> str:
    if len(weights_of(value)) < 2:
        raise ValueError(f"must be two or more numbers above 0 with commas, such as 2,1, not {shown(value)}")
    return value.replace(" ", "")


_TEXT = {"type": "string"}
_TRACKER = f"({'|'.join(TRACKERS)})"

JsonObjectOption = Annotated[
    dict[str, object],
    BeforeValidator(read_json_object),
    WithJsonSchema({"anyOf": [{"type": "object"}, {"type": "string", "pattern": r"^(@.|\s*\{)"}]}),
]
Table = Annotated[dict[str, object], BeforeValidator(_read_table), WithJsonSchema({"type": ["object", "null"]})]
Names = Annotated[
    str,
    BeforeValidator(_read_names),
    WithJsonSchema({"anyOf": [_TEXT, {"type": "array", "items": _TEXT, "minItems": 1}]}),
]
Texts = Annotated[
    list[str],
    BeforeValidator(_read_texts),
    WithJsonSchema({"anyOf": [_TEXT, {"type": "array", "items": {**_TEXT, "minLength": 1}, "minItems": 1}]}),
]
Environments = Annotated[
    str | list[str],
    BeforeValidator(_read_environments),
    WithJsonSchema(
        {
            "anyOf": [
                {**_TEXT, "pattern": r"\S"},
                {"type": "array", "items": {**_TEXT, "pattern": r"\S"}, "minItems": 1},
            ]
        }
    ),
]
Trackers = Annotated[
    str,
    BeforeValidator(_read_names),
    AfterValidator(_read_trackers),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "pattern": rf"^ *(none|{_TRACKER}( *, *{_TRACKER})*) *$"},
                {"type": "array", "items": {"enum": list(TRACKERS)}, "minItems": 1},
            ]
        }
    ),
]
EnvWorkers = Annotated[
    int | str,
    BeforeValidator(_read_workers),
    WithJsonSchema(
        {"anyOf": [{"type": "integer", "minimum": 1}, {"type": "string", "pattern": "^(ray:)?[1-9][0-9]*$"}]}
    ),
]
ScoreRange = Annotated[
    str,
    BeforeValidator(_read_names),  # a pair of numbers: [-1, 1]
    AfterValidator(_checked_score_range),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "pattern": r"^(any|[^,]*[0-9][^,]*,[^,]*[0-9][^,]*)$"},
                {"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 2},
            ]
        }
    ),
]
FunctionName = Annotated[
    str, AfterValidator(_checked_function), WithJsonSchema({"type": "string", "pattern": r".:[A-Za-z_]\w*$"})
]
FunctionNames = Annotated[
    str,
    BeforeValidator(_read_names),
    AfterValidator(_checked_functions),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "pattern": r".:[A-Za-z_]\w* *(,|$)"},
                {"type": "array", "items": {"type": "string", "pattern": r".:[A-Za-z_]\w* *(,|$)"}, "minItems": 1},
            ]
        }
    ),
]
_WEIGHT = r" *(?=[0-9.]*[1-9])[0-9]*\.?[0-9]+(e[+-]?[0-9]+)? *"
Weights = Annotated[
    str,
    BeforeValidator(_read_names),
    AfterValidator(_checked_weights),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "pattern": rf"^{_WEIGHT}(,{_WEIGHT})+$"},
                {"type": "array", "items": {"type": "number", "exclusiveMinimum": 0}, "minItems": 2},
            ]
        }
    ),
]
_ADDRESS = r"https?://[^/\s,][^\s,]*"
Addresses = Annotated[
    str,
    BeforeValidator(_read_names),
    AfterValidator(_read_addresses),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "pattern": rf"^{_ADDRESS}( *, *{_ADDRESS})*$"},
                {"type": "array", "items": {"type": "string", "pattern": f"^{_ADDRESS}$"}, "minItems": 1},
            ]
        }
    ),
]


def normalize(value: object, annotation: object) -> object:
    """An option's value before pydantic checks it: a path becomes text, and `true` is not the number 1.

    Raises:
        ValueError: it is empty text, text of several lines, or a boolean where none is allowed.
    """
    if isinstance(value, bool) and not _allows(annotation, bool):
        if not value and _allows(annotation, "no"):
            return "no"  # YAML reads the word `no` as false
        raise ValueError(f"must be {_kind_of(annotation)}, not {str(value).lower()}")
    if isinstance(value, str) and not value.strip():
        raise ValueError("must not be empty")
    if isinstance(value, str) and _allows(annotation, str) and not value.isprintable():
        raise ValueError(f"must be one line of plain text, not {value[:60]!r}")
    return str(value) if isinstance(value, PurePath) else value


def _allows(annotation: object, kind: object) -> bool:
    """Whether a type, or one value of a Literal, is among those that an annotation allows."""
    if get_origin(annotation) is dict:
        return kind is dict  # the types of its keys and values do not count
    return annotation == kind or any(_allows(part, kind) for part in get_args(annotation))


def _kind_of(annotation: object) -> str:
    kinds = {int: "a whole number", float: "a number", str: "text", dict: "a table"}
    words = ", ".join(f"'{word}'" for word in get_args(annotation) if isinstance(word, str))
    return next((name for kind, name in kinds.items() if _allows(annotation, kind)), words)


def shown(value: object) -> str:
    """A given value in an error message, at most 60 characters."""
    is_plain = isinstance(value, str) and value.isprintable()
    text = "null" if value is None else str(value) if is_plain else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
