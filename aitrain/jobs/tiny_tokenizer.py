"""The tokenizer of the bundled model without transformers, whose import takes seconds: for showing prompts."""

from __future__ import annotations

import json
from typing import Any

from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from aitrain.environment.session import Message
from aitrain.packages import PACKAGE

FOLDER = PACKAGE / "tiny_model"


class TinyTokenizer:
    """Encodes, decodes and renders as the tokenizer that transformers makes of the same files."""

    def __init__(self) -> None:
        self._tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
        jinja = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        jinja.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)  # Jinja's own escapes HTML
        self._template = jinja.from_string((FOLDER / "chat_template.jinja").read_text(encoding="utf-8"))
        self.pad_token_id: int | None = self._tokenizer.token_to_id("<|endoftext|>")

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a text."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = False, **_: bool) -> str:
        """The text of token ids."""
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens))

    def apply_chat_template(self, conversation: list[Message], **options: Any) -> str:
        """The rendered conversation; options are the template's variables."""
        return str(self._template.render(**{"tools": None, **options}, messages=conversation))
