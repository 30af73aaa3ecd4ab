"""`aitrain data`: datasets in the form that the bundled environments read."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from aitrain.errors import ConfigError

data = typer.Typer(help="Bring datasets into the form that the bundled environments read.", no_args_is_help=True)

INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'
ANSWER = re.compile(r"#### (\-?[0-9\.\,]+)")


@data.callback()
def _group() -> None:
    """Bring datasets into the form that the bundled environments read."""


@data.command()
def gsm8k(
    input_dir: Annotated[Path, typer.Option(help="Folder with GSM8K's train.jsonl and test.jsonl (question, answer).")],
    out_dir: Annotated[Path, typer.Option(help="Folder to write train.jsonl and test.jsonl to.")],
) -> None:
    """GSM8K's question/answer rows as prompts with a ground truth, for envs.gsm8k."""
    splits = [split for split in ("train", "test") if (input_dir / f"{split}.jsonl").is_file()]
    if not splits:
        raise ConfigError(f"input_dir: there is no train.jsonl or test.jsonl in {input_dir}")
    for split in splits:
        rows = [_converted(row, split, index) for index, row in enumerate(_read(input_dir / f"{split}.jsonl"))]
        _write(out_dir / f"{split}.jsonl", rows)
        typer.echo(f"{len(rows)} rows in {out_dir / f'{split}.jsonl'}")


def _read(path: Path) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if line.strip():
            try:
                yield {"line": f"{path}, line {number}", **json.loads(line)}
            except (json.JSONDecodeError, TypeError):
                raise ConfigError(f"{path}, line {number}: not a JSON object") from None


def _converted(row: dict[str, Any], split: str, index: int) -> dict[str, Any]:
    question, answer = row.get("question"), row.get("answer")
    found = ANSWER.search(answer) if isinstance(answer, str) else None
    if not isinstance(question, str) or found is None:
        raise ConfigError(f"{row['line']}: needs a question, and an answer with `#### <number>`")
    return {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": f"{question} {INSTRUCTION}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": found.group(1).replace(",", "")},
        "extra_info": {"split": split, "index": index, "answer": answer, "question": question},
    }


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"out_dir: cannot write {path}: {error.strerror}") from None
