"""docs/notebook.ipynb, executed as in Jupyter, and what is shown there."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient

pytestmark = pytest.mark.slow
NOTEBOOK = Path(__file__).parents[1] / "docs" / "notebook.ipynb"


LOUD = """class Loud(Sums):
    def score_episode(self, text):
        print("said", text)
        return 0.5


train(model="tiny", project_name="loud", max_steps=2, rl_max_new_tokens=4, eval_cases=2, environment=Loud())
log = result.folder.with_name("loud") / "train.log"
assert log.read_text().count("said") > 10
"""


class ThisPython(KernelSpecManager):
    """Knows one kernel, which runs the Python of the tests."""

    def get_kernel_spec(self, kernel_name: str) -> KernelSpec:
        command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        return KernelSpec(argv=command, display_name="Python", language="python")


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The executed code cells, by their first line."""
    folder = tmp_path_factory.mktemp("notebook")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    notebook.cells.insert(-1, nbformat.v4.new_code_cell(LOUD))
    manager = AsyncKernelManager(kernel_name="python3", kernel_spec_manager=ThisPython())
    client = NotebookClient(notebook, km=manager, timeout=300, resources={"metadata": {"path": str(folder)}})
    client.execute()
    return {cell.source.splitlines()[0]: cell for cell in notebook.cells if cell.cell_type == "code"}


def html_of(cell: Any) -> str:
    return "".join(output.data["text/html"] for output in cell.outputs if "data" in output)


def test_the_display_shows_progress_and_the_curve_in_one_output(cells: dict[str, Any]) -> None:
    outputs = [output for output in cells["config = TrainConfig("].outputs if output.output_type == "display_data"]
    assert len(outputs) == 1
    html = outputs[0].data["text/html"]
    assert "finished" in html
    assert "<polyline" in html
    assert "held-out" in outputs[0].data["text/plain"]


def test_libraries_and_environments_write_nothing_into_the_notebook(cells: dict[str, Any]) -> None:
    assert [output for cell in cells.values() for output in cell.outputs if output.output_type == "stream"] == []


def test_a_result_and_a_comparison_are_tables(cells: dict[str, Any]) -> None:
    assert re.search(r"<th[^>]*>change</th>.*sampled.*greedy", html_of(cells["result"]))
    assert "runs/sums/model" in html_of(cells["result"])
    assert "cases won" in html_of(cells["result.compare()"])
