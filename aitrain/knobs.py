"""The options as people meet them: flags, YAML keys, checks, and the table in docs/options.md."""

from __future__ import annotations

import json
import os
import textwrap
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml
from annotated_types import Ge, Gt, Interval, Le, Lt
from pydantic.fields import FieldInfo

from aitrain.config import TrainConfig
from aitrain.errors import ConfigError, did_you_mean
from aitrain.values import read_yaml

ELSEWHERE = {
    "token": "Tokens are taken from HF_TOKEN or the hub login only: a flag would show them to everyone on the machine.",
    "wandb_token": "Tokens are taken from WANDB_API_KEY or `wandb login` only.",
    "trainer": "aitrain grpo has one trainer: leave it out.",
    "train": "aitrain grpo always trains: leave it out.",
    "use_flash_attention_2": "Say --attn-implementation flash_attention_2.",
    "padding": "Generation needs left padding and has it: leave it out.",
    "data_path": "The environment builds its dataset: leave it out, or hand it over with --rl-env-config.",
    "auto_find_batch_size": "A smaller batch would break the groups: set --batch-size.",
    "base_model": "Here it is called model.",
    "task": "aitrain grpo has one task: leave it out.",
    "params": "Options are not nested: write them without an indent.",
    "backend": "aitrain trains on the machine that it runs on: leave it out.",
    "distributed_backend": "Several processes always share the work by DDP: leave it out, and set --num-processes;"
    " for DeepSpeed hand TRL its file, --trl deepspeed=FILE.",
    "unsloth": "aitrain trains with TRL as it is: leave it out.",
    "max_prompt_length": "Say --rl-max-prompt-length.",
    "max_completion_length": "Say --rl-max-new-tokens.",
    "valid_split": "Cases are held out by --eval-cases, or come from the environment's build_eval_dataset.",
}
"""AITraining's flags that aitrain has no option for, and what to do about each."""


@dataclass(frozen=True)
class Option:
    """One field of TrainConfig, as flags, help and docs need it."""

    name: str
    sentence: str
    section: str
    default: Any
    kind: str
    may_change: bool
    """Whether a resumed run may have another value."""

    @property
    def flag(self) -> str:
        """The option's flag: `--rl-num-generations`."""
        return "--" + self.name.replace("_", "-")

    @property
    def choices(self) -> tuple[str, ...]:
        """The words that it may be; empty where it takes anything else."""
        is_choice = self.kind.partition(",")[0] not in ("switch", "integer", "number", "text", "JSON object")
        return tuple(self.kind.split(", ")) if is_choice else ()

    @property
    def placeholder(self) -> str:
        """What stands behind the flag in its help: `INTEGER`, `KEY=VALUE`."""
        return "KEY=VALUE" if self.name == "trl" else self.kind.partition(",")[0].upper()

    @property
    def is_switch(self) -> bool:
        """Whether the flag stands alone, with a `--no-` form beside it."""
        return self.kind == "switch"

    @property
    def shown_default(self) -> str:
        """The default as it would be typed."""
        if self.is_switch:
            return "on" if self.default else "off"
        return "unset" if self.default is None else str(self.default)


@cache
def options() -> tuple[Option, ...]:
    """Every option, in the order of config.py."""
    return tuple(_option(name, field) for name, field in TrainConfig.model_fields.items())


def _option(name: str, field: FieldInfo) -> Option:
    extra = field.json_schema_extra
    assert isinstance(extra, dict)  # every field is made by config.option
    default = field.get_default(call_default_factory=True, validated_data={})
    kind = _kind(field.annotation, field.metadata)
    return Option(name, field.description or "", str(extra["section"]), default, kind, bool(extra["may_change"]))


def _kind(annotation: Any, metadata: list[Any]) -> str:
    """What may stand behind the flag: `integer, at least 2`, `ddp`, `text`."""
    if get_origin(annotation) in (Union, types.UnionType):  # `X | None`: unset is possible, and goes without saying
        annotation = next(arg for arg in get_args(annotation) if arg is not type(None))
    if get_origin(annotation) is Annotated:
        inner, *more = get_args(annotation)
        return _kind(inner, [*metadata, *more])
    if get_origin(annotation) is Literal:
        return ", ".join(map(str, get_args(annotation)))
    return _type_name(annotation) + "".join(_bounds(metadata))


def _type_name(annotation: Any) -> str:
    names = {bool: "switch", int: "integer", float: "number", str: "text", list[str]: "text"}
    return names.get(annotation, "JSON object")


def _bounds(metadata: list[Any]) -> Iterator[str]:
    for bound in metadata:
        if isinstance(bound, FieldInfo):
            yield from _bounds(bound.metadata)
        elif isinstance(bound, Interval):
            yield from _bounds(list(bound))
        else:
            yield from _bound(bound)


def _bound(bound: Any) -> Iterator[str]:
    if isinstance(bound, Ge):
        yield f", at least {bound.ge}"
    elif isinstance(bound, Gt):
        yield f", above {bound.gt}"
    elif isinstance(bound, Le):
        yield f", at most {bound.le}"
    elif isinstance(bound, Lt):
        yield f", below {bound.lt}"


def as_help(width: int = 80) -> str:
    """Every flag with its sentence and default, section by section."""
    lines = []
    for section in dict.fromkeys(option.section for option in options()):
        lines += ["", f"{section}:"]
        for option in options():
            lines += _help_entry(option, width) if option.section == section else []
    return "\n".join(lines[1:])


def _help_entry(option: Option, width: int) -> list[str]:
    value = "" if option.is_switch else " " + ("|".join(option.choices) or option.placeholder)
    text = f"{option.sentence} [{option.shown_default}]"
    return [f"  {option.flag}{value}", *textwrap.wrap(text, width, initial_indent=" " * 8, subsequent_indent=" " * 8)]


DISPLACES = {
    "rl_env": ("rl_env_module", "rl_env_class"),
    "rl_env_module": ("rl_env",),
    "rl_prompts_per_step": ("gradient_accumulation",),
    "gradient_accumulation": ("rl_prompts_per_step",),
}
"""Two ways to say one thing: a flag also wins over the other way in the file."""


def resolve(file: Path | None, flags: Mapping[str, Any], trl: list[str]) -> TrainConfig:
    """The configuration of a command: defaults, then the file, then the flags.

    Raises:
        ConfigError: the file cannot be read, or a name or value is wrong.
    """
    from_file = read_file(file) if file else {}
    for name in {other for flag in flags for other in DISPLACES.get(flag, ())}:
        from_file.pop(name, None)
    given = from_file | dict(flags)
    if trl:
        fields = TrainConfig(trl=from_file.get("trl", {})).trl
        given["trl"] = {**fields, **dict(map(_key_and_value, trl))}
    return TrainConfig(**given)


def read_file(path: Path) -> dict[str, Any]:
    """The options of a YAML file.

    Raises:
        ConfigError: it cannot be read, is not a table of options, or has a name that is none.
    """
    try:
        loaded = read_yaml(Path(os.path.expanduser(path)).read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"--config: cannot read {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config: {path}{_not_yaml(error)}") from None
    if not isinstance(loaded, dict):
        raise ConfigError(f"--config: {path} must hold one option a line, like `lr: 1e-5`")
    for key in loaded:
        _refuse_unknown(str(key), path)
    return {str(key): value for key, value in loaded.items()}


def _not_yaml(error: yaml.YAMLError | UnicodeDecodeError) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        what = " ".join(filter(None, (error.context, error.problem)))
        return f", line {error.problem_mark.line + 1}: {what}"
    return " is not a YAML text"


def _refuse_unknown(key: str, path: Path) -> None:
    if key not in TrainConfig.model_fields:
        hint = elsewhere(key) or did_you_mean(key, TrainConfig.model_fields).strip()
        shown = key if key.isprintable() and key.strip() else repr(key)
        raise ConfigError(f"{shown[:100]}: there is no such option (in {path}). {hint}".rstrip())


def _key_and_value(text: str) -> tuple[str, Any]:
    """`KEY=VALUE` with the value read as YAML, so that 0.5, true and [1, 2] are what they look like."""
    key, equals, value = text.partition("=")
    if not (key.strip() and equals):
        raise ConfigError(f"--trl {text}: write KEY=VALUE, like --trl scale_rewards=none")
    try:
        return key.strip(), read_yaml(value)
    except yaml.YAMLError:
        return key.strip(), value


def as_command(config: TrainConfig) -> list[str]:
    """The words of the command that means this configuration: a flag for each option that is not at its default."""
    words = ["aitrain", "grpo"]
    for option in options():
        value = config.changed().get(option.name)
        if value is None:
            continue
        if option.name == "trl":
            words += [word for key, field in value.items() for word in ("--trl", f"{key}={json.dumps(field)}")]
        elif option.is_switch:
            words.append(option.flag if value else f"--no-{option.flag[2:]}")
        else:
            words += [option.flag, json.dumps(value) if isinstance(value, (dict, list)) else str(value)]
    return words


def as_markdown() -> str:
    """docs/options.md: every option in a table, section by section."""
    lines = ["# Options", "", _INTRODUCTION]
    for section in dict.fromkeys(option.section for option in options()):
        lines += ["", f"## {section}", "", "| flag | default | values | what it does |", "|---|---|---|---|"]
        lines += [_table_row(option) for option in options() if option.section == section]
    return "\n".join(lines) + "\n"


_INTRODUCTION = """\
<!-- made by `make docs` from aitrain/config.py; a test fails when it is stale -->

Every option is a flag (`--rl-num-generations 8`), a key of the file given with `--config` (`rl_num_generations: 8`) and
an argument of `aitrain.TrainConfig` (`rl_num_generations=8`). A flag wins over the file, the file over the default. A
switch has a `--no-` form. Unknown names are errors."""


def _table_row(option: Option) -> str:
    cells = (f"`{option.flag}`", f"`{option.shown_default}`", option.kind, option.sentence)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def elsewhere(flag: str) -> str | None:
    """What to do about a flag that AITraining has and aitrain has not."""
    return ELSEWHERE.get(flag.lstrip("-").replace("-", "_"))
