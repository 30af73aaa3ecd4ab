"""`aitrain env list`: what can be named with --rl-env, found without importing it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from aitrain.cli.env import list_environments
from aitrain.environment.adapters import ADAPTERS
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


def test_installed_environments_and_adapters_are_listed_with_what_is_wrong_with_their_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(tmp_path, "hotels", "1.2", "[aitrain.environments]\nhotel = hotels.booking:Hotel\n")
    install(tmp_path, "textarena", "0.1")
    monkeypatch.syspath_prepend(tmp_path)
    list_environments(as_json=True)
    listed = {one["rl_env"].partition(":")[0]: one for one in json.loads(capsys.readouterr().out)}
    assert set(ADAPTERS) <= set(listed)
    hotel = listed["hotels.booking"]
    assert (hotel["source"], hotel["package"], hotel["version"]) == ("installed", "hotels", "1.2")
    assert "0.1 is installed" in listed["textarena"]["problem"]
