"""Recipes: folders with the options of a training (config.yaml) and what is known about it (recipe.yaml)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from aitrain.errors import ConfigError, did_you_mean
from aitrain.options.yaml_text import read_yaml
from aitrain.packages import PACKAGE

RECIPES = next((place for place in (PACKAGE / "recipes", PACKAGE.parent / "recipes") if place.is_dir()), PACKAGE)
"""Beside the package in a checkout, inside it in a wheel."""
FACTS = ("title", "about", "hardware", "before", "after", "source", "needs")
"""What recipe.yaml says: the hardware that it is for, the expected held-out scores, where these are from, and the extra
that it needs, if there is one."""


@dataclass(frozen=True)
class Recipe:
    """One recipe."""

    folder: Path
    facts: dict[str, str]
    """Those of FACTS."""
    is_measured: bool
    """Whether the scores were measured with aitrain."""
    tiny: dict[str, object]
    """Options that make of it a run of seconds on the CPU."""

    @property
    def name(self) -> str:
        """The name of its folder."""
        return self.folder.name

    @property
    def config(self) -> Path:
        """The file of its options."""
        return self.folder / "config.yaml"

    @property
    def hardware(self) -> str:
        """What it is for, and whether it was measured there."""
        how = ", measured by us" if self.is_measured else " by the memory estimate; not measured by us"
        return self.facts["hardware"] + how

    def options(self, tiny: bool = False) -> dict[str, object]:
        """Its options, with the files of its folder as paths that work from everywhere."""
        given = _mapping(self.config) | (self.tiny if tiny else {})
        place, colon, name = str(given["rl_env"]).partition(":")
        if place.endswith(".py"):
            given["rl_env"] = f"{(self.folder / place).resolve()}{colon}{name}"
        if str(given.get("chat_template", "")).endswith(".jinja"):
            given["chat_template"] = str((self.folder / str(given["chat_template"])).resolve())
        return {"project_name": self.name, **given}

    def document(self) -> dict[str, object]:
        """What there is to know, for programs."""
        command = f"aitrain recipe run {self.name}"
        known = {"name": self.name, **self.facts, "is_measured": self.is_measured, "command": command}
        return {**known, "options": self.options()}


def recipes() -> list[Recipe]:
    """All recipes, by name."""
    return [_read(file.parent) for file in sorted(RECIPES.glob("*/recipe.yaml"))]


def read_recipe(name: str) -> Recipe:
    """The recipe of this name.

    Raises:
        ConfigError: there is none.
    """
    names = [file.parent.name for file in RECIPES.glob("*/recipe.yaml")]
    if name not in names:
        raise ConfigError(f"There is no recipe {name}.{did_you_mean(name, names)}\nList them with: aitrain recipe list")
    return _read(RECIPES / name)


def _read(folder: Path) -> Recipe:
    found = _mapping(folder / "recipe.yaml")
    tiny = found["tiny"]
    facts = {name: str(found.get(name, "")) for name in FACTS}
    return Recipe(folder, facts, found["measured"] is True, tiny if isinstance(tiny, dict) else {})


def _mapping(file: Path) -> dict[str, object]:
    loaded = read_yaml(file.read_text(encoding="utf-8"))
    assert isinstance(loaded, dict), file
    return {str(key): value for key, value in loaded.items()}
