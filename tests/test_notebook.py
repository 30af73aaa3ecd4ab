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

FAILS = """class Fails(Sums):
    def build_dataset(self, tokenizer):
        return [1 / 0]


train(model="tiny", environment=Fails())
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
    fails = nbformat.v4.new_code_cell(FAILS, metadata={"tags": ["raises-exception"]})
    notebook.cells[-1:-1] = [nbformat.v4.new_code_cell(LOUD), fails]
    manager = AsyncKernelManager(kernel_name="python3", kernel_spec_manager=ThisPython())
    client = NotebookClient(notebook, km=manager, timeout=300, resources={"metadata": {"path": str(folder)}})
    client.execute()
    return {cell.source.splitlines()[0]: cell for cell in notebook.cells if cell.cell_type == "code"}


def test_progress_and_results_are_displayed_and_an_error_has_the_lines_of_its_cell(
    cells: dict[str, Any],
) -> None:
    outputs = [output for output in cells["config = TrainConfig("].outputs if output.output_type == "display_data"]
    assert len(outputs) == 1
    html = outputs[0].data["text/html"]
    assert "finished" in html
    assert "▁" in html
    assert "held-out" in outputs[0].data["text/plain"]

    assert [output for cell in cells.values() for output in cell.outputs if output.output_type == "stream"] == []
    result, comparison = (
        "".join(output.data["text/plain"] for output in cells[source].outputs if "data" in output)
        for source in ("result", "compare(result)")
    )
    assert re.search(r"^finished: 12 .*\nheld-out  before .*\nsampled   0\..*\ngreedy    0\..*\n.* 32 cases\n", result)
    assert "runs/sums/model" in result
    assert re.search(r"^after compared with before: .* over 32 cases\nheld-out  before .*\nsampled   0\.", comparison)

    shown = "\n".join(cells["class Fails(Sums):"].outputs[-1].traceback)
    assert re.search(r"Cell In\[\d+\], line 3, in build_dataset\n +return \[1 / 0\]", shown), shown
    assert "/aitrain/" not in shown
