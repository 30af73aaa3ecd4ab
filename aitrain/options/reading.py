"""Options of a command: read from a file and from flags, and written back as a command."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

import yaml

from aitrain.errors import ConfigError
from aitrain.missing_file import no_file
from aitrain.options.option import options_of
from aitrain.options.other_names import unknown_option
from aitrain.options.section import Options, sections_of
from aitrain.options.value_types import REPEATED, TABLES
from aitrain.options.yaml_text import read_yaml

Job = TypeVar("Job", bound=Options)


NOTHING: Mapping[str, object] = MappingProxyType({})


def resolve(
    job: type[Job], file: Path | None, flags: Mapping[str, object] = NOTHING, defaults: Mapping[str, object] = NOTHING
) -> Job:
    """A job's options: its defaults, overridden by `defaults`, by the file, and by the flags.

    A value also overrides the alternatives to its option (`replaces`); flags of a table are `KEY=VALUE` texts, merged
    into the file's one.

    Raises:
        ConfigError: the file cannot be read, or a name or value is wrong.
    """
    values = read_file(job, file) if file else {}
    replaced = {name: others for section in sections_of(job) for name, others in section.replaces.items()}
    below = dict(defaults)
    for name in {other for value in values for other in replaced.get(value, ())}:
        below.pop(name, None)
    values = {**below, **values}
    for name in {other for flag in flags for other in replaced.get(flag, ())}:
        values.pop(name, None)
    given = dict(flags)
    for name in TABLES:
        if isinstance(texts := given.get(name), list):
            in_file = values.get(name) or {}
            pairs = dict(_key_and_value(name, text) for text in texts)
            given[name] = {**in_file, **pairs} if isinstance(in_file, dict) else in_file
    return job.read({**values, **given})


def read_file(job: type[Options], path: Path) -> dict[str, object]:
    """The options of a job in a YAML file.

    Raises:
        ConfigError: it cannot be read, is not a mapping, or has a key that is no option.
    """
    if os.path.isdir(os.path.expanduser(path)):
        inside = path / "config.yaml"
        is_run = os.path.isfile(os.path.expanduser(inside))
        advice = f"Name the file in it: {inside}" if is_run else "It holds no config.yaml either."
        raise ConfigError(f"{job.file_flag}{path} is a folder\n{advice}")
    try:
        loaded = read_yaml(Path(os.path.expanduser(path)).read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise ConfigError(f"{job.file_flag}{no_file(path)}{job.file_hint}") from None
    except OSError as error:
        raise ConfigError(f"{job.file_flag}cannot read {path}: {error.strerror}{job.file_hint}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        why = " is not a YAML text"
        if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
            what = " ".join(filter(None, (error.context, error.problem)))
            why = f", line {error.problem_mark.line + 1}: {what}"
        raise ConfigError(f"{job.file_flag}{path}{why}") from None
    if not isinstance(loaded, dict):
        raise ConfigError(f"{job.file_flag}{path} must hold one option a line, like `lr: 1e-5`")
    for key in map(str, loaded):
        if key not in job.model_fields:
            raise ConfigError(unknown_option(key, job.model_fields, f" (in {path})"))
    return {str(key): value for key, value in loaded.items()}


def place_of_run(file: Path) -> dict[str, object]:
    """The options of the place of the run whose config.yaml this is, as a run that was copied or moved is resumed where
    it is; none if the file is not in a run folder."""
    folder = Path(os.path.abspath(os.path.expanduser(file))).parent
    if file.name != "config.yaml" or not (folder / "status.json").is_file():
        return {}
    parent, here = folder.parent, Path.cwd()
    shown = parent.relative_to(here) if parent.is_relative_to(here) else parent
    return {"project_name": folder.name, "output_dir": str(shown)}


def _key_and_value(name: str, text: str) -> tuple[str, object]:
    """`KEY=VALUE` with the value read as YAML, so that 0.5, true and [1, 2] are what they look like."""
    key, equals, value = text.partition("=")
    if not (key.strip() and equals):
        flag = "--" + name.replace("_", "-")
        raise ConfigError(f"{flag} {text}: write KEY=VALUE, like {flag} {TABLES[name]}")
    try:
        return key.strip(), read_yaml(value)
    except yaml.YAMLError:
        return key.strip(), value


def as_command(config: Options, *command: str) -> list[str]:
    """The words of the command that sets these options, with a flag for each that differs from its default."""
    words = list(command)
    changed = config.changed()
    for option in options_of(type(config)):
        value = changed.get(option.name)
        if value is None:
            continue
        if option.name in TABLES and isinstance(value, dict):
            words += [word for key, field in value.items() for word in (option.flag, f"{key}={json.dumps(field)}")]
        elif option.name in REPEATED and isinstance(value, list):
            words += [word for one in value for word in (option.flag, str(one))]
        elif option.is_switch:
            words.append(option.flag if value else f"--no-{option.flag[2:]}")
        else:
            words += [option.flag, json.dumps(value) if isinstance(value, (dict, list)) else str(value)]
    return words
