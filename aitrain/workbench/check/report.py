"""The output of `aitrain env check`: one line for each check, then what was found."""

from __future__ import annotations

import json
import shutil
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import typer

from aitrain.redaction import redact
from aitrain.ui.escape_controls import escape_controls

COLOURS = {"ok": typer.colors.GREEN, "fail": typer.colors.RED, "warning": typer.colors.YELLOW}
RANKS = ("fail", "warning", "info")
Message = dict[str, Any]
"""A message of the worker, see workbench/worker.py."""


def exit_code(messages: Iterable[Message]) -> int:
    """0 if nothing failed, else 3, or the code of the error that ended the checks."""
    code = 0
    for message in messages:
        code = int(message.get("exit_code", code))
        if any(finding["level"] == "fail" for finding in message.get("result", {}).get("findings", ())):
            code = 3
    return code


def lines(messages: Iterable[Message]) -> Iterator[str]:
    """The report, line by line, as the messages arrive."""
    results: list[Message] = []
    episodes = 0
    for message in messages:
        if "opened" in message:
            yield from _opened(message["opened"])
        if "result" in message:
            results.append(message["result"])
            if not message["result"]["skipped"]:
                yield _status_line(message["result"])
        episodes = message.get("episodes", episodes)
    yield from _skipped(results)
    findings = [finding for result in results for finding in result["findings"] if not _is_fact(finding)]
    for finding in sorted(findings, key=lambda finding: RANKS.index(finding["level"])):
        yield from _finding(finding)
    if results:
        yield ""
        yield _summary(results, findings, episodes)


def as_json(messages: Iterable[Message]) -> str:
    """The report as a JSON object."""
    everything = list(messages)
    merged: Message = {}
    for message in everything:
        merged.update({name: value for name, value in message.items() if name in ("opened", "error", "episodes")})
    merged["checks"] = [message["result"] for message in everything if "result" in message]
    return json.dumps({**merged, "exit_code": exit_code(everything)}, indent=2)


def _opened(opened: Message) -> Iterator[str]:
    held_out = f", {opened['held_out']} held out" if opened["held_out"] else ""
    cases = "1 case" if opened["cases"] == 1 else f"{opened['cases']} cases"
    yield _plain(f"{opened['name']}: {cases}{held_out}, opened in {opened['seconds']:.1f}s")
    if opened["note"]:
        yield _plain(opened["note"])
    yield ""


def _is_fact(finding: Message) -> bool:
    """Whether a finding is a sentence that asks for nothing: it stands in the line of its check."""
    return finding["level"] == "info" and not finding["why"] and not finding["fix"]


def _status_line(result: Message) -> str:
    levels = {finding["level"] for finding in result["findings"] if not _is_fact(finding)}
    state = next((level for level in RANKS if level in levels), "ok")
    facts = [finding["what"] for finding in result["findings"] if _is_fact(finding)]
    said = "see below" if state != "ok" else " ".join(facts) or result["description"]
    state = "info" if facts and state == "ok" else state
    return typer.style(f"{state:8}", COLOURS.get(state)) + f" {result['name']:18} {_plain(said)}"


def _skipped(results: Iterable[Message]) -> Iterator[str]:
    """The checks that did not run, by the reason."""
    names: dict[str, list[str]] = {}
    for result in results:
        if result["skipped"]:
            names.setdefault(result["skipped"], []).append(result["name"])
    for reason, skipped in names.items():
        yield _plain(f"-        not checked        {', '.join(skipped)}: {reason}")


def _finding(finding: Message) -> Iterator[str]:
    case = "" if finding["case_idx"] is None else f" (case {finding['case_idx']})"
    yield ""
    yield typer.style(finding["level"], COLOURS.get(finding["level"])) + _plain(f" {finding['check']}{case}")
    for label, text in (("", finding["what"]), ("why", finding["why"]), ("fix", finding["fix"])):
        if text:
            yield from _wrapped(label, _plain(text))


def _wrapped(label: str, text: str) -> Iterator[str]:
    width = min(100, shutil.get_terminal_size().columns) - 6
    for paragraph in text.splitlines():
        for line in textwrap.wrap(paragraph, max(30, width), break_long_words=False, break_on_hyphens=False):
            yield f"  {label:4}{line}"
            label = ""


def _summary(results: list[Message], findings: list[Message], episodes: int) -> str:
    counts = Counter(finding["level"] for finding in findings)
    found = ", ".join(
        f"{counts[level]} {level}{'s' if counts[level] > 1 and level != 'info' else ''}"
        for level in RANKS
        if counts[level]
    )
    run = sum(not result["skipped"] for result in results)
    seconds = sum(result["seconds"] for result in results)
    checks = "1 check" if run == 1 else f"{run} checks"
    return f"{checks} with {episodes} episodes in {seconds:.1f}s: {found or 'nothing found'}"


def _plain(text: str) -> str:
    """Text of the environment, safe for a terminal."""
    return escape_controls(redact(text))
