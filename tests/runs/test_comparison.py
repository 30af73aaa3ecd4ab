"""Two scorings compared case by case."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from aitrain.errors import ConfigError
from aitrain.runs.comparison import Comparison, compare_all
from aitrain.runs.held_out import grouped
from aitrain.runs.recorded_scoring import RecordedCase, match_cases, read_scorings
from aitrain.runs.records import RolloutRecord
from aitrain.runs.run_folder import RunFolder
from aitrain.runs.statistics import score_table
from aitrain.ui.overview import Overview
from tests.runs.scorings import ENVIRONMENT, episode, episodes, table_of, write_scoring
from tests.ui.conftest import read


def compared(tmp_path: Path, *scorings: Sequence[dict[str, Any]], **options: Any) -> list[Comparison]:
    """Each of the other scorings compared with the first; their folders are called a, b, c."""
    folders = [write_scoring(tmp_path / name, one, **options) for name, one in zip("abcd", scorings, strict=False)]
    return compare_all(read_scorings(folders))


def means(comparison: Comparison) -> tuple[float, ...]:
    """The mean scores of A and of B."""
    row = comparison.rows[comparison.decoding]
    return tuple(side["mean"] for side in (row["before"], row["after"]) if side)


def changes_of(comparison: Comparison) -> dict[str, float]:
    """The mean change of each row."""
    return {name: row["change"]["mean"] for name, row in comparison.rows.items() if row["change"]}


def test_cases_are_matched_by_content_and_the_change_is_that_of_the_run(tmp_path: Path) -> None:
    a = {"x": [0.0, 1.0], "y": [1.0, 1.0], "z": [0.0, 0.0], "only a": [1.0]}
    b = {"z": [1.0, 1.0], "only b": [0.0], "x": [1.0, 1.0], "y": [0.0, 1.0], "only b, too": [0.0]}
    (comparison,) = compared(tmp_path, episodes(a), episodes(b))
    rows = [{name: scores for name, scores in scoring.items() if len(name) == 1} for scoring in (a, b)]
    expected = table_of({"before_sampled": rows[0], "after_sampled": rows[1]}, tries=2)
    assert {name: comparison.rows[name] for name in ("sampled", "pass@2")} == {
        name: expected[name] for name in ("sampled", "pass@2")
    }
    assert [pair.a.prompt for pair in comparison.cases("won")] == ["z", "x"]
    assert comparison.to_json()["counts"] == {"won": 2, "lost": 1, "equal": 0}


def test_the_verdict_is_that_of_the_interval(tmp_path: Path) -> None:
    low, high = {str(n): [float(n % 4 == 0)] for n in range(40)}, {str(n): [float(n % 4 != 1)] for n in range(40)}
    better, same = compared(tmp_path, episodes(low), episodes(high), episodes(low))
    (worse,) = compared(tmp_path, episodes(high), episodes(low))
    assert [one.verdict for one in (better, worse, same)] == ["better", "worse", "undetected"]
    assert (same.change["p_value"], same.change["mean"]) == (1.0, 0.0)
    high_limit = worse.change["high"] or 0.0
    assert [worse.is_worse_by(margin) for margin in (-high_limit - 0.01, -high_limit + 0.01)] == [True, False]
    assert not better.is_worse_by(0.0)


def test_of_several_comparisons_the_corrected_p_value_must_be_small_as_well(tmp_path: Path) -> None:
    base = {str(n): [0.0] for n in range(30)}
    slightly = {str(n): [float(n < 6)] for n in range(30)}
    (alone,) = compared(tmp_path, episodes(base), episodes(slightly))
    among = compared(tmp_path, episodes(base), episodes(slightly), episodes(slightly), episodes(base))
    assert alone.change["p_value"] == 2 / 2**6
    assert alone.verdict == "better"
    assert [one.change["p_value"] for one in among] == pytest.approx([6 / 2**6, 6 / 2**6, 1.0])
    assert [one.verdict for one in among] == ["undetected"] * 3


def test_sampled_scores_decide_and_greedy_ones_where_none_was_sampled(tmp_path: Path) -> None:
    sampled, greedy = episodes({"x": [0.0], "y": [1.0]}), episodes({"x": [1.0], "y": [1.0]}, eval_phase="eval_greedy")
    (both,) = compared(tmp_path, sampled + greedy, sampled + greedy)
    assert [*both.rows] == ["sampled", "greedy"]
    for scored in (greedy, episodes({"x": [None]}) + greedy):
        (mixed,) = compared(tmp_path, scored, sampled + greedy)
        assert [*mixed.rows] == [mixed.decoding] == ["greedy"]
    with pytest.raises(ConfigError, match="--decoding both"):
        compared(tmp_path, sampled, greedy)


def test_an_episode_that_was_recorded_twice_counts_once_and_unscored_ones_are_left_out_and_said(tmp_path: Path) -> None:
    a, b = {"x": [0.0, None], "y": [1.0, 1.0], "z": [1.0]}, {"x": [0.0, 1.0], "y": [None, None], "z": [1.0]}
    (comparison,) = compared(tmp_path, episodes(a), [*episodes(b), *episodes({"x": [1.0]}), {"score": "?"}])
    assert [(pair.a.prompt, pair.score_b) for pair in comparison.pairs] == [("x", 1.0), ("z", 1.0)]
    assert comparison.change["count"] == 2
    assert [note[:18] for note in comparison.notes] == [
        "1 of 5 episodes of",
        "1 lines of the rol",
        "2 of 5 episodes of",
    ]
    with pytest.raises(ConfigError, match="has a score in both"):
        compared(tmp_path, episodes({"x": [None]}), episodes({"x": [1.0]}))


# -- conditions


def test_other_conditions_are_said_and_other_ranges_refused(tmp_path: Path) -> None:
    cases = {"x": [0.0], "y": [1.0]}
    a = write_scoring(tmp_path / "a", episodes(cases))
    b = write_scoring(tmp_path / "b", episodes(cases, seed=2), rl_temperature=0.5)
    (b / "status.json").write_text(json.dumps({"status": "running"}))
    (b / "environment.json").write_text(json.dumps(ENVIRONMENT | {"config": {"judge": "exact"}}))
    (comparison,) = compare_all(read_scorings([a, b]))
    words = ["2 of 2 cases", "b is dead", "rl_temperature (1.0 and 0.5)"]
    words.append('config ({} and {"judge": "exact"})')
    assert [word in note for word, note in zip(words, comparison.notes, strict=True)] == [True] * 4
    c = write_scoring(tmp_path / "c", episodes(cases), rl_score_range="-1,1")
    with pytest.raises(ConfigError, match=r"\(0.0, 1.0\) in a and \(-1.0, 1.0\) in c"):
        compare_all(read_scorings([a, c]))


def test_several_environments_have_one_weighted_mean_in_every_number_of_run_and_comparison(tmp_path: Path) -> None:
    """Scores of `half` are at most 0.5; those of `game` begin at -1."""
    envs = {"half": {"share": 0.75, "score_range": "0,0.5"}, "game": {"share": 0.25, "score_range": "-1,1"}}
    rng, records = random.Random(1), []
    for phase, chance in (("before_sampled", 0.3), ("after_sampled", 0.5)):
        for row, sample in product(range(16), range(4)):
            env, right = "half" if row < 6 else "game", rng.random() < chance
            score = (0.5 * right) if env == "half" else 2.0 * right - 1
            of = {"row_number": row, "sample": sample, "environment": env, "eval_phase": phase}
            records.append(episode(f"{env} {row}", score, **of))
    run = RunFolder(write_scoring(tmp_path / "run", records, eval_samples=4))
    run.environment.write_text(json.dumps(ENVIRONMENT | {"environments": envs}))
    rollouts = read(run.path)
    phases = {entry.eval_phase for entry in rollouts.entries}
    scorings = {
        phase: grouped((entry.case, entry.score or 0.0) for entry in rollouts.entries if entry.eval_phase == phase)
        for phase in phases
    }
    table = score_table(scorings, Overview(run.path, rollouts).mixture(), 4)
    (comparison,) = compare_all(read_scorings([run.path]))

    assert [*comparison.rows] == [f"{row}{env}" for row in ("sampled", "pass@4") for env in ("", ", half", ", game")]
    assert comparison.rows == {name: table[name] for name in comparison.rows}
    changes = changes_of(comparison)
    assert changes["sampled"] == pytest.approx(0.75 * changes["sampled, half"] + 0.25 * changes["sampled, game"])


def test_scorings_without_a_common_case_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="aitrain eval A B"):
        compared(tmp_path, episodes({"x": [0.0]}), episodes({"y": [0.0], "z": [0.0]}))


# -- more than a score


def test_a_gain_that_is_only_format_is_told_apart(tmp_path: Path) -> None:
    def with_lenient(scores: list[float]) -> list[dict[str, Any]]:
        found = [(n % 2 == 0, score) for n, score in enumerate(scores)]
        return [episode(str(n), score, row_number=n, metrics={"lenient": max(float(right), score)})
                for n, (right, score) in enumerate(found)]  # fmt: skip

    right = [float(n % 2 == 0) for n in range(40)]
    form, skill = compared(tmp_path, with_lenient([0.0] * 40), with_lenient(right), with_lenient([1.0] * 40))
    assert form.verdict == "better"
    assert form.format_sentence().startswith("The gain may be only format")
    assert changes_of(form) == {
        "sampled": 0.5,
        "lenient": 0.0,
        "format": 0.5,
    }
    assert skill.format_sentence().startswith("score")


# -- which scoring


def test_a_single_run_compares_its_model_before_training_with_the_one_after(tmp_path: Path) -> None:
    phases = ("before_sampled", 0, 0.0), ("", 3, 1.0), ("step3_sampled", 3, 0.0), ("after_sampled", 5, 1.0)
    records = [episode("x", score, eval_phase=phase, step=step) for phase, step, score in phases]
    run = write_scoring(tmp_path / "run", records)
    (run / "result.json").write_text(json.dumps({"model_step": 5}))
    (comparison,) = compare_all(read_scorings([run]))
    assert (comparison.a.model, comparison.b.model) == ("some/base", "some/base, step 5")
    assert means(comparison) == (0.0, 1.0)
    base = write_scoring(tmp_path / "eval-base", episodes({"x": [0.5]}))
    (other,) = compare_all(read_scorings([base, run]))
    assert (other.a.label, *means(other)) == ("eval-base", 0.5, 1.0)


def test_a_folder_without_scores_says_what_to_do(tmp_path: Path) -> None:
    run = write_scoring(tmp_path / "run", episodes({"x": [0.0]}, eval_phase="before_sampled"))
    (run / "status.json").write_text(json.dumps({"status": "failed"}))
    with pytest.raises(ConfigError, match=r"status failed.*\n.*aitrain eval"):
        read_scorings([run])
    with pytest.raises(ConfigError, match="an eval of one model"):
        read_scorings([write_scoring(tmp_path / "eval", episodes({"x": [0.0]}))])


# -- which cases are the same


def test_rows_that_repeat_are_matched_once_each_those_with_the_same_seed_first() -> None:
    def keys(*cases: tuple[str, int], env: str = "", only: str = "") -> dict[str, RecordedCase]:
        records = [RolloutRecord(prompt=prompt, seed=seed, environment=env) for prompt, seed in cases]
        cases = [RecordedCase(f"{env}{number}", record, env or only) for number, record in enumerate(records)]
        return {one.case: one for one in cases}

    def matched(a: dict[str, RecordedCase], b: dict[str, RecordedCase]) -> list[tuple[str, str]]:
        return [(one.case, other.case) for one, other in match_cases(a, b)]

    a = keys(("play", 1), ("y", 0), ("play", 2), ("only here", 0), ("play", 3))
    b = keys(("y", 0), ("play", 3), ("play", 4), ("only there", 0))
    assert matched(a, b) == [("0", "2"), ("1", "0"), ("4", "1")]
    assert matched(b, a) == [("0", "1"), ("1", "4"), ("2", "0")]
    easy, hard, other = (keys(("same rows", 1), env=env) for env in ("easy", "hard", "other"))
    assert matched(easy | hard, hard | other) == [("easy0", "other0"), ("hard0", "hard0")]
    assert matched(easy | hard, hard) == [("hard0", "hard0")]
    assert matched(easy | hard, keys(("same rows", 1), only="hard")) == [("hard0", "0")]
