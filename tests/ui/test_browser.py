"""The page as a person sees it: in a real browser, headless, with real runs and with output that means harm."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from aitrain.runs.rollout_index import RolloutIndex
from aitrain.runs.run_folder import RunFolder, append_lines
from aitrain.ui.report_writer import ReportWriter
from aitrain.ui.server import PageServer
from tests.ui.conftest import record, said, write_run
from tests.ui.made_runs import make_on_two_machines

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install '.[test]'")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on the path: apt-get install chromium")

Serve = Callable[..., PageServer]


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
        self.page.wait_for_selector(".run-head h1")

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


@pytest.fixture(scope="module")  # while it lasts, this thread runs a loop of asyncio
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        launched = started.chromium.launch(executable_path=CHROMIUM)
        yield launched
        launched.close()


@pytest.fixture
def visit(browser: Any) -> Iterator[Callable[..., Tab]]:
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


def file_of(folder: Path) -> str:
    return (folder / "report.html").as_uri()


def reported(folder: Path, records: list[Any]) -> str:
    """A report of these rollouts, as an address."""
    write_run(folder, records)
    ReportWriter(RunFolder(folder)).write(lambda event: pytest.fail(str(event)))
    return file_of(folder)


INK = """(selector) => [...document.querySelectorAll(selector)].map((canvas) => {
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  const isStrong = (at) => data[at + 3] > 200 && Math.abs(data[at] - data[at + 2]) > 60;
  return Array.from({ length: data.length / 4 }, (_, pixel) => 4 * pixel).some(isStrong);
})"""
"""Whether each canvas has strong colours in it: lines, not only axes."""


@pytest.fixture(params=["report", "view"])
def sums(request: pytest.FixtureRequest, real_runs: Path, visit: Callable[..., Tab], serve: Serve) -> Tab:
    """The same real run, in its report and in `aitrain view`."""
    if request.param == "report":
        return visit(file_of(real_runs / "sums"))
    tab = visit(serve(real_runs / "sums").address)
    tab.page.wait_for_selector("table.cases")
    return tab


@pytest.mark.slow
def test_the_scores_of_the_result_are_shown_with_what_a_reader_should_know(
    tmp_path: Path, visit: Callable[..., Tab]
) -> None:
    """Of several samples, chosen with --save-best, with held-out cases that were trained on."""
    one = {"mean": 0.25, "low": 0.125, "high": 0.5625, "count": 4}
    row = {"before": one, "after": {**one, "mean": 0.5}, "change": {**one, "low": None, "high": None}}
    result = {"scores": {"sampled": row, "pass@3": row, "greedy": row}, "selection_score": 0.75, "model_step": 2}
    result |= {"selection_scorings": 5, "eval_overlap": 3, "eval_cases": 4, "status": "finished"}
    (tmp_path / "result.json").write_text(json.dumps(result))
    (tmp_path / "config.yaml").write_text("rl_score_range: '-1,1'\n")
    tab = visit(
        reported(tmp_path, [record(row_number=3, case_idx="a", eval_phase="after_sampled"), record(row_number=0)])
    )

    assert tab.texts(".scores h3") == ["Held-out score, sampled", "Held-out pass@3", "Held-out score, greedy"]
    assert tab.texts(".scores.pass .big b") == ["0.250", "0.500"]
    assert tab.texts(".scores.pass .interval") == ["0.125 to 0.562"] * 2  # as Python writes 0.5625
    assert tab.texts(".scores.pass .change") == ["+0.250 change on the same 4 cases"]
    place = "(name) => document.querySelector(`.scores.${name} .range.before .point`).style.left"
    assert [tab.page.evaluate(place, name) for name in ("sampled", "pass")] == ["62.5%", "25%"]  # pass@K is from 0 to 1
    chosen, overlap = tab.texts(".selection")
    assert "its score of 0.750 was the best of 5 scorings" in chosen
    assert overlap.startswith("3 of 4 held-out cases have the same prompt")
    assert tab.texts("table.cases td.case") == ["3 (case_idx a)"]


@pytest.mark.slow
def test_each_row_of_scores_says_what_it_is_and_only_a_change_that_is_detectable_is_bold(
    tmp_path: Path, visit: Callable[..., Tab], serve: Serve
) -> None:
    """Of two environments, in a run in which no step changed the weights."""
    one = {"mean": 0.25, "low": 0.125, "high": 0.5, "count": 4}
    row = {"before": one, "after": one, "change": {**one, "low": -0.25}}
    better = {**row, "change": {**one, "p_value": 0.01}}
    result = {"scores": {"sampled": row, "sampled, hotel": row, "greedy, hotel": better}, "status": "finished"}
    (tmp_path / "result.json").write_text(json.dumps(result))
    line = {"step": 1, "reward": 0.5, "frac_reward_zero_std": 1.0}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    tab = visit(reported(tmp_path, [record()]))
    sampled, of_hotel, greedy = tab.texts(".scores .what .hint")
    assert of_hotel.startswith(sampled)
    assert "hotel" in of_hotel
    assert greedy.startswith("the likeliest answer")
    assert "undefined" not in tab.page.locator("body").inner_text()
    weights = (
        "() => [...document.querySelectorAll('.change b')].map((b) => Number(getComputedStyle(b).fontWeight) > 500)"
    )
    assert tab.page.evaluate(weights) == [False, False, True]
    assert tab.texts(".pill") == ["finished, nothing learned"]
    table = visit(serve(tmp_path.parent).address)
    table.page.wait_for_selector("table.runs .pill.unchanged")


@pytest.mark.slow
def test_scores_are_shown_with_their_intervals(sums: Tab, real_runs: Path) -> None:
    result = json.loads((real_runs / "sums" / "result.json").read_text())
    big = sums.texts(".scores.sampled .big b")
    assert big == [f"{result['score_before']:.3f}", f"{result['score_after']:.3f}"]
    assert re.fullmatch(r"0\.\d{3} to [01]\.\d{3}", sums.texts(".scores.sampled .interval")[0])
    assert "on the same 8 cases, 95% interval" in sums.texts(".scores.sampled .change")[0]
    assert sums.texts(".pill") == ["finished"]


@pytest.mark.slow
def test_curves_are_drawn(sums: Tab) -> None:
    names = sums.page.eval_on_selector_all("[data-chart]", "all => all.map((one) => one.dataset.chart)")
    assert {"reward", "held-out", "length", "entropy", "kl", "time", "loss"} <= set(names)
    sums.page.click("#curves summary")
    charts = "document.querySelectorAll('#curves [data-chart]').length"
    sums.wait(f"document.querySelectorAll('#curves canvas').length === {charts}")
    assert set(sums.page.evaluate(INK, "#curves canvas")) == {True}
    with sums.page.expect_download() as download:
        sums.page.click("[data-chart=reward] .save")
    assert download.value.suggested_filename == "sums-reward.png"
    assert Path(download.value.path()).read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_the_value_under_the_pointer_is_read_out(sums: Tab) -> None:
    over = sums.page.locator("[data-chart=reward] .u-over")
    over.scroll_into_view_if_needed()
    over.hover(position={"x": 5, "y": 20})
    sums.wait("document.querySelector('[data-chart=reward] .legend .step')?.textContent === 'step 1'")


def test_cases_are_sorted_by_any_column(sums: Tab) -> None:
    sums.page.click("#cases .choice button:has-text('Training')")

    def column(name: str) -> list[float]:
        texts = sums.texts(f"table.cases tbody td.{name}")
        return [float(text.replace("\u2212", "-").replace("+", "")) for text in texts if text != "–"]

    for name in ("last", "variance", "case"):
        sums.page.click(f"table.cases [data-key={name}]")
        once = column(name)
        assert len(once) > 5
        assert once == sorted(once, reverse=name != "case")
        sums.page.click(f"table.cases [data-key={name}]")
        assert sums.page.get_attribute(f"table.cases th.{name}", "aria-sort") in ("ascending", "descending")
        again = column(name)
        assert again == sorted(again, reverse=name == "case")


def test_rollouts_are_filtered(sums: Tab) -> None:
    assert sums.texts("#rollouts [role=status]")[0].startswith("16 episodes")
    sums.page.click("[aria-label='Previous step']")
    sums.wait("document.querySelector('.group-title b').textContent === 'step 7'")
    assert len(sums.texts(".group")) == 4
    assert sums.texts("#rollouts [role=status]")[0].startswith("16 episodes")
    sums.page.select_option("#rollouts label:has-text('Episodes') select", "before_greedy")
    sums.wait("document.querySelector('.group-title b').textContent === 'before training, greedy'")
    assert len(sums.texts("#rollouts .episode")) == 8
    sums.page.fill("#rollouts label:has-text('Score from') input", "0.5")
    sums.page.keyboard.press("Enter")
    sums.wait("document.querySelectorAll('#rollouts .episode').length < 8")
    assert set(sums.texts("#rollouts .episode .number.score")) <= {"1.000"}


@pytest.mark.slow
def test_rollouts_are_searched(sums: Tab, real_runs: Path) -> None:
    rollouts = RolloutIndex(real_runs / "sums" / "rollouts")
    rollouts.refresh()
    asked = rollouts.record(rollouts.entries[100]).transcript()[0][0].text
    sums.page.click("#rollouts button:has-text('Clear')")
    sums.page.keyboard.press("/")
    sums.page.keyboard.type(asked)
    sums.page.keyboard.press("Enter")
    prompts = "[...document.querySelectorAll('.group .prompt')]"
    sums.wait(f"{prompts}.every((one) => one.textContent === {json.dumps(asked)})")
    assert int(sums.texts("#rollouts [role=status]")[0].split()[0]) >= 4


@pytest.mark.slow
def test_a_transcript_is_opened_with_the_keyboard(sums: Tab) -> None:
    first = sums.page.locator("#rollouts .episode").first
    first.focus()
    sums.page.keyboard.press("Enter")
    sums.page.wait_for_selector("#rollouts .message.model")
    assert first.get_attribute("aria-expanded") == "true"
    assert sums.texts("#rollouts .message .speaker") == ["Prompt", "Model"]
    assert {"score", "advantage", "ended", "turns", "tokens"} <= set(sums.texts("#rollouts .fact dt"))
    sums.page.keyboard.press("Enter")
    assert not sums.page.locator("#rollouts .transcript").is_visible()


@pytest.mark.slow
def test_two_groups_are_put_side_by_side(sums: Tab) -> None:
    buttons = sums.page.locator(".group button:has-text('Compare')")
    buttons.nth(1).click()
    sums.page.locator(".group").nth(2).locator("header button").click()
    sums.page.wait_for_selector("dialog .column:nth-child(2) .message.model")
    assert [title.split(" · case")[0] for title in sums.texts("dialog h3")] == ["step 8 · group 1", "step 8 · group 2"]
    sums.page.keyboard.press("Escape")
    sums.page.wait_for_selector("dialog", state="detached")


@pytest.mark.slow
def test_a_case_is_shown_before_and_after(sums: Tab) -> None:
    sums.page.locator("table.cases tbody button").first.click()
    sums.page.wait_for_selector("dialog .column:nth-child(2) .message.model")
    assert sums.texts("dialog h3") == ["First: before training, sampled", "Last: after training, sampled"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.slow
def test_colours_follow_the_system_and_the_switch(scheme: str, real_runs: Path, visit: Callable[..., Tab]) -> None:
    tab = visit(file_of(real_runs / "sums"), color_scheme=scheme)
    background = "getComputedStyle(document.body).backgroundColor"
    before = tab.page.evaluate(background)
    assert (before == "rgb(18, 20, 24)") == (scheme == "dark")
    for _ in range(2 if scheme == "light" else 1):
        tab.page.click("button.theme")
    assert tab.page.evaluate(background) != before


@pytest.mark.slow
def test_a_phone_shows_all_of_it_without_scrolling_sideways(sums: Tab) -> None:
    sums.page.set_viewport_size({"width": 375, "height": 700})
    sums.page.locator("#rollouts .episode").first.click()
    sums.page.wait_for_selector("#rollouts .message.model")
    assert sums.page.evaluate("document.documentElement.scrollWidth") == 375


# -- view alone


@pytest.mark.slow
def test_two_runs_are_put_side_by_side(real_runs: Path, visit: Callable[..., Tab], serve: Serve) -> None:
    tab = visit(serve(real_runs).address + "&run=sums&with=other")
    tab.page.wait_for_selector("table.cases th.other")
    assert tab.texts("#comparison thead th") == ["", "sums", "other"] * 2
    options = dict(line.split("\t", 1) for line in tab.texts("#comparison .card:last-child tbody tr"))
    assert options == {"seed": "42\t7", "max_steps": "8\t4"}
    assert tab.texts("[data-chart=reward] .legend bdi") == ["sums", "other"]
    tab.page.select_option(".chooser label:has-text('beside') select", "")
    tab.wait("!document.querySelector('#comparison')")


def test_a_run_is_followed_while_it_goes_on(tmp_path: Path, visit: Callable[..., Tab], serve: Serve) -> None:
    folder = write_run(tmp_path / "live", [])
    RunFolder(folder).write_status("running", step=0, heartbeat=time.time())
    tab = visit(serve(folder).address)
    assert tab.texts(".pill") == ["running"]
    append_lines(folder / "rollouts" / "rank0.jsonl", [record(step=1), record(step=1, score=0.0)])
    append_lines(folder / "metrics.jsonl", [{"step": 1, "reward": 0.5, "seconds": 1}])
    RunFolder(folder).write_status("running", step=1, heartbeat=time.time())
    tab.wait("document.querySelectorAll('#rollouts .episode').length === 2")
    tab.wait("document.querySelector('[data-chart=reward] .legend b')?.textContent === '0.500'")
    append_lines(folder / "rollouts" / "rank0.jsonl", [said("newest", step=2)])
    append_lines(folder / "metrics.jsonl", [{"step": 2, "reward": 1.0, "seconds": 2}])
    RunFolder(folder).write_status("finished", step=2, heartbeat=time.time())
    tab.wait("document.querySelector('.pill').textContent === 'finished'")
    assert len(tab.texts("#rollouts .episode")) == 2  # what somebody reads stays where it is
    tab.page.click("button.fresh")
    tab.wait("document.querySelector('#rollouts .episode .answer').textContent === 'newest'")


@pytest.mark.slow
def test_the_machines_of_a_run_are_named_and_each_has_its_curves(
    tmp_path: Path, visit: Callable[..., Tab], serve: Serve
) -> None:
    run = make_on_two_machines(tmp_path / "run")
    tab = visit(serve(run.path).address)
    tab.wait("document.querySelector('[data-chart=gpu] .legend')")
    assert tab.texts("[data-chart=gpu] .legend bdi") == ["gpu0: GPU 0", "gpu1: GPU 0"]
    assert "2 machines: gpu0 (1 rank), gpu1 (1 rank)" in tab.texts(".live")[0]


@pytest.mark.slow
def test_a_run_that_starts_later_is_shown_as_soon_as_it_does(tmp_path: Path, browser: Any, serve: Serve) -> None:
    page = browser.new_page()
    page.goto(serve(tmp_path).address)
    page.wait_for_selector("h2:has-text('No runs here yet')")
    write_run(tmp_path / "late", [record()])
    page.wait_for_selector(".runs a:has-text('late')")
    page.close()


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


@pytest.mark.parametrize("where", ["report", "view"])
def test_hostile_output_is_shown_as_text(where: str, tmp_path: Path, visit: Callable[..., Tab], serve: Serve) -> None:
    call = [{"function": {"name": HARM[0], "arguments": HARM[1]}}]
    records = [
        record(
            case_idx=harm, stop=harm, metrics={harm: 1.0}, group=number, completion=harm,
            error={"kind": harm, "place": harm, "message": harm}, prompt=[{"role": harm, "content": harm}],
            messages=[{"role": harm, "content": harm}, {"role": "assistant", "content": harm, "tool_calls": call},
                      {"role": "tool", "name": harm, "content": harm}, {"role": harm, "content": harm}],
        )
        for number, harm in enumerate(HARM)
    ]  # fmt: skip
    folder = tmp_path / "<img src=x onerror=alert(1)>"
    folder.mkdir()
    for name, values in {"environment": {"class": HARM[1], "module": HARM[0]}, "status": {"status": HARM[0]}}.items():
        (folder / f"{name}.json").write_text(json.dumps(values))
    (folder / "config.yaml").write_text(json.dumps({"model": HARM[1], HARM[0]: HARM[1]}))
    append_lines(folder / "metrics.jsonl", [{"step": step, "reward": 0.1, f"env/{HARM[1]}": 1.0} for step in (1, 2)])
    (folder / "environment").mkdir()
    (folder / "environment" / "<b>harm<b>.py").write_text("\n".join(HARM))
    address = reported(folder, records)
    tab = visit(address if where == "report" else serve(folder).address)
    tab.page.wait_for_selector("table.cases")
    assert tab.texts("#environment summary") == ["<b>harm<b>.py"]
    assert tab.texts("#environment .text") == ["\n".join(HARM)]
    for row in tab.page.locator("#rollouts .episode").all():
        row.click()
    tab.wait(f"document.querySelectorAll('#rollouts .transcript').length === {len(HARM)}")
    shown = tab.texts("#rollouts .message.model > div:not(.call) .text")
    assert shown == HARM
    tab.page.locator("table.cases tbody button").first.click()
    tab.page.wait_for_selector("dialog .message.model")
    assert tab.page.evaluate("window.__pwned") is None
    assert tab.page.evaluate("document.querySelectorAll('#app script, img, iframe, svg, base').length") == 0


@pytest.mark.parametrize("where", ["report", "view"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_row_and_the_tools_of_a_case_open_in_its_transcript(
    where: str, scheme: str, tmp_path: Path, visit: Callable[..., Tab], serve: Serve
) -> None:
    tool = {"type": "function", "function": {"name": HARM[0], "description": HARM[1]}}
    row = {"answer": 4, HARM[0]: HARM[1], "text": "x" * 30_000, **{f"column {number}": number for number in range(120)}}
    records = [record(case_idx=case, group=case, row={**row, "answer": case}, tools=[tool]) for case in (0, 1)]
    address = reported(tmp_path / "run", records)
    tab = visit(address if where == "report" else serve(tmp_path / "run").address, color_scheme=scheme)
    tab.page.locator("#rollouts .episode").nth(1).click()
    tab.page.wait_for_selector("#rollouts .transcript")
    opened = tab.page.locator("#rollouts .transcript details")
    assert tab.texts("#rollouts .transcript summary") == ["Case row (123 columns)", "Tools (1)"]
    assert opened.nth(0).locator("dl").is_visible()
    assert not opened.nth(1).locator("dl").is_visible()
    opened.nth(1).locator("summary").click()
    names, texts = (opened.nth(0).locator(f"{tag}").all_inner_texts() for tag in ("dt", "dd"))
    assert (names[:2], texts[:2]) == (["answer", HARM[0]], ["1", HARM[1]])
    assert "Show more (" in texts[2]
    assert opened.nth(0).locator("> .note").inner_text() == "23 more are in the rollout file."
    assert json.loads(opened.nth(1).locator("dd").inner_text()) == tool
    assert "weight version" in tab.texts("#rollouts .transcript .fact dt")
    colours = "getComputedStyle(document.querySelector('#rollouts .transcript dd')).color"
    assert tab.page.evaluate(colours) == {"light": "rgb(27, 30, 35)", "dark": "rgb(231, 233, 236)"}[scheme]
    assert tab.page.evaluate("window.__pwned") is None
    assert tab.page.evaluate("document.documentElement.scrollWidth <= innerWidth")


@pytest.mark.slow
def test_turns_of_different_weights_say_which(tmp_path: Path, visit: Callable[..., Tab]) -> None:
    messages = [{"role": role, "content": "?"} for role in ("user", "assistant", "user", "assistant")]
    turns = [{"tokens": 2, "weight_version": version} for version in (3, 4)]
    tab = visit(reported(tmp_path / "run", [record(messages=messages, turns=turns)]))
    tab.page.locator("#rollouts .episode").click()
    tab.page.wait_for_selector("#rollouts .transcript")
    speakers = tab.texts("#rollouts .message.model .speaker")
    assert speakers == ["Model, turn 1, weight version 3", "Model, turn 2, weight version 4"]
    assert "weight version" not in tab.texts("#rollouts .fact dt")


@pytest.mark.slow
def test_the_source_of_the_environment_is_shown_with_its_own_file_open(sums: Tab) -> None:
    assert sums.texts("#environment summary") == ["arithmetic.py"]
    assert "class Arithmetic" in sums.texts("#environment details[open] .text")[0]
    assert "Environment" in sums.texts("nav a")


@pytest.mark.slow
def test_a_run_without_its_source_says_so(tmp_path: Path, visit: Callable[..., Tab]) -> None:
    tab = visit(reported(tmp_path, [record()]))
    assert tab.texts("#environment .note") == ["This run has not kept the source of its environment."]


@pytest.mark.slow
def test_markup_cannot_be_made_by_a_script_either(real_runs: Path, visit: Callable[..., Tab], serve: Serve) -> None:
    """Should a mistake of ours ever write HTML, the policy stops it."""
    for address in (file_of(real_runs / "sums"), serve(real_runs / "sums").address):
        tab = visit(address)
        refused = tab.page.evaluate("(() => { try { document.body.innerHTML = '<b>x'; } catch { return true } })()")
        assert refused
        tab.wrongs.clear()  # which the browser reports


@pytest.mark.slow
def test_characters_that_hide_or_turn_text_are_made_visible(tmp_path: Path, visit: Callable[..., Tab]) -> None:
    text = "abc\u202edcba\u202c \u200bzero\x00\x1b[31mred\ufeff \u2066x\u2069 \U000e0041 \x85 end"
    tab = visit(reported(tmp_path / "run", [said(text)]))
    tab.page.locator("#rollouts .episode").first.click()
    (shown,) = tab.texts("#rollouts .message.model .text")
    named = ["202E", "202C", "200B", "0000", "001B", "FEFF", "2066", "2069", "E0041", "0085"]
    assert [mark[2:] for mark in tab.texts("#rollouts .message.model .hidden-character")] == named
    assert not set(shown) & set("\u202e\u202c\u200b\x00\x1b\ufeff\u2066\u2069\U000e0041\x85")
    assert "abcU+202Edcba" in shown


@pytest.mark.slow
def test_right_to_left_text_keeps_its_direction_to_itself(tmp_path: Path, visit: Callable[..., Tab]) -> None:
    tab = visit(reported(tmp_path / "run", [said("שלום עולם"), said("plain")]))
    for row in tab.page.locator("#rollouts .episode").all():
        row.click()
    direction = "all => all.map((one) => getComputedStyle(one).unicodeBidi + ' ' + one.matches(':dir(rtl)'))"
    found = tab.page.eval_on_selector_all("#rollouts .message.model .text", direction)
    assert found == ["plaintext true", "plaintext false"]
    assert not tab.page.eval_on_selector("#rollouts .episode .tokens", "one => one.matches(':dir(rtl)')")


@pytest.mark.parametrize("where", ["report", "view"])
@pytest.mark.slow
def test_a_line_of_a_megabyte_and_ten_thousand_turns_leave_the_page_usable(
    where: str, tmp_path: Path, visit: Callable[..., Tab], serve: Serve
) -> None:
    roles = ("user", "assistant")
    turns = [{"role": roles[turn % 2], "content": f"turn {turn}"} for turn in range(10_000)]
    records = [said("x" * 2**20), record(messages=[{"role": "user", "content": "?"}, *turns], turns=5000)]
    address = reported(tmp_path / "run", records)
    tab = visit(address if where == "report" else serve(tmp_path / "run").address)
    tab.page.wait_for_selector("table.cases")
    tab.page.locator("#rollouts .episode").nth(0).click()
    more = tab.page.locator("#rollouts .message.model button").first
    assert "more characters" in more.inner_text()
    assert len(tab.texts("#rollouts .message.model .text")[0]) == 3000
    more.click()
    assert len(tab.texts("#rollouts .message.model .text")[0]) == 15_000
    tab.page.locator("#rollouts .episode").nth(1).click()
    between = tab.page.locator("#rollouts .between")
    between.wait_for()
    assert tab.texts("#rollouts .conversation >> nth=1 >> .message .text")[-1] == "turn 9999"
    assert tab.page.locator("#rollouts .message").count() < 40
    between.click()
    assert 60 < tab.page.locator("#rollouts .message").count() < 100
    assert tab.page.evaluate("document.documentElement.scrollWidth <= innerWidth")


@pytest.mark.slow
def test_invalid_utf_8_and_damaged_lines_are_shown_as_far_as_they_go(
    tmp_path: Path, visit: Callable[..., Tab], serve: Serve
) -> None:
    line = json.dumps(said("bad bytes: AB")).encode().replace(b"AB", b"\xff\xfe") + b"\n"
    folder = write_run(tmp_path / "run", [line, b"\x00\x01 no record\n"])
    for address in (reported(folder, [line, b"\x00\x01 no record\n"]), serve(folder).address):
        tab = visit(address)
        tab.page.wait_for_selector("table.cases")
        assert tab.texts("#rollouts .episode .answer") == ["bad bytes: \ufffd\ufffd"]
        assert "damaged lines" in tab.texts(".tile dt")
