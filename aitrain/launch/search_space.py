"""The search space of a sweep: the options that its trials vary, read from `search` of the sweep's file."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from aitrain.errors import ConfigError, did_you_mean
from aitrain.options.option import options_of
from aitrain.options.other_names import unknown_option
from aitrain.options.train import TrainConfig
from aitrain.options.value_types import shown

TRL = "trl."
RANGE_KEYS = ("low", "high", "log", "step")
FORMS = "a list of values, or a range like {low: 1e-6, high: 1e-4, log: true}"
MOST_PROBES = 100
MOST_COMBINATIONS = 10_000
"""Finite spaces up to this size are searched without trying a combination twice; a grid is not larger."""
LOG_WORDS = ("log", "loguniform", "log_uniform")
RANGE_WORDS = (*LOG_WORDS, "float", "uniform", "int", "int_uniform")
"""Words that AITraining's sweep_params have for kinds of ranges."""

Number = int | float


@dataclass(frozen=True)
class SearchedOption:
    """An option with the values that trials may give it: a list, or a range of numbers."""

    name: str
    """Name of the option; `trl.KEY` for a field of TRL."""
    choices: tuple[object, ...] = ()
    """The values of a list; empty for a range."""
    low: Number = 0
    high: Number = 0
    log: bool = False
    """Whether the range is searched by orders of magnitude."""
    step: Number | None = None
    is_integer: bool = False

    @property
    def count(self) -> int | None:
        """Number of values; None if there are infinitely many."""
        if self.choices:
            return len(self.choices)
        if self.is_integer:
            return int((self.high - self.low) // (self.step or 1)) + 1
        return None if self.step is None else int((self.high - self.low) / self.step * (1 + 1e-12)) + 1

    @property
    def values(self) -> tuple[object, ...]:
        """All values, if there are finitely many."""
        return self.choices or tuple(tidy(self.low + index * (self.step or 1)) for index in range(self.count or 0))

    @property
    def top(self) -> Number:
        """The highest value of a range, which is below `high` if no step leads to it."""
        if self.step is None or self.count is None:
            return self.high
        return tidy(self.low + (self.count - 1) * self.step)

    @property
    def probes(self) -> tuple[object, ...]:
        """Values to check before the first trial: all of a list or of a short range, else the ends of the range."""
        is_short = self.choices or (self.count is not None and self.count <= MOST_PROBES)
        return self.values if is_short else (self.low, self.top)


@dataclass(frozen=True)
class SearchSpace:
    """The searched options."""

    options: tuple[SearchedOption, ...]

    @property
    def size(self) -> int | None:
        """Number of combinations; None if a range has infinitely many values."""
        return math.prod(option.count or 0 for option in self.options) or None

    def combinations(self) -> Iterator[dict[str, object]]:
        """All combinations of a finite space; the last option changes fastest."""
        names = [option.name for option in self.options]
        for values in itertools.product(*(option.values for option in self.options)):
            yield dict(zip(names, values, strict=True))

    def probes(self) -> Iterator[dict[str, object]]:
        """Combinations to check: each probe with the first values of the other options, then the probes' product as
        far as it is small."""
        first = {option.name: option.probes[0] for option in self.options}
        for option in self.options:
            yield from ({**first, option.name: value} for value in option.probes)
        product = itertools.product(*(option.probes for option in self.options))
        for values in itertools.islice(product, 200):
            yield dict(zip(first, values, strict=True))


def tidy(number: Number) -> Number:
    """A sum of steps without its rounding error: 0.3 of 0.1 + 0.1 + 0.1."""
    return number if isinstance(number, int) else float(f"{number:.12g}")


def in_our_form(search: Mapping[str, object]) -> dict[str, object]:
    """`search` with the forms of AITraining's sweep_params replaced by those of ours."""
    ours = {name: _from_aitraining(values) for name, values in search.items()}
    if isinstance(fields := search.get("trl"), Mapping):
        ours["trl"] = {name: _from_aitraining(values) for name, values in fields.items()}
    return ours


def read_space(search: Mapping[str, object]) -> SearchSpace:
    """The search space of `search` in our form.

    Raises:
        ConfigError: a name is no option, or its values are neither a list nor a range.
    """
    flat = dict(search)
    fields = flat.pop("trl", {})
    if not isinstance(fields, Mapping):
        raise ConfigError("search: trl must be a table of TRL's fields, like {num_iterations: [1, 2]}")
    kinds = {option.name: option.type_name for option in options_of(TrainConfig)}
    for name in flat:
        if name not in kinds:
            raise ConfigError(unknown_option(name, kinds, " (in search)"))
    read = [_searched(name, values, kinds[name]) for name, values in flat.items()]
    return SearchSpace((*read, *(_searched(TRL + str(name), values, None) for name, values in fields.items())))


def with_values(options: Mapping[str, object], values: Mapping[str, object]) -> dict[str, object]:
    """Options of a run with the values of a trial; `trl.KEY` goes into the table `trl`."""
    given = {name: value for name, value in values.items() if not name.startswith(TRL)}
    fields = {name.removeprefix(TRL): value for name, value in values.items() if name.startswith(TRL)}
    table = options.get("trl") or {}
    if fields and isinstance(table, Mapping):
        given["trl"] = {**table, **fields}
    return {**options, **given}


def _searched(name: str, given: object, kind: str | None) -> SearchedOption:
    """`kind` is the type name of an option, None for a field of TRL."""
    if isinstance(given, list):
        if not given:
            raise ConfigError(f"search: {name}: the list is empty")
        if len({json.dumps(value, sort_keys=True, default=str) for value in given}) < len(given):
            raise ConfigError(f"search: {name}: a value is in the list twice")
        return SearchedOption(name, choices=tuple(given))
    if not isinstance(given, dict):
        raise ConfigError(f"search: {name}: must be {FORMS}\nFor a fixed value, write it under options.")
    for key in map(str, given):
        if key not in RANGE_KEYS:
            raise ConfigError(f"search: {name}: a range has no {key}.{did_you_mean(key, RANGE_KEYS)} Write {FORMS}")
    return _range(name, given, kind)


def _range(name: str, given: Mapping[str, object], kind: str | None) -> SearchedOption:
    low, high, step = (_number(name, key, given.get(key)) for key in ("low", "high", "step"))
    log = given.get("log", False)
    if low is None or high is None:
        raise ConfigError(f"search: {name}: a range needs low and high, like {{low: 1e-6, high: 1e-4, log: true}}")
    is_integer = kind == "integer" if kind is not None else isinstance(low, int) and isinstance(high, int)
    wrong = (
        (kind not in (None, "integer", "number"), "is not a number: write a list of values"),
        (not isinstance(log, bool), f"log must be true or false, not {shown(log)}"),
        (low >= high, f"low must be below high, not {low} and {high}"),
        (bool(log) and low <= 0, f"a logarithmic range must be above 0, and low is {low}"),
        (bool(log) and step is not None, "a range has either log or step"),
        (step is not None and step <= 0, f"step must be above 0, not {step}"),
        (
            is_integer and not all(isinstance(value, int) for value in (low, high, step or 1)),
            "low, high and step must be whole numbers",
        ),
    )
    for is_wrong, why in wrong:
        if is_wrong:
            raise ConfigError(f"search: {name}: {why}")
    if not is_integer:
        low, high = float(low), float(high)
    return SearchedOption(name, (), low, high, bool(log), step, is_integer)


def _number(name: str, key: str, value: object) -> Number | None:
    if value is None or (isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)):
        return value
    raise ConfigError(f"search: {name}: {key} must be a number, not {shown(value)}")


def _from_aitraining(given: object) -> object:
    """The forms of AITraining's sweep_params, `{type: log_uniform, low: .., high: ..}`, `{type: categorical, values:
    [..]}` and `[low, high, log_uniform]`, in the form of ours; anything else is returned unchanged."""
    if isinstance(given, list) and len(given) == 3 and given[2] in RANGE_WORDS:
        given = {"type": given[2], "low": given[0], "high": given[1]}
    if not isinstance(given, dict) or not isinstance(given.get("type"), str):
        return given
    kind = str(given["type"]).lower()
    rest = {key: value for key, value in given.items() if key != "type"}
    if kind == "categorical":
        return rest.get("values", rest.get("choices", given))
    if kind in RANGE_WORDS:
        return {**rest, "log": True} if kind in LOG_WORDS else rest
    return given
