"""`aitrain env show`: sample cases of an environment, as the model sees them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.text import Text

from aitrain.environment.contract import Case, env_kind
from aitrain.environment.rollout_session import session_for
from aitrain.environment.session import ResetResult
from aitrain.errors import EnvironmentFailed
from aitrain.execution.failure import CallFailed
from aitrain.execution.user_code import describe_error
from aitrain.runs.environment_source import files_of
from aitrain.ui.escape_controls import escape_controls
from aitrain.workbench.check.subject import spread
from aitrain.workbench.episode_view import shortened, show_columns, show_heading, show_text, signature
from aitrain.workbench.model_view import ModelView
from aitrain.workbench.opening import OpenedEnvironment
from aitrain.workbench.play import chosen_case, is_named
from aitrain.workbench.player import reference_of

MOST_MEASURED = 256
"""Cases whose prompts are counted in tokens."""


def show(
    opened: OpenedEnvironment, view: ModelView, case: str | None = None, count: int = 3, as_json: bool = False
) -> dict[str, object]:
    """Show what the environment is, then a case, or several that are spread over the dataset; returns it for `--json`.

    Raises:
        ConfigError: there is no such case.
        EnvironmentFailed: an episode cannot be begun, or a prompt not be rendered.
    """
    console = Console(highlight=False, quiet=as_json)
    cases = opened.all_cases
    shown = [chosen_case(cases, case)] if case is not None else spread(cases, count) if count else []
    for name, text in _facts(opened, view):
        console.print(Text(f"{name:9} {escape_controls(text)}"), soft_wrap=True)
    kind = env_kind(opened.environment)
    what = {"class": type(opened.environment).__name__, "episode": kind, "tools": _begun(opened, cases[0]).tools}
    counts = {"cases": len(opened.cases), "held_out": len(opened.held_out), "requires": opened.note}
    return {**what, **counts, "shown": [_show_case(console, opened, view, one) for one in shown]}


def _facts(opened: OpenedEnvironment, view: ModelView) -> Iterator[tuple[str, str]]:
    environment = opened.environment
    files = files_of(environment)
    yield "class", type(environment).__name__ + (f" in {_short(files[0])}" if files else "")
    kind = env_kind(environment)
    yield "cases", f"{len(opened.cases)}" + (f", {len(opened.held_out)} held out" if opened.held_out else "")
    yield "episode", "one answer (score_episode)" if kind == "score_episode" else f"several turns ({kind})"
    columns = {name: type(value).__name__ for name, value in opened.cases[0].row.items()}
    yield "columns", ", ".join(f"{name} ({kind})" for name, kind in columns.items())
    reset = _begun(opened, opened.cases[0])
    if reset.tools:
        yield "tools", "\n          ".join(map(signature, reset.tools))
    if opened.note:
        yield "requires", opened.note
    yield "tokens", _lengths(opened, view, reset)


def _short(file: Path) -> str:
    """The path from the working directory, for a file below it."""
    return str(file.relative_to(Path.cwd())) if file.is_relative_to(Path.cwd()) else str(file)


def _lengths(opened: OpenedEnvironment, view: ModelView, reset: ResetResult) -> str:
    """Tokens of the prompts, of `view.name`."""
    if env_kind(opened.environment) != "score_episode":  # what each episode adds is known when it begins
        return f"counted for each case below ({view.name})"
    cases = opened.all_cases
    measured = spread(cases, MOST_MEASURED)
    lengths = sorted(view.prompt(case.prompt, reset.tools).tokens for case in measured)
    number = f"{len(cases)} cases" if len(measured) == len(cases) else f"{len(measured)} of {len(cases)} cases"
    spread_out = f"{lengths[0]} to {lengths[-1]} in a prompt, median {median(lengths):g}"
    same = f"{lengths[0]} in each prompt"
    return f"{same if lengths[0] == lengths[-1] else spread_out} ({view.name}, {number})"


def _show_case(console: Console, opened: OpenedEnvironment, view: ModelView, case: Case) -> dict[str, object]:
    """Show a case; returns it for `--json`."""
    reset = _begun(opened, case)
    rendered = view.prompt(reset.prompt or case.prompt, reset.tools)
    named = f" (case_idx {case.case_idx})" if is_named(case) else ""
    held_out = ", held out" if case.number >= len(opened.cases) else ""
    console.print()
    show_heading(console, f"case {case.number}{named}{held_out}: {rendered.tokens} tokens")
    show_text(console, rendered.text)
    show_columns(console, case)
    reference = _reference(opened.environment, case)
    show_text(console, reference, "green")
    row = {name: value for name, value in case.row.items() if name != "prompt"}
    place = {"case": case.number, "case_idx": case.case_idx, "held_out": bool(held_out)}
    return {
        **place,
        "tokens": rendered.tokens,
        "prompt": rendered.text,
        "row": row,
        "reference": reference.removeprefix("reference: "),
    }


def _reference(environment: object, case: Case) -> str:
    try:
        script = reference_of(environment, case)
    except Exception as error:  # such as for held-out cases, which many methods do not know
        return f"reference raised: {describe_error(error)}"
    return "reference: " + ("none" if script is None else "\n           ".join(map(shortened, script.replies)))


def _begun(opened: OpenedEnvironment, case: Case) -> ResetResult:
    """The start of an episode of the case."""
    session = session_for(opened.environment, case=case)
    try:
        return session.open(case.arguments(seed=0))
    except CallFailed as error:
        raise EnvironmentFailed(f"{error.failure.place} of case {case.case_idx} {error.failure.message}") from error
    finally:
        session.close()
