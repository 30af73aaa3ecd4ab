"""Rows of JSON lines, parquet files or a data set of the Hub, in several forms, as cases with a prompt.

Understood are rows with `prompt` (TRL; verl and XTuner, whose `reward_model.ground_truth` also becomes the column
`ground_truth`), with `messages` (OpenAI: the last answer becomes the column `answer`), with `question` or `problem`.
"""

from __future__ import annotations

import codecs
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from aitrain.environment.adapters.settings import choose, prompted
from aitrain.errors import ConfigError, EnvironmentFailed
from aitrain.missing_file import no_file

Row = dict[str, Any]
Data = str | Sequence[str] | Mapping[str, float]
"""A file, a data set of the Hub (`org/name` or `org/name:config`), several, or each with its ratio: 0.5 takes every
other row, 2 takes each row twice."""
SUFFIXES = (".jsonl", ".json", ".parquet")


@dataclass(frozen=True)
class RowSource:
    """Where rows come from, and how they become cases."""

    data: Data
    split: str = "train"
    """Split of a data set of the Hub."""
    columns: Mapping[str, str] = field(default_factory=dict)
    """New columns by the names of those they are copied from, as in {"solution": "reward_model.ground_truth"}."""
    size: int | None = None
    seed: int | None = None
    system: str | None = None
    few_shot: int = 0

    @property
    def ratios(self) -> dict[str, float]:
        """Each file or data set, and its ratio."""
        if isinstance(self.data, Mapping):
            return {str(name): float(ratio) for name, ratio in self.data.items()}
        return dict.fromkeys([self.data] if isinstance(self.data, str) else self.data, 1.0)

    def check(self) -> None:
        """Check ratios, and that the files exist.

        Raises:
            ConfigError: a file does not exist, or a ratio is not positive.
        """
        for name, ratio in self.ratios.items():
            if not ratio > 0:
                raise ConfigError(f"rl_env_config: the ratio of {name} must be a positive number, not {ratio:g}")
            file = Path(os.path.expanduser(name))
            if is_file(name) and not file.is_file():
                raise ConfigError(f"rl_env_config: data: {no_file(name)}")

    def cases(self) -> list[Row]:
        """The rows as cases; of these, the first `few_shot` are shown as solved ones in the prompts of the others.

        Raises:
            EnvironmentFailed: a file cannot be read, or a row is in none of the forms.
        """
        self.check()
        rows = [row for name, ratio in self.ratios.items() for row in _sampled(list(self._read(name)), ratio)]
        rows = choose(rows, None if self.size is None else self.size + self.few_shot, self.seed)
        if not rows:
            raise EnvironmentFailed(f"There are no rows in {', '.join(self.ratios)}")
        shots, rows = rows[: self.few_shot], rows[self.few_shot :]
        return [self._prompted(row, shots) for row in rows]

    def _read(self, name: str) -> Iterator[Row]:
        """The rows of a file or data set, each with its form checked."""
        for place, row in read_file(name) if is_file(name) else read_hub(name, self.split):
            if not isinstance(row, Mapping):
                raise EnvironmentFailed(f"{place}: a row must be an object with columns, not {str(row)[:40]!r}")
            yield as_case({**row, **self._copied(place, row)}, place)

    def _copied(self, place: str, row: Mapping[str, object]) -> Row:
        found = {}
        for name, path in self.columns.items():
            value: Any = row
            for key in path.split("."):
                if not (isinstance(value, Mapping) and key in value):
                    raise EnvironmentFailed(f"{place}: there is no column {path} (there are: {', '.join(row)})")
                value = value[key]
            found[name] = value
        return found

    def _prompted(self, row: Row, shots: Sequence[Row]) -> Row:
        solved = [(question_of(shot), str(shot["answer"])) for shot in shots if shot.get("answer") is not None]
        if len(solved) < len(shots):
            raise EnvironmentFailed("few_shot needs a column `answer` with right answers: name one with `columns`")
        prompt = row["prompt"]
        if isinstance(prompt, str):
            if not solved and self.system is None:
                return row
            prompt = [{"role": "user", "content": prompt}]
        return {**row, "prompt": prompted(prompt, self.system, solved)}


def check_data(data: object) -> None:
    """Check a setting `data`; None is not set.

    Raises:
        ConfigError: it is of the wrong type, a file does not exist, or a ratio is not positive.
    """
    if isinstance(data, (str, list, dict)):
        RowSource(data).check()
    elif data is not None:
        raise ConfigError(f"rl_env_config: data must name a file, a list of files, or files with ratios; not {data!r}")


def is_file(name: str) -> bool:
    """Whether a name is that of a file; otherwise it is a data set of the Hub."""
    return name.endswith(SUFFIXES) or name.startswith((".", "/", "~")) or Path(name).is_file()


def read_file(name: str) -> Iterator[tuple[str, object]]:
    """The rows of a JSON lines or parquet file, or of a list in a .json file, each with its place for messages.

    Raises:
        EnvironmentFailed: the file cannot be read.
    """
    file = Path(os.path.expanduser(name))
    try:
        if file.suffix == ".parquet":
            for number, row in enumerate(import_module("pyarrow.parquet").read_table(file).to_pylist()):
                yield f"{name}, row {number}", row
            return
        text = file.read_bytes().removeprefix(codecs.BOM_UTF8)
    except Exception as error:
        raise EnvironmentFailed(f"{name} cannot be read: {type(error).__name__}: {str(error)[:200]}") from error
    if file.suffix == ".json" and text.lstrip().startswith(b"["):
        for number, row in enumerate(_parsed(text, name)):
            yield f"{name}, row {number}", row
        return
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            place = f"{name}, line {number}"
            yield place, _parsed(line, place)


def _parsed(text: bytes, place: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise EnvironmentFailed(f"{place}: not JSON: {error}\nEach line is one object.") from None


def read_hub(name: str, split: str) -> Iterator[tuple[str, object]]:
    """The rows of a split of a data set of the Hub, each with its place for messages."""
    path, _, config = name.partition(":")
    for number, row in enumerate(import_module("datasets").load_dataset(path, config or None, split=split)):
        yield f"{name}, {split}, row {number}", row


def as_case(row: Row, place: str) -> Row:
    """A row with `prompt`, in whichever of the forms it is.

    Raises:
        EnvironmentFailed: it is in none of them.
    """
    row = {**row, **{name: _unpacked(row[name]) for name in ("prompt", "messages", "reward_model") if name in row}}
    messages, question = row.get("messages"), row.get("question") or row.get("problem")
    if "prompt" not in row and isinstance(messages, list) and messages:
        is_solved = isinstance(messages[-1], Mapping) and messages[-1].get("role") == "assistant"
        answer = {"answer": messages[-1].get("content")} if is_solved else {}
        row = {"prompt": messages[:-1] if is_solved else messages, **answer, **row}
    elif "prompt" not in row and isinstance(question, str):
        row = {"prompt": [{"role": "user", "content": question}], **row}
    truth = row.get("reward_model")
    if isinstance(truth, Mapping) and "ground_truth" in truth:
        row = {"ground_truth": truth["ground_truth"], **row}
    prompt = row.get("prompt")
    is_chat = isinstance(prompt, list) and prompt and all(isinstance(one, Mapping) and "role" in one for one in prompt)
    if not (is_chat or (isinstance(prompt, str) and prompt)):
        raise EnvironmentFailed(
            f"{place}: no prompt (it has: {', '.join(map(str, row))})\nIt needs a column prompt, messages, question or"
            ' problem; name another: --rl-env-config \'{"columns": {"question": "its name"}}\''
        )
    return row


def _unpacked(value: object) -> object:
    """Messages or an object that are written as JSON text, as some tables hold them; any other value as it is."""
    if not (isinstance(value, str) and value.lstrip().startswith(("[{", "{"))):
        return value
    try:
        parsed = json.loads(value)
    except ValueError:
        return value
    is_messages = isinstance(parsed, list) and all(isinstance(one, Mapping) and "role" in one for one in parsed)
    return parsed if is_messages or (isinstance(parsed, Mapping) and "ground_truth" in parsed) else value


def question_of(row: Row) -> str:
    """What a case asks: its text, or the last message of the user."""
    if isinstance(row["prompt"], str):
        return row["prompt"]
    return str(next((message["content"] for message in reversed(row["prompt"]) if message["role"] == "user"), ""))


def _sampled(rows: list[Row], ratio: float) -> list[Row]:
    """So many times the rows, spread evenly over them."""
    count = round(len(rows) * ratio)
    return [rows[number * len(rows) // count] for number in range(count)]
