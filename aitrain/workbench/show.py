"""`aitrain env show`: sample cases of an environment, as the model sees them."""

import os

from rich.console import Console

from aitrain.environment.completion_parser import short
from aitrain.environment.contract import Case
from aitrain.environment.rollout_session import session_for
from aitrain.environment.session import EnvResponse
from aitrain.errors import EnvironmentFailed
from aitrain.execution.failure import as_failure
from aitrain.rollout.chat_format import ChatFormat
from aitrain.runs.environment_source import files_of
from aitrain.ui.overview import evenly
from aitrain.workbench.opening import OpenedEnvironment
from aitrain.workbench.play import case_name, chosen_case, show_heading, show_text
from aitrain.workbench.player import reference_of

LONGEST_VALUE = 300
"""Maximum characters of a column's value."""


def show(
    opened: OpenedEnvironment,
    chat: ChatFormat,
    case: str | None = None,
    count: int = 3,
    as_json: bool = False,
) -> dict[str, object]:
    """Show what the environment is, then a case, or several that are spread over the dataset, as the chat format of a
    model renders them; returns it for `--json`.

    Raises:
        ConfigError: there is no such case.
        EnvironmentFailed: an episode cannot be begun, or a prompt not be rendered.
    """
    console = Console(highlight=False, quiet=as_json)
    environment, cases = opened.runner.environment, opened.all_cases
    chosen = [chosen_case(cases, case)] if case is not None else evenly(cases, count)
    facts = {
        "class": opened.runner.label,
        "file": "".join(map(os.path.relpath, files_of(environment)[:1])),
        "episode": opened.runner.kind,
        "cases": len(opened.cases),
        "held_out": len(opened.held_out),
        "columns": ", ".join(f"{column} ({type(value).__name__})" for column, value in cases[0].row.items()),
        "requires": opened.note,
        "tokens": f"those of {opened.runner.config.model}",
    }
    for fact, value in facts.items():
        if value:
            show_text(console, f"{fact:9} {value}")
    shown: list[dict[str, object]] = []
    for one in chosen:
        reset = _begun(opened, one)
        text, ids = chat.render_prompt(reset.prompt or one.prompt, reset.tools)
        is_held_out = one.number >= len(opened.cases)
        row = {name: value for name, value in one.row.items() if name != "prompt"}
        try:
            script = reference_of(environment, one)
            reference = "none" if script is None else "\n".join(script.replies)
        except EnvironmentFailed as error:  # such as for held-out cases, which many methods do not know
            reference = str(error)
        console.print()
        show_heading(console, f"{case_name(one)}{', held out' * is_held_out}: {len(ids)} tokens")
        show_text(console, text)
        for column, value in {**row, "reference": reference}.items():
            style = "green" if column == "reference" else "dim"
            show_text(console, f"{column}: {short(str(value), LONGEST_VALUE)}", style)
        shown.append(
            {
                "case": one.number,
                "case_idx": one.case_idx,
                "held_out": is_held_out,
                "tokens": len(ids),
                "prompt": text,
                "row": row,
                "tools": reset.tools,
                "reference": reference,
            }
        )
    return {**facts, "shown": shown}


def _begun(opened: OpenedEnvironment, case: Case) -> EnvResponse:
    """The start of an episode of the case."""
    session = session_for(opened.runner.environment, case)
    try:
        return session.open(case.arguments(seed=0))
    except (Exception, SystemExit) as error:
        raise EnvironmentFailed(f"The episode of case {case.case_idx} {as_failure(error).message}") from error
    finally:
        session.close()
