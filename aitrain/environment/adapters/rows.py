"""Rows of JSON lines, CSV or parquet files or a data set of the Hub with judges: `--rl-env rows:train.jsonl`, the
environment for data that needs no class.

Settings: `judges`; `split`, `columns` and `eval_data`; `size`, `seed`, `system` of `settings.py`.

Understood are rows with `prompt` (TRL; verl and XTuner, whose `reward_model.ground_truth` also becomes the column
`ground_truth`), with `messages` (OpenAI: the last answer becomes the column `answer`), with `question` or `problem`.
"""

import csv
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from importlib import import_module
from operator import getitem
from pathlib import Path
from typing import Any

from aitrain.environment.adapters.settings import AdaptedEnvironment, prompted
from aitrain.environment.contract import Score, as_messages
from aitrain.environment.judges.judge_set import JudgeDescription, Judges, load, users_place
from aitrain.environment.judges.rules import EXAMPLES
from aitrain.errors import ConfigError, EnvironmentFailed, no_file

Row = dict[str, Any]
Data = str | Sequence[str]
"""A file, a data set of the Hub (`org/name` or `org/name:config`), or several."""


@dataclass(kw_only=True, eq=False)
class RowSource(AdaptedEnvironment):
    """Where rows come from, and how they become cases."""

    data: Data | None
    split: str = "train"
    """Split of a data set of the Hub."""
    columns: Mapping[str, str] | None = None
    """New columns by the names of those they are copied from, as in {"solution": "reward_model.ground_truth"}."""

    def cases(self) -> list[Row]:
        """The chosen rows of `data`.

        Raises:
            ConfigError, EnvironmentFailed: see `cases_of`.
        """
        return self.cases_of(self.data, self.choose)

    def cases_of(self, data: object, choose: Callable[[list[Any]], list[Any]] = list) -> list[Row]:
        """Rows of files or data sets, as cases; those that are not chosen are not checked.

        Raises:
            ConfigError: the data are of the wrong type, or a file does not exist.
            EnvironmentFailed: a file cannot be read, or a row is in none of the forms.
        """
        names = [data] if isinstance(data, str) else data
        if not isinstance(names, list):
            raise ConfigError(f"rl_env_config: data must name a file, or a list of files; not {data!r}")
        rows = [placed for name in names for placed in read_rows(name, self.split)]
        if not rows:
            raise EnvironmentFailed(f"There are no rows in {', '.join(names)}")
        return [self.case(row, place) for place, row in choose(rows)]

    def case(self, row: Any, place: str) -> Row:
        """A row with `prompt` and the new columns, in whichever of the forms it is.

        Raises:
            EnvironmentFailed: it is in none of them, or has not what a new column is to be copied from.
        """
        if not isinstance(row, Mapping):
            raise EnvironmentFailed(f"{place}: a row must be an object with columns, not {str(row)[:40]!r}")
        case = dict(row)
        for name, path in (self.columns or {}).items():
            try:
                case[name] = reduce(getitem, path.split("."), row)
            except (KeyError, TypeError):
                raise EnvironmentFailed(f"{place}: there is no column {path} (there are: {', '.join(row)})") from None
        for name in {"prompt", "messages", "reward_model"} & case.keys():  # some tables hold them as JSON text
            with suppress(ValueError, TypeError):
                parsed = json.loads(case[name])
                if _are_messages(parsed) or (isinstance(parsed, Mapping) and "ground_truth" in parsed):
                    case[name] = parsed
        if "prompt" not in case:
            said, asked = case.get("messages"), case.get("question") or case.get("problem")
            case["prompt"] = as_messages(asked) if isinstance(asked, str) else None
            if _are_messages(said):  # `messages` may be something else, such as their number
                case["prompt"] = said
            if _are_messages(case["prompt"]) and case["prompt"][-1]["role"] == "assistant":
                *case["prompt"], last = case["prompt"]
                case.setdefault("answer", last.get("content"))
        truth = case.get("reward_model")
        if isinstance(truth, Mapping) and "ground_truth" in truth:
            case.setdefault("ground_truth", truth["ground_truth"])
        prompt: Any = case.get("prompt")
        if not (_are_messages(prompt) or (isinstance(prompt, str) and prompt)):
            raise EnvironmentFailed(
                f"{place}: no prompt (it has: {', '.join(map(str, row))})\nIt needs a column prompt, messages,"
                ' question or problem; name another: --rl-env-config \'{"columns": {"question": "its name"}}\''
            )
        if self.system is not None:
            case["prompt"] = prompted(as_messages(prompt), self.system)
        return case


def is_file(name: str) -> bool:
    """Whether a name is that of a file; otherwise it is a data set of the Hub."""
    is_known = name.lower().endswith((".jsonl", ".json", ".csv", ".parquet"))
    return is_known or name.startswith((".", "/", "~")) or Path(name).is_file()


def read_rows(name: str, split: str = "train") -> Iterator[tuple[str, Any]]:
    """The rows of a JSON lines, CSV or parquet file, of a list in a .json file, or of a split of a data set of the Hub,
    each with its place for messages.

    Raises:
        ConfigError: there is no such file.
        EnvironmentFailed: the file cannot be read.
    """
    if not is_file(name):
        path, _, config = name.partition(":")
        for number, row in enumerate(import_module("datasets").load_dataset(path, config or None, split=split)):
            yield f"{name}, {split}, row {number}", row
        return
    file, place = Path(name).expanduser(), name
    if not file.is_file():
        raise ConfigError(f"rl_env_config: {no_file(name)}")
    try:
        if file.suffix.lower() == ".parquet":
            rows = import_module("pyarrow.parquet").read_table(file).to_pylist()
        elif file.suffix.lower() == ".csv":
            with file.open(encoding="utf-8-sig", newline="") as opened:
                table = csv.DictReader(opened, strict=True)
                rows, names = list(table), table.fieldnames or []
            if len({*names}) < len(names):
                raise ValueError(f"two columns have the same name: {', '.join(names)}")
            if long := [number for number, row in enumerate(rows) if None in row]:
                raise ValueError(f"row {long[0]} has more cells than the header: put those with a comma into quotes")
        elif (text := file.read_text("utf-8-sig")).lstrip().startswith("["):
            rows = json.loads(text)
        else:
            rows = []
            for number, line in enumerate(text.split("\n"), start=1):
                place = f"{name}, line {number}"
                if line.strip():
                    yield place, json.loads(line)
        for number, row in enumerate(rows):
            yield f"{name}, row {number}", row
    except Exception as error:
        raise EnvironmentFailed(f"{place} cannot be read: {type(error).__name__}: {str(error)[:200]}") from error


def _are_messages(value: Any) -> bool:
    is_list = isinstance(value, list) and bool(value)
    return is_list and all(isinstance(one, Mapping) and "role" in one for one in value)


@dataclass(kw_only=True, eq=False)
class ScoredRows(RowSource):
    """Asks the rows' prompts; the judges of a row's `data_source` score the answers."""

    eval_data: Data | None = None
    """Rows that are not trained on; None: some of the others are held out."""
    score_episode: Judges = field(init=False)
    """The weighted sum of the judges that look at one answer."""

    @property
    def score_group(self) -> Callable[..., list[Score]] | None:
        """The scores of a group, with the judges that compare its answers; None without any."""
        return self.score_episode.compare if self.score_episode.compares else None

    def build_dataset(self) -> list[Row]:
        """The rows of `data`."""
        return self.cases()

    @property
    def build_eval_dataset(self) -> Callable[[], list[Row]] | None:
        """The rows of `eval_data`; None without."""
        return None if self.eval_data is None else partial(self.cases_of, self.eval_data)

    def reference(self, case: Row) -> str | None:
        """The right answer of a row, if it has one."""
        return None if case.get("answer") in (None, "") else str(case["answer"])


@dataclass(eq=False, kw_only=True)
class JudgedRows(ScoredRows):
    """The rows of the files that the id names."""

    judges: JudgeDescription | None = None
    data: Data | None = field(init=False)

    def __post_init__(self) -> None:
        self.data = self.id.split(",")
        self.score_episode = load(self.judges)
        self.source_files = self.score_episode.source_files
        if self.score_range is None:
            bounds = self.score_episode.score_range
            self.score_range = bounds if all(map(math.isfinite, bounds)) else "any"
        super().__post_init__()
        # code of the user's and math-verify may hang: a process can be ended
        if not any(judge.place == "math" or users_place(judge.place) for judge in self.score_episode):
            self.requirements = replace(self.requirements, isolation=None)

    def case(self, row: Any, place: str) -> Row:
        """A row that judges can score.

        Raises:
            ConfigError, EnvironmentFailed: see `RowSource.case` and `Judges.check_row`.
        """
        case = super().case(row, place)
        try:
            self.score_episode.check_row(case)
        except EnvironmentFailed as error:
            raise EnvironmentFailed(f"{place}: {error}") from None
        return case

    def reference(self, case: Row) -> str | None:
        """The ground truth in the form of the row's rule; else the right answer of a row, or its ground truth."""
        truth = case.get("ground_truth")
        for judge in self.score_episode.judges_of(case) if truth is not None else ():
            if judge.place in EXAMPLES:
                return EXAMPLES[judge.place].format(truth)
        return super().reference(case) or (None if truth is None else str(truth))
