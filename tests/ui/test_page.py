"""The page as a file: nothing in it can run but its own scripts, and a run leaves one whatever happens to it."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import aitrain.ui.comparison_view as pages
import aitrain.ui.page as writing
from aitrain.events import Event
from aitrain.runs.comparison import compare_all
from aitrain.runs.recorded_scoring import read_scorings
from aitrain.runs.run_folder import RunFolder
from aitrain.ui.comparison_view import page_of_comparisons
from aitrain.ui.page import page_data, run_page, write_report
from aitrain.ui.sweep_page import open_study, sweep_page
from tests.conftest import read_lines
from tests.runs.scorings import episodes, write_scoring
from tests.ui.conftest import read, record, said, write_run
from tests.ui.made_runs import EVIL, make_sweep


def comparison_page(*folders: Path) -> str:
    return page_of_comparisons(compare_all(read_scorings(folders)))


class Tags(HTMLParser):
    """The tags of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))


def page_of(folder: Path) -> str:
    return run_page(page_data(RunFolder(folder), read(folder)))


def data_in(page: str) -> dict[str, Any]:
    """What the scripts of a page read."""
    data: dict[str, Any] = json.loads(page.partition('id="data">')[2].partition("</script>")[0])
    return data


def data_of(folder: Path) -> dict[str, Any]:
    return data_in((folder / "report.html").read_text())


def test_hostile_words_are_data_and_the_page_allows_only_its_own_scripts(tmp_path: Path) -> None:
    page = page_of(write_run(tmp_path, [said(EVIL, case_idx=EVIL)]))
    assert data_in(page)["episodes"][0]["said"][0]["text"].startswith("</script><script>alert(1)")
    assert page.count("<script") + page.count("<style") == 1 + page.count("sha256-"), "the data, and what is allowed"
    assert "default-src 'none'; " in page
    assert "<img" not in page


def test_the_page_of_a_sweep_shows_hostile_words_as_text_and_loads_nothing(tmp_path: Path) -> None:
    folders = [make_sweep(tmp_path / str(number), text) for number, text in enumerate(("word", EVIL))]
    pages = [sweep_page(open_study(folder), folder) for folder in folders]
    harmless, evil = map(Tags, pages)
    assert [tag for tag, _ in evil.tags] == [tag for tag, _ in harmless.tags]
    assert "alert(1)" in str(data_in(pages[1]))
    (policy,) = (a["content"] or "" for tag, a in evil.tags if a.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-")
    assert policy.count("unsafe") == 1
    links = [attributes["href"] for tag, attributes in evil.tags if tag == "a"]
    assert links == [f"trial-{number}/report.html" for number in range(4)]


# -- a run's own report


def test_a_run_leaves_a_report_of_all_that_it_did(real_run: Path) -> None:
    data = data_of(real_run)
    shown = data["summary"]
    assert shown["status"] == "finished"
    assert [point["step"] for point in shown["held_out"]] == [0, 1, 2, 3, 4]
    rewards = [line["reward"] for line in read_lines(real_run / "metrics.jsonl") if "reward" in line]
    assert shown["curves"]["series"]["reward"] == rewards
    assert shown["episodes"]["all"] == len(data["episodes"]) == 62
    assert {row["name"]: row["value"] for row in shown["options"]}["max_steps"] == "4"
    assert "tests/finished_runs.py" in {file["name"] for file in data["source"]}


def test_a_report_that_cannot_be_written_ends_nothing(real_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writing, "write_text", full)
    told: list[Event] = []
    write_report(RunFolder(real_run), told.append)
    assert "No space left on device" in str(told[0])


# -- what goes into it


def test_damaged_files_of_a_run_are_shown_as_far_as_they_go(tmp_path: Path) -> None:
    folder = write_run(tmp_path, [record()])
    for name in ("result.json", "status.json", "environment.json", "config.yaml"):
        (folder / name).write_bytes(b'{"status": [\xff')
    (folder / "metrics.jsonl").write_bytes(b'{"step": 1, "reward": 0.5}\n\xff\n{"step": 2, "reward": null}\n{"st')
    shown = data_in(page_of(folder))["summary"]
    assert shown["curves"] == {"step": [1, 2], "series": {"reward": [0.5, None]}}
    assert shown["status"] == "unknown"


# -- the pages of comparisons and sweeps


def test_a_large_comparison_lists_its_cases_and_holds_some_transcripts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "MOST_CASES", {"won": 2, "lost": 1})
    monkeypatch.setattr(pages, "MOST_ROWS", 7)
    base = {str(n): [0.0, float(n > 5)] for n in range(8)}
    better = {str(n): [float(n < 6)] * 2 for n in range(8)}
    a, b = write_scoring(tmp_path / "a", episodes(base)), write_scoring(tmp_path / "b", episodes(better))
    page = comparison_page(a, b)
    cases = page.split('<details class="compared-case"')[1:]
    assert (len(cases), "Only the 7 largest" in page) == (7, True)
    held = {
        re.findall('data-outcome="(.*?)"', case)[0]: re.findall("this scores (.*?)<", case)
        for case in cases
        if "are not in this page" not in case
    }
    assert held["won"] == ["0.0", "1.0"], "the samples that differ"
    assert held["lost"] == ["1.0", "0.0"]
    assert page.count("are not in this page") == 4


def test_hostile_words_are_text_on_the_page_of_a_comparison(tmp_path: Path) -> None:
    made = []
    for name, text in {"harmless": "word", "evil": EVIL}.items():
        records = episodes({text: [0.0]}, metrics={text: 1.0}, stop=text, error={"kind": text, "message": text})
        made.append(comparison_page(*(write_scoring(tmp_path / name / side, records) for side in "ab")))
    harmless, evil = map(Tags, made)
    assert [tag for tag, _ in evil.tags] == [tag for tag, _ in harmless.tags]
