"""The output of `aitrain env check`: one line for each check, then what was found."""

from __future__ import annotations

import json
import shutil
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator

import typer

from aitrain.redaction import redact
from aitrain.ui.escape_controls import escape_controls
from aitrain.workbench.check.process import Message

COLOURS = {"ok": typer.colors.GREEN, "fail": typer.colors.RED, "warning": typer.colors.YELLOW}
RANKS = ("fail", "warning", "info")


def exit_code(messages: Iterable[Message]) -> int:
    """0 if nothing failed, else 3, or the code of the error that ended the checks."""
    code = 0
    for message in messages:
        code = int(message.get("exit_code", code))
        if any(finding["level"] == "fail" for finding in message.get("result", {}).get("findings", ())):
            code = 3
    return code


def lines(messages: Iterable[Message], is_verbose: bool) -> Iterator[str]:
    """The report, line by line, as the messages arrive; `info` only if it is verbose, but for facts, which stand in
    the lines of their checks."""
    counts, found, episodes = Counter[str](), list[Message](), 0
    skipped: dict[str, list[str]] = {}
    seconds = 0.0
    for message in messages:
        episodes = message.get("episodes", episodes)
        if opened := message.get("opened"):
            held_out = f", {opened['held_out']} held out" if opened["held_out"] else ""
            cases = f"{opened['cases']} case{'' if opened['cases'] == 1 else 's'}"
            yield _plain(f"{opened['name']}: {cases}{held_out}, opened in {opened['seconds']:.1f}s")
            yield from filter(None, [_plain(opened["note"])])
            yield ""
        if not (result := message.get("result")):
            continue
        if result["skipped"]:
            skipped.setdefault(result["skipped"], []).append(result["name"])
            continue
        seconds += result["seconds"]
        counts["check"] += 1
        facts = [one["what"] for one in result["findings"] if not one["why"] and not one["fix"]]
        own = [one for one in result["findings"] if one["what"] not in facts or one["level"] != "info"]
        counts.update(one["level"] for one in own)
        shown = [one for one in own if is_verbose or one["level"] != "info"]
        found += shown
        state = min((one["level"] for one in own), key=RANKS.index, default="info" if facts else "ok")
        said = "see below" if shown else " ".join(facts) or ("with --verbose" if own else result["description"])
        yield typer.style(f"{state:8}", COLOURS.get(state)) + f" {result['name']:18} {_plain(said)}"
    for reason, names in skipped.items():
        yield _plain(f"-        not checked        {', '.join(names)}: {reason}")
    width = max(30, min(100, shutil.get_terminal_size().columns) - 6)
    for one in sorted(found, key=lambda finding: RANKS.index(finding["level"])):
        case = "" if one["case_idx"] is None else f" (case {one['case_idx']})"
        yield ""
        yield typer.style(one["level"], COLOURS.get(one["level"])) + _plain(f" {one['check']}{case}")
        for label, text in (("", one["what"]), ("why", one["why"]), ("fix", one["fix"])):
            for paragraph in _plain(text).splitlines():
                for line in textwrap.wrap(paragraph, width, break_long_words=False, break_on_hyphens=False):
                    yield f"  {label:4}{line}"
                    label = ""
    if counts or skipped:
        named = [f"{counts[one]} {one}{'s' * (counts[one] > 1 and one != 'info')}" for one in RANKS if counts[one]]
        checks = f"{counts['check']} check{'' if counts['check'] == 1 else 's'}"
        yield ""
        yield f"{checks} with {episodes} episodes in {seconds:.1f}s: {', '.join(named) or 'nothing found'}"


def as_json(messages: Iterable[Message]) -> str:
    """The report as a JSON object."""
    everything = list(messages)
    merged: Message = {}
    for message in everything:
        merged.update({name: value for name, value in message.items() if name in ("opened", "error", "episodes")})
    merged["checks"] = [message["result"] for message in everything if "result" in message]
    return json.dumps({**merged, "exit_code": exit_code(everything)}, indent=2)


def _plain(text: str) -> str:
    """Text of the environment, safe for a terminal."""
    return escape_controls(redact(text))
