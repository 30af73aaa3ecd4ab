"""Tests with the real vLLM are skipped where it is not installed; .ci/vllm installs its CPU build."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests of this folder."""
    for item in items if importlib.util.find_spec("vllm") is None else ():
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.skip(reason="vLLM is not installed"))
