"""A run keeps the source of its environment: its own file and what it imports, and no link, huge file or secret."""

from __future__ import annotations

import importlib
import linecache
import sys
from pathlib import Path

import pytest

from aitrain.redaction import MASK, known_forms
from aitrain.runs.environment_source import (
    MOST_BYTES,
    keep_source,
    kept_files,
    read_source,
    source_facts,
)
from tests.conftest import write

CLASS = "class Env:\n    def score_episode(self):\n        return 1.0\n"


@pytest.fixture
def imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that modules are imported from, and forgotten afterwards."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    return tmp_path


def names(kind: type) -> list[str]:
    return [file["name"] for file in kept_files(kind())]


def test_the_files_beside_it_that_it_imports_are_kept_and_belong_to_its_hash(imported: Path) -> None:
    helpers = {
        "scored_env.py": f"import points_of_env, secret_of_env\n{CLASS}",
        "points_of_env.py": "def points():\n    from more_of_env import x\n",
        "more_of_env.py": "import scored_env\n",
        "neighbour.py": "",
    }
    write(imported, helpers)
    (imported / "secret_of_env.py").symlink_to(imported / "neighbour.py")
    module = type(sys)("scored_env")
    module.__file__ = str(imported / "scored_env.py")
    sys.modules["scored_env"] = module
    exec(CLASS, module.__dict__)
    assert names(module.Env) == ["scored_env.py", "points_of_env.py", "more_of_env.py"]
    before = source_facts(module.Env())
    write(imported, {"neighbour.py": "x = 1\n"})
    assert source_facts(module.Env()) == before
    write(imported, {"more_of_env.py": "x = 2\n"})
    assert source_facts(module.Env())["sha256"] != before["sha256"]


def test_of_a_package_the_modules_that_it_imports_are_kept_but_no_links_and_no_huge_ones(imported: Path) -> None:
    env = f"from pack.near import x\nfrom . import huge, link\n{CLASS}"
    files = {"__init__.py": "", "env.py": env, "near.py": "x = 1", "huge.py": "#" * (MOST_BYTES + 1), "other.py": ""}
    write(imported, {f"pack/{name}": text for name, text in files.items()} | {"secret.py": "x = 2\n"})
    (imported / "pack" / "link.py").symlink_to(imported / "secret.py")
    environment = importlib.import_module("pack.env").Env()
    keep_source(environment, imported / "run" / "environment")
    (imported / "run" / "environment" / "link.py").symlink_to(imported / "secret.py")
    kept = [file["name"] for file in read_source(imported / "run" / "environment")]
    assert sorted(kept) == ["pack/env.py", "pack/near.py"]
    assert names(type(environment))[0] == "pack/env.py"


def test_secrets_in_the_source_are_masked(imported: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DB_PASSWORD", "correct-horse")
    known_forms.cache_clear()
    write(imported, {"leaks_env.py": CLASS + 'login = dict(password="0123456789", phrase="correct-horse")\n'})
    (file,) = kept_files(importlib.import_module("leaks_env").Env())
    assert file["text"].endswith(f'login = dict(password="{MASK}", phrase="{MASK}")\n')


def test_a_class_of_a_notebook_is_kept_as_its_cell() -> None:
    cell = "# a cell\n" + CLASS
    linecache.cache["<cell 1>"] = len(cell), None, cell.splitlines(keepends=True), "<cell 1>"
    scope: dict[str, object] = {"__name__": "nowhere"}
    exec(compile(cell, "<cell 1>", "exec"), scope)
    kind = scope["Env"]
    assert isinstance(kind, type)
    assert kept_files(kind()) == [{"name": "Env.py", "text": cell}]
    assert kept_files(type("Env", (), {"__module__": "nowhere"})()) == [], "nothing remembers it"
