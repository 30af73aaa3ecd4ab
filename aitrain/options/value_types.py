"""Types of option values: bounds, and values that come in several forms from YAML, JSON, a shell or Python."""

import json
import math
import re
from pathlib import PurePath
from typing import Annotated, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic import AfterValidator, BeforeValidator, FiniteFloat, StringConstraints, WithJsonSchema

PositiveInt = Annotated[int, Ge(1)]
TwoOrMore = Annotated[int, Ge(2)]
ZeroOrOne = Annotated[int, Ge(0), Le(1)]
Seed = Annotated[int, Ge(0), Lt(2**32)]
PositiveFloat = Annotated[FiniteFloat, Gt(0)]
NonNegativeFloat = Annotated[FiniteFloat, Ge(0)]
Fraction = Annotated[float, Ge(0), Le(1)]
PositiveFraction = Annotated[float, Gt(0), Le(1)]
ProperFraction = Annotated[float, Ge(0), Lt(1)]

TABLES = ("trl", "vllm_args")
"""Options that are tables, given as KEY=VALUE and repeated."""
REPEATED = (*TABLES, "rl_env", "rl_stop")
"""Options whose flag may be repeated."""

_EXAMPLE = '{"key": 1}'


def leaves(annotation: object) -> list[object]:
    """The types, the values of Literals and the bounds that an annotation is made of."""
    arguments = () if get_origin(annotation) is dict else get_args(annotation)
    return [leaf for argument in arguments for leaf in leaves(argument)] or [annotation]


def normalize(value: object, annotation: object) -> object:
    """An option's value before pydantic checks it: a path becomes text, and `true` is not the number 1.

    Raises:
        ValueError: it is text of spaces or of several lines, or a boolean where none is allowed.
    """
    kinds = leaves(annotation)
    if isinstance(value, bool) and bool not in kinds:
        for word in ("on",) if value else ("no", "off"):
            if word in kinds:
                return word  # YAML reads these words as true and false
        raise ValueError(f"must not be {str(value).lower()}")
    if isinstance(value, str) and value.isspace():
        raise ValueError("must not be blank")
    if isinstance(value, str) and str in kinds and not value.isprintable():
        raise ValueError(f"must be one line of plain text, not {value[:60]!r}")
    return str(value) if isinstance(value, PurePath) else value


def shown(value: object) -> str:
    """A given value in an error message, at most 60 characters."""
    text = value if isinstance(value, str) and value and value.isprintable() else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


# -- tables


def _table(value: object) -> object:
    """A dict that config.yaml and environment.json can hold, which may be given as JSON; an empty one for None.

    Raises:
        ValueError: it is anything else, or holds what JSON cannot hold.
    """
    try:
        value = json.loads(value) if isinstance(value, str) else value
        json.dumps(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(
            f"is no JSON: {error}\nIn a shell, put single quotes around it, and double ones around the words in it:"
            f" '{_EXAMPLE}'"
        ) from None
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ValueError(f"must be a table like {_EXAMPLE}, not {shown(value)}")
    return value


Table = Annotated[dict[str, object], BeforeValidator(_table), WithJsonSchema({"type": ["object", "string", "null"]})]


# -- one value, or several

_ONE_OR_SEVERAL = WithJsonSchema({"type": ["string", "array"]})


def _joined(value: object) -> object:
    """Names or numbers with commas between them, also where they are a list."""
    items = value.split(",") if isinstance(value, str) else value
    return ",".join(str(item).strip() for item in items) if isinstance(items, (list, tuple)) else value


def _environments(value: object) -> object:
    """One place, or a list of several; a list of one is that one."""
    return value[0] if isinstance(value, (list, tuple)) and len(value) == 1 else value


Names = Annotated[str, BeforeValidator(_joined), _ONE_OR_SEVERAL]
Texts = Annotated[
    list[str],
    MinLen(1),
    BeforeValidator(lambda value: [value] if isinstance(value, str) else value),
    _ONE_OR_SEVERAL,
]
Environments = Annotated[str | list[str], MinLen(1), BeforeValidator(_environments), _ONE_OR_SEVERAL]


def _addresses(value: str) -> str:
    """The addresses without `/v1`: clients append their own paths."""
    addresses = [one.rstrip("/").removesuffix("/v1") for one in value.split(",")]
    for address in addresses:
        if not re.fullmatch(r"https?://[^/\s]\S*", address) or addresses.count(address) > 1:
            raise ValueError(f"must be different addresses like http://127.0.0.1:8000, not {address}")
    return ",".join(addresses)


def score_bounds(given: object) -> tuple[float, float] | None:
    """The lowest and the highest score of `LOW,HIGH` or a list; infinite ones for `any`; None for anything else."""
    if given == "any":
        return -math.inf, math.inf
    try:
        low, high = map(float, given if isinstance(given, (list, tuple)) else str(given).split(","))
    except (ValueError, TypeError):
        return None
    return (low, high) if -math.inf < low < high < math.inf else None


def _score_range(value: str) -> str:
    if score_bounds(value) is None:
        raise ValueError(f"must be LOW,HIGH with two numbers, the lower one first, such as -1,1, or any; not {value}")
    return value


RAY_WORKERS = "ray:"
"""Beginning of a number of concurrent calls that run in a Ray cluster."""
_TRACKER, _FUNCTION = "(none|wandb|tensorboard|trackio)", r"[^,]+:[A-Za-z_]\w*"

Addresses = Annotated[Names, AfterValidator(_addresses)]
Trackers = Annotated[Names, StringConstraints(pattern=f"^{_TRACKER}(,{_TRACKER})*$")]
ScoreRange = Annotated[Names, AfterValidator(_score_range)]
FunctionNames = Annotated[Names, StringConstraints(pattern=f"^{_FUNCTION}(,{_FUNCTION})*$")]
Weights = Annotated[
    list[PositiveFloat],
    MinLen(2),
    BeforeValidator(lambda value: value.split(",") if isinstance(value, str) else value),
    _ONE_OR_SEVERAL,
]
EnvWorkers = PositiveInt | Annotated[str, StringConstraints(pattern=f"^{RAY_WORKERS}[1-9][0-9]*$")]
