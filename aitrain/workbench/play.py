"""`aitrain env play`: one episode, played by a person, a scripted policy or a model, and its messages."""

import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import closing
from itertools import takewhile
from pathlib import Path

from rich.console import Console
from rich.text import Text

from aitrain.environment.completion_parser import clean
from aitrain.environment.contract import Case
from aitrain.environment.session import Message
from aitrain.errors import ConfigError, EnvironmentFailed
from aitrain.rollout.engine import Decoding
from aitrain.rollout.episode import STOPS, Rollout
from aitrain.rollout.event_loop import event_loop
from aitrain.runs.records import TranscriptMessage
from aitrain.ui.output import escape_controls
from aitrain.ui.transcript import messages_text
from aitrain.workbench.opening import OpenedEnvironment
from aitrain.workbench.player import EMPTY, JUNK, Conversation, Policy, Script, reference_of, rollout_of


def play(
    opened: OpenedEnvironment,
    rollout_of_model: Callable[[OpenedEnvironment], Rollout],
    case: str = "0",
    seed: int = 0,
    policy: str = "person",
    script: str | None = None,
    as_json: bool = False,
) -> dict[str, object]:
    """Play one episode at the terminal; returns it for `--json`, which shows nothing. `case` is a row number or a
    case_idx, `script` a file with the replies of the policy `script`.

    Raises:
        ConfigError: there is no such case, or the policy cannot play it.
        EnvironmentFailed: the environment failed.
    """
    console = Console(highlight=False, quiet=as_json)
    chosen = chosen_case(opened.all_cases, case)
    rollout = rollout_of_model(opened) if policy == "model" else written_rollout(opened, chosen, policy, script)
    title = f"{opened.runner.label}, {case_name(chosen)} of {len(opened.all_cases)}, seed {seed}"
    show_text(console, title, "dim")
    opened.runner.policy.restore({"mode": "serial"})  # nothing is watched: a debugger may trace it
    with closing(event_loop()) as loop, closing(opened.runner):
        (episode,) = loop.run(rollout.play([chosen], [seed], [seed], Decoding.SEEDED))
    said = episode.conversation
    if policy == "person":  # who has seen all but what followed the last answer
        said = unanswered(said) if episode.stop == "done" else []
    show_messages(console, said)
    stop, turns = episode.stop, len(episode.trajectory.turns)
    if episode.result.failure is not None:
        raise EnvironmentFailed(episode.failure_message)
    why = STOPS.get(stop, "there is no further answer")
    show_heading(console, f"{why} ({stop}, {turns} turn{'' if turns == 1 else 's'})")
    score, metrics = episode.result.score, dict(episode.result.metrics)
    show_text(console, "score none: unscored, left out of training" if score is None else f"score {score:.3f}")
    for name, value in metrics.items():
        show_text(console, f"      env/{name} {value:g}", "dim")
    return {
        "case": chosen.number,
        "case_idx": chosen.case_idx,
        "seed": seed,
        "policy": policy,
        "prompt": episode.prompt,
        "messages": episode.messages,
        "stop": stop,
        "turns": turns,
        "score": score,
        "metrics": metrics,
    }


def chosen_case(cases: Sequence[Case], wanted: str) -> Case:
    """The case of a row number, else of a case_idx.

    Raises:
        ConfigError: there is none.
    """
    found = [case for name in ("number", "case_idx") for case in cases if str(getattr(case, name)) == wanted]
    if not found:
        raise ConfigError(f"case: there is no case {wanted}: rows are numbered from 0 to {len(cases) - 1}")
    return found[0]


def case_name(case: Case) -> str:
    """`case 3`, with the environment's own name if it has one: `case 3 (case_idx c3)`."""
    return f"case {case.number}" + ("" if str(case.case_idx) == str(case.number) else f" (case_idx {case.case_idx})")


def written_rollout(opened: OpenedEnvironment, case: Case, policy: str, script: str | None) -> Rollout:
    """Rollouts with the answers of a person or a scripted policy; `play` closes the environment.

    Raises:
        ConfigError: the policy cannot play the case.
        EnvironmentFailed: `reference` failed.
    """
    player: Policy = {"empty": EMPTY, "junk": JUNK}.get(policy, person)
    if script is not None:
        try:
            text = Path(script).read_text(encoding="utf-8")
            replies = json.loads(text) if text.lstrip().startswith("[") else text.splitlines()
        except (OSError, ValueError) as error:
            raise ConfigError(f"--script: {script} cannot be read: {error}") from None
        player = Script(tuple(map(str, replies)))
    elif policy == "reference":
        reference = reference_of(opened.runner.environment, case)
        if reference is None:
            raise ConfigError(
                f"--policy reference: {opened.runner.label} knows no right answer to case"
                f" {case.case_idx}\nGive it a method reference(self, case_idx) that returns a reply, or a list of"
                " replies."
            )
        player = reference
    return rollout_of(opened.runner, defaultdict(lambda: player))


# -- a person

HINT = "Type the answer; an empty line ends it. Ctrl-D ends the episode."
TOOL_HINT = 'Call a tool with: {"name": ..., "arguments": {...}}.'


def person(said: Conversation) -> str | None:
    """A policy that reads answers line by line; the end of the input ends the episode."""
    console, lines = Console(highlight=False), list[str]()
    if said.answers == 0:
        import readline  # noqa: F401  # input() then edits lines and has a history

        for text in (HINT, *map(json.dumps, said.tools), *[TOOL_HINT] * bool(said.tools)):
            show_text(console, text, "dim")
    show_messages(console, unanswered(said.messages) if said.answers else said.messages)
    try:
        while (line := clean(input("> "))).strip():
            lines.append(line)
    except EOFError:
        print()  # Ctrl-D leaves the cursor behind the prompt
        if not lines:
            return None
    text = "\n".join(lines)
    is_call = said.tools and '"name"' in text and text.startswith("{")
    return f"<tool_call>{text}</tool_call>" if is_call else text


# -- how texts are shown, by the other commands too


def show_heading(console: Console, text: str) -> None:
    """`-- text ----------`, as wide as the terminal, at most 80 columns."""
    line = f"-- {escape_controls(text)} "
    console.print(Text(line.ljust(min(80, console.width), "-"), style="bold"), soft_wrap=True)


def show_text(console: Console, text: str, style: str = "") -> None:
    """Escaped text; a line end at its end is that of the line."""
    console.print(Text(escape_controls(text.removesuffix("\n")), style=style), soft_wrap=True)


def show_messages(console: Console, messages: Sequence[Message]) -> None:
    """Messages with their roles and tool calls."""
    for text in messages_text(map(TranscriptMessage.of, messages)):
        console.print(text, soft_wrap=True)


def unanswered(messages: Sequence[Message]) -> list[Message]:
    """The messages that follow the last answer."""
    return list(takewhile(lambda message: message["role"] != "assistant", reversed(messages)))[::-1]
