"""Messages for callers of `aitrain.train`: what a message says as a flag becomes the argument of TrainConfig.

Messages are written with flags, as most people read them in a terminal: `use --peft` becomes `use peft=True`, `lower
--lr` becomes `lower lr`, and `--vllm-mode server` becomes `vllm_mode="server"`. Commands in a message stay commands.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import get_args

from pydantic.fields import FieldInfo

from aitrain.options.value_types import TABLES

_COMMAND = r"(?:aitrain (?:grpo|plan|env|eval|chat|export|serve|view|show) |vllm serve |pip install )[^\n)]*"
_VALUE = r"\w+='[^'\n]*'|'[^'\n]*'|\[[^\]\n]*\]|[^\s;)]+"
_PART = re.compile(rf"(?P<command>{_COMMAND})|(?<![\w-])--(?P<flag>[a-z][a-z0-9-]*)(?: (?P<value>{_VALUE}))?")
_NUMBER = re.compile(r"-?\d+(\.\d+)?(e-?\d+)?")
_TEXT = re.compile(r"['\[{]|-?\d[\d.]*,|.*[A-Z/:.{]|(chatml|tiny|any)$")
"""What a value of a text option looks like, as opposed to the next word of the sentence."""

_PHRASES = (
    (
        re.compile(r"aitrain grpo --config (?:'[^']*'|\S+) --resume"),
        'the same options and resume_from_checkpoint="auto"',
    ),
    (re.compile(r"aitrain grpo --config (?:'[^']*'|\S+)"), "the same options"),
    (re.compile(r"--config: "), ""),
    (re.compile(r"; --debug shows all that the run printed"), ""),
    (re.compile(r"--resume\b(?!-)"), 'resume_from_checkpoint="auto"'),
)
"""What has no argument of its own."""


def in_python(message: str, fields: Mapping[str, FieldInfo]) -> str:
    """The message with the arguments of a class of options, whose `fields` are given, in place of its flags."""
    for phrase, instead in _PHRASES:
        message = phrase.sub(instead, message)
    return _PART.sub(lambda part: _argument(part, fields), message)


def _argument(part: re.Match[str], fields: Mapping[str, FieldInfo]) -> str:
    """A flag, with its value if the next word is one, as an argument; other flags and commands as they are."""
    name, value = (part["flag"] or "").replace("-", "_"), part["value"] or ""
    positive = name.removeprefix("no_")
    if positive not in fields:
        return part[0]
    rest = part[0][len("--") + len(name) :]  # the blank and the next word
    if fields[positive].annotation is bool:
        return f"{positive}={positive == name}{rest}"
    word = value if value[:1] in "'[" else value.rstrip(".,;:")
    end = value[len(word) :]
    if name in TABLES:
        return (_table(name, word) + end) if value else name
    if word and (written := _written(word, fields[name])):
        return f"{name}={written}{end}"
    return name + rest


def _types_in(annotation: object) -> set[object]:
    """A type, and the types that it is made of."""
    return {annotation, *(each for part in get_args(annotation) for each in _types_in(part))}


def _written(word: str, field: FieldInfo) -> str:
    """A value as Python code; empty if the word is no value of the option but the next one of the sentence."""
    choices = {choice for each in (field.annotation, *get_args(field.annotation)) for choice in get_args(each)}
    if word in choices:
        return json.dumps(word)
    if _NUMBER.fullmatch(word):
        return word
    is_text = str in _types_in(field.annotation) or word[0] in "'["
    if not (is_text and _TEXT.match(word)):
        return ""
    return word.strip("'") if word[0] in "'[" else json.dumps(word)


def _table(name: str, word: str) -> str:
    """`trl={"beta": 0.1}` for `beta=0.1`, and `trl["beta"]` for the name alone; likewise for other tables."""
    key, equals, value = word.partition("=")
    if not equals:
        return f'{name}["{key}"]'
    names = {"true": "True", "false": "False", "null": "None"}
    is_code = _NUMBER.fullmatch(value) or value.isupper() or value[:1] in ("'", "[", "{") or value in names
    return f'{name}={{"{key}": {names.get(value, value).strip(chr(39)) if is_code else json.dumps(value)}}}'
