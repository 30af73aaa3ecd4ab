"""`aitrain env list`: what can be named with --rl-env, found without importing it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from aitrain.cli.env_list import env_list
from aitrain.environment.adapters import ADAPTERS
from aitrain.workbench.listing import listed_environments
from tests.conftest import write


def install(folder: Path, name: str, version: str, entry_points: str = "") -> None:
    """A package as pip leaves it, whose module must not be imported."""
    write(
        folder,
        {
            f"{name}/__init__.py": "raise RuntimeError('imported')",
            f"{name}-{version}.dist-info/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
            f"{name}-{version}.dist-info/entry_points.txt": entry_points,
        },
    )


def test_an_installed_package_lists_its_environments_by_an_entry_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, "hotels", "1.2", "[aitrain.environments]\nhotel = hotels.booking:Hotel\n")
    monkeypatch.syspath_prepend(tmp_path)
    (found,) = [one for one in listed_environments() if one.source == "installed"]
    assert (found.rl_env, found.package, found.version) == ("hotels.booking:Hotel", "hotels", "1.2")


def test_adapters_are_listed_with_the_version_of_their_package_and_what_is_wrong_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(tmp_path, "reasoning_gym", "0.1.25")
    install(tmp_path, "textarena", "0.1")
    monkeypatch.syspath_prepend(tmp_path)
    env_list(as_json=True)
    adapters = {one["rl_env"].partition(":")[0]: one for one in json.loads(capsys.readouterr().out)}
    assert set(ADAPTERS) <= set(adapters)
    assert (adapters["reasoning-gym"]["version"], adapters["reasoning-gym"]["problem"]) == ("0.1.25", "")
    assert "0.1 is installed" in adapters["textarena"]["problem"]
