"""`--rl-env NAME:ID`: which adapter is meant, and what is refused before its framework is imported."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest

from aitrain import ConfigError
from aitrain.environment.adapters import ADAPTERS, Adapter
from tests.adapters.conftest import made, refusal
from tests.conftest import write

ROOT = Path(__file__).parents[2]
WEATHER = """
from aitrain.errors import ConfigError

class Weather:
    def __init__(self, id, /, *, size=2, score_range=None):
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
    made = Adapter("weather", "weather_adapter", "Weather", "Rome", "pyyaml", ">=1,<99")
    monkeypatch.setitem(ADAPTERS, "weather", made)
    yield made
    sys.modules.pop("weather_adapter", None)


@pytest.mark.usefixtures("weather")
def test_an_adapter_gets_the_id_and_the_settings() -> None:
    assert vars(made("weather:Oslo", size=3)) == {"place": "Oslo", "size": 3}


@pytest.mark.usefixtures("weather")
def test_what_is_wrong_is_refused() -> None:
    assert "Did you mean size?" in refusal("weather:Rome", sise=3)
    assert "Did you mean weather?" in refusal("wether:Rome")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"package": "no-such-package-of-weather"}, 'none is installed\npip install "aitrain[weather]"'),
        ({"versions": ">=99"}, f"needs pyyaml >=99\n{version('pyyaml')} is installed"),
    ],
)
def test_a_missing_package_or_another_version_is_refused_before_the_import(
    weather: Adapter, change: dict[str, str], words: str
) -> None:
    ADAPTERS["weather"] = replace(weather, **change)  # type: ignore[arg-type]
    with pytest.raises(ConfigError) as caught:
        made("weather:Rome")
    assert all(word in str(caught.value) for word in words.splitlines())
    assert "weather_adapter" not in sys.modules
