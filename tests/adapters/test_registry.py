"""`--rl-env NAME:ID`: which adapter is meant, and what is refused before its framework is imported."""

from __future__ import annotations

import random
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest

from aitrain import ConfigError, TrainConfig
from aitrain.environment.adapters import ADAPTERS, Adapter
from aitrain.environment.loader import load_env
from aitrain.environment.locator import check_by_reading, find_env
from tests.adapters.conftest import source_of
from tests.conftest import write

ROOT = Path(__file__).parents[2]
WEATHER = """
import random
from aitrain.errors import ConfigError

def check_id(id, settings):
    if id == "nowhere":
        raise ConfigError("rl_env: weather has no place nowhere")

class Weather:
    def __init__(self, id, /, *, size=2, score_range=None):
        random.seed(len(id))
        self.place, self.size = id, size
        if score_range == "wrong":
            raise ConfigError("score_range: must be LOW,HIGH")
    def build_dataset(self): return [{"prompt": self.place}] * self.size
    def score_episode(self): return 1.0
"""


@pytest.fixture
def weather(here: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Adapter]:
    """An adapter of an installed package, whose module is not one of ours."""
    site = here.parent / "site"
    write(site, {"weather_adapter.py": WEATHER})
    monkeypatch.syspath_prepend(str(site))
    made = Adapter("weather", "weather_adapter", "Weather", "Weather.", "Rome", "pyyaml", ">=1,<99")
    monkeypatch.setitem(ADAPTERS, "weather", made)
    yield made
    sys.modules.pop("weather_adapter", None)


def made(rl_env: str, **settings: object) -> object:
    source = find_env(TrainConfig(rl_env=rl_env))
    check_by_reading(source, settings)
    return load_env(source, settings)


def refusal(rl_env: str, **settings: object) -> str:
    with pytest.raises(ConfigError) as caught:
        made(rl_env, **settings)
    assert len(str(caught.value).splitlines()) <= 4
    return str(caught.value)


@pytest.mark.parametrize(
    ("rl_env", "adapter", "id"),
    [
        ("openenv:http://127.0.0.1:8000", "openenv", "http://127.0.0.1:8000"),
        ("gem:game:GuessTheNumber-v0-easy", "gem", "game:GuessTheNumber-v0-easy"),
        ("reasoning_gym:chain_sum", "reasoning-gym", "chain_sum"),
        ("reward:my_rewards.py:exact,short", "reward", "my_rewards.py:exact,short"),
    ],
)
def test_the_first_colon_ends_the_name_of_the_adapter(here: Path, rl_env: str, adapter: str, id: str) -> None:
    source = find_env(TrainConfig(rl_env=rl_env))
    assert source.adapter is ADAPTERS[adapter]
    assert source.id == id


@pytest.mark.usefixtures("weather")
def test_the_class_gets_the_id_and_the_settings(here: Path) -> None:
    environment = made("weather:Oslo", size=3)
    assert vars(environment) == {"place": "Oslo", "size": 3}


@pytest.mark.usefixtures("weather")
def test_loading_an_adapter_leaves_the_runs_random_numbers_alone(here: Path) -> None:
    random.seed(5)
    before = random.getstate()
    made("weather:Oslo")
    assert random.getstate() == before


@pytest.mark.usefixtures("weather")
def test_a_module_here_that_has_the_class_wins_over_the_adapter_of_its_name(here: Path) -> None:
    own = "class Own:\n    def build_dataset(self): ...\n    def score_episode(self): ...\n"
    write(here, {"weather.py": own})
    assert find_env(TrainConfig(rl_env="weather:Own")).file == here / "weather.py"
    assert find_env(TrainConfig(rl_env="weather")).file == here / "weather.py"
    assert find_env(TrainConfig(rl_env="weather:Oslo")).adapter is ADAPTERS["weather"]


@pytest.mark.usefixtures("weather")
def test_nothing_here_is_run_to_tell_a_module_from_an_adapter(here: Path) -> None:
    write(here, {"weather.py": "open('somebody_ran_this', 'w').close()\n"})
    find_env(TrainConfig(rl_env="weather:Oslo"))
    assert not (here / "somebody_ran_this").exists()


@pytest.mark.usefixtures("weather")
@pytest.mark.parametrize(
    ("rl_env", "settings", "words"),
    [
        ("weather", {}, ["weather needs", "--rl-env weather:Rome"]),
        ("weather:", {}, ["--rl-env weather:Rome"]),
        ("weather:nowhere", {}, ["weather has no place nowhere"]),
        ("weather:Rome", {"sise": 3}, ["does not take sise", "Did you mean size?"]),
        ("weather:Rome", {"score_range": "wrong"}, ["score_range: must be"]),
        ("reasonning-gym:chain_sum", {}, ["Did you mean reasoning-gym?"]),
        ("wether:Rome", {}, ["Did you mean weather?"]),
    ],
)
def test_what_is_wrong_is_refused_in_one_message(
    here: Path, rl_env: str, settings: dict[str, object], words: list[str]
) -> None:
    message = refusal(rl_env, **settings)
    assert all(word in message for word in words), message


def test_a_missing_package_is_refused_with_the_command_that_installs_it(weather: Adapter) -> None:
    ADAPTERS["weather"] = replace(weather, package="no-such-package-of-weather")
    message = refusal("weather:Rome")
    assert "no-such-package-of-weather, which is not installed" in message
    assert 'pip install "aitrain[weather]"' in message
    assert "weather_adapter" not in sys.modules


def test_a_package_in_another_version_is_refused_with_both(weather: Adapter) -> None:
    ADAPTERS["weather"] = replace(weather, versions=">=99")
    message = refusal("weather:Rome")
    assert "weather works with pyyaml >=99" in message
    assert f"{version('pyyaml')} is installed" in message


def test_each_adapter_with_a_package_has_an_extra_with_the_same_versions() -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        extras = tomllib.load(file)["project"]["optional-dependencies"]
    wanted = {name: [f"{one.package}{one.versions}"] for name, one in ADAPTERS.items() if one.package}
    assert {name: extras.get(name) for name in wanted} == wanted


def test_what_a_server_has_is_named_by_its_address_and_has_no_source_here() -> None:
    for name in ("openenv", "ors"):
        found = source_of(made(f"{name}:http://127.0.0.1:1", score_range="0,1"))
        assert found == {"class": f"{name}:http://127.0.0.1:1", "package": None, "files": []}


def test_every_adapter_is_short_and_has_its_class() -> None:
    for adapter in ADAPTERS.values():
        file = ROOT.joinpath(*adapter.module.split(".")).with_suffix(".py")
        text = file.read_text(encoding="utf-8")
        assert sum(bool(line.strip()) for line in text.splitlines()) <= 120, file
        assert f"\nclass {adapter.class_name}" in text or f"\ndef {adapter.class_name}(" in text


def test_adapters_that_need_no_package_are_always_there() -> None:
    for adapter in ADAPTERS.values():
        if adapter.package is None:
            adapter.require_package()
            assert adapter.installed_version is None
