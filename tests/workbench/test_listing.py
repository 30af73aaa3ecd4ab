"""`aitrain env list`: what can be named with --rl-env, found without importing it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from aitrain.environment.adapters import ADAPTERS
from tests.conftest import install_package, run_in_process, write


def install(site: Path, name: str, version: str, entry_points: str = "") -> None:
    """A package whose module must not be imported."""
    write(site, {f"{name}/__init__.py": "raise RuntimeError('imported')"})
    write(install_package(site, name, version), {"entry_points.txt": entry_points})


def test_installed_environments_and_adapters_are_listed_with_what_is_wrong_with_their_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, "hotels", "1.2", "[aitrain.environments]\nhotel = hotels.booking:Hotel\n")
    install(tmp_path, "textarena", "0.1")
    monkeypatch.syspath_prepend(tmp_path)
    listed = {one["rl_env"].partition(":")[0]: one for one in json.loads(run_in_process("env list --json")[1])}
    assert set(ADAPTERS) <= set(listed)
    hotel = listed["hotels.booking"]
    assert (hotel["source"], hotel["package"], hotel["version"]) == ("installed", "hotels", "1.2")
    assert "0.1 is installed" in listed["textarena"]["problem"]
