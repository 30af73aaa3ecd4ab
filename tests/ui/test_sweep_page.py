"""The page of a sweep: what is in it, that nothing in it becomes HTML, and how it looks in a browser."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aitrain.runs.sweep_record import SweepRecord, Trial
from aitrain.ui.page import asset
from aitrain.ui.sweep_page import PAGE, SCRIPTS, STYLES, page_data, sweep_page, write_page
from tests.ui.test_browser import CHROMIUM, Tab, browser, visit  # noqa: F401  fixtures

EVIL = "</script><img src=x onerror=alert(1)>\u202e&lt;"
SEARCH = {
    "lr": {"low": 1e-7, "high": 1e-3, "log": True},
    "rl_loss_type": ["grpo", "dapo"],
    "trl": {"num_iterations": [1, 2]},
}


CUT_OFF = """() => {
  const cut = [...document.querySelectorAll("main td, main dd, .command")];
  const isCut = (one) => one.scrollWidth > one.clientWidth + 1;
  const boxes = [...document.querySelectorAll(".parallel text")].map((one) => one.getBoundingClientRect());
  return cut.filter(isCut).length + boxes.filter((box) => box.left < 0 || box.right > innerWidth).length;
}"""
"""Number of texts that are not seen as a whole."""


def interval(mean: float) -> Any:
    return {"mean": mean, "low": mean - 0.1, "high": mean + 0.1, "count": 64}


def record_in(folder: Path, **config: object) -> SweepRecord:
    """A sweep with finished trials, a pruned one, a failed one, and hostile texts."""
    folder.mkdir(exist_ok=True)
    options = {"options": {"model": EVIL}, "search": SEARCH, "objective": "sampled", "direction": "maximize"}
    record = SweepRecord(folder, {**options, "sampler": "tpe", "pruner": "median", **config}, 8, "finished")
    for number in range(6):
        values = {
            "lr": 10.0 ** (number - 7),
            "rl_loss_type": ["grpo", "dapo"][number % 2],
            "trl.num_iterations": 1 + number % 2,
        }
        score = 0.3 + number / 10
        record.trials.append(
            Trial(number, values, "finished", score, interval(score), 0.25, steps=20, seconds=60.0 + number)
        )
    record.trials[0] = Trial(0, {**record.trials[0].values, "rl_loss_type": EVIL}, "failed", error=EVIL)
    record.trials.append(Trial(6, record.trials[4].values, "pruned", before=0.25, scores={5: 0.2, 10: 0.3}))
    return record


def test_the_page_has_the_trials_best_first_with_axes_for_the_searched_options(tmp_path: Path) -> None:
    data: Any = page_data(record_in(tmp_path / "lrs"))
    assert [trial["number"] for trial in data["trials"]] == [5, 4, 3, 2, 1, 0, 6]
    assert data["best"] == 5
    assert data["axes"][0] == {"name": "lr", "low": 1e-7, "high": pytest.approx(1e-2), "log": True}
    assert data["axes"][1]["choices"][:2] == ["grpo", "dapo"]
    assert data["axes"][2] == {"name": "trl.num_iterations", "choices": ["1", "2"]}
    assert data["trials"][-1]["scores"] == [(5, 0.2), (10, 0.3)]
    assert page_data(record_in(tmp_path / "least", direction="minimize"))["best"] == 1


def test_a_sweep_without_trials_or_scores_has_a_page(tmp_path: Path) -> None:
    record = record_in(tmp_path / "lrs")
    record.trials = [Trial(0, {"lr": 1e-5})]
    write_page(record)
    assert page_data(record)["best"] is None
    record.trials = []
    write_page(record)
    assert (tmp_path / "lrs" / PAGE).exists()


def test_texts_of_a_sweep_add_no_tag_and_the_page_loads_nothing(tmp_path: Path) -> None:
    page = sweep_page(record_in(tmp_path / "lrs"))
    assert EVIL not in page
    assert "<img" not in page
    assert not re.search(r'(?:src|href)="(?!data:,|#)', page)
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', page)
    assert policy is not None
    assert policy.group(1).startswith("default-src 'none'; ")
    assert policy.group(1).count("sha256-") == len(STYLES) + len(SCRIPTS)
    for name in SCRIPTS:
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function", asset(name))


def test_the_page_links_to_where_the_trials_are_shown(tmp_path: Path) -> None:
    page = sweep_page(record_in(tmp_path / "lrs"), "/?run=lrs%2F{name}")
    assert json.dumps("/?run=lrs%2F{name}")[1:-1] in page


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on the path: apt-get install chromium")
@pytest.mark.slow
def test_in_a_browser_lines_and_rows_light_up_together_and_nothing_is_cut_off(
    tmp_path: Path,
    visit: Callable[..., Tab],  # noqa: F811
) -> None:
    write_page(record_in(tmp_path / "lrs"))
    tab = visit((tmp_path / "lrs" / PAGE).as_uri())
    page = tab.page
    page.wait_for_selector(".parallel svg")
    assert page.locator(".trial-line").count() == 7
    assert page.locator(".trial-line.unscored").count() == 2
    assert page.locator(".trial-line.best").count() == 1
    assert page.locator("main img").count() == 0
    assert tab.texts(".trials tbody tr:first-child td:first-child") == ["trial-5"]
    page.hover(".trials tbody tr:nth-child(2)")
    assert page.locator(".trial-line.lit").count() == 1
    page.click(".trials th:nth-child(2) button")  # by learning rate, the highest first; again: the lowest first
    page.click(".trials th:nth-child(2) button")
    assert tab.texts(".trials tbody tr:first-child td:first-child") == ["trial-0"]
    assert tab.texts("#best .best-score b") == ["0.800"]
    page.set_viewport_size({"width": 390, "height": 800})
    tab.wait("document.querySelector('.parallel svg').clientWidth < 390")
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    assert page.evaluate(CUT_OFF) == 0
    page.click("button.theme")
    page.click("button.theme")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
