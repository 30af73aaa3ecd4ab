"""Finding the user's environment without running it, and importing it: every trap that is known."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from aitrain import AitrainError, ConfigError, EnvironmentFailed, TrainConfig
from aitrain.environment.loader import bundled_modules, find_env, load_env
from tests.conftest import case_name, write

ENV = "class Env:\n    def build_dataset(self, tokenizer): ...\n    def score_episode(self): ...\n"


@pytest.fixture(autouse=True)
def imports_of_its_own(here: Path) -> Iterator[None]:
    """Each test works in an empty folder; what it imports is forgotten afterwards, what others left of envs before."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "envs"]:
        del sys.modules[name]
    modules, path = dict(sys.modules), list(sys.path)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - set(modules):
        del sys.modules[name]
    importlib.invalidate_caches()


def made(files: Mapping[str, str | bytes | None], *, config: dict[str, Any] | None = None, **options: str) -> Any:
    """The environment that these options name, through everything that a run does to get it."""
    write(Path.cwd(), files)
    return load_env(TrainConfig(**options, rl_env_config=config or {}))


def refusal(kind: type[AitrainError], files: Mapping[str, str | bytes | None], **options: Any) -> str:
    with pytest.raises(kind) as caught:
        made(files, **options)
    assert type(caught.value) is kind
    return str(caught.value)


def test_a_module_with_the_name_of_a_library_that_was_imported_before_is_refused_with_its_file() -> None:
    said = refusal(ConfigError, {"json.py": ENV}, rl_env_module="json")
    assert "json/__init__.py has 0 classes" in said


# -- finding


@pytest.mark.parametrize(
    "options",
    [
        {"rl_env": "envs/hotel.py:Env"},
        {"rl_env": "~/here/envs/hotel.py"},
        {"rl_env": "envs.hotel:Env"},
        {"rl_env_module": "envs.hotel", "rl_env_class": "Env"},
        {"rl_env_module": "envs/hotel.py", "rl_env_class": "Env"},
    ],
    ids=str,
)
def test_an_environment_has_many_names(options: dict[str, str], here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(here.parent))
    assert type(made({"envs/hotel.py": ENV}, **options)).__name__ == "Env"


def test_bundled_environments_and_a_users_own_envs_folder_do_not_hide_each_other() -> None:
    assert bundled_modules()
    for name in bundled_modules():
        assert find_env(TrainConfig(rl_env=name)).file is not None
    files = {"envs/__init__.py": "", "envs/hotel.py": ENV, "envs/guess_number.py": ENV}

    assert type(made(files, rl_env="envs.arithmetic")).__name__ == "Arithmetic"
    assert type(made({}, rl_env="envs.hotel")).__name__ == "Env"
    assert type(made({}, rl_env="envs.guess_number")).__name__ == "Env", "the user's own file wins"


def test_a_users_folder_named_like_a_library_does_not_hide_the_library(here: Path) -> None:
    write(here.parent / "site", {"library/__init__.py": "name = 'the real one'"})
    sys.path.insert(0, str(here.parent / "site"))
    users = {
        "library/__init__.py": "name = 'not this one'",
        "env.py": "import library\n" + ENV + "    name = library.name",
    }

    assert made(users, rl_env="env.py").name == "the real one"


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({}, "--rl-env path/to/file.py:Class"),
        ({"rl_env": "hotle.py:Env"}, "Did you mean hotel.py?"),
        ({"rl_env": "pkg/inner.txt"}, "path/to/file.py:NAME"),
        ({"rl_env_module": "pkg.iner"}, "Did you mean pkg.inner?"),
        ({"rl_env": "hotel.py:Evn"}, "Did you mean Env?"),
        ({"rl_env": "two.py"}, "two.py:Other"),
    ],
    ids=case_name,
)
def test_what_is_not_there_is_refused_with_what_is(options: dict[str, str], word: str) -> None:
    files = {
        "hotel.py": ENV, "pkg/inner.py": ENV, "book.ipynb": "{}",
        "two.py": ENV + ENV.replace("Env", "Other"),
    }  # fmt: skip
    assert word in refusal(ConfigError, files, **options)


# -- choosing the class


@pytest.mark.parametrize(
    "text",
    [
        ENV.replace("Env:", "_Base:") + "class Env(_Base):\n    pass\n",
        "try:\n    import not_there\nexcept ImportError:\n    class Env:\n        def build_dataset(self): ...\n",
        "from elsewhere import Base\nclass Env(Base):\n    pass\n",
    ],
)
def test_the_only_environment_of_a_file_need_not_be_named(text: str) -> None:
    elsewhere = ENV.replace("Env", "Base")

    assert type(made({"env.py": text, "elsewhere.py": elsewhere}, rl_env="env.py")).__name__ == "Env"


def with_init(parameters: str) -> str:
    return ENV + f"    def __init__(self{parameters}):\n        self.city = 'Rome'\n"


@pytest.mark.parametrize(
    ("text", "config", "word"),
    [
        (with_init(", city=1"), {"ctiy": 1}, "Did you mean city?"),
        (with_init(", *, city, stars=3"), {"stars": 4}, "missing a required argument: 'city'"),
        ("from dataclasses import dataclass\n@dataclass\n" + ENV.replace("Env:", "Env:\n    stars: int = 1"),
         {"city": 1}, "It takes: stars"),
    ],
)  # fmt: skip
def test_a_keyword_that_the_constructor_refuses_is_a_wrong_command(
    text: str, config: dict[str, Any], word: str
) -> None:
    said = refusal(ConfigError, {"env.py": text}, rl_env="env.py:Env", config=config)

    assert said.startswith("rl_env_config: ")
    assert word in said


# -- importing


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("class Env:\n    def build_dataset(self:\n", ["SyntaxError", "env.py, line 2"]),
        ("import os\nimport not_there\n" + ENV, ["No module named 'not_there'", "line 2"]),
        ("import sys\nsys.exit('no key')\n" + ENV, ["SystemExit: no key", "line 2"]),
        ("Env = 3\n", ["Env raised: TypeError: 'int' object is not callable"]),
    ],
)
def test_whatever_a_file_does_is_one_short_message_with_its_line(content: str, words: list[str]) -> None:
    said = refusal(EnvironmentFailed, {"env.py": content}, rl_env="env.py:Env")

    assert all(word in said for word in words), said
    assert len(said) < 800


# -- constructing


def test_a_constructor_that_raises_is_told_with_the_users_line_and_without_the_values() -> None:
    text = ENV + "    def __init__(self, key):\n        raise ValueError('no such\\n key')\n"

    said = refusal(EnvironmentFailed, {"env.py": text}, rl_env="env.py", config={"key": "secret"})

    assert "Env raised: ValueError: no such key" in said
    assert "env.py, line 5, in __init__: raise ValueError(" in said
    assert "secret" not in said
