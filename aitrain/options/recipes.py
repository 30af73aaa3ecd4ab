"""Recipes: folders with the options of a training (config.yaml) and what is known about it (recipe.yaml)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from aitrain.errors import ConfigError, did_you_mean
from aitrain.options.yaml_text import read_yaml
from aitrain.packages import PACKAGE

RECIPES = next((place for place in (PACKAGE / "recipes", PACKAGE.parent / "recipes") if place.is_dir()), PACKAGE)
"""Beside the package in a checkout, inside it in a wheel."""


@dataclass(frozen=True)
class Recipe:
    """One recipe, by the name of its folder."""

    folder: Path
    title: str
    about: str
    hardware: str
    minutes: str
    """Minutes of the training on that hardware, as its source says."""
    before: str
    after: str
    """Expected held-out scores."""
    source: str
    is_measured: bool
    """Whether the scores were measured with aitrain."""
    tiny: dict[str, object]
    """Options that make of it a run of seconds on the CPU."""
    needs: str = ""
    """The extra that it needs."""

    @property
    def name(self) -> str:
        """The name of its folder."""
        return self.folder.name

    @property
    def config(self) -> Path:
        """The file of its options."""
        return self.folder / "config.yaml"

    @property
    def command(self) -> str:
        """The command that trains it."""
        return f"aitrain recipe run {self.name}"

    def options(self, tiny: bool = False) -> dict[str, object]:
        """Its options, with the files of its folder as paths that work from everywhere."""
        given = _mapping(self.config) | (self.tiny if tiny else {})
        place, colon, name = str(given["rl_env"]).partition(":")
        if place.endswith(".py"):
            given["rl_env"] = f"{(self.folder / place).resolve()}{colon}{name}"
        if str(given.get("chat_template", "")).endswith(".jinja"):
            given["chat_template"] = str((self.folder / str(given["chat_template"])).resolve())
        return {"project_name": self.name, **given}

    def facts(self) -> dict[str, object]:
        """What there is to know, for programs."""
        shown = ("title", "about", "hardware", "minutes", "before", "after", "source", "is_measured", "needs")
        facts: dict[str, object] = {name: getattr(self, name) for name in shown}
        return {"name": self.name, **facts, "command": self.command, "options": self.options()}


def recipes() -> list[Recipe]:
    """All recipes, by name."""
    return [_read(file.parent) for file in sorted(RECIPES.glob("*/recipe.yaml"))]


def read_recipe(name: str) -> Recipe:
    """The recipe of this name.

    Raises:
        ConfigError: there is none.
    """
    folder = RECIPES / name
    if not (name.strip(".") and "/" not in name and (folder / "recipe.yaml").is_file()):
        near = did_you_mean(name, [file.parent.name for file in RECIPES.glob("*/recipe.yaml")])
        raise ConfigError(f"There is no recipe {name}.{near}\nList them with: aitrain recipe list")
    return _read(folder)


def _read(folder: Path) -> Recipe:
    found = _mapping(folder / "recipe.yaml")
    tiny = found["tiny"]
    texts = {
        name: str(found.get(name, ""))
        for name in ("title", "about", "hardware", "minutes", "before", "after", "source", "needs")
    }
    return Recipe(folder, **texts, is_measured=found["measured"] is True, tiny=tiny if isinstance(tiny, dict) else {})


def _mapping(file: Path) -> dict[str, object]:
    loaded = read_yaml(file.read_text(encoding="utf-8"))
    assert isinstance(loaded, dict), file
    return {str(key): value for key, value in loaded.items()}
