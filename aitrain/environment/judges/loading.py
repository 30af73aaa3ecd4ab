"""Judges by their description: a name, a place in a file, a URL, or an object with settings; several, or by source."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from aitrain.environment.adapters.user_objects import Place, check_objects, load_object, source_files
from aitrain.environment.judges.judge_set import ANY_SOURCE, Judge, Judges
from aitrain.environment.judges.rules import EXAMPLES, RULES, SOURCES, require_math_verify
from aitrain.environment.score_parsing import ZERO_TO_ONE, Bounds
from aitrain.errors import ConfigError, did_you_mean
from aitrain.options.value_types import score_bounds

JudgeDescription = str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]]
"""A judge, several, or judges by `data_source`; docs/judges.md describes the forms."""
MODEL_JUDGES = {"rubric": "Rubric", "ranking": "Ranking"}
"""Judges that ask a model, with their classes; each is in the module of its name."""
REMOTE = ("http://", "https://")
_ROOM = "aitrain.environment.judges"


@dataclass(frozen=True)
class JudgeSpec:
    """The description of one judge."""

    place: str
    """Its name, `file.py:function`, `module:function`, or URL."""
    name: str
    weight: float = 1.0
    bounds: Bounds = ZERO_TO_ONE
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_remote(self) -> bool:
        """Whether it is behind a URL."""
        return self.place.startswith(REMOTE)

    @property
    def users_place(self) -> Place | None:
        """File or module of the user's own judge, and its name there; None for other judges."""
        module, _, name = self.place.rpartition(":")
        return None if self.is_remote or not module else (module, name)

    @property
    def may_hang(self) -> bool:
        """Whether it runs code that should be in a process which can be ended: the user's, and math-verify."""
        return self.users_place is not None or self.place == "math"

    def __str__(self) -> str:
        weight = "" if self.weight == 1 else f"{self.weight:g} x "
        asked = [str(self.settings[name]) for name in ("model", "url") if name in self.settings]
        limits = [
            f"at most {self.settings[name]} {name[4:]}" for name in ("max_calls", "max_tokens") if name in self.settings
        ]
        details = ", ".join(filter(None, (" at ".join(asked), *limits)))
        return f"{weight}{self.name}{f' ({details})' if details else ''}"

    def check(self) -> None:
        """Check it without running the user's code.

        Raises:
            ConfigError: there is no such judge, or a setting is wrong.
        """
        if self.users_place is not None:
            check_objects([self.users_place], "judge")
        elif self.place in RULES:
            if self.settings:
                raise ConfigError(f"judges: the rule {self.place} has no settings, such as {next(iter(self.settings))}")
            if self.place == "math":
                require_math_verify()
        elif self.is_remote or self.place in MODEL_JUDGES:
            self._server_judge()
        else:
            known = [*RULES, *MODEL_JUDGES]
            raise ConfigError(
                f"judges: there is no judge {self.place}.{did_you_mean(self.place, known)}\nName one of"
                f" {', '.join(known)}; your own, such as my_judges.py:polite; or a URL."
            )

    def load(self) -> Judge:
        """The judge, with the user's code imported.

        Raises:
            ConfigError: it cannot be loaded.
        """
        function: Any
        if self.users_place is not None:
            function = load_object(*self.users_place)
            if inspect.isclass(function):
                function = function(**self.settings)
            elif self.settings:
                function = partial(function, **self.settings)
        else:
            function = RULES[self.place] if self.place in RULES else self._server_judge()
        return Judge(self.name, function, self.weight, self.bounds, EXAMPLES.get(self.place))

    def _server_judge(self) -> Any:
        module, kind = (self.place, MODEL_JUDGES[self.place]) if not self.is_remote else ("remote_judge", "RemoteJudge")
        made = getattr(import_module(f"{_ROOM}.{module}"), kind)
        settings = {"url": self.place, **self.settings} if self.is_remote else self.settings
        takes = inspect.signature(made).parameters
        for name in settings:
            if name not in takes:
                key = " A key belongs into an environment variable, which key_name names." if "key" in name else ""
                raise ConfigError(
                    f"judges: {self.place} does not take {name}.{did_you_mean(name, takes)}{key}\n"
                    f"It takes: {', '.join(takes)}"
                )
        missing = [name for name, one in takes.items() if one.default is one.empty and name not in settings]
        if missing:
            raise ConfigError(f"judges: {self.place} also needs {', '.join(missing)}")
        try:
            return TypeAdapter(made).validate_python(settings)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise ConfigError(f"judges: {where} of {self.place}: {first['msg']}") from None


@dataclass(frozen=True)
class JudgeSpecs:
    """The descriptions of judges by `data_source`."""

    by_source: Mapping[str, Sequence[JudgeSpec]]
    is_given: bool = True
    """Whether they are described; else they are those of well-known data sets, most of which a run does not need."""

    @classmethod
    def read(cls, description: JudgeDescription | None) -> JudgeSpecs:
        """Read a description; without one, well-known data sets have their rules.

        Raises:
            ConfigError: it is none.
        """
        if description is None:
            return cls({source: [JudgeSpec(rule, rule)] for source, rule in SOURCES.items()}, is_given=False)
        if isinstance(description, Mapping) and "judge" not in description:
            return cls({str(source): _several(one) for source, one in description.items()})
        return cls({ANY_SOURCE: _several(description)})

    def __str__(self) -> str:
        several = {source: " + ".join(map(str, judges)) for source, judges in self.by_source.items()}
        return "; ".join(
            judges if source == ANY_SOURCE else f"{source}: {judges}" for source, judges in several.items()
        )

    def __iter__(self) -> Iterator[JudgeSpec]:
        return iter(one for several in self.by_source.values() for one in several)

    def check(self) -> None:
        """Check all of them without running the user's code.

        Raises:
            ConfigError: one is wrong.
        """
        for one in self if self.is_given else ():
            one.check()

    def load(self) -> Judges:
        """The judges.

        Raises:
            ConfigError: one cannot be loaded.
        """
        self.check()
        return Judges({source: [one.load() for one in several] for source, several in self.by_source.items()})

    @property
    def source_files(self) -> list[Path]:
        """The user's own files among the judges'."""
        return source_files(place for one in self if (place := one.users_place) is not None)


def load(description: JudgeDescription | None = None) -> Judges:
    """The judges of a description, such as `"gsm8k"`, `["exact", "my_judges.py:polite"]`, or judges by `data_source`.

    Raises:
        ConfigError: a judge does not exist, or a setting is wrong.
    """
    return JudgeSpecs.read(description).load()


def _several(description: Any) -> list[JudgeSpec]:
    parts = description if isinstance(description, (list, tuple)) else [description]
    specs: list[JudgeSpec] = []
    for part in parts:
        spec = _one(part)
        count = sum(other.name.rpartition("_")[0] == spec.name or other.name == spec.name for other in specs)
        specs.append(spec if not count else JudgeSpec(**{**vars(spec), "name": f"{spec.name}_{count}"}))
    if not specs:
        raise ConfigError("judges: the list of judges is empty")
    return specs


def _one(part: Any) -> JudgeSpec:
    settings = dict(part) if isinstance(part, Mapping) else {"judge": part}
    place = settings.pop("judge", None)
    if not isinstance(place, str) or not place:
        raise ConfigError(
            f"judges: {str(part)[:80]!r} is no judge\nGive a name, such as gsm8k; or an object with its settings, such"
            ' as {"judge": "rubric", "rubric": "...", "url": "...", "model": "..."}.'
        )
    short = place.rpartition(":")[2] if not place.startswith(REMOTE) else "remote"
    name, weight, given = settings.pop("name", short), settings.pop("weight", 1.0), settings.pop("range", ZERO_TO_ONE)
    bounds = score_bounds(",".join(map(str, given)) if isinstance(given, (list, tuple)) else str(given))
    if bounds is None:
        raise ConfigError(f"judges: the range of {name} must be its lowest and highest score, not {given}")
    if isinstance(weight, bool) or not isinstance(weight, (int, float)):
        raise ConfigError(f"judges: the weight of {name} must be a number, not {weight!r}")
    return JudgeSpec(place, str(name), float(weight), bounds, settings)
