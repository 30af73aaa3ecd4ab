"""Writes events.md, which follows from aitrain/events.py, and llms.txt, from mkdocs.yml and the pages."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

import yaml

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from aitrain.events import Event, NoteLevel  # noqa: E402
from aitrain.options.docstrings import field_docstrings  # noqa: E402

DOCS = ROOT / "docs"
LONGEST = 200
"""Characters of a page's description."""

EVENTS_HEAD = """\
# Events

<!-- made by `make docs` from aitrain/events.py; a test fails when it is stale -->

With `--json` a run writes its events to standard output, one JSON object a line:

```bash
aitrain grpo --model tiny --rl-env envs.arithmetic --max-steps 1 --rl-max-new-tokens 8 --eval-cases 2 --json > run.jsonl
aitrain options --schema events > events.schema.json
```

The first line is `RunStarted`, with the run folder. The last line is `RunResult`, with result.json, or `Failed`. The
second command writes the JSON schema (draft 2020-12) of a line. A reader should ignore events and fields that it does
not know: later versions may add some. When a field changes its meaning, `schema` in `RunStarted` changes.

Each object has `event`, the name below, and these fields:
"""


# -- events.md


def events_page() -> str:
    """A section for each event, with a table of its fields."""
    lines = [EVENTS_HEAD]
    for kind in get_args(Event):
        lines += [f"## {kind.__name__}", "", " ".join((kind.__doc__ or "").split()), ""]
        meanings = field_docstrings(kind)
        lines += ["| field | type | meaning |", "|---|---|---|"]
        lines += [f"| `{one.name}` | {type_text(str(one.type))} | {meanings[one.name]} |" for one in fields(kind)]
        lines.append("")
    return "\n".join(lines)


def type_text(annotation: str) -> str:
    """The type of a field, for a cell of a table."""
    if annotation == "NoteLevel":
        return " or ".join(f"`{level}`" for level in get_args(NoteLevel))
    return "`" + annotation.replace("|", "\\|") + "`"


# -- llms.txt


def llms_text() -> str:
    """The pages by sections, with what each is about: https://llmstxt.org."""
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    lines = [f"# {site['site_name']}", "", f"> {site['site_description']}", "", INTRODUCTION]
    section = ""
    for title, below in (next(iter(entry.items())) for entry in site["nav"]):
        if isinstance(below, str) and section != "Start":
            section = "Start"
            lines += ["", f"## {section}", ""]
        elif not isinstance(below, str):
            section = title
            lines += ["", f"## {section}", ""]
        for name, page in pages_of({title: below}):
            lines.append(f"- [{name}]({page}): {description(page)}".rstrip(": "))
    return "\n".join(lines) + "\n"


INTRODUCTION = """\
One class asks questions and scores answers; `aitrain grpo` trains, and compares held-out scores before and after. Links
lead to Markdown, beside this file. Begin with For coding agents: `--json`, exit codes, and the order of work. `aitrain
COMMAND --help` and `aitrain options WORD` are the reference of the installed version."""


def pages_of(entry: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Titles and files of an entry of the navigation, with those below it."""
    ((title, below),) = entry.items()
    if isinstance(below, str):
        yield title, below
        return
    for each in below:
        for name, page in pages_of(each):
            yield (name if page in each.values() else f"{next(iter(each))}: {name}"), page


def description(page: str) -> str:
    """The first sentence of a page, without its links."""
    text = (DOCS / page).read_text(encoding="utf-8")
    text = re.sub(r"^---\n.*?\n---\n|^```.*?^```$|<!--.*?-->|^#.*?$", "", text, flags=re.DOTALL | re.MULTILINE)
    prose = next((part for part in text.split("\n\n") if part.strip() and part.strip()[0] not in "|*!"), "")
    plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", " ".join(prose.split()))
    first = re.split(r"(?<=\.)\s", plain)[0].rstrip(":.")
    return first if len(first) <= LONGEST else first[:LONGEST].rsplit(" ", 1)[0] + " ..."


FILES = {DOCS / "events.md": events_page, DOCS / "llms.txt": llms_text}

if __name__ == "__main__":
    for file, text in FILES.items():
        file.write_text(text(), encoding="utf-8")
