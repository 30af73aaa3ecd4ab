"""The site: made pages are current, every page is in the navigation, and the commands of docs/moving.md are valid."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from aitrain.cli.main import main
from aitrain.options.other_names import SAME_AS

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
MOVING = (DOCS / "moving.md").read_text(encoding="utf-8")
COMMANDS = [text for _, text in re.findall(r"^```(sh)\n(.*?)^```", MOVING, re.MULTILINE | re.DOTALL)]
ENVIRONMENT = "class HotelEnv:\n    def build_dataset(self): ...\n    def score_episode(self): ...\n"
LONGEST_SENTENCE, MEAN_SENTENCE = 35, 20

sys.path.insert(0, str(DOCS))
import draw_report  # noqa: E402
import write_first_session  # noqa: E402
import write_reference  # noqa: E402


def test_the_made_pages_are_those_that_make_docs_writes() -> None:
    for file, text in write_reference.FILES.items():
        assert file.read_text(encoding="utf-8") == text(), f"{file.name}: run `make docs`"


def test_every_page_is_in_the_navigation_once_and_says_what_it_is_about() -> None:
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    named = [page for entry in site["nav"] for _, page in write_reference.pages_of(entry)]
    assert sorted(named) == sorted(page.name for page in DOCS.glob("*.md"))
    for page in named:
        assert write_reference.description(page) or page == "changelog.md", page


def test_the_home_page_leads_to_every_page_but_those_of_single_adapters() -> None:
    home = (DOCS / "index.md").read_text(encoding="utf-8")
    linked = set(re.findall(r"\]\(([\w-]+\.md)\)", home))
    all_pages = {page.name for page in DOCS.glob("*.md") if page.name != "index.md"}
    assert {page for page in all_pages - linked if not page.startswith("adapters-")} == set()


@pytest.mark.skipif(find_spec("mkdocs") is None, reason="mkdocs is not installed; .ci/docs builds the site")
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-d", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_claim_has_a_benchmark_and_the_figures_of_its_section() -> None:
    measured = (DOCS / "benchmarks.md").read_text(encoding="utf-8")
    sections = {part.split(":")[0]: part for part in measured.split("\n## ")[1:]}
    claims = (DOCS / "claims.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| .* \| .* \| (.*) \| `(\w+)` \|$", claims, re.MULTILINE)
    assert len(rows) >= 20
    for figure, benchmark in rows:
        for number in re.findall(r"[\d.,]*\d", figure):
            assert re.search(rf"(?<![\d.]){re.escape(number)}(?![\d.]*\d)", sections[benchmark]), (benchmark, number)


# -- the picture of the report


def test_the_pictures_of_the_report_show_its_page_and_run_of_today() -> None:
    kept = json.loads(draw_report.DATA.read_text(encoding="utf-8"))
    redraw = "run `python docs/draw_report.py`, which needs Chromium"
    assert draw_report.digest(draw_report.page_of(kept["data"])) == kept["page"], f"page or run changed: {redraw}"
    for picture in draw_report.PICTURES.values():
        assert draw_report.digest(picture.read_bytes()) == kept["pictures"][picture.name], f"{picture.name}: {redraw}"


def test_readme_and_home_page_show_the_report_in_light_and_dark() -> None:
    for page in ("README.md", "docs/index.md"):
        text = (ROOT / page).read_text(encoding="utf-8")
        assert all(picture.name in text for picture in draw_report.PICTURES.values()), page


def test_the_page_of_a_first_session_has_the_commands_that_its_script_runs() -> None:
    page = write_first_session.PAGE.read_text(encoding="utf-8")
    shown = re.findall(r"^\$ ((?:.*\\\n)*.*)$", page, re.MULTILINE)
    assert shown == write_first_session.commands(), "run docs/write_first_session.py"


# -- moving from other tools


@pytest.mark.parametrize("text", COMMANDS, ids=range(len(COMMANDS)))
def test_a_command_that_replaces_one_of_another_tool_is_valid(
    text: str, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for file, code in re.findall(r"^```python file=(\S+)\n(.*?)^```", MOVING, re.MULTILINE | re.DOTALL):
        (here / file).write_text(code)
    for file, lines in re.findall(r"cat > (\S+) <<END\n(.*?)^END", text, re.MULTILINE | re.DOTALL):
        (here / file).write_text(lines)
    (here / "my_envs").mkdir()
    (here / "my_envs" / "hotel_env.py").write_text(ENVIRONMENT)
    (here / "rows.jsonl").write_text('{"prompt": "a", "answer": "b"}\n')
    (here / "train.jsonl").write_text(
        '{"prompt": "a", "data_source": "openai/gsm8k", "reward_model": {"ground_truth": "1"}}\n'
    )
    words = shlex.split(text[text.index("aitrain grpo") :].replace("\\\n", " "))

    monkeypatch.setattr(sys, "argv", [*words, "--dry-run", "--options-only", "--num-processes", "1"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0


def test_names_of_trl_are_answered_with_the_options_of_the_page() -> None:
    trl = MOVING[MOVING.index("## From TRL") : MOVING.index("## From AITraining")]
    named = re.findall(r"^\| `(\w+)` \| `--([\w-]+)` \|", trl, re.MULTILINE)
    assert len(named) >= 13
    assert {name: SAME_AS.get(name) for name, _ in named} == {name: flag.replace("-", "_") for name, flag in named}


# -- sentences


def sentences(page: str) -> list[str]:
    """The sentences of a page's prose: no code, tables, headings, or names of links."""
    text = re.sub(r"^(```).*?^\1|^\|.*?$|^#.*?$|<[^>]+>", "", page, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"!?\[([^]]*)\]\([^)]*\)", r"\1", text)
    blocks = re.split(r"\n\s*\n|^\s*(?:[*-]|\d+\.) ", text, flags=re.MULTILINE)
    found = [re.split(r"(?<=[.!?:;])\s+", " ".join(block.split())) for block in blocks]
    return [sentence for block in found for sentence in block if len(sentence.split()) > 2]


@pytest.mark.parametrize("name", ["README.md", "docs/tutorial.md"])
def test_sentences_of_the_first_pages_are_short(name: str) -> None:
    found = sentences((ROOT / name).read_text(encoding="utf-8"))
    lengths = [len(sentence.split()) for sentence in found]
    assert max(lengths) <= LONGEST_SENTENCE, max(found, key=lambda sentence: len(sentence.split()))
    assert sum(lengths) / len(lengths) <= MEAN_SENTENCE


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 120
