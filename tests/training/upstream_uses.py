"""Finds what aitrain uses from the inside of TRL, transformers, peft, vLLM and Typer, in the text of its own source."""

from __future__ import annotations

import importlib
import inspect
import re
from collections import defaultdict
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
UPSTREAM = r"(?:accelerate|click|datasets|peft|transformers|trl|typer|vllm)\b[\w.]*"
HELD_AS = r"\b(?:trainer|vllm_generation|scheduler|lr_scheduler|_?generation)\.(\w+)"
"""Attributes of variables that hold an object of TRL or transformers."""
GIVEN = re.compile(r"(?:def |class |self\.|for |as |^\s*)(_\w+)", re.MULTILINE)
"""Names that aitrain gives itself."""


@cache
def uses() -> dict[str, set[str]]:
    """Each inside name that aitrain reads, sets, calls, replaces, overrides or imports, with the places.

    These are: names that begin with an underscore and that aitrain does not define; names from private modules;
    upstream members that a subclass uses or overrides; and attributes of TRL's trainer and its vLLM generation, public
    ones as well, because none of them is documented.
    """
    files = sorted((ROOT / "aitrain").rglob("*.py"))
    texts = {str(file.relative_to(ROOT)): re.sub("#.*", "", file.read_text(encoding="utf-8")) for file in files}
    own = {name for text in texts.values() for name in GIVEN.findall(text)}
    held = members("trl", "GRPOTrainer") | members("trl.generation.vllm_generation", "VLLMGeneration")
    found: dict[str, set[str]] = defaultdict(set)
    for place, text in texts.items():
        imports = {
            name: module
            for module, names in re.findall(rf"from ({UPSTREAM}) import (\([^)]*\)|.*)", text)
            for name in re.findall(r"\w+", names)
        }
        names = {name for name, module in imports.items() if re.search(r"(^|\.)_", f"{module}.{name}")}
        names |= set(re.findall(r"""[."'](_[A-Za-z]\w*)\b""", re.sub(r"(from|import) \S+", "", text))) - own
        names |= set(re.findall(HELD_AS, text)) & held
        for base in re.findall(r"class \w+\((\w+)", text):
            if base in imports:
                used = re.findall(r"""(?:self|super\(\))\.(\w+)|def (\w+)|"(\w+)":""", text)
                names |= {name for parts in used for name in parts} & members(imports[base], base)
        for name in names:
            found[name].add(place)
    return dict(found)


@cache
def members(module: str, name: str) -> set[str]:
    """Names of an upstream class and of its upstream bases: members, and attributes that their methods set."""
    kinds = [
        kind
        for kind in getattr(importlib.import_module(module), name).__mro__[:-1]
        if re.match(UPSTREAM, kind.__module__)
    ]
    set_in = (name for kind in kinds for name in re.findall(r"self\.(\w+)\b", inspect.getsource(kind)))
    return {name for name in (*set_in, *(name for kind in kinds for name in vars(kind))) if not name.startswith("__")}
