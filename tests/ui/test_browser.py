"""The pages as a person sees and uses them: in a real browser, headless; also with output that means harm."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from aitrain.runs.comparison import compare_all
from aitrain.runs.recorded_scoring import read_scorings
from aitrain.runs.run_folder import RunFolder, append_lines
from aitrain.ui.comparison_view import page_of_comparisons
from aitrain.ui.page import write_report
from aitrain.ui.sweep_page import open_study, sweep_page
from tests.runs.scorings import episodes, write_scoring
from tests.ui.conftest import Serve, record, said, write_run
from tests.ui.made_runs import RENDERED, make_eval, make_sweep

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install '.[test]'")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on the path: apt-get install chromium")


class Tab:
    """A page in the browser, and whatever it did that it should not: errors, dialogs, requests to others."""

    def __init__(self, context: Any, own: str) -> None:
        self.page, self.wrongs = context.new_page(), []
        allowed = (own.partition("?")[0], "data:", "blob:")
        self.page.set_default_timeout(60_000)
        self.page.on("console", lambda message: self._note(message.type in ("error", "warning"), message.text))
        self.page.on("pageerror", lambda error: self._note(True, str(error)))
        self.page.on("dialog", lambda dialog: (self._note(True, "dialog"), dialog.dismiss()))
        self.page.on("request", lambda request: self._note(not request.url.startswith(allowed), request.url))
        self.page.goto(own)
        self.page.wait_for_selector("h1")

    def _note(self, is_wrong: bool, what: str) -> None:
        if is_wrong:
            self.wrongs.append(what)

    def texts(self, selector: str) -> list[str]:
        """The text of all elements that are to be found there."""
        return [text.strip() for text in self.page.locator(selector).all_inner_texts()]

    def wait(self, expression: str) -> None:
        """Until this is so, in JavaScript; asked from outside, as the page lets no text become a script."""
        for _ in range(600):
            if self.page.evaluate(f"Boolean({expression})"):
                return
            self.page.wait_for_timeout(100)
        pytest.fail(f"it never came to this: {expression}")


Visit = Callable[..., Tab]


@pytest.fixture(scope="module")  # while it lasts, this thread runs a loop of asyncio
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        launched = started.chromium.launch(executable_path=CHROMIUM)
        yield launched
        launched.close()


@pytest.fixture
def visit(browser: Any) -> Iterator[Visit]:
    """`visit(address)`: at the end, nothing wrong may have happened in any of them."""
    tabs: list[Tab] = []
    contexts: list[Any] = []

    def open_tab(address: str, **settings: Any) -> Tab:
        contexts.append(browser.new_context(**{"viewport": {"width": 1200, "height": 900}, **settings}))
        tabs.append(Tab(contexts[-1], address))
        return tabs[-1]

    yield open_tab
    wrongs = [wrong for tab in tabs for wrong in tab.wrongs]
    for context in contexts:
        context.close()
    assert wrongs == []


@pytest.fixture(params=["report", "view"])
def open_run(request: pytest.FixtureRequest, visit: Visit, serve: Serve) -> Callable[[Path], Tab]:
    """`open_run(folder)`: its page, in its report and in `aitrain view`."""

    def opened(folder: Path, **settings: Any) -> Tab:
        if request.param == "report" and not (folder / "report.html").exists():
            write_report(RunFolder(folder), lambda event: pytest.fail(str(event)))
        is_report = request.param == "report"
        tab = visit((folder / "report.html").as_uri() if is_report else serve(folder).address, **settings)
        tab.page.wait_for_selector("table.cases")
        return tab

    return opened


# -- the page of a run


def test_cases_are_sorted_and_rollouts_are_filtered(open_run: Any, real_run: Path) -> None:
    tab = open_run(real_run)
    tab.page.click("#cases .choice button:has-text('Training')")
    for name in ("last", "case"):
        for _ in range(2):
            tab.page.click(f"table.cases [data-key={name}]")
            texts = tab.texts(f"table.cases tbody td.{name}")
            column = [float(text.replace("\u2212", "-")) for text in texts if text != "–"]
            down = tab.page.get_attribute(f"table.cases th.{name}", "aria-sort") == "descending"
            assert len(column) > 5
            assert column == sorted(column, reverse=down)
    tab.page.click("[aria-label='Previous step']")
    tab.wait("document.querySelector('.group-title b').textContent === 'step 3'")
    assert tab.texts("#rollouts [role=status]")[0].startswith("8 episodes")
    tab.page.select_option("#rollouts label:has-text('Episodes') select", "before_greedy")
    tab.wait("document.querySelectorAll('#rollouts .episode').length === 3")
    tab.page.click("#rollouts button:has-text('Clear')")
    tab.page.fill("#rollouts label:has-text('Score from') input", "1")
    tab.page.keyboard.press("Enter")
    tab.wait("!document.querySelector('#rollouts [role=status]').textContent.startsWith('62')")
    assert set(tab.texts("#rollouts .episode .number.score")) <= {"1.000"}


@pytest.mark.slow
def test_curves_are_drawn_and_read_out(open_run: Any, real_run: Path) -> None:
    tab = open_run(real_run)
    tab.page.click("#curves summary")
    over = tab.page.locator("[data-chart=reward] .u-over")
    over.scroll_into_view_if_needed()
    over.hover(position={"x": 5, "y": 20})
    tab.wait("document.querySelector('[data-chart=reward] .legend .step')?.textContent === 'step 1'")


@pytest.mark.slow
def test_episodes_are_searched_opened_and_put_side_by_side(open_run: Any, kinds: Path) -> None:
    tab = open_run(kinds / "better")
    tab.page.locator("#rollouts .group:has(.advantage) .episode").first.focus()
    tab.page.keyboard.press("Enter")
    tab.page.click("text=Rendered prompt")
    assert tab.texts(".rendered .text") == [RENDERED.strip()], "the record of another one has it"
    tab.page.keyboard.press("/")
    tab.page.keyboard.type("Book me")
    tab.page.keyboard.press("Enter")
    tab.wait("document.querySelector('#rollouts [role=status]').textContent.startsWith('4 episodes')")
    tab.page.click("#rollouts button:has-text('Clear')")
    tab.wait("document.querySelectorAll('.group').length > 2")
    tab.page.locator(".group button:has-text('Compare')").nth(0).click()
    tab.page.locator(".group").nth(1).locator("header button").click()
    tab.page.wait_for_selector("dialog .column:nth-child(2) .message.model")


@pytest.mark.slow
def test_the_page_of_a_failed_run_has_the_reason_and_leads_to_its_failures(open_run: Any, kinds: Path) -> None:
    tab = open_run(kinds / "failed")
    assert tab.texts("#reason > div .text") == ["Out of memory in step 4.\nLower --batch-size."]
    assert "--resume" in tab.texts("#reason code")[0]
    tab.page.click("text=Show the 1 failed episode")
    tab.wait("document.querySelector('#rollouts [role=status]').textContent.startsWith('1 episode')")
    tab.page.click("#reason summary")
    assert tab.texts("#reason .log .text") == ["loading\ntorch.OutOfMemoryError: <b>out</b> of memory"]


def test_a_run_is_followed_while_it_goes_on(tmp_path: Path, visit: Visit, serve: Serve) -> None:
    folder = write_run(tmp_path / "live", [])
    RunFolder(folder).write_status("running", step=0, heartbeat=time.time())
    tab = visit(serve(folder).address)
    assert tab.texts(".pill") == ["running"]
    append_lines(folder / "rollouts" / "rank0.jsonl", [record(step=1), record(step=1, score=0.0)])
    append_lines(folder / "metrics.jsonl", [{"step": 1, "reward": 0.5, "seconds": 1}])
    tab.wait("document.querySelectorAll('#rollouts .episode').length === 2")
    tab.wait("document.querySelector('[data-chart=reward] .legend b')?.textContent === '0.500'")
    append_lines(folder / "rollouts" / "rank0.jsonl", [said("newest", step=2)])
    RunFolder(folder).write_status("finished", step=2, heartbeat=time.time())
    tab.wait("document.querySelector('.pill').textContent === 'finished'")
    assert len(tab.texts("#rollouts .episode")) == 2  # what somebody reads stays where it is
    tab.page.click("button.fresh")
    tab.wait("document.querySelector('#rollouts .episode .answer').textContent === 'newest'")


# -- the table of runs


@pytest.mark.slow
def test_the_table_of_runs_is_sorted_filtered_unfolded_and_found_again_by_its_address(
    kinds: Path, visit: Visit, serve: Serve
) -> None:
    tab = visit(serve(kinds).address)
    page = tab.page

    def names() -> list[str]:
        return tab.texts(".runs tbody th > :first-child")

    assert page.locator("[data-run=better] td[data-label=Change]").inner_text().split()[:2] == ["+0.375", "better"]
    shown = {"eval-sums": "seed 7", "better": "seed 42"}  # an evaluation has no max_steps
    assert {run: page.locator(f"[data-run={run}] td.options").inner_text() for run in shown} == shown
    page.click(".runs [data-key=after]")
    page.reload()
    page.wait_for_selector(".runs tbody tr")
    assert names() == ["lr-sweep", "better", "eval-sums", "failed", "live"]
    page.keyboard.press("/")
    page.keyboard.type("ARITH tiny")
    assert names() == ["lr-sweep", "better"]
    page.fill(".search", "")
    page.select_option("label:has-text('Status') select", "failed")
    assert names() == ["failed"]
    page.select_option("label:has-text('Status') select", "")
    page.click("[data-run=lr-sweep] .unfold")
    page.click(".trial a:has-text('trial-1')")
    page.wait_for_selector("h1:has-text('trial-1')")


def test_an_eval_has_the_length_of_its_episodes(tmp_path: Path, visit: Visit, serve: Serve) -> None:
    tab = visit(serve(make_eval(tmp_path / "eval").path).address)
    assert tab.texts("table.evaluation tbody tr") == ["tokens of an episode, mean\t2"]


# -- the pages of comparisons and sweeps


@pytest.mark.slow
def test_compared_cases_are_found_opened_and_read_side_by_side(tmp_path: Path, visit: Visit) -> None:
    base = {f"case {n}": [float(n % 4 == 0), 0.0] for n in range(40)}
    better = {name: [1.0, 1.0] if int(name[5:]) % 5 else [0.0, 0.0] for name in base}
    scorings = {"base": base, "better": better, "worse": {name: [0.0, 0.0] for name in base}}
    runs = [write_scoring(tmp_path / name, episodes(scores)) for name, scores in scorings.items()]
    (tmp_path / "page.html").write_text(page_of_comparisons(compare_all(read_scorings(runs))))
    tab = visit((tmp_path / "page.html").as_uri(), viewport={"width": 390, "height": 844})
    page = tab.page
    better = page.locator(".comparison").first
    assert better.locator(".choice button").all_inner_texts() == ["Lost (2)", "Won (32)", "Equal (6)"]
    assert page.evaluate("document.documentElement.scrollWidth") <= 390, "nothing is cut off on a phone"
    better.get_by_role("button", name="Won (32)").click()
    better.get_by_label("Find a case").fill("case 13")
    better.locator(".compared-case:visible > summary").click()
    heads = better.locator(".column h3:visible").all_inner_texts()
    assert heads == ["base mean of 2 samples: 0.000", "better mean of 2 samples: 1.000"]
    page.get_by_role("link", name="worse", exact=True).click()
    assert page.locator("h1").last.inner_text().startswith("worse compared with base")


@pytest.mark.slow
def test_the_page_of_a_sweep_draws_its_plots_from_its_own_file(tmp_path: Path, visit: Visit) -> None:
    folder = make_sweep(tmp_path / "lrs")
    (folder / "sweep.html").write_text(sweep_page(open_study(folder), folder))
    tab = visit((folder / "sweep.html").as_uri(), viewport={"width": 390, "height": 844})
    tab.page.wait_for_selector(".figure:nth-of-type(3) .plot-container svg")
    assert tab.page.locator(".figure .plot-container").count() == 2
    assert tab.page.locator(".figure .main-svg").first.bounding_box()["height"] > 300
    assert tab.texts("tbody tr td:first-child") == ["0", "1", "2", "3"]
    assert tab.page.evaluate("document.documentElement.scrollWidth") == 390


# -- output that means harm

HARM = [
    "<script>window.__pwned = 1</script>",
    "<img src=x onerror='window.__pwned = 2'><svg onload='window.__pwned = 3'>",
    "</script></title></textarea><script>window.__pwned = 4; alert(1)</script>",
    "<a href='javascript:window.__pwned = 5'>click</a><iframe srcdoc='<script>parent.__pwned = 6</script>'></iframe>",
    "{{constructor.constructor('window.__pwned = 7')()}} ${window.__pwned = 8} `",
    "<link rel=stylesheet href=http://192.0.2.1/x.css><style>body{display:none}</style>",
    "]]><!--<base href='http://192.0.2.1/'>",
]


def test_hostile_output_is_shown_as_text(tmp_path: Path, open_run: Any) -> None:
    call = [{"function": {"name": HARM[0], "arguments": HARM[1]}}]
    tool = {"type": "function", "function": {"name": HARM[0], "description": HARM[1]}}
    records = [
        record(
            case_idx=harm, stop=harm, metrics={harm: 1.0}, group=number, completion=harm, tools=[tool],
            row={harm: harm}, error={"kind": harm, "place": harm, "message": harm},
            prompt=[{"role": harm, "content": harm}],
            messages=[{"role": harm, "content": harm}, {"role": "assistant", "content": harm, "tool_calls": call},
                      {"role": "tool", "name": harm, "content": harm}, {"role": harm, "content": harm}],
        )
        for number, harm in enumerate(HARM)
    ]  # fmt: skip
    folder = write_run(tmp_path / "<img src=x onerror=alert(1)>", records)
    for name, values in {"environment": {"class": HARM[1], "module": HARM[0]}, "status": {"status": HARM[0]}}.items():
        (folder / f"{name}.json").write_text(json.dumps(values))
    (folder / "config.yaml").write_text(json.dumps({"model": HARM[1], HARM[0]: HARM[1]}))
    append_lines(folder / "metrics.jsonl", [{"step": step, "reward": 0.1, f"env/{HARM[1]}": 1.0} for step in (1, 2)])
    (folder / "environment").mkdir()
    (folder / "environment" / "<b>harm<b>.py").write_text("\n".join(HARM))
    tab = open_run(folder)
    assert tab.texts("#environment .text") == ["\n".join(HARM)]
    for row in tab.page.locator("#rollouts .episode").all():
        row.click()
    tab.wait(f"document.querySelectorAll('#rollouts .transcript').length === {len(HARM)}")
    assert tab.texts("#rollouts .message.model > div:not(.call) .text") == HARM
    tab.page.locator("table.cases tbody button").first.click()
    tab.page.wait_for_selector("dialog .message.model")
    assert tab.page.evaluate("window.__pwned") is None
    assert tab.page.evaluate("document.querySelectorAll('#app script, img, iframe, svg, base').length") == 0
    # should a mistake of ours ever write HTML, the policy stops it
    assert tab.page.evaluate("(() => { try { document.body.innerHTML = '<b>x'; } catch { return true } })()")
    tab.wrongs.clear()  # which the browser reports


@pytest.mark.slow
def test_long_episodes_and_characters_that_hide_or_turn_text_leave_the_page_readable(
    tmp_path: Path, open_run: Any
) -> None:
    turns = [{"role": ("user", "assistant")[turn % 2], "content": f"turn {turn}"} for turn in range(10_000)]
    hidden = "abc\u202edcba\u202c \u200bzero\x00\x1b[31mred\ufeff \u2066x\u2069 \U000e0041 \x85 end"
    records = [said("x" * 2**20), record(messages=[{"role": "user", "content": "?"}, *turns]), said(hidden)]
    tab = open_run(write_run(tmp_path / "run", records))
    rows, text = tab.page.locator("#rollouts .episode"), "#rollouts .message.model .text"
    rows.nth(0).click()
    tab.page.locator("#rollouts .message.model button").first.click()
    assert len(tab.texts(text)[0]) == 15_000
    rows.nth(1).click()
    tab.page.locator("#rollouts .between").click()
    assert 60 < tab.page.locator("#rollouts .message").count() < 100
    rows.nth(2).click()
    tab.page.wait_for_selector("#rollouts .message.model .hidden-character")
    named = ["202E", "202C", "200B", "0000", "001B", "FEFF", "2066", "2069", "E0041", "0085"]
    assert [mark[2:] for mark in tab.texts("#rollouts .message.model .hidden-character")] == named
    assert tab.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
