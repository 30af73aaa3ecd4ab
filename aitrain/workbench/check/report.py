"""The output of `aitrain env check`: one line for each check, then what was found."""

from __future__ import annotations

import shutil
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator

import typer

from aitrain.redaction import redact
from aitrain.ui.escape_controls import escape_controls
from aitrain.workbench.check.process import Message
from aitrain.workbench.check.subject import LEVELS

COLOURS = {"ok": typer.colors.GREEN, "fail": typer.colors.RED, "warning": typer.colors.YELLOW}


def lines(messages: Iterable[Message], is_verbose: bool) -> Iterator[str]:
    """The report, line by line, as the messages arrive; advice on what is no defect only if it is verbose."""
    counts, skipped, seconds, episodes = Counter[str](), dict[str, list[str]](), 0.0, 0
    width = max(30, min(100, shutil.get_terminal_size().columns) - 6)
    for message in messages:
        episodes = message.get("episodes", episodes)
        if opened := message.get("opened"):
            held_out = f", {opened['held_out']} held out" if opened["held_out"] else ""
            cases = f"{opened['cases']} case{'' if opened['cases'] == 1 else 's'}"
            yield _plain(f"{opened['name']}: {cases}{held_out}, opened in {opened['seconds']:.1f}s\n{opened['note']}")
        result = message.get("result")
        if result and result["skipped"]:
            skipped.setdefault(result["skipped"], []).append(result["name"])
        elif result:
            findings = sorted(result["findings"], key=lambda finding: LEVELS.index(finding["level"]))
            levels = [finding["level"] for finding in findings] or ["ok"]
            seconds += result["seconds"]
            counts.update(["check", *levels])
            yield (
                typer.style(f"{levels[0]:8}", COLOURS.get(levels[0])) + f" {result['name']:18} {result['description']}"
            )
            for one in [one for one in findings if is_verbose or one["level"] != "info" or not one["why"]]:
                case = "" if one["case_idx"] is None else f" (case {one['case_idx']})"
                for label, text in (("", f"{one['what']}{case}"), ("why", one["why"]), ("fix", one["fix"])):
                    for paragraph in _plain(text).splitlines():
                        for line in textwrap.wrap(paragraph, width, break_long_words=False, break_on_hyphens=False):
                            yield f"  {label:4}{line}"
                            label = ""
    for reason, names in skipped.items():
        yield _plain(f"-        not checked        {', '.join(names)}: {reason}")
    if counts or skipped:
        named = ", ".join(f"{counts[level]} {level}" for level in LEVELS if counts[level])
        checks = f"{counts['check']} check{'' if counts['check'] == 1 else 's'}"
        yield f"\n{checks} with {episodes} episodes in {seconds:.1f}s: {named or 'nothing found'}"


def document_of(messages: Iterable[Message]) -> Message:
    """The report as a JSON object. Its exit code is 0 if nothing failed, else 3, or that of the error that ended it."""
    document: Message = {"checks": [], "exit_code": 0}
    for message in messages:
        document |= {name: message[name] for name in ("opened", "error", "exit_code", "episodes") if name in message}
        if "result" in message:
            document["checks"].append(message["result"])
            if any(finding["level"] == "fail" for finding in message["result"]["findings"]):
                document["exit_code"] = 3
    return document


def _plain(text: str) -> str:
    """Text of the environment, safe for a terminal."""
    return escape_controls(redact(text))
