"""`aitrain env list`: what can be named with --rl-env, found without importing it."""

from __future__ import annotations

import json
import subprocess
import sys
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


def test_bundled_environments_are_listed_with_their_first_sentence() -> None:
    bundled = {one.rl_env: one.summary for one in listed_environments() if one.source == "bundled"}
    assert set(bundled) == {"envs.arithmetic", "envs.gsm8k", "envs.guess_number", "envs.hotel_booking"}
    assert bundled["envs.guess_number"].startswith("The smallest environment of several turns")


def test_an_installed_package_lists_its_environments_by_an_entry_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, "hotels", "1.2", "[aitrain.environments]\nhotel = hotels.booking:Hotel\n")
    monkeypatch.syspath_prepend(tmp_path)
    (found,) = [one for one in listed_environments() if one.source == "installed"]
    assert (found.rl_env, found.package, found.version) == ("hotels.booking:Hotel", "hotels", "1.2")


def test_adapters_are_listed_with_the_version_of_their_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, "reasoning_gym", "0.1.25")
    install(tmp_path, "textarena", "0.1")
    monkeypatch.syspath_prepend(tmp_path)
    adapters = {one.rl_env.partition(":")[0]: one for one in listed_environments() if one.source == "adapter"}
    assert set(adapters) == set(ADAPTERS)
    assert (adapters["reasoning-gym"].version, adapters["reasoning-gym"].problem) == ("0.1.25", "")
    assert "textarena 0.1 is" in adapters["textarena"].problem or "0.1 is installed" in adapters["textarena"].problem
    assert adapters["ors"].package is None


def test_the_list_says_what_is_not_installed_and_what_is_too_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(tmp_path, "textarena", "0.1")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    env_list()
    lines = capsys.readouterr().out.splitlines()
    assert "  reasoning-gym:chain_sum  (reasoning-gym is not installed)" in lines
    assert "  textarena:GuessTheNumber-v0  (textarena 0.1, which the adapter does not support)" in lines
    assert "  none" in lines  # no package has an entry point
    assert max(map(len, lines)) <= 84


def test_the_json_list_has_the_same_environments(capsys: pytest.CaptureFixture[str]) -> None:
    env_list(as_json=True)
    assert [one["rl_env"] for one in json.loads(capsys.readouterr().out)] == [
        one.rl_env for one in listed_environments()
    ]


def test_the_command_imports_nothing_heavy() -> None:
    code = (
        "import sys; sys.argv[1:] = ['env', 'list']\n"
        "from aitrain.cli.main import _run\n"
        "_run()\n"
        "print('HEAVY', *sorted({'torch', 'transformers', 'reasoning_gym', 'textarena'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "HEAVY"
