"""Writes a new environment with its test from a template."""

from __future__ import annotations

import keyword
import sys
from pathlib import Path

from aitrain.errors import ConfigError
from aitrain.packages import installed

TEMPLATES = Path(__file__).parent / "templates"
KINDS = ("plain", "multi_turn", "tools", "tools_with_state", "service", "judges")
"""The templates: KIND.py.txt and its test, KIND_test.py.txt."""

RESERVED = {"aitrain", "conftest", "envs", "setup", "test"}
"""Names that are not installed modules, but mean something to aitrain or to pytest."""


def write_environment(name: str, kind: str, folder: Path) -> tuple[Path, Path]:
    """Write NAME.py and test_NAME.py into the folder; returns them.

    Raises:
        ConfigError: the name cannot be a module's, or would hide one; or one of the files exists or cannot be written.
    """
    stem, why = name.removesuffix(".py"), ""
    if not stem.isidentifier() or keyword.iskeyword(stem) or stem != name:
        why = f"{name} is {'a word of Python' if keyword.iskeyword(name) else 'not the name of a Python module'}"
    elif name.startswith(("_", "test_")) or name.endswith("_test"):
        why = f"pytest or Python would take {name}.py for something else"
    elif name in RESERVED or name in sys.stdlib_module_names or installed(name) is not None:
        why = f"{name}.py would hide the module {name}"
    if why:
        raise ConfigError(f"NAME: {why}\nTake another one, such as: aitrain env init my_task")
    files = folder / f"{name}.py", folder / f"test_{name}.py"
    for path in (*files, folder / name):
        if path.exists() or path.is_symlink():
            raise ConfigError(f"{path.name} exists here, and is left as it is\nTake another name.")
    class_name = "".join(part[0].upper() + part[1:] for part in name.split("_") if part)
    for path, template in zip(files, (f"{kind}.py.txt", f"{kind}_test.py.txt"), strict=True):
        text = (TEMPLATES / template).read_text(encoding="utf-8")
        try:
            with path.open("x", encoding="utf-8") as file:
                file.write(text.replace("my_environment", name).replace("MyEnvironment", class_name))
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror}") from None
    return files
