"""Rows of a file with judges: `--rl-env rows:train.jsonl`, the environment for data that needs no class.

Settings: `judges`; `split`, `columns` of `adapters/rows.py`; `eval_data`; `size`, `seed`, `system`, `few_shot` of
`adapters/settings.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from aitrain.environment.adapters.rows import Data, Row, RowSource, check_data
from aitrain.environment.contract import Score
from aitrain.environment.judges.judge_set import JudgeDescription, JudgeSpecs
from aitrain.environment.requirements import EnvRequirements


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
        specs = JudgeSpecs.read(judges)
        self.judges = specs.load()
        self.source_files = specs.source_files
        low, high = self.judges.score_range
        self.requirements = EnvRequirements(
            "process" if any(spec.may_hang for spec in specs) else None,
            score_range=(low, high) if math.isfinite(high - low) else "any",
        )
        self.source = RowSource(_files(id), split, columns or {}, size, seed, system, few_shot)
        self.eval_source = RowSource(eval_data or _files(id), split, columns or {}, system=system, few_shot=few_shot)
        if eval_data is None:
            self.build_eval_dataset = None  # type: ignore[method-assign, assignment]
        if not self.judges.compares:
            self.score_group = None  # type: ignore[method-assign, assignment]

    def build_dataset(self) -> list[Row]:
        """The rows of the file."""
        return self._checked(self.source)

    def build_eval_dataset(self) -> list[Row]:
        """The rows of `eval_data`."""
        return self._checked(self.eval_source)

    def score_episode(self, **episode: Any) -> Score:
        """The weighted sum of the judges that look at one answer."""
        return self.judges(**episode)

    def score_group(self, **group: Any) -> list[Score]:
        """The scores of a group, with the judges that compare its answers."""
        return self.judges.compare(**group)

    def reference(self, case: Row) -> str | None:
        """The right answer of a row, if it has one."""
        examples = (judge.example for judge in self.judges.judges_of(case) if judge.example)
        for example in examples if "ground_truth" in case else ():
            return example.format(case["ground_truth"])
        found = case.get("answer", case.get("ground_truth"))
        return None if found is None else str(found)

    def _checked(self, source: RowSource) -> list[Row]:
        rows = source.cases()
        for number, row in enumerate(rows):
            self.judges.check_row(row, f"row {number}")
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
    JudgeSpecs.read(settings.get("judges")).check()
