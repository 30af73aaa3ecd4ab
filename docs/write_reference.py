"""Writes what follows from the code: options.md, events.md and the tables of algorithms.md; and llms.txt."""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Iterator
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

import yaml

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from aitrain.events import Event, NoteLevel  # noqa: E402
from aitrain.options.algorithms import ALGORITHMS, CISPO_BOUND, PRESETS  # noqa: E402
from aitrain.options.section import Option, options_of, sections_of  # noqa: E402
from aitrain.options.train import TrainConfig  # noqa: E402

DOCS = ROOT / "docs"
LONGEST = 200
"""Characters of a page's description."""

EVENTS_HEAD = """\
# Events

<!-- made by `make docs` from aitrain/events.py; a test fails when it is stale -->

With `--json` a run writes its events to standard output, one JSON object a line:

```bash
aitrain grpo --model tiny --rl-env envs.arithmetic --max-steps 1 --rl-max-new-tokens 8 --eval-cases 2 --json > run.jsonl
```

The first line is `RunStarted`, with the run folder. The last line is `RunResult`, with result.json, or `Failed`. A
reader should ignore events and fields that it does not know: later versions may add some. When a field changes its
meaning, `schema` in `RunStarted` changes.

Each object has `event`, the name below, and these fields:
"""


# -- options.md

OPTIONS_HEAD = """\
# Options

<!-- made by `make docs` from aitrain/options/; a test fails when it is stale -->

```bash
aitrain options memory
```

`aitrain options WORD` searches the options of a run, and without a WORD shows all of them.

Every option is a flag (`--rl-num-generations 8`), a key of the file given with `--config` (`rl_num_generations: 8`),
and an argument of `aitrain.TrainConfig` (`rl_num_generations=8`). Messages name options as in the file; flags take `_`
for `-` as well. A flag overrides the file, the file overrides the default. A switch has a `--no-` form. Unknown names
are errors; for a name of TRL, AITraining or Unsloth, the message names the option that means the same.

## In an editor

```bash
aitrain options --schema > config.schema.json
```

writes a JSON schema (draft 2020-12) of the file. With it an editor that has a YAML language server, such as VS Code
with the YAML extension, completes keys, shows the descriptions below, and marks unknown keys and values out of range,
where the file begins with this comment:

```yaml
# yaml-language-server: $schema=config.schema.json
model: Qwen/Qwen3-0.6B
rl_env: my_envs/hotel.py:HotelEnv
peft: true
lr: 1e-5
```

The path is relative to the file. aitrain itself does not read the schema."""


def options_page() -> str:
    """Every option in a table, section by section."""
    lines = [OPTIONS_HEAD]
    for section in sections_of(TrainConfig):
        lines += ["", f"## {section.section}", "", "| flag | default | values | what it does |", "|---|---|---|---|"]
        for option in options_of(TrainConfig):
            if option.section == section.section:
                cells = (f"`{option.flag}`", f"`{option.shown_default}`", values_of(option), option.description)
                lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


BOUNDS = {"minimum": "at least", "exclusiveMinimum": "above", "maximum": "at most", "exclusiveMaximum": "below"}


def values_of(option: Option) -> str:
    """What may follow a flag: `integer, at least 2`, `colocate, server`."""
    properties: Any = TrainConfig.model_json_schema()["properties"]
    stated = properties[option.name]
    parts = stated.get("anyOf", [stated])
    bounds = [f"{text} {part[name]}" for part in parts for name, text in BOUNDS.items() if name in part]
    kinds = (*option.choices, *(["N"] if bounds else [])) if option.choices else (option.type_name,)
    return ", ".join((*kinds, *bounds))


# -- algorithms.md


def algorithms_page() -> str:
    """The page with its two tables, those of losses and of presets, as they are now."""
    text = (DOCS / "algorithms.md").read_text(encoding="utf-8")
    for table in (losses_table(), presets_table()):
        head = table.partition("\n")[0]
        text = re.sub(rf"^{re.escape(head)}\n(\|.*\n)+", lambda _, table=table: table, text, flags=re.MULTILINE)
    return text


def presets_table() -> str:
    """What each preset sets."""
    rows = ["| preset | source | what it sets |", "|---|---|---|"]
    for name, preset in PRESETS.items():
        settings = []
        for option, value in preset.settings.items():
            settings.append(f"`{option}` {short(value)}")
        settings += ["`rl_overlong_buffer` a fifth of the limit"] if preset.overlong else []
        rows.append(f"| `{name}` | {preset.source} | {'; '.join(settings)} |")
    return "\n".join(rows) + "\n"


OF_EACH = "over each completion's tokens, then over completions"
OF_STEP = "over all tokens of the step"
AVERAGED = {
    "grpo": OF_EACH,
    "dr_grpo": "sum of tokens, divided by completions x rl_max_new_tokens",
    "dapo": OF_STEP,
    "bnpo": "over the tokens of each forward pass",
    "cispo": OF_STEP,
    "sapo": OF_EACH,
    "luspo": "sum of each completion's tokens, then over completions",
    "vespo": OF_STEP,
}
"""How token losses become one number, by TRL's loss type."""
UNCLIPPED = ("sapo", "vespo")
"""Those that do not clip the ratio."""


def losses_table() -> str:
    """The settings of each loss type."""
    head = "| loss type | ratio for each | clip range, low and high | scores scaled by | tokens averaged | source |"
    lines = [head, "|---|---|---|---|---|---|"]
    for name, kind in ALGORITHMS.items():
        clip = "not clipped" if kind.loss_type in UNCLIPPED else f"{kind.clip[0]:g}, {kind.clip[1]:g}"
        if name == "cispo":
            clip = f"ratio at most {CISPO_BOUND:g}"
        extra = "".join(f"; with vLLM `{field}={value}`" for field, value in kind.trl.items())
        lines.append(
            f"| `{name}` | {kind.level} | {clip}{extra} | {kind.scale} | {AVERAGED[kind.loss_type]} | {kind.source} |"
        )
    return "\n".join(lines) + "\n"


def short(value: object) -> str:
    """A setting as it is typed."""
    return f"{value:g}" if isinstance(value, float) else str(value)


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


def field_docstrings(kind: type) -> dict[str, str]:
    """The docstring under each field of a class, as one line."""
    body = ast.parse(inspect.getsource(kind)).body[0].body  # type: ignore[attr-defined]
    return {
        node.target.id: " ".join(str(ast.literal_eval(below.value)).split())
        for node, below in pairwise(body)
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and isinstance(below, ast.Expr)
    }


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


FILES = {
    DOCS / "options.md": options_page,
    DOCS / "algorithms.md": algorithms_page,
    DOCS / "events.md": events_page,
    DOCS / "llms.txt": llms_text,
}

if __name__ == "__main__":
    for file, text in FILES.items():
        file.write_text(text(), encoding="utf-8")
