"""`aitrain env list`: what can be named with --rl-env, found without importing it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from aitrain.environment.adapters import ADAPTERS
from tests.conftest import install_package, run_in_process, write


def test_adapters_are_listed_with_what_is_wrong_with_their_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, {"textarena/__init__.py": "raise RuntimeError('imported')"})
    install_package(tmp_path, "textarena", "0.1")
    monkeypatch.syspath_prepend(tmp_path)
    listed = {one["rl_env"].partition(":")[0]: one for one in json.loads(run_in_process("env list --json")[1])}
    assert set(ADAPTERS) <= set(listed)
    assert "0.1 is installed" in listed["textarena"]["problem"]
