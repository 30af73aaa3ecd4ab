"""Finds without importing anything: modules, in the working directory or installed, the files of this package, and the
models that `--model` knows by a name of aitrain's own.
"""

import os
import sys
from functools import lru_cache
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent
STANDARD = Path(os.__file__).parent
"""Folder of the standard library."""
BUNDLED = PACKAGE / "envs"
"""The example environments: `envs.NAME` for --rl-env, `aitrain.envs.NAME` in Python."""


def is_installed(file: str) -> bool:
    """Whether a file is that of an installed package; Debian's Python and that of Colab call the folder otherwise."""
    return "site-packages" in file or "dist-packages" in file


def is_library(file: str) -> bool:
    """Whether a file is that of an installed package, which may be a user's environment, too."""
    return is_installed(file) and not Path(file).is_relative_to(BUNDLED)


def is_machinery(file: str) -> bool:
    """Whether a file belongs to aitrain, the import system or the standard library."""
    path = Path(file)
    if path.is_relative_to(BUNDLED):
        return False
    is_standard = path.is_relative_to(STANDARD) and not is_library(file)
    return is_standard or file.startswith("<frozen") or path.is_relative_to(PACKAGE)


@lru_cache(maxsize=1024)
def is_users_file(file: str) -> bool:
    """Whether a file is the user's code, as opposed to Python's, a library's or aitrain's."""
    return not is_machinery(file) and not is_library(file)


def in_working_directory(name: str) -> ModuleSpec | None:
    """A top-level module or folder of the user's; a folder without `__init__.py` has no `origin`."""
    return PathFinder.find_spec(name, [str(Path.cwd())])


def installed(name: str) -> ModuleSpec | None:
    """An installed top-level module; what lies in the working directory does not count."""
    elsewhere = [folder for folder in sys.path if Path(folder).resolve() != Path.cwd()]
    found = PathFinder.find_spec(name, elsewhere)
    if found is None:
        others = (finder.find_spec(name, None) for finder in sys.meta_path if finder is not PathFinder)
        found = next((spec for spec in others if spec is not None), None)
    return found if found is not None and found.origin is not None else None


def version_of(library: str) -> str | None:
    """Installed version of a distribution; None if it is not installed."""
    from importlib import metadata  # here, as most commands need none

    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:
        return None


TINY = "tiny"
TINY_FOLDER = PACKAGE / "tiny_model"
"""The model that comes with aitrain; built by tests/tiny_model.py."""
SMOLLM2 = "smollm2"
"""SmolLM2-135M-Instruct, which `--model smollm2` makes from a package of pip's registry."""
NAMED_MODELS = (TINY, SMOLLM2)


def named_folder(name: str) -> Path | None:
    """Folder of a model with a name of aitrain's own, whether it exists or not; None for any other name."""
    if name == TINY:
        return TINY_FOLDER
    cache = os.environ.get("AITRAIN_CACHE")  # of what is kept between runs
    cache = cache or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "aitrain")
    return Path(cache, SMOLLM2).expanduser() if name == SMOLLM2 else None


def public_base(base: str) -> str:
    """A base as others may read it: of a folder of this machine only the name; Hub names as they are."""
    if Path(base).parts[-2:] == ("aitrain", "tiny_model"):
        return TINY  # the shipped model has another path on each machine
    if Path(base) == named_folder(SMOLLM2):
        return SMOLLM2
    return Path(base).name if base.startswith(("/", "~", ".")) else base
