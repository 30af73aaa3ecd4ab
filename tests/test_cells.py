"""What a notebook shows of an error: the user's lines, and cells by their number."""

from __future__ import annotations

import linecache
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from aitrain import EnvironmentFailed, TrainConfig
from aitrain.environment.loader import load_env
from aitrain.environment.locator import find_env
from aitrain.notebook import errors_in_python
from tests.conftest import write

KERNEL_FILE = "/tmp/ipykernel_12/345.py"


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """A notebook whose cell 3 is KERNEL_FILE."""
    named = types.SimpleNamespace(format_code_name=lambda file: ("Cell", "In[3]") if file == KERNEL_FILE else None)
    shell = types.SimpleNamespace(compile=named, kernel=object())
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: shell))  # type: ignore[arg-type]


def run_cell(source: str, **names: Any) -> None:
    linecache.cache[KERNEL_FILE] = (len(source), None, source.splitlines(keepends=True), KERNEL_FILE)
    exec(compile(source, KERNEL_FILE, "exec"), names)


@pytest.mark.usefixtures("kernel")
def test_an_error_is_shown_with_the_cells_line_and_without_the_lines_of_aitrain(here: Path) -> None:
    write(here, {"bad.py": "class Bad:\n    def build_dataset(self): ...\n    def __init__(self):\n        1 / 0\n"})
    config = TrainConfig(rl_env="bad.py:Bad")
    with pytest.raises(EnvironmentFailed) as caught, errors_in_python():
        run_cell("load(config)", load=lambda config: load_env(find_env(config), {}), config=config)

    shown = "\n".join(caught.value._render_traceback_())
    assert "Cell In[3], line 1, in <module>\n    load(config)" in shown
    assert "bad.py, line 4, in __init__\n    1 / 0" in shown
    assert "EnvironmentFailed: Bad() raised: ZeroDivisionError" in shown
    assert "loader.py" not in shown
