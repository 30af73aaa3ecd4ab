"""Finding the user's environment without running it, and importing it: every trap that is known."""

from __future__ import annotations

import importlib.util
import os
import pickle
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from aitrain import AitrainError, ConfigError, EnvironmentFailed, TrainConfig
from aitrain.environment.loader import load_env
from aitrain.environment.locator import bundled_modules, check_by_reading, find_env
from tests.conftest import write

ENV = "class Env:\n    def build_dataset(self, tokenizer): ...\n    def score_episode(self): ...\n"
TRIPWIRE = "open('somebody_ran_this', 'w').close()\n"


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
    source = find_env(TrainConfig(**options))
    check_by_reading(source, config or {})
    return load_env(source, config or {})


def refusal(kind: type[AitrainError], files: Mapping[str, str | bytes | None], **options: Any) -> str:
    with pytest.raises(kind) as caught:
        made(files, **options)
    assert type(caught.value) is kind
    assert len(str(caught.value).splitlines()) <= 4
    return str(caught.value)


def installed(folder: Path, files: Mapping[str, str]) -> None:
    """Packages that come from somewhere else than the working directory."""
    write(folder.parent / "site", files)
    sys.path.insert(0, str(folder.parent / "site"))


# -- finding


@pytest.mark.parametrize(
    "options",
    [
        {"rl_env": "envs/hotel.py:Env"},
        {"rl_env": "./envs/hotel.py"},
        {"rl_env": "envs/hotel.py", "rl_env_class": "Env"},
        {"rl_env": "envs.hotel:Env"},
        {"rl_env": "envs.hotel"},
        {"rl_env_module": "envs.hotel", "rl_env_class": "Env"},
        {"rl_env_module": "envs.hotel"},
    ],
    ids=str,
)
def test_an_environment_has_many_names(options: dict[str, str]) -> None:
    assert type(made({"envs/hotel.py": ENV}, **options)).__name__ == "Env"


def test_a_file_is_found_by_its_full_path_and_from_the_home_folder(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(here.parent))
    write(here.parent, {"away/hotel.py": ENV})

    assert made({}, rl_env=f"{here.parent}/away/hotel.py:Env")
    assert made({}, rl_env="~/away/hotel.py:Env")


def test_finding_and_reading_run_nothing_of_the_users(here: Path) -> None:
    write(here, {"pkg/__init__.py": TRIPWIRE, "pkg/sub/__init__.py": TRIPWIRE, "pkg/sub/hotel.py": TRIPWIRE + ENV})

    source = find_env(TrainConfig(rl_env_module="pkg.sub.hotel"))
    check_by_reading(source, {})

    assert source.file == here / "pkg/sub/hotel.py"
    assert not (here / "somebody_ran_this").exists()
    assert not {"pkg", "pkg.sub", "pkg.sub.hotel"} & set(sys.modules)


def test_a_bundled_environment_is_found_from_an_empty_folder() -> None:
    assert type(made({}, rl_env="envs.arithmetic")).__name__ == "Arithmetic"


def test_a_users_own_envs_folder_does_not_hide_the_bundled_ones_and_is_not_hidden() -> None:
    files = {"envs/__init__.py": "", "envs/hotel.py": ENV}

    assert type(made(files, rl_env="envs.arithmetic")).__name__ == "Arithmetic"
    assert type(made(files, rl_env="envs.hotel")).__name__ == "Env"


def test_a_users_own_file_wins_over_the_bundled_one_of_its_name() -> None:
    assert type(made({"envs/arithmetic.py": ENV}, rl_env="envs.arithmetic")).__name__ == "Env"


@pytest.mark.parametrize("files", [{"hotels/own.py": ENV}, {"hotels/own.py": ENV, "hotels/__init__.py": ""}], ids=str)
def test_an_installed_package_does_not_hide_the_users_folder_of_its_name(here: Path, files: dict[str, str]) -> None:
    installed(here, {"hotels/__init__.py": "", "hotels/other.py": ENV})

    assert sys.modules[type(made(files, rl_env_module="hotels.own")).__module__].__file__ == str(here / "hotels/own.py")


def test_a_folder_of_the_users_does_not_hide_an_installed_environment_of_its_name(here: Path) -> None:
    installed(here, {"hotels/__init__.py": ENV, "hotels/other.py": ENV})

    assert made({"hotels/data.csv": ""}, rl_env_module="hotels")
    assert made({}, rl_env_module="hotels.other")


def test_a_users_folder_named_like_a_library_does_not_hide_the_library(here: Path) -> None:
    installed(here, {"library/__init__.py": "name = 'the real one'"})
    users = {
        "library/__init__.py": "name = 'not this one'",
        "env.py": "import library\n" + ENV + "    name = library.name",
    }

    assert made(users, rl_env="env.py").name == "the real one"


@pytest.mark.parametrize("name", ["datasets", "vllm", "code"])
def test_a_module_in_a_folder_named_like_a_library_is_refused_and_its_file_is_taken(name: str) -> None:
    said = refusal(ConfigError, {f"{name}/hotel.py": ENV}, rl_env_module=f"{name}.hotel")

    assert f"rl_env_module: {name}.hotel begins with the name of the library {name}" in said
    assert f"--rl-env {name}/hotel.py" in said
    assert made({}, rl_env=f"{name}/hotel.py")


NOT_FOUND: list[tuple[dict[str, str], list[str]]] = [
    ({}, ["rl_env: no environment is given", "--rl-env path/to/file.py:Class", "envs.arithmetic"]),
    ({"rl_env": ":Env"}, ["rl_env: no environment is given"]),
    ({"rl_env": "hotle.py:Env"}, ["rl_env: there is no file hotle.py", "Did you mean hotel.py?"]),
    ({"rl_env": "~nobody_has_this_name/x.py"}, ["rl_env: there is no file"]),
    ({"rl_env": "x" * 5000 + ".py"}, ["rl_env: there is no file"]),
    ({"rl_env": "pkg.py"}, ["rl_env: pkg.py is a folder"]),
    ({"rl_env": "pkg"}, ["rl_env: pkg is a folder", "Name a file in it: pkg.inner"]),
    ({"rl_env": "./pkg"}, ["rl_env: ./pkg is a folder", "--rl-env pkg/inner.py:Class"]),
    ({"rl_env": "empty/"}, ["rl_env: empty/ is a folder", "It holds no Python file"]),
    ({"rl_env": "notes.txt:Env"}, ["rl_env: notes.txt does not end in .py"]),
    ({"rl_env": "./hotel:Env"}, ["rl_env: ./hotel does not end in .py"]),
    ({"rl_env": "book.ipynb"}, ["rl_env: book.ipynb is a notebook", "aitrain.train"]),
    ({"rl_env_module": "hotle"}, ["rl_env_module: there is no module hotle", "Did you mean hotel?", "envs.arithmetic"]),
    ({"rl_env_module": "pkg.iner"}, ["there is no module pkg.iner", "Did you mean pkg.inner?"]),
    ({"rl_env_module": "hotel.inner"}, ["there is no module hotel.inner"]),
    ({"rl_env_module": "envs.arithmetc"}, ["there is no module envs.arithmetc", "Did you mean envs.arithmetic?"]),
    (
        {"rl_env_module": "hotel.py"},
        ["rl_env_module: hotel.py is not the name of a module", "--rl-env path/to/file.py"],
    ),
    ({"rl_env_module": "pkg/inner"}, ["rl_env_module: pkg/inner is not the name of a module"]),
    ({"rl_env_module": "..hotel"}, ["rl_env_module: ..hotel is not the name of a module"]),
    ({"rl_env_module": "my hotel"}, ["rl_env_module: my hotel is not the name of a module"]),
]


@pytest.mark.parametrize(("options", "words"), NOT_FOUND, ids=[str(options)[:60] for options, _ in NOT_FOUND])
def test_what_is_not_there_is_refused_with_what_is(options: dict[str, str], words: list[str]) -> None:
    files = {"hotel.py": ENV, "pkg/inner.py": ENV, "pkg.py": None, "empty": None, "notes.txt": "", "book.ipynb": "{}"}

    said = refusal(ConfigError, files, **options)

    for word in words:
        assert word in said


def test_every_bundled_environment_has_a_file_with_one_class() -> None:
    for name in bundled_modules():
        file = find_env(TrainConfig(rl_env=name)).file
        assert file is not None
        assert file.read_text(encoding="utf-8").count("def build_dataset(") == 1
        spec = importlib.util.find_spec(f"aitrain.{name}")  # the name in Python, in a checkout as in a wheel
        assert spec is not None
        assert spec.origin == str(file)


# -- reading


@pytest.mark.parametrize(
    "text",
    [
        ENV + "class Helper:\n    pass\n",
        ENV.replace("Env:", "_Base:") + "class Env(_Base):\n    pass\n",
        ENV.replace("def build", "async def build"),
        "if True:\n    class Env:\n        def build_dataset(self): ...\n",
        "try:\n    import not_there\nexcept ImportError:\n    class Env:\n        def build_dataset(self): ...\n",
        "from elsewhere import Base\nclass Env(Base):\n    pass\n",
        "import elsewhere\nclass Env(elsewhere.Base):\n    pass\n",
    ],
)
def test_the_only_environment_of_a_file_need_not_be_named(text: str) -> None:
    elsewhere = ENV.replace("Env", "Base")

    assert type(made({"env.py": text, "elsewhere.py": elsewhere}, rl_env="env.py")).__name__ == "Env"


@pytest.mark.parametrize(
    "text",
    [
        "from elsewhere import Env\n",
        "from elsewhere import *\n",
        "from elsewhere import Env as Other\nEnv = Other\n",
        "import elsewhere\nEnv: type = elsewhere.Env\n",
        "import elsewhere\ndef Env():\n    return elsewhere.Env()\n",
        "try:\n    from nothing_of_the_kind import Env\nexcept ImportError:\n    from elsewhere import Env\n",
    ],
)
def test_a_named_class_may_come_from_another_module_or_a_function(text: str) -> None:
    assert type(made({"env.py": text, "elsewhere.py": ENV}, rl_env="env.py:Env")).__name__ == "Env"


@pytest.mark.parametrize(
    ("text", "options", "words"),
    [
        (ENV, {"rl_env": "env.py:Evn"}, ["rl_env_class: there is no class Evn in", "Did you mean Env?"]),
        (ENV, {"rl_env": "env.py:1+2"}, ["rl_env_class: there is no class 1+2"]),
        ("from os import *\n" + ENV, {"rl_env": "env.py:Hotel"}, ["rl_env_class: there is no class Hotel"]),
        (
            ENV + ENV.replace("Env", "Other"),
            {"rl_env": "env.py"},
            ["2 environments: Env, Other", "--rl-env-class Other"],
        ),
        ("class A:\n    pass\n", {"rl_env": "env.py"}, ["no class in", "has build_dataset (classes there: A)"]),
        ("", {"rl_env": "env.py"}, ["no class in", "classes there: none"]),
        ("class A(B): pass\nclass B(A): pass\n", {"rl_env": "env.py"}, ["no class in"]),
        ("Env = 3\n", {"rl_env": "env.py:Env"}, ["rl_env_class: Env is not a class, but 3"]),
        ("from abc import ABC\nclass A(ABC):\n    pass\n", {"rl_env": "env.py"}, ["no class in", "has build_dataset"]),
    ],
)
def test_a_class_that_is_not_there_or_not_the_only_one_is_refused(
    text: str, options: dict[str, str], words: list[str]
) -> None:
    said = refusal(ConfigError, {"env.py": text}, **options)

    for word in words:
        assert word in said


def with_init(parameters: str) -> str:
    return ENV + f"    def __init__(self{parameters}):\n        self.city = 'Rome'\n"


@pytest.mark.parametrize(
    ("text", "config", "words"),
    [
        (with_init(", city=1"), {"ctiy": 1}, ["Env does not take ctiy. Did you mean city?", "It takes: city"]),
        (with_init(""), {"city": 1}, ["Env does not take city.", "It takes: nothing"]),
        (ENV, {"city": 1}, ["Env does not take city.", "It takes: nothing"]),
        (with_init(", city"), {}, ["Env also needs city.", """--rl-env-config '{"city": ...}'"""]),
        (with_init(", *, city, stars=3"), {"stars": 4}, ["Env also needs city."]),
        ("from dataclasses import dataclass\n@dataclass\n" + ENV.replace("Env:", "Env:\n    stars: int = 1"),
         {"city": 1}, ["Env does not take city.", "It takes: stars"]),
    ],
)  # fmt: skip
def test_a_keyword_that_the_constructor_refuses_is_a_wrong_command(
    text: str, config: dict[str, Any], words: list[str]
) -> None:
    said = refusal(ConfigError, {"env.py": text}, rl_env="env.py", config=config)

    assert said.startswith("rl_env_config: ")
    for word in words:
        assert word in said


def test_a_keyword_that_a_function_refuses_is_a_wrong_command_too() -> None:
    said = refusal(ConfigError, {"env.py": "def make(city): ...\n"}, rl_env="env.py:make", config={"town": 1})

    assert said == "rl_env_config: make does not take town.\nIt takes: city"


@pytest.mark.parametrize("parameters", [", city", ", *, city", ", **config", ", city='Oslo', *args", ", *rest, city"])
def test_keywords_that_the_constructor_takes_are_handed_to_it(parameters: str) -> None:
    assert made({"env.py": with_init(parameters)}, rl_env="env.py", config={"city": 1}).city == "Rome"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("class Env:\n    def build_dataset(self:\n", ["env.py, line 2: SyntaxError: '(' was never closed"]),
        ("class Env:\ndef x(): ...\n", ["env.py, line 2: IndentationError"]),
        (b"\x00\x01", ["env.py: ", "null bytes"]),
    ],
)
def test_a_file_that_is_not_python_is_refused_with_its_line(content: str | bytes, words: list[str]) -> None:
    said = refusal(EnvironmentFailed, {"env.py": content}, rl_env="env.py:Env")

    for word in words:
        assert word in said


# -- importing


def test_postponed_annotations_and_dataclasses_work_in_a_file_loaded_by_its_path() -> None:
    text = (
        "from __future__ import annotations\nfrom dataclasses import dataclass\n"
        "@dataclass\nclass State:\n    numbers: list[int]\n" + ENV + "    state = State([1])\n"
    )

    environment = made({"env.py": text}, rl_env="env.py:Env")

    assert pickle.loads(pickle.dumps(environment.state)).numbers == [1]


def test_a_module_is_registered_while_it_runs_and_forgotten_when_it_fails() -> None:
    text = "import sys\nassert sys.modules[__name__].__dict__ is globals()\n" + ENV
    before = set(sys.modules)

    assert made({"env.py": text}, rl_env="env.py")
    refusal(EnvironmentFailed, {"broken.py": "1 / 0\n" + ENV}, rl_env="broken.py")

    assert not any("broken" in name for name in set(sys.modules) - before)


@pytest.mark.parametrize("options", [{"rl_env": "pkg/env.py:Env"}, {"rl_env_module": "pkg.env"}], ids=str)
def test_a_missing_dependency_is_named_with_the_users_line_and_is_not_a_missing_module(options: dict[str, str]) -> None:
    text = "import os\nimport nothing_of_the_kind\n" + ENV

    said = refusal(EnvironmentFailed, {"pkg/env.py": text}, **options)

    assert "ModuleNotFoundError: No module named 'nothing_of_the_kind'" in said
    assert f"{os.sep}env.py, line 2, in <module>: import nothing_of_the_kind" in said
    assert "Install nothing_of_the_kind, or correct the import." in said
    assert "there is no module" not in said


def test_a_failure_in_a_parent_package_is_told_with_its_line() -> None:
    files = {"pkg/__init__.py": "import json\njson.loads('{')\n", "pkg/env.py": ENV}

    said = refusal(EnvironmentFailed, files, rl_env_module="pkg.env")

    assert "JSONDecodeError" in said
    assert f"{os.sep}__init__.py, line 2, in <module>: json.loads('{{')" in said


def test_a_module_that_wants_to_leave_is_a_failure() -> None:
    said = refusal(EnvironmentFailed, {"env.py": "import sys\nsys.exit('no key')\n" + ENV}, rl_env="env.py")

    assert "SystemExit: no key" in said
    assert "line 2" in said


def test_imports_inside_the_users_package_work_when_it_is_named_as_a_module() -> None:
    files = {
        "pkg/__init__.py": "city = 'Rome'\n",
        "pkg/rules.py": "stars = 4\n",
        "pkg/env.py": "from . import city\nfrom .rules import stars\nimport pkg.rules\n"
        + ENV
        + "    both = (city, stars)\n",
    }

    assert made(files, rl_env_module="pkg.env").both == ("Rome", 4)


def test_relative_imports_in_a_file_named_by_its_path_say_how_to_name_it() -> None:
    files = {"pkg/__init__.py": "", "pkg/rules.py": "", "pkg/env.py": "from .rules import stars\n" + ENV}

    assert "--rl-env-module package.module" in refusal(EnvironmentFailed, files, rl_env="pkg/env.py")


def test_a_file_can_import_what_lies_beside_it_and_what_lies_in_the_working_directory() -> None:
    files = {
        "deep/rules.py": "stars = 4\n",
        "city_names.py": "city = 'Rome'\n",
        "deep/env.py": "import city_names\nimport rules\n" + ENV + "    both = (city_names.city, rules.stars)\n",
    }

    assert made(files, rl_env="deep/env.py").both == ("Rome", 4)


def test_a_package_itself_may_hold_the_environment() -> None:
    files = {"pkg/__init__.py": "from pkg.inner import Env\n", "pkg/inner.py": ENV}

    assert type(made(files, rl_env="pkg:Env")).__module__ == "pkg.inner"


# -- constructing


def test_a_constructor_that_raises_is_told_with_the_users_line_and_without_the_values() -> None:
    text = ENV + "    def __init__(self, key):\n        raise ValueError('no such\\n key')\n"

    said = refusal(EnvironmentFailed, {"env.py": text}, rl_env="env.py", config={"key": "secret"})

    assert "Env(key=...) raised: ValueError: no such key" in said
    assert "env.py, line 5, in __init__: raise ValueError(" in said
    assert "secret" not in said


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("    def __init__(self):\n        exit(3)\n", ["SystemExit: 3"]),
        (
            "    def __init__(self):\n        import json\n        json.loads('')\n",
            ["JSONDecodeError", "json.loads('')"],
        ),
        ("    def __new__(cls): raise KeyError('x')\n", ["KeyError: 'x'"]),
        ("    def __init__(self, city, /): ...\n", ["TypeError", "city"]),
    ],
)
def test_whatever_a_constructor_does_is_one_short_message(body: str, words: list[str]) -> None:
    config = {"city": 1} if "city" in body else {}

    said = refusal(EnvironmentFailed, {"env.py": ENV + body}, rl_env="env.py", config=config)

    for word in words:
        assert word in said


def test_a_long_message_is_cut() -> None:
    said = refusal(EnvironmentFailed, {"env.py": ENV + "raise ValueError('x' * 9000)\n"}, rl_env="env.py")

    assert len(said) < 800
