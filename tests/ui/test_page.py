"""The page as a file: nothing in it can run but its own scripts, and a run leaves one whatever happens to it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import aitrain.ui.report_writer as writing
from aitrain.events import Event, Step
from aitrain.runs.comparison import compare_all
from aitrain.runs.metrics_line import MetricsLine
from aitrain.runs.recorded_scoring import read_scorings
from aitrain.runs.rollout_index import RolloutIndex
from aitrain.runs.run_folder import RunFolder, append_lines, read_lines
from aitrain.ui.comparison_page import page_of_comparisons
from aitrain.ui.page import SERVED_SCRIPTS, asset, self_contained
from aitrain.ui.report_writer import MOST_CASES, ReportWriter, page_data
from aitrain.ui.summary import POINTS, curves
from aitrain.ui.sweep_page import open_study, sweep_page
from tests.runs.scorings import episodes, write_scoring
from tests.ui.conftest import record, said, write_run
from tests.ui.made_runs import EVIL, make_sweep


class Tags(HTMLParser):
    """The tags of a page, and the text of its data element."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.data = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1][1].get("id") == "data":
            self.data += data


def page_of(folder: Path) -> str:
    rollouts = RolloutIndex(folder / "rollouts")
    rollouts.refresh()
    return self_contained(page_data(RunFolder(folder), rollouts))


def data_in(page: str) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(Tags(page).data)
    return data


def data_of(folder: Path) -> dict[str, Any]:
    return data_in((folder / "report.html").read_text())


def of_run(folder: Path, text: str) -> str:
    evil_record = said(text, case_idx=text, stop=text, error={"kind": text, "message": text}, metrics={text: 1.0})
    (folder / "environment").mkdir(parents=True)
    (folder / "environment" / "env.py").write_text(text, errors="surrogatepass")
    (folder / "config.yaml").write_text(f"model: {json.dumps(text)}\n")
    return page_of(write_run(folder, [evil_record]))


def of_comparison(folder: Path, text: str) -> str:
    each = ("a", 0.0), ("b", 1.0)
    runs = [write_scoring(folder / name, episodes({text: [score]}, completion=text)) for name, score in each]
    return page_of_comparisons(compare_all(read_scorings(runs)))


@pytest.mark.parametrize("make", [of_run, of_comparison])
def test_hostile_words_add_no_tag_and_the_page_loads_nothing_and_allows_only_its_own_scripts(
    tmp_path: Path, make: Any
) -> None:
    harmless, evil = (Tags(make(tmp_path / str(number), text)) for number, text in enumerate(("word", EVIL)))
    assert [tag for tag, _ in evil.tags] == [tag for tag, _ in harmless.tags]
    assert "alert(1)" in json.dumps(json.loads(evil.data))
    for tag, attributes in evil.tags:
        assert "src" not in attributes, tag
        assert (attributes.get("href") or "data:,").startswith(("data:", "#")), tag
    (policy,) = (a["content"] or "" for tag, a in evil.tags if a.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe" not in policy
    own = [tag for tag, attributes in evil.tags if tag in ("style", "script") and attributes.get("id") != "data"]
    assert policy.count("sha256-") == len(own) > 2


def test_the_page_of_a_sweep_shows_hostile_words_as_text_and_loads_nothing(tmp_path: Path) -> None:
    folders = [make_sweep(tmp_path / str(number), text) for number, text in enumerate(("word", EVIL))]
    harmless, evil = (Tags(sweep_page(open_study(folder), folder)) for folder in folders)
    assert [tag for tag, _ in evil.tags] == [tag for tag, _ in harmless.tags]
    assert "alert(1)" in evil.data
    (policy,) = (a["content"] or "" for tag, a in evil.tags if a.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-")
    assert policy.count("unsafe") == 1
    links = [attributes["href"] for tag, attributes in evil.tags if tag == "a"]
    assert links == [f"trial-{number}/report.html" for number in range(4)]


def test_a_sweep_without_trials_has_a_page(tmp_path: Path) -> None:
    assert "there is no best one" in sweep_page(open_study(tmp_path, is_new=True), tmp_path)


def test_our_scripts_never_write_html() -> None:
    for name in (*SERVED_SCRIPTS[1:], "comparison.js", "sweep.js"):
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function", asset(name))


# -- a run's own report


def test_a_run_leaves_a_report_of_all_that_it_did(real_run: Path) -> None:
    data, result = data_of(real_run), json.loads((real_run / "result.json").read_text())
    shown = data["summary"]
    assert shown["status"] == "finished"
    assert shown["scores"]["sampled"]["before"]["mean"] == pytest.approx(result["score_before"])
    assert shown["scores"]["greedy"]["after"]["mean"] == pytest.approx(result["greedy_after"])
    assert shown["scores"]["sampled"]["change"]["count"] == result["eval_cases"] == 3
    assert [point["step"] for point in shown["held_out"]] == [0, 1, 2, 3, 4]
    rewards = [line["reward"] for line in read_lines(real_run / "metrics.jsonl") if "reward" in line]
    assert shown["curves"]["series"]["reward"] == rewards
    assert shown["episodes"]["all"] == len(data["episodes"]) == 62
    assert {row["name"]: row["value"] for row in shown["options"]}["max_steps"] == "4"
    assert "tests/finished_runs.py" in {file["name"] for file in data["source"]}


@pytest.mark.slow
def test_a_run_that_is_killed_leaves_a_report(here: Path, preloaded_aitrain: Path) -> None:
    command = [str(preloaded_aitrain / "aitrain"), "grpo", "--model=tiny", "--rl-env=envs.arithmetic", "--batch-size=8"]
    more = ["--max-steps=500", "--project-name=r", "--rl-max-new-tokens=8", "--eval-cases=2"]
    variables = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    with subprocess.Popen([*command, *more], cwd=here, env=variables, stderr=subprocess.PIPE) as run:
        assert run.stderr is not None
        while b"/500" not in run.stderr.readline():
            pass
        status = json.loads((here / "runs" / "r" / "status.json").read_text())
        os.kill(status["pid"], signal.SIGKILL)  # the training process; its parent writes the report
        run.stderr.read()
    assert data_of(here / "runs" / "r")["summary"]["status"] == "failed"


def test_a_report_that_cannot_be_written_ends_nothing(real_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writing, "write_text", full)
    told: list[Event] = []
    ReportWriter(RunFolder(real_run)).finish(told.append)
    assert "No space left on device" in str(told[0])


def test_a_run_that_goes_on_writes_its_report_now_and_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_run(tmp_path, [record()])
    told: list[Event] = []
    announce: Any = ReportWriter(RunFolder(folder)).during(told.append)
    for step, every in enumerate((1000.0, 0.0, 0.0)):
        monkeypatch.setattr(writing, "EVERY", every)
        announce(Step(step, 9, 0.5, 1.0))
        if announce.thread:
            announce.thread.join()
            assert data_of(folder)["summary"]["episodes"]["all"] == step
            append_lines(folder / "rollouts" / "rank0.jsonl", [record(step=2)])
    assert data_of(folder)["summary"]["episodes"]["all"] == 2
    assert [event.step for event in told if isinstance(event, Step)] == [0, 1, 2]


# -- what goes into it


def test_damaged_files_of_a_run_are_shown_as_far_as_they_go(tmp_path: Path) -> None:
    folder = write_run(tmp_path, [record()])
    for name in ("result.json", "status.json", "environment.json", "config.yaml"):
        (folder / name).write_bytes(b'{"status": [\xff')
    (folder / "metrics.jsonl").write_bytes(b'{"step": 1, "reward": 0.5}\n\xff\n{"step": 2, "reward": NaN}\n{"st')
    shown = data_in(page_of(folder))["summary"]
    assert shown["curves"] == {"step": [1, 2], "series": {"reward": [0.5, None]}}
    assert shown["status"] == "unknown"


def test_a_long_run_has_curves_of_means() -> None:
    drawn = curves([MetricsLine(step=step, reward=step % 2) for step in range(1, 4 * POINTS + 1)])
    assert len(drawn["step"]) == POINTS
    assert drawn["step"][-1] == 4 * POINTS
    assert set(drawn["series"]["reward"]) == {0.5}


def test_of_very_many_cases_those_that_changed_are_in_the_page_and_a_huge_episode_is_cut(tmp_path: Path) -> None:
    turns = [{"role": "assistant", "content": str(turn)} for turn in range(10_000)]
    huge = [record(messages=[{"role": "user", "content": "?"}, *turns]), said("x" * 2_000_000)]
    many, long = data_in(page_of(write_run(tmp_path / "huge", huge)))["episodes"]
    assert many["skipped"] == {"after": 120, "count": 9850}
    assert [message["text"] for message in many["said"][-2:]] == ["9998", "9999"]
    assert (len(long["said"][0]["text"]), long["said"][0]["length"]) == (20_000, 2_000_000)
    records = [record(step=step, case_idx=case, score=0.0) for step in (1, 2) for case in range(MOST_CASES + 50)]
    records[-1]["score"] = 1.0
    data = data_in(page_of(write_run(tmp_path / "many", records)))
    assert (data["case_count"], len(data["cases"])) == (MOST_CASES + 50, MOST_CASES)
    assert data["cases"][0]["case"] == str(MOST_CASES + 49)
