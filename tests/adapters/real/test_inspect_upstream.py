"""What the adapter uses of Inspect's private API, and what has to hold of it; see adapters/inspect_sample.py."""

from __future__ import annotations

import ast
import inspect
from importlib import import_module
from pathlib import Path

import pytest

from tests.adapters.real.conftest import ROOT, in_environment

pytestmark = in_environment("newest")

PACKAGE = ROOT / "aitrain" / "environment" / "adapters"

PARAMETERS = {
    "inspect_ai._eval.context.init_task_context": ["model", "model_roles", "config"],
    "inspect_ai._eval.loader.load_tasks": ["task_specs", "task_args"],
    "inspect_ai._eval.task.generate.task_generate": ["model", "state", "tool_calls", "cache", "config"],
    "inspect_ai._eval.task.run.resolve_plan": ["task", "solver"],
    "inspect_ai._eval.task.util.sample_messages": ["sample"],
    "inspect_ai._util.registry.registry_lookup": ["type", "name"],
    "inspect_ai.log._samples.active_sample": [
        "task", "log_location", "model", "sample", "epoch", "message_limit", "token_limit", "cost_limit", "time_limit",
        "working_limit", "fails_on_error", "transcript", "eval_id", "sample_uuid",
    ],
    "inspect_ai.log._transcript.Transcript": [],
    "inspect_ai.log._transcript.init_transcript": ["transcript"],
    "inspect_ai.model._model.init_sample_model_data": [],
    "inspect_ai.scorer._score.init_scoring_context": ["scorers", "target"],
    "inspect_ai.scorer._scorer.unique_scorer_name": ["scorer", "already_used_names"],
    "inspect_ai.solver._task_state.sample_state": [],
    "inspect_ai.solver._task_state.set_sample_state": ["state"],
    "inspect_ai.util._store.init_subtask_store": ["store"],
}  # fmt: skip
"""The names, and the parameters that we pass to each."""


def private_imports(file: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and "._" in (node.module or ""):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in found if name.startswith("inspect_ai")}


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_private_name_takes_what_we_pass_and_needs_nothing_else(name: str) -> None:
    module, _, attribute = name.rpartition(".")
    parameters = inspect.signature(getattr(import_module(module), attribute)).parameters
    assert set(PARAMETERS[name]) <= set(parameters)
    needed = {key for key, one in parameters.items() if one.default is one.empty and one.kind is not one.VAR_KEYWORD}
    assert needed <= set(PARAMETERS[name])


def test_private_names_are_imported_in_one_module_and_listed_here() -> None:
    used = {file.name: private_imports(file) for file in PACKAGE.glob("*.py")}
    assert {name for name, found in used.items() if found} == {"inspect_sample.py"}
    assert used["inspect_sample.py"] == set(PARAMETERS)
