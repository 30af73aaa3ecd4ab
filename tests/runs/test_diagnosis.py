"""The diagnosis of a run: one line for what lasts, none for a bad batch."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest

from aitrain import TrainConfig
from aitrain.runs.diagnosis import LINES_IN_A_ROW, Diagnosis, RunFinding, findings_of
from aitrain.runs.records import MetricsLine
from aitrain.runs.run_folder import RunFolder, append_lines, append_text
from benchmarks.simulated_runs import HEALTHY, PLANTED, Kind, simulate

RATIO = "sampling/importance_sampling_ratio/mean"
FINE = {
    "reward": 0.5, "frac_reward_zero_std": 0.25, "completions/clipped_ratio": 0.1, "unscored": 0.0, "entropy": 2.0,
    "tools/unused": 0.1, RATIO: 0.9,
}  # fmt: skip

BAD = [
    ({"frac_reward_zero_std": 1.0, "reward": 0.0}, "the cases are too hard, or the policy has become worse", "--lr"),
    ({"frac_reward_zero_std": 0.8, "reward": 0.4}, "80% of the groups", "--rl-temperature"),
    ({"completions/clipped_ratio": 0.75}, "75% of the episodes end with an answer", "--rl-max-new-tokens"),
    ({"unscored": 0.3}, "30% of the episodes have no score", "--rl-env-timeout"),
    ({"tools/unused": 1.0}, "100% of the episodes that have tools call none", "--model"),
    ({"entropy": 0.01}, "entropy has collapsed to 0.010", "--rl-kl-coef"),
    ({RATIO: 0.2, "sampling/sampling_logp_difference/mean": 0.8}, "0.20", "--dtype"),
]

USUAL = TrainConfig()


def as_line(step: int, values: dict[str, float]) -> MetricsLine:
    return MetricsLine.of_logs(step, 0.0, values)


def told(*lines: dict[str, float], config: TrainConfig = USUAL) -> list[str]:
    diagnosis = Diagnosis(config)
    found = [diagnosis.see(as_line(step, {**FINE, **line})) for step, line in enumerate(lines, 1)]
    return [finding.text for findings in found for finding in findings]


@pytest.mark.parametrize(("line", "meaning", "option"), BAD)
def test_what_lasts_is_told_once_with_an_option_to_change_and_a_few_bad_batches_are_not(
    line: dict[str, float], meaning: str, option: str
) -> None:
    (advice,) = told({}, *[line] * (3 * LINES_IN_A_ROW))

    assert meaning in advice
    assert option in advice
    assert told({}, *([line] * (LINES_IN_A_ROW - 1) + [{}]) * 4) == []


@pytest.mark.parametrize(
    "lines",
    [
        [{}, *[{"frac_reward_zero_std": 1.0, "entropy": 0.001, "reward": 0.98}] * 20],
        [{"entropy": 0.05}] * 20,
        [{"frac_reward_zero_std": 0.79, "completions/clipped_ratio": 0.5, "unscored": 0.25, RATIO: 0.5}] * 20,
    ],
    ids=["sure of solved cases", "sure from the start", "just not bad"],
)
def test_what_is_well_is_not_reported(lines: list[dict[str, float]]) -> None:
    assert told(*lines) == []


@pytest.mark.parametrize(
    ("score_range", "reward", "meaning"),
    [
        ("-1,1", -1.0, "mostly near -1.00: the cases are too hard"),
        ("-1,1", 0.0, "mostly near 0.00"),
        ("0,100", 95.0, None),
        ("any", 0.0, "mostly near 0.00"),
    ],
)
def test_solved_and_too_hard_are_parts_of_the_score_range(score_range: str, reward: float, meaning: str | None) -> None:
    config = TrainConfig(rl_score_range=score_range)
    advice = told(*[{"frac_reward_zero_std": 1.0, "reward": reward}] * 20, config=config)

    assert [meaning in line for line in advice if meaning] == [True] * (meaning is not None)
    assert bool(advice) == (meaning is not None)


# -- trends

TO_DO = ("--", "aitrain env check", "less weight")


def found_in(kind: Kind) -> list[RunFinding]:
    config, lines = simulate(kind, 1)
    diagnosis = Diagnosis(config)
    return [finding for line in lines for finding in diagnosis.see(line)]


@pytest.mark.parametrize("kind", PLANTED, ids=lambda kind: kind.name)
def test_a_planted_condition_is_found_once_and_said_on_one_line_with_what_to_do(kind: Kind) -> None:
    found = found_in(kind)
    names = [finding.name for finding in found]

    assert kind.finding in names
    assert len(names) == len(set(names))
    assert all("\n" not in one.text and any(word in one.text for word in TO_DO) for one in found)


@pytest.mark.parametrize("kind", HEALTHY, ids=lambda kind: kind.name)
def test_nothing_is_found_in_a_healthy_run(kind: Kind) -> None:
    assert found_in(kind) == []


def test_a_fall_of_the_held_out_score_is_told_with_the_step_before_it() -> None:
    diagnosis = Diagnosis(USUAL)
    diagnosis.see(MetricsLine(0, {"eval_score": 0.69, "eval_low": 0.62}))
    for step, reward in enumerate([0.69] * 6 + [0.1] * 6, 1):
        diagnosis.see(as_line(step, {"reward": reward}))
    (found,) = diagnosis.see(MetricsLine(13, {"eval_score": 0.0, "eval_low": 0.0}))
    assert "from 0.69 around step 0 to 0.00. If the reward has fallen as well" in found.text


def test_the_findings_of_a_run_are_those_that_it_recorded_in_whole_lines(tmp_path: Path) -> None:
    folder, found = RunFolder(tmp_path), RunFinding("entropy", 3, "recorded")
    append_lines(folder.diagnostics, [asdict(found), {"name": "entropy", "step": "three", "text": "damaged"}])
    append_text(folder.diagnostics, '{"name": "cut_')

    assert findings_of(folder) == [found]
