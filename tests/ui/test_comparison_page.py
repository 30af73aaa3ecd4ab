"""The page of a comparison: its data, and what a person does with it in a browser."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from aitrain.runs.comparison import compare_all
from aitrain.runs.recorded_scoring import read_scorings
from aitrain.ui import comparison_page as pages
from aitrain.ui.comparison_page import SCRIPTS, STYLES, comparison_page, page_of_comparisons
from aitrain.ui.page import asset
from tests.runs.scorings import episode, episodes, write_scoring
from tests.ui.test_page import EVIL, Tags

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def scorings(tmp_path: Path) -> tuple[Path, Path, Path]:
    """A base, a better and a worse model, with samples, a failure, tools and output that means harm."""
    base = {f"case {n}": [float(n % 4 == 0), 0.0] for n in range(40)}
    better = {name: [1.0, 1.0] if int(name[5:]) % 5 else [0.0, 0.0] for name in base}
    tool = {"type": "function", "function": {"name": "look"}}
    first = [one | {"tools": [tool]} for one in episodes(base)]
    second = [*episodes(better), episode("case 3", None, row_number=3, sample=0, stop="env_error", error="it broke")]
    asked, answered = {"role": "user", "content": "case 39"}, {"role": "assistant", "content": EVIL}
    second += [episode("case 39", 0.0, row_number=39, sample=0, completion=EVIL, messages=[asked, answered])]
    return (
        write_scoring(tmp_path / "base", first),
        write_scoring(tmp_path / "better", second),
        write_scoring(tmp_path / "worse", episodes({name: [0.0, 0.0] for name in base}), rl_temperature=0.5),
    )


def test_the_page_allows_only_its_own_scripts_and_hostile_words_add_no_tag(tmp_path: Path) -> None:
    base, better, _ = scorings(tmp_path)
    evil, harmless = Tags(comparison_page(base, better)), Tags(comparison_page(base, base.parent / "worse"))
    assert [tag for tag, _ in evil.tags] == [tag for tag, _ in harmless.tags]
    cases = json.loads(evil.data)["comparisons"][0]["cases"]
    (hostile,) = (case for case in cases if case["prompt"] == "case 39")
    assert EVIL.replace("\ud800", "\ufffd" * 3) in [one["said"][0]["text"] for one in hostile["sides"][1]]
    (policy,) = (a["content"] for tag, a in evil.tags if a.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    assert "unsafe" not in policy
    assert policy.count("sha256-") == len(SCRIPTS) + len(STYLES)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", asset("comparison.js"))


def test_a_large_comparison_lists_its_cases_and_holds_some_transcripts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "MOST_CASES", {"won": 2, "lost": 1})
    monkeypatch.setattr(pages, "MOST_ROWS", 35)
    monkeypatch.setattr(pages, "MOST_SAMPLES", 1)
    base, better, _ = scorings(tmp_path)
    (shown,) = json.loads(Tags(comparison_page(base, better)).data)["comparisons"]
    assert (len(shown["cases"]), shown["counts"]["matched"]) == (35, 40)
    held = [case for case in shown["cases"] if "sides" in case]
    assert sorted(case["outcome"] for case in held) == ["lost", "won", "won"]
    assert [[len(side) for side in case["sides"]] for case in held] == [[1, 1]] * 3
    assert {tuple(case["samples"]) for case in held} == {(2, 2)}


def test_a_run_named_twice_is_compared_with_itself_before_training(tmp_path: Path) -> None:
    before, after = episodes({"x": [0.0]}, eval_phase="before_sampled"), episodes({"x": [1.0]})
    run = write_scoring(tmp_path / "run", [*before, *(one | {"eval_phase": "after_sampled"} for one in after)])
    (shown,) = json.loads(Tags(comparison_page(run, run)).data)["comparisons"]
    assert (shown["a"], shown["b"]) == ("before", "after")


def test_a_case_that_an_interrupted_eval_has_no_sample_of_is_listed_without_transcripts(tmp_path: Path) -> None:
    greedy = episodes({"x": [0.0], "y": [1.0]}, eval_phase="eval_greedy")
    a = write_scoring(tmp_path / "a", [*greedy, *episodes({"x": [0.0], "y": [1.0]})])
    b = write_scoring(tmp_path / "b", [*greedy, *episodes({"x": [0.0]})])
    (shown,) = json.loads(Tags(comparison_page(a, b)).data)["comparisons"]
    assert {case["prompt"]: (case["outcome"], "sides" in case) for case in shown["cases"]} == {
        "x": ("equal", True), "y": ("unscored", False)
    }  # fmt: skip


# -- in a browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install '.[test]'")
    if CHROMIUM is None:
        pytest.skip("no Chromium on the path: apt-get install chromium")
    with playwright.sync_playwright() as started:
        launched = started.chromium.launch(executable_path=CHROMIUM)
        yield launched
        launched.close()


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.slow
def test_cases_are_found_opened_and_read_side_by_side(browser: Any, tmp_path: Path, width: int) -> None:
    comparisons = compare_all(read_scorings(scorings(tmp_path)))
    (tmp_path / "page.html").write_text(page_of_comparisons(comparisons))
    context = browser.new_context(viewport={"width": width, "height": 900})
    page, wrongs = context.new_page(), list[str]()
    page.on("console", lambda message: wrongs.append(message.text))
    page.on("pageerror", lambda error: wrongs.append(str(error)))
    page.on("dialog", lambda dialog: (wrongs.append("dialog"), dialog.dismiss()))
    page.goto((tmp_path / "page.html").as_uri())

    def texts(selector: str) -> list[str]:
        return [text.strip() for text in page.locator(selector).all_inner_texts()]

    assert page.locator("h1").inner_text().startswith("better compared with base")
    assert texts(".pill") == ["better"]
    assert texts(".choice button") == ["Lost (2)", "Won (32)", "Equal (6)"]
    assert len(texts(".compared-case")) == 2
    assert page.evaluate("document.documentElement.scrollWidth") <= width

    page.get_by_role("button", name="Won (32)").click()
    assert len(texts(".compared-case")) == 30
    page.get_by_role("button", name="Show more of 32 cases").click()
    assert len(texts(".compared-case")) == 32
    page.get_by_label("Find a case").fill("case 13")
    (row,) = texts(".compared-case")
    assert row.split("\n")[-1].endswith("case 13")
    page.locator(".compared-case").click()
    assert texts(".column h3") == ["base\nmean of 2 samples: 0.000", "better\nmean of 2 samples: 1.000"]
    assert texts(".column > .compared-sample .message.model .text") == ["this scores 0.0", "this scores 1.0"]
    assert page.locator(".about").inner_text().startswith("Case 13")
    assert "Tools (1)" in page.locator(".about").inner_text()
    page.locator(".column summary").first.click()
    assert page.locator(".column").first.locator(".compared-sample:visible").count() == 2
    assert page.evaluate("document.documentElement.scrollWidth") <= width

    page.get_by_label("Find a case").fill("")
    page.get_by_role("button", name="Lost (2)").click()
    page.get_by_role("button", name="worse", exact=True).click()
    assert page.locator("h1").inner_text().startswith("worse compared with base")
    assert "rl_temperature (1.0 and 0.5)" in page.locator(".warnings").inner_text()
    assert texts(".choice button") == ["Lost (10)", "Equal (30)"]
    page.get_by_text("Metrics and lengths").click()
    assert "tokens" in page.locator("details .metrics").inner_text()
    themes = []
    for _ in range(3):
        page.locator("button.theme").click()
        themes.append(page.evaluate("document.documentElement.dataset.theme"))
    assert {"light", "dark"} <= set(themes)
    context.close()
    assert wrongs == []
