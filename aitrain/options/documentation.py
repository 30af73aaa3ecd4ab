"""Options as text: the help of a command, and docs/options.md."""

from __future__ import annotations

import textwrap
from collections.abc import Collection

from aitrain.options.option import Option, options_of
from aitrain.options.section import Options, sections_of


def help_text(job: type[Options], width: int = 80, names: Collection[str] | None = None) -> str:
    """Every flag of a job with its description and default, section by section; with `names`, only these."""
    lines = []
    shown = [option for option in options_of(job) if names is None or option.name in names]
    for section in sections_of(job):
        if any(option.section == section.section for option in shown):
            lines += ["", f"{section.section}:"]
        for option in shown:
            if option.section == section.section:
                lines += _entry(option, width)
    return "\n".join(lines[1:])


def _entry(option: Option, width: int) -> list[str]:
    text = f"{option.description} [{option.shown_default}]"
    head = f"  {option.flag}{'' if option.is_switch else f' {option.placeholder}'}"
    return [head, *textwrap.wrap(text, width, initial_indent=" " * 8, subsequent_indent=" " * 8)]


COMMON = (
    "model", "rl_env", "peft", "lr", "rl_prompts_per_step", "rl_num_generations", "rl_max_new_tokens", "max_steps",
    "use_vllm", "project_name",
)  # fmt: skip
"""The most used options, which the short help shows."""


def common_help(job: type[Options], width: int = 80) -> str:
    """The most used options, in the order in which one thinks of them."""
    shown = {option.name: option for option in options_of(job)}
    return "\n".join(line for name in COMMON for line in _entry(shown[name], width))


def options_with(job: type[Options], words: Collection[str]) -> list[str]:
    """Names of the options that have all of the words in their name, section or description."""
    wanted = [word.lstrip("-").lower() for word in words]
    texts = {
        one.name: f"{one.name} {one.flag} {one.section} {one.description} {one.values}".lower()
        for one in options_of(job)
    }
    return [name for name, text in texts.items() if all(word in text for word in wanted)]


def as_entry(option: Option) -> dict[str, object]:
    """An option for programs."""
    return {
        "name": option.name,
        "flag": option.flag,
        "section": option.section,
        "values": option.values,
        "choices": option.choices,
        "default": option.default,
        "resume_safe": option.resume_safe,
        "description": option.description,
    }


def options_page(job: type[Options]) -> str:
    """docs/options.md: every option in a table, section by section."""
    lines = ["# Options", "", _INTRODUCTION]
    for section in sections_of(job):
        lines += ["", f"## {section.section}", "", "| flag | default | values | what it does |", "|---|---|---|---|"]
        lines += [_table_row(option) for option in options_of(job) if option.section == section.section]
    return "\n".join(lines) + "\n"


_INTRODUCTION = """\
<!-- made by `make docs` from aitrain/options/; a test fails when it is stale -->

```bash
aitrain options memory
```

`aitrain options WORD` searches the options of a run, and `aitrain grpo --help-all` shows all of them.

Every option is a flag (`--rl-num-generations 8`), a key of the file given with `--config` (`rl_num_generations: 8`),
and an argument of `aitrain.TrainConfig` (`rl_num_generations=8`). A flag overrides the file, the file overrides the
default. A switch has a `--no-` form. Unknown names are errors; for a name of TRL, AITraining or Unsloth, the message
names the option that means the same.

## In an editor

```bash
aitrain schema > config.schema.json
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

The path is relative to the file. A run folder holds both: config.yaml with this comment, and config.schema.json beside
it. Copy both, or write the schema again beside the copy. aitrain itself does not read the schema."""


def _table_row(option: Option) -> str:
    cells = (f"`{option.flag}`", f"`{option.shown_default}`", option.values, option.description)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
