"""Writes a new environment with its test from a template."""

from __future__ import annotations

import keyword
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from aitrain.errors import ConfigError
from aitrain.packages import installed

TEMPLATES = Path(__file__).parent / "templates"
KINDS = ("plain", "multi_turn", "tools", "tools_with_state", "service", "judges")
"""The templates: KIND.py.txt and its test, KIND_test.py.txt."""

_MODULE, _CLASS = "my_environment", "MyEnvironment"
"""The names in the templates."""
_RESERVED = {"aitrain", "conftest", "envs", "setup", "test"}
"""Names that are not installed modules, but mean something to aitrain or to pytest."""


@dataclass(frozen=True)
class NewEnvironment:
    """The files of a new environment, and its class."""

    file: Path
    test: Path
    class_name: str


def write_environment(name: str, kind: str, folder: Path) -> NewEnvironment:
    """Write NAME.py and test_NAME.py into the folder.

    Raises:
        ConfigError: the name cannot be a module's, or would hide one; or one of the files exists or cannot be written.
    """
    _check_name(name)
    new = NewEnvironment(folder / f"{name}.py", folder / f"test_{name}.py", class_name(name))
    for path in (new.file, new.test, folder / name):
        if path.exists() or path.is_symlink():
            raise ConfigError(f"{path.name} exists here, and is left as it is\nTake another name: {_other_name(name)}")
    for path, template in ((new.file, f"{kind}.py.txt"), (new.test, f"{kind}_test.py.txt")):
        text = (TEMPLATES / template).read_text(encoding="utf-8")
        try:
            with path.open("x", encoding="utf-8") as file:
                file.write(text.replace(_MODULE, name).replace(_CLASS, new.class_name))
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror}") from None
    return new


def class_name(name: str) -> str:
    """The class of a module: `hotel_booking` has HotelBooking."""
    return "".join(part[0].upper() + part[1:] for part in name.split("_") if part)


def _check_name(name: str) -> None:
    stem = name.removesuffix(".py")
    if not stem.isidentifier() or keyword.iskeyword(stem) or stem != name:
        why = "is a word of Python" if keyword.iskeyword(name) else "is not the name of a Python module"
        raise ConfigError(f"NAME: {name} {why}, like my_task{_try(_as_name(stem))}")
    if name.startswith(("_", "test_")) or name.endswith("_test"):
        raise ConfigError(f"NAME: pytest or Python would take {name}.py for something else{_try(_as_name(stem))}")
    if _is_module(name):
        raise ConfigError(f"NAME: {name}.py would hide the module {name}{_try(_other_name(name))}")


def _is_module(name: str) -> bool:
    """Whether Python, aitrain or pytest knows a module of this name."""
    return name in _RESERVED or name in sys.stdlib_module_names or installed(name) is not None


def _try(name: str) -> str:
    return f"\nTry: aitrain env init {name}"


def _as_name(text: str) -> str:
    """A name like the text: `my-task 2` becomes my_task_2."""
    name = re.sub(r"\W+", "_", text.rsplit("/", 1)[-1]).strip("_").lower().removeprefix("test_").removesuffix("_test")
    name = name if name.isidentifier() else f"task_{name}".rstrip("_")
    return _other_name(name) if keyword.iskeyword(name) or _is_module(name) else name


def _other_name(name: str) -> str:
    return "my_task" if name == "test" else f"my_{name}"  # pytest takes my_test.py for tests
