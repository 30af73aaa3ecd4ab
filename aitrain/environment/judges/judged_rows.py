"""Rows of a file with judges: `--rl-env rows:train.jsonl`, the environment for data that needs no class.

Settings: `judges`; `split`, `columns` of `adapters/rows.py`; `eval_data`; `size`, `seed`, `system`, `few_shot` of
`adapters/settings.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from aitrain.environment.adapters.rows import Data, Row, RowSource, check_data
from aitrain.environment.contract import Score
from aitrain.environment.judges.judge_set import JudgeDescription, Judges
from aitrain.environment.judges.rules import EXAMPLES
from aitrain.environment.requirements import EnvRequirements
from aitrain.errors import EnvironmentFailed


class JudgedRows:
    """Asks the rows' prompts; the judges of a row's `data_source` score the answers."""

    def __init__(
        self,
        id: str,
        /,
        *,
        judges: JudgeDescription | None = None,
        split: str = "train",
        eval_data: Data | None = None,
        columns: Mapping[str, str] | None = None,
        size: int | None = None,
        seed: int | None = None,
        system: str | None = None,
        few_shot: int = 0,
    ) -> None:
        self.source = RowSource(_files(id), split, columns or {}, size, seed, system, few_shot)
        self.judges, self.eval_data = Judges.described(judges).load(), eval_data
        self.source_files = self.judges.source_files
        low, high = self.judges.score_range
        self.requirements = EnvRequirements(
            "process" if any(judge.may_hang for judge in self.judges) else None,
            score_range=(low, high) if math.isfinite(high - low) else "any",
        )
        if eval_data is None:
            self.build_eval_dataset = None  # type: ignore[method-assign, assignment]
        if not self.judges.compares:
            self.score_group = None  # type: ignore[method-assign, assignment]

    def build_dataset(self) -> list[Row]:
        """The rows of the file."""
        return self._checked(self.source.cases())

    def build_eval_dataset(self) -> list[Row]:
        """The rows of `eval_data`."""
        assert self.eval_data is not None
        return self._checked(replace(self.source, data=self.eval_data, size=None, seed=None).cases())

    def score_episode(self, **episode: Any) -> Score:
        """The weighted sum of the judges that look at one answer."""
        return self.judges(**episode)

    def score_group(self, **group: Any) -> list[Score]:
        """The scores of a group, with the judges that compare its answers."""
        return self.judges.compare(**group)

    def reference(self, case: Row) -> str | None:
        """The right answer of a row, if it has one."""
        for judge in self.judges.judges_of(case) if "ground_truth" in case else ():
            if judge.place in EXAMPLES:
                return EXAMPLES[judge.place].format(case["ground_truth"])
        found = case.get("answer", case.get("ground_truth"))
        return None if found is None else str(found)

    def _checked(self, rows: list[Row]) -> list[Row]:
        for number, row in enumerate(rows):
            try:
                self.judges.check_row(row)
            except EnvironmentFailed as error:
                raise EnvironmentFailed(f"row {number}: {error}") from None
        return rows


def _files(id: str) -> Data:
    return id.split(",") if "," in id else id


def check_id(id: str, settings: Mapping[str, Any]) -> None:
    """Check files and judges without running anything.

    Raises:
        ConfigError: a file or a judge does not exist, or a setting is wrong.
    """
    check_data(_files(id))
    check_data(settings.get("eval_data"))
    for judge in Judges.described(settings.get("judges")):
        judge.check()
