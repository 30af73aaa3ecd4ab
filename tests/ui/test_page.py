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
from aitrain.events import Event, Note, Step
from aitrain.runs.metrics_line import MetricsLine
from aitrain.runs.rollout_index import RolloutIndex
from aitrain.runs.run_folder import RunFolder, append_lines, read_lines
from aitrain.ui.page import SCRIPTS, SERVED_SCRIPTS, STYLES, as_inert_json, asset, self_contained
from aitrain.ui.report_writer import MOST_CASES, ReportWriter, page_data
from aitrain.ui.summary import POINTS, curves, summary
from tests.ui.conftest import SHORT, record, said, write_run

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)><!-- &amp; \u2028\u2029 \ud800 \x00"


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


def data_of(folder: Path) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(Tags((folder / "report.html").read_text()).data)
    return data


def test_json_in_the_page_cannot_be_markup() -> None:
    text = as_inert_json({EVIL: [EVIL]})
    assert not re.search(r"[<>&\u2028\u2029\ud800-\udfff\x00]", text)
    assert json.loads(text) == {EVIL: [EVIL]}


def test_hostile_words_add_no_tag_to_the_page(tmp_path: Path) -> None:
    harmless = Tags(page_of(write_run(tmp_path / "harmless", [record()])))
    evil_record = said(EVIL, case_idx=EVIL, stop=EVIL, error={"kind": EVIL, "message": EVIL}, metrics={EVIL: 1.0})
    folder = write_run(tmp_path / "evil", [evil_record])
    (folder / "config.yaml").write_text(f"model: {json.dumps(EVIL)}\n")
    (folder / "environment").mkdir()
    (folder / "environment" / "env.py").write_text(EVIL, errors="surrogatepass")
    evil = Tags(page_of(folder))
    assert [tag for tag, _ in evil.tags] == [tag for tag, _ in harmless.tags]
    shown = json.loads(evil.data)["episodes"][0]["said"][0]["text"]
    assert shown == EVIL.replace("\ud800", "\ufffd" * 3)  # which is no UTF-8


def test_the_page_names_no_other_place_and_allows_only_its_own_scripts(real_run: Path) -> None:
    parsed = Tags((real_run / "report.html").read_text())
    for tag, attributes in parsed.tags:
        assert "src" not in attributes, tag
        assert (attributes.get("href") or "data:,") == "data:,", tag
    (policy,) = (a["content"] for tag, a in parsed.tags if a.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe" not in policy
    assert policy.count("sha256-") == len(SCRIPTS) + len(STYLES)


def test_our_scripts_never_write_html() -> None:
    for name in SERVED_SCRIPTS[1:]:
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function", asset(name))
    assert "MIT License" in asset("uPlot.LICENSE.txt")


# -- a run's own report


def test_a_run_leaves_a_report_of_all_that_it_did(real_run: Path) -> None:
    data, result = data_of(real_run), json.loads((real_run / "result.json").read_text())
    shown = data["summary"]
    assert shown["status"] == "finished"
    assert shown["scores"]["sampled"]["before"]["mean"] == pytest.approx(result["score_before"])
    assert shown["scores"]["greedy"]["after"]["mean"] == pytest.approx(result["greedy_after"])
    assert shown["scores"]["sampled"]["change"]["count"] == result["eval_cases"] == 8
    assert [point["step"] for point in shown["held_out"]] == [0, 3, 6, 8]
    rewards = [line["reward"] for line in read_lines(real_run / "metrics.jsonl") if "reward" in line]
    assert shown["curves"]["series"]["reward"] == rewards
    assert shown["episodes"]["all"] == len(data["episodes"]) == 8 * 16 + 4 * 2 * 8
    assert {row["name"]: row["value"] for row in shown["options"]}["rl_num_generations"] == "4"


def test_the_picture_is_drawn_where_matplotlib_is(real_run: Path) -> None:
    assert (real_run / "reward.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_there_is_a_report_and_no_picture(real_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aitrain.ui.reward_plot.find_spec", lambda name: None)
    from aitrain.ui.reward_plot import draw_curve

    assert draw_curve(RunFolder(real_run), RolloutIndex(real_run / "rollouts")) is None


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=["stopped", "killed"])
@pytest.mark.slow
def test_a_run_that_ends_early_leaves_a_report(number: signal.Signals, here: Path, preloaded_aitrain: Path) -> None:
    command = [
        str(preloaded_aitrain / "aitrain"),
        "grpo",
        "--model=tiny",
        "--rl-env=envs.arithmetic",
        "--max-steps=500",
    ]
    variables = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.Popen([*command, *SHORT, "--project-name=r"], cwd=here, env=variables, stderr=subprocess.PIPE)
    assert run.stderr is not None
    while b"/500" not in run.stderr.readline():
        pass
    status = json.loads((here / "runs" / "r" / "status.json").read_text())
    os.kill(status["pid"], number)  # the training process; its parent writes the report
    run.communicate()
    shown = data_of(here / "runs" / "r")["summary"]
    assert shown["status"] == ("stopped" if number == signal.SIGINT else "failed")
    assert shown["step"] >= 1


def test_a_report_that_cannot_be_written_ends_nothing(real_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writing, "write_text", full)
    monkeypatch.setattr(writing, "draw_curve", full)
    told: list[Event] = []
    ReportWriter(RunFolder(real_run)).finish(told.append)
    assert [type(event) for event in told] == [Note, Note]
    assert "No space left on device" in str(told[0])


def test_a_run_that_goes_on_writes_its_report_now_and_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_run(tmp_path, [record()])
    told: list[Event] = []
    monkeypatch.setattr(writing, "EVERY", 1000.0)
    announce: Any = ReportWriter(RunFolder(folder)).during(told.append)
    announce(Step(1, 9, 0.5, 1.0))
    assert announce.thread is None
    monkeypatch.setattr(writing, "EVERY", 0.0)
    announce(Step(2, 9, 0.5, 1.0))
    announce.thread.join()
    assert data_of(folder)["summary"]["episodes"]["all"] == 1
    append_lines(folder / "rollouts" / "rank0.jsonl", [record(step=2)])
    announce(Step(3, 9, 0.5, 1.0))
    announce.thread.join()
    assert data_of(folder)["summary"]["episodes"]["all"] == 2
    assert [event.step for event in told if isinstance(event, Step)] == [1, 2, 3]


def test_a_report_holds_the_source_of_the_environment_as_it_ran(real_run: Path) -> None:
    (file,) = data_of(real_run)["source"]
    assert file["name"] == "arithmetic.py"
    assert file["text"] == (Path(__file__).parents[2] / "aitrain" / "envs" / "arithmetic.py").read_text()


# -- what goes into it


def test_a_folder_with_nothing_in_it_is_shown_as_that(tmp_path: Path) -> None:
    shown = summary(tmp_path, RolloutIndex(tmp_path / "rollouts"))
    assert shown["status"] == "unknown"
    assert shown["curves"] == {"step": [], "series": {}}
    assert shown["held_out"] == []


def test_damaged_files_of_a_run_are_shown_as_far_as_they_go(tmp_path: Path) -> None:
    folder = write_run(tmp_path, [record()])
    for name in ("result.json", "status.json", "environment.json"):
        (folder / name).write_bytes(b'{"status": \xff')
    (folder / "config.yaml").write_bytes(b"model: [\xff")
    (folder / "metrics.jsonl").write_bytes(b'{"step": 1, "reward": 0.5}\n\xff\n{"step": 2, "reward": NaN}\n{"st')
    shown = data_in(page_of(folder))["summary"]
    assert shown["curves"] == {"step": [1, 2], "series": {"reward": [0.5, None]}}


def data_in(page: str) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(Tags(page).data)
    return data


def test_a_long_run_has_curves_of_means() -> None:
    lines = [MetricsLine(step=step, reward=step % 2) for step in range(1, 4 * POINTS + 1)]
    drawn = curves(lines)
    assert len(drawn["step"]) == POINTS
    assert drawn["step"][-1] == 4 * POINTS
    assert set(drawn["series"]["reward"]) == {0.5}


def test_of_very_many_cases_those_that_changed_are_in_the_page(tmp_path: Path) -> None:
    records = [record(step=step, case_idx=case, score=0.0) for step in (1, 2) for case in range(MOST_CASES + 50)]
    records[-1]["score"] = 1.0
    data = data_in(page_of(write_run(tmp_path, records)))
    assert data["case_count"] == MOST_CASES + 50
    assert len(data["cases"]) == MOST_CASES
    assert data["cases"][0]["case"] == str(MOST_CASES + 49)


def test_a_huge_episode_is_cut_in_the_page(tmp_path: Path) -> None:
    turns = [{"role": "assistant", "content": str(turn)} for turn in range(10_000)]
    folder = write_run(tmp_path, [record(messages=[{"role": "user", "content": "?"}, *turns]), said("x" * 2_000_000)])
    page = page_of(folder)
    many, long = data_in(page)["episodes"]
    assert many["skipped"] == {"after": 120, "count": 9850}
    assert [message["text"] for message in many["said"][-2:]] == ["9998", "9999"]
    assert (len(long["said"][0]["text"]), long["said"][0]["length"]) == (20_000, 2_000_000)
    assert len(page) < 500_000
