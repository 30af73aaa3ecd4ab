"""What holds for a while, and what is restored after it."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from aitrain.engines import scopes
from aitrain.engines.scopes import frozen_heap


@pytest.fixture(autouse=True)
def heap_of_the_tests(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """It is frozen, see tests/conftest.py."""
    monkeypatch.setattr(scopes, "gc", gc)
    gc.unfreeze()
    yield
    gc.freeze()


def test_the_heap_is_frozen_while_a_run_lasts() -> None:
    with frozen_heap():
        assert gc.get_freeze_count() > 0
    assert gc.get_freeze_count() == 0
