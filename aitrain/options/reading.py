"""Options of a command: read from a file and from flags; recipes, folders with the options of a training (config.yaml)
and what is known about it (recipe.yaml).
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from aitrain.errors import ConfigError, did_you_mean, no_file
from aitrain.options.algorithms import OF_PAPERS, preset_settings
from aitrain.options.section import Options
from aitrain.options.value_types import TABLES
from aitrain.options.yaml_text import read_yaml
from aitrain.packages import PACKAGE

Job = TypeVar("Job", bound=Options)

ALTERNATIVES = {
    "rl_env": {"rl_env_module", "rl_env_class"},
    "rl_env_module": {"rl_env"},
    "rl_prompts_per_step": {"gradient_accumulation"},
    "gradient_accumulation": {"rl_prompts_per_step"},
}
"""Other ways to say what an option says: its value overrides also those that are further from the user."""


def resolve(
    job: type[Job], file: Path | None, flags: Mapping[str, object] = {}, defaults: Mapping[str, object] = {}
) -> Job:
    """A job's options: its defaults, overridden by `defaults`, by the file, and by the flags. Flags of a table are
    `KEY=VALUE` texts, merged into the file's one.

    Raises:
        ConfigError: the file cannot be read, or a name or value is wrong.
    """
    values: dict[str, object] = {}
    for layer in (defaults, read_file(file) if file else {}, flags):
        own = {*layer, *preset_settings(layer.get("rl_preset")), *(OF_PAPERS if "rl_preset" in layer else ())}
        for other in own.union(*(ALTERNATIVES.get(name, ()) for name in own)) - layer.keys():
            values.pop(other, None)
        for name, value in layer.items():
            below = values.get(name) or {}
            if name in TABLES and isinstance(value, list) and isinstance(below, dict):
                value = {**below, **dict(_key_and_value(text, name) for text in value)}
            values[name] = value
    return job(**values)


def read_file(path: Path) -> dict[str, object]:
    """The options in a YAML file, unchecked.

    Raises:
        ConfigError: it cannot be read, or is not a mapping.
    """
    place = os.path.expanduser(path)
    try:
        loaded = read_yaml(Path(place).read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise ConfigError(no_file(path)) from None
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from None
    if not isinstance(loaded, dict):
        raise ConfigError(f"{path} must hold one option a line, like `lr: 1e-5`")
    return {str(key): value for key, value in loaded.items()}


def place_of_run(file: Path) -> dict[str, object]:
    """The options of the place of the run whose config.yaml this is, as a run that was copied or moved is resumed where
    it is; none if the file is not in a run folder."""
    folder = Path(os.path.abspath(os.path.expanduser(file))).parent
    if file.name != "config.yaml" or not (folder / "status.json").is_file():
        return {}
    return {"project_name": folder.name, "output_dir": os.path.relpath(folder.parent)}


def _key_and_value(text: str, option: str) -> tuple[str, object]:
    """`KEY=VALUE` with the value read as YAML, so that 0.5, true and [1, 2] are what they look like; the text itself if
    it cannot be read.

    Raises:
        ConfigError: it has another form; the message has the option.
    """
    key, equals, value = text.partition("=")
    if not (key.strip() and equals):
        raise ConfigError(f"{option}: write KEY=VALUE, not {text}")
    try:
        return key.strip(), read_yaml(value)
    except ValueError:
        return key.strip(), value


# -- recipes

RECIPES = next((place for place in (PACKAGE / "recipes", PACKAGE.parent / "recipes") if place.is_dir()), PACKAGE)
"""Beside the package in a checkout, inside it in a wheel."""


def recipes() -> dict[str, dict[str, Any]]:
    """All recipes by the names of their folders: what recipe.yaml says (title, about, hardware, the held-out scores
    before and after and their source, whether they were measured by us, in `tiny` options that make of it a run of
    seconds on the CPU, and the extra that it needs), and as `options` its config.yaml, in which files of its folder are
    paths that work from everywhere."""
    found = dict[str, dict[str, Any]]()
    for folder in sorted(place.parent for place in RECIPES.glob("*/recipe.yaml")):
        known, options = (read_file(folder / name) for name in ("recipe.yaml", "config.yaml"))
        for name in ("rl_env", "chat_template"):
            place, colon, rest = str(options.get(name, "")).partition(":")
            if place.endswith((".py", ".jinja")):
                options[name] = f"{(folder / place).resolve()}{colon}{rest}"
        found[folder.name] = {**known, "options": {"project_name": folder.name, **options}}
    return found


def read_recipe(name: str) -> dict[str, Any]:
    """The recipe of this name.

    Raises:
        ConfigError: there is none.
    """
    found = recipes()
    if name not in found:
        raise ConfigError(f"There is no recipe {name}.{did_you_mean(name, found)}\nList them with: aitrain recipe list")
    return found[name]
