"""The table of runs, and the pages of live, failed and evaluated runs, in a real browser; runs are made by hand."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aitrain.runs.run_folder import RunFolder, append_lines
from aitrain.ui.report_writer import ReportWriter
from aitrain.ui.server import PageServer
from tests.ui.conftest import said, write_run
from tests.ui.made_runs import RENDERED, make_better, make_eval, make_failed, make_live, make_run, make_sweep
from tests.ui.test_browser import INK, Tab, browser, file_of, playwright, pytestmark, visit

__all__ = ["browser", "playwright", "pytestmark", "visit"]

Visit = Callable[..., Tab]
Serve = Callable[..., PageServer]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One run of each kind."""
    folder = tmp_path_factory.mktemp("kinds")
    make_better(folder / "better")
    make_failed(folder / "failed")
    make_live(folder / "live")
    make_eval(folder / "eval-sums")
    make_sweep(folder / "lr-sweep")
    return folder


@pytest.fixture
def table(runs: Path, visit: Visit, serve: Serve) -> Tab:
    return visit(serve(runs).address)


def names(tab: Tab) -> list[str]:
    return tab.texts(".runs tbody th a")


@pytest.mark.slow
def test_each_run_is_a_row_with_its_scores_and_state(table: Tab) -> None:
    def cells(run: str) -> dict[str, str]:
        lines = table.page.locator(f"[data-run={run}] td[data-label]")
        return dict(lines.evaluate_all("all => all.map((cell) => [cell.dataset.label, cell.innerText])"))

    better, live, failed, an_eval, sweep = map(cells, ("better", "live", "failed", "eval-sums", "lr-sweep"))
    assert (better["Status"], better["Before"], better["After"], better["Steps"]) == ("finished", "0.375", "0.750", "9")
    assert [part for part in better["Change"].split("\n") if part] == ["+0.375", "better", "+0.275 to +0.475"]
    assert better["Time"] == "1 min 30 s"
    assert table.page.locator("[data-run=better] svg").get_attribute("aria-label") == "reward from 0.100 to 0.900"
    assert (live["Status"], live["Steps"], live["Before"]) == ("running\ntraining", "12 of 50", "0.250")
    assert live["After"] == "0.500\nat step 10"
    assert live["Time"].startswith("10 min")
    assert failed["Status"] == "failed"
    assert "Out of memory in step 4." in table.texts("[data-run=failed] th")[0]
    assert (an_eval["Before"], an_eval["After"], an_eval["Steps"]) == ("–", "0.625", "8 episodes")
    assert (sweep["After"], sweep["Steps"]) == ("0.800", "2 of 2 trials")
    assert table.texts(".run-head .hint") == ["5 shown: 1 running, 3 finished, 1 failed"]


def test_the_table_is_sorted_by_any_column_and_found_again_by_its_address(table: Tab) -> None:
    assert names(table)[0] == "live"  # the newest one
    for key in ("name", "status", "curve", "before", "after", "change", "steps", "time", "heartbeat"):
        table.page.click(f".runs [data-key={key}]")
        once, way = names(table), table.page.get_attribute(f".runs th.{key}", "aria-sort")
        assert table.page.evaluate("document.activeElement.dataset.key") == key
        table.page.click(f".runs [data-key={key}]")
        assert {way, table.page.get_attribute(f".runs th.{key}", "aria-sort")} == {"ascending", "descending"}
        assert sorted(names(table)) == sorted(once)
    table.page.click(".runs [data-key=after]")
    assert names(table) == ["lr-sweep", "better", "eval-sums", "live", "failed"]
    table.page.reload()
    table.page.wait_for_selector(".runs tbody tr")
    assert names(table) == ["lr-sweep", "better", "eval-sums", "live", "failed"]


@pytest.mark.slow
def test_the_table_is_filtered_by_text_status_and_kind(table: Tab) -> None:
    table.page.keyboard.press("/")
    table.page.keyboard.type("ARITH tiny")
    assert set(names(table)) == {"better", "lr-sweep"}
    table.page.fill(".search", "")
    table.page.select_option("label:has-text('Status') select", "failed")
    assert names(table) == ["failed"]
    table.page.select_option("label:has-text('Status') select", "")
    table.page.select_option("label:has-text('Kind') select", "eval")
    assert names(table) == ["eval-sums"]
    table.page.select_option("label:has-text('Kind') select", "sweep")
    assert names(table) == ["lr-sweep"]
    table.page.fill(".search", "nothing like this")
    assert table.texts(".empty") == ["No run is like that."]


@pytest.mark.slow
def test_the_trials_of_a_sweep_are_listed_under_it(table: Tab) -> None:
    table.page.click("[data-run=lr-sweep] .unfold")
    place = names(table).index("lr-sweep")
    assert sorted(names(table)[place + 1 : place + 3]) == ["trial-0", "trial-1"]
    assert table.page.evaluate("document.activeElement.getAttribute('aria-expanded')") == "true"
    table.page.click(".trial a:has-text('trial-1')")
    table.page.wait_for_selector("h1:has-text('trial-1')")
    table.page.go_back()
    table.page.click("a:has-text('lr-sweep')")
    table.page.wait_for_selector("h1:has-text('lr-sweep')")


@pytest.mark.slow
def test_two_runs_are_chosen_and_compared(table: Tab) -> None:
    for run in ("failed", "better", "eval-sums"):  # a third one replaces the first
        table.page.check(f"[data-run={run}] input")
    assert not table.page.is_checked("[data-run=failed] input")
    assert table.texts(".selection-bar [role=status]") == ["better and eval-sums"]
    assert table.texts(".selection-bar a") == ["Compare case by case"]  # an eval has no curves
    table.page.click(".selection-bar button")
    assert not table.page.locator(".selection-bar").is_visible()
    table.page.check("[data-run=better] input")
    assert "choose another one" in table.texts(".selection-bar [role=status]")[0]
    table.page.check("[data-run=live] input")
    table.page.click("text=Curves in the same axes")
    table.page.wait_for_selector("#comparison")
    assert table.texts("#comparison thead th")[1:3] == ["better", "live"]
    table.page.go_back()
    table.page.wait_for_selector("[data-run=better]")
    for run in ("better", "eval-sums"):
        table.page.check(f"[data-run={run}] input")
    table.page.click("text=Compare case by case")
    table.page.wait_for_selector("h1:has-text('eval-sums compared with better')")


@pytest.mark.slow
def test_a_run_that_begins_later_joins_the_table_and_the_focus_stays(
    tmp_path: Path, visit: Visit, serve: Serve
) -> None:
    make_run(tmp_path / "first", [], "finished", step=1)
    harm = tmp_path / "<img src=x onerror=alert(1)>"
    make_run(harm, [], "failed", reason="<script>alert(1)</script>\nmore", model="<b>")
    tab = visit(serve(tmp_path).address)
    assert set(names(tab)) == {"first", harm.name}
    tab.page.focus("[data-run=first] input")
    make_run(tmp_path / "second", [], "finished", step=1)
    tab.wait("document.querySelectorAll('.runs tbody tr').length === 3")
    assert tab.page.evaluate("document.activeElement.closest('tr').dataset.run") == "first"
    assert "<script>alert(1)</script>" in " ".join(tab.texts(".runs tbody th"))
    assert tab.page.locator(".runs img, .runs script").count() == 0


@pytest.mark.slow
def test_many_runs_are_shown_a_hundred_at_a_time(tmp_path: Path, visit: Visit, serve: Serve) -> None:
    for number in range(120):
        (tmp_path / f"run-{number}").mkdir()
        (tmp_path / f"run-{number}" / "config.yaml").write_text("model: tiny\n")
    tab = visit(serve(tmp_path).address)
    assert len(names(tab)) == 100
    tab.page.click("button.wide")
    assert len(names(tab)) == 120


# -- the page of a run


def open_run(runs: Path, run: str, visit: Visit, serve: Serve, **settings: Any) -> Tab:
    tab = visit(f"{serve(runs).address}&run={run}", **settings)
    tab.page.wait_for_selector("table.cases")
    return tab


@pytest.mark.slow
def test_the_page_of_a_failed_run_begins_with_the_reason(runs: Path, visit: Visit, serve: Serve) -> None:
    ReportWriter(RunFolder(runs / "failed")).write(lambda event: pytest.fail(str(event)))
    for tab in (open_run(runs, "failed", visit, serve), visit(file_of(runs / "failed"))):
        parts = tab.page.locator(".run-head > *").evaluate_all("all => all.map((one) => one.id || one.tagName)")
        assert parts[:2] == ["H1", "reason"]
        assert tab.texts("#reason > div .text") == ["Out of memory in step 4.\nLower --batch-size."]
        assert "--resume" in tab.texts("#reason code")[0]
        tab.page.click("text=Show the 1 failed episode")
        tab.wait("document.querySelector('#rollouts [role=status]').textContent.startsWith('1 episode')")
        assert tab.texts("#rollouts .episode .tag") == ["raised an error"]
        tab.page.click("#reason summary")
        assert tab.texts("#reason .log .text") == ["loading\ntorch.OutOfMemoryError: <b>out</b> of memory"]


@pytest.mark.slow
def test_a_live_page_has_progress_time_left_and_the_newest_score(tmp_path: Path, visit: Visit, serve: Serve) -> None:
    run = make_live(tmp_path / "live")
    tab = visit(serve(run.path).address)  # a run that was named is opened at once
    tab.wait("document.querySelector('.newest')?.innerText.includes('step 10')")
    assert tab.texts(".newest") == ["0.500 held-out score at step 10, +0.250 since the start"]
    assert tab.page.title() == "0.500 · live · aitrain"
    bar = tab.page.locator("[role=progressbar]")
    assert (bar.get_attribute("aria-valuenow"), bar.get_attribute("aria-valuemax")) == ("12", "50")
    assert tab.texts(".live")[0].startswith("step 12 of 50 · about 10 min")
    newer = {"step": 13, "steps": 50, "heartbeat": time.time(), "ends_at": time.time() + 200}
    run.write_status("running", **newer)
    tab.wait("document.querySelector('.live').innerText.startsWith('step 13 of 50 · about 3 min')")
    append_lines(run.metrics, [{"step": 13, "reward": 0.7}])
    run.write_status("failed", reason="The disk is full.")
    tab.wait("document.querySelector('#reason')?.innerText.includes('The disk is full.')")
    assert tab.page.locator("[role=progressbar]").count() == 0


@pytest.mark.slow
def test_regressions_are_one_click_away(runs: Path, visit: Visit, serve: Serve) -> None:
    ReportWriter(RunFolder(runs / "better")).write(lambda event: pytest.fail(str(event)))
    for tab in (open_run(runs, "better", visit, serve), visit(file_of(runs / "better"))):
        assert tab.texts("#cases .counts button") == ["all", "5 better", "2 the same", "1 worse"]
        for direction, cases in (("1 worse", ["107"]), ("2 the same", ["105", "106"]), ("all", None)):
            tab.page.click(f"#cases .counts button:has-text('{direction}')")
            shown = [text.split()[0] for text in tab.texts("table.cases td.case")]
            assert sorted(shown) == (cases or [str(number) for number in range(100, 108)])
        assert tab.texts(".newest") == ["0.750 held-out score after training, better than before"]


@pytest.mark.slow
def test_identical_answers_are_one_row_with_labelled_columns(runs: Path, visit: Visit, serve: Serve) -> None:
    tab = open_run(runs, "better", visit, serve)
    assert tab.texts("#rollouts .episode-labels span") == [
        "Score", "Advantage", "Last answer", "Ended", "Turns", "Tokens",
    ]  # fmt: skip
    assert len(tab.texts("#rollouts .episode")) == 2
    fold = tab.page.locator("#rollouts .identical")
    assert fold.inner_text() == "3 identical"
    fold.click()
    assert len(tab.texts("#rollouts .others .episode")) == 2
    fold.click()
    assert not tab.page.locator("#rollouts .others").is_visible()
    spoken = tab.page.locator("#rollouts .episode").first.get_attribute("aria-label")
    assert spoken == "score 1.000, advantage +0.50, done, 2 turns, 2 tokens: 2"


@pytest.mark.slow
def test_the_row_the_tools_and_the_rendered_prompt_stand_beside_a_transcript(
    runs: Path, visit: Visit, serve: Serve
) -> None:
    ReportWriter(RunFolder(runs / "better")).write(lambda event: pytest.fail(str(event)))
    for tab in (open_run(runs, "better", visit, serve), visit(file_of(runs / "better"))):
        tab.page.locator("#rollouts .folded .episode").first.click()  # the record of another one has the prompt
        tab.page.wait_for_selector("#rollouts .given")
        length = f"Rendered prompt ({len(RENDERED)} characters)"
        assert tab.texts(".given summary") == ["Case row (1 column)", "Tools (1)", length]
        tab.page.click(f"text={length}")
        assert tab.texts(".rendered .text") == [RENDERED.strip()]
        boxes = [tab.page.locator(name).bounding_box() for name in ("#rollouts .spoken", "#rollouts .given")]
        assert boxes[1]["x"] >= boxes[0]["x"] + boxes[0]["width"]


@pytest.mark.slow
def test_the_use_of_the_machine_is_drawn(runs: Path, visit: Visit, serve: Serve) -> None:
    tab = open_run(runs, "better", visit, serve)
    charts = tab.page.locator("#machine [data-chart]").evaluate_all("all => all.map((one) => one.dataset.chart)")
    assert charts == ["cpu", "memory", "gpu"]
    tab.wait("document.querySelectorAll('#machine canvas').length === 3")
    assert set(tab.page.evaluate(INK, "#machine canvas")) == {True}
    assert "Machine" in tab.texts("nav a")
    assert "Machine" not in open_run(runs, "failed", visit, serve).texts("nav a")


@pytest.mark.slow
def test_an_eval_has_scores_without_a_before_and_cases_without_a_change(runs: Path, visit: Visit, serve: Serve) -> None:
    ReportWriter(RunFolder(runs / "eval-sums")).write(lambda event: pytest.fail(str(event)))
    for tab in (open_run(runs, "eval-sums", visit, serve), visit(file_of(runs / "eval-sums"))):
        assert tab.texts(".scores h3") == ["Held-out score, sampled", "Held-out pass@2"]
        assert tab.texts(".scores .big b") == ["0.625", "0.750"]
        assert "sums, step 9, evaluated on" in tab.texts(".lead")[0]
        assert "share of cases solved at least once" in tab.texts(".evaluation th")
        assert tab.texts("#cases .counts") == ["2 solved by every sample, 1 by some, 1 by none of 4 cases"]
        assert "Change" not in " ".join(tab.texts("table.cases thead th"))
        assert "Curves" not in tab.texts("nav a")
        tab.page.locator("table.cases tbody button").first.click()
        tab.page.wait_for_selector("dialog .message.model")
        assert tab.texts("dialog h3") == ["Episodes: evaluation, sampled"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.slow
def test_nothing_is_cut_off_on_a_phone(scheme: str, runs: Path, visit: Visit, serve: Serve) -> None:
    server = serve(runs)
    cut = """[...document.querySelectorAll('.scroll, td, th, h1, .hint, nav, .bdi')].filter((one) =>
        one.clientWidth > 1 && one.scrollWidth > one.clientWidth + 1).map((one) => one.className)"""
    phone = {"viewport": {"width": 390, "height": 844}, "color_scheme": scheme}
    for address in ("", "&run=better&with=live", "&run=failed", "&run=live", "&run=eval-sums"):
        tab = visit(server.address + address, **phone)
        if address:
            tab.page.wait_for_selector("table.cases")
            tab.page.locator("#rollouts .episode").first.click()
            tab.page.wait_for_selector("#rollouts .transcript")
        assert tab.page.evaluate("document.documentElement.scrollWidth") == 390, address
        assert tab.page.evaluate(cut) == [], address
    labels = "getComputedStyle(document.querySelector('.cases td.last'), '::before').content"
    assert tab.page.evaluate(labels) == '"Score"'


@pytest.mark.slow
def test_the_keyboard_reaches_the_content_first_and_a_missing_run_is_told(
    runs: Path, visit: Visit, serve: Serve
) -> None:
    tab = visit(serve(runs).address + "&run=gone")
    assert tab.texts("[role=alert]") == ["There is no run gone here any more."]
    tab.page.keyboard.press("Tab")
    assert tab.page.evaluate("document.activeElement.textContent") == "Skip to the content"
    tab.page.keyboard.press("Enter")
    assert tab.page.evaluate("document.activeElement.id") == "main"


@pytest.mark.slow
def test_a_single_file_of_rollouts_is_opened_at_once(tmp_path: Path, visit: Visit, serve: Serve) -> None:
    run = write_run(tmp_path / "run", [said("only this")])
    tab = visit(serve(run / "rollouts" / "rank0.jsonl").address)
    tab.page.wait_for_selector("#rollouts .episode .answer:has-text('only this')")
