"""`aitrain env play`: one episode, played by a person or a scripted policy, shown turn by turn."""

from __future__ import annotations

import json
from bdb import BdbQuit
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.text import Text

from aitrain.environment.contract import Case, Prompt, ScoreResult
from aitrain.environment.rollout_session import session_for
from aitrain.environment.runner import NoModel
from aitrain.environment.session import Message
from aitrain.errors import ConfigError, EnvironmentFailed
from aitrain.execution.failure import CallFailed, Failure
from aitrain.options.train import TrainConfig
from aitrain.ui.escape_controls import escape_controls
from aitrain.workbench.episode_view import EpisodeView
from aitrain.workbench.model_view import ModelView
from aitrain.workbench.opening import OpenedEnvironment
from aitrain.workbench.person import Person
from aitrain.workbench.player import EMPTY, JUNK, Play, Policy, Script, reference_of
from aitrain.workbench.stage import Stage


@dataclass(frozen=True)
class PlayOptions:
    """What is played, and who plays."""

    case: str = "0"
    """Number of the row, or its case_idx."""
    seed: int = 0
    policy: str = "person"
    script: str | None = None
    """File with the replies of the policy `script`."""
    as_json: bool = False
    """Whether the episode is printed as JSON at its end, instead of turn by turn."""


def play(opened: OpenedEnvironment, config: TrainConfig, view: ModelView, options: PlayOptions) -> dict[str, object]:
    """Play one episode at the terminal; returns it for `--json`.

    Raises:
        ConfigError: there is no such case, or the policy cannot play it.
        EnvironmentFailed: the environment failed.
    """
    console = Console(highlight=False, quiet=options.as_json)
    case = chosen_case(opened.all_cases, options.case)
    shown = EpisodeView(console, view, options.policy, is_typed=options.policy == "person" and console.is_terminal)
    policy = _policy(opened.environment, case, options, console)
    show_title(console, opened, case, options, view.name)
    session = session_for(opened.environment, config.score_bounds, case)
    try:
        given = {"model": NoModel(), "tokenizer": view.tokenizer}
        episode = Stage(session, shown, config.rl_max_turns, given).play(Play(case, policy, options.seed))
    except CallFailed as error:
        if isinstance(error.__cause__, BdbQuit):  # `q` in the debugger
            raise KeyboardInterrupt from None
        raise _failed(case, error.failure) from error
    finally:
        session.close()
    if episode.result.failure is not None:
        raise _failed(case, episode.result.failure)
    shown.ended(episode)
    said = episode.conversation
    how = {"stop": episode.stop, "turns": episode.turns}
    return episode_json(case, options, said.prompt, said.messages, how, episode.result)


def episode_json(
    case: Case,
    options: PlayOptions,
    prompt: Prompt,
    messages: Sequence[Message],
    end: Mapping[str, object],
    result: ScoreResult,
) -> dict[str, object]:
    """An episode for a program."""
    what = {"case": case.number, "case_idx": case.case_idx, "seed": options.seed, "policy": options.policy}
    said = {"prompt": prompt, "messages": list(messages)}
    return {**what, **said, **end, "score": result.score, "metrics": dict(result.metrics)}


def show_title(console: Console, opened: OpenedEnvironment, case: Case, options: PlayOptions, model: str) -> None:
    """One line about what is played."""
    which = f"case {case.number} of {len(opened.all_cases)}"
    named = f" (case_idx {case.case_idx})" if is_named(case) else ""
    title = f"{type(opened.environment).__name__}, {which}{named}, seed {options.seed}; template and tokens of {model}"
    console.print(Text(escape_controls(title), style="dim"), soft_wrap=True)


def chosen_case(cases: Sequence[Case], wanted: str) -> Case:
    """The case of a row number, else of a case_idx.

    Raises:
        ConfigError: there is none.
    """
    by_number = [case for case in cases if str(case.number) == wanted]
    found = by_number or [case for case in cases if str(case.case_idx) == wanted]
    if not found:
        raise ConfigError(f"case: there is no case {wanted}: rows are numbered from 0 to {len(cases) - 1}")
    return found[0]


def is_named(case: Case) -> bool:
    """Whether the environment has a name of its own for the case."""
    return str(case.case_idx) != str(case.number)


def _policy(environment: object, case: Case, options: PlayOptions, console: Console) -> Policy:
    if options.policy == "person":
        return Person(lambda text: console.print(Text(escape_controls(text), style="dim"), soft_wrap=True))
    if options.policy == "script":
        return read_script(Path(options.script or ""))
    if options.policy != "reference":
        return {"empty": EMPTY, "junk": JUNK}[options.policy]
    try:
        reference = reference_of(environment, case)
    except EnvironmentFailed:
        raise
    except Exception as error:
        raise EnvironmentFailed(f"reference of case {case.case_idx} raised: {error!r}") from error
    if reference is None:
        name = type(environment).__name__
        raise ConfigError(
            f"--policy reference: {name} knows no right answer to case {case.case_idx}\n"
            "Give it a method reference(self, case_idx) that returns a reply, or a list of replies."
        )
    return reference


def read_script(path: Path) -> Script:
    """The replies in a file: a JSON list of texts, or one reply a line.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise ConfigError(f"--policy script: cannot read {path}: {why}") from None
    if not text.lstrip().startswith("["):
        return Script(tuple(text.splitlines()))
    try:
        replies = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--policy script: {path} begins with [ and is not a JSON list: {error}") from None
    if not all(isinstance(reply, str) for reply in replies):
        raise ConfigError(f"--policy script: {path} must hold a JSON list of texts, or one reply a line")
    return Script(tuple(replies))


def _failed(case: Case, failure: Failure) -> EnvironmentFailed:
    return EnvironmentFailed(f"{failure.place or 'The environment'} of case {case.case_idx} {failure.message}")
