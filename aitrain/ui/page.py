"""The HTML pages: each is one file with everything in it, such as report.html, which is written at the end of a run;
or the page of `aitrain view`, which requests its data.

Text of models and environments is never HTML: a page has it as JSON without tags, which the scripts set as text only,
or escaped by its template. The pages' policy forbids any script but their own, and any request but those for data.
"""

import hashlib
import json
import time
from base64 import b64encode
from collections.abc import Sequence
from functools import cache
from importlib.resources import files

from aitrain.events import Announce, Note
from aitrain.runs.environment_source import read_source
from aitrain.runs.json_values import JsonObject
from aitrain.runs.rollout_index import RolloutIndex
from aitrain.runs.run_folder import RunFolder, write_text
from aitrain.ui.episodes import cases_json, choose, episode
from aitrain.ui.overview import Overview

STYLES = ("uPlot.min.css", "page.css")
SCRIPTS = (
    "uPlot.iife.min.js",
    "dom.js",
    "theme.js",
    "source.js",
    "charts.js",
    "transcript.js",
    "rollouts.js",
    "cases.js",
    "head.js",
    "runs.js",
    "page.js",
)
NOTHING_ELSE = "base-uri 'none'; form-action 'none'"
NO_HTML = f"{NOTHING_ELSE}; require-trusted-types-for 'script'; trusted-types 'none'"


@cache
def asset(name: str) -> str:
    """A file of the package's assets folder."""
    return (files("aitrain.ui") / "assets" / name).read_text(encoding="utf-8")


def run_page(data: object = None) -> str:
    """The page of a run with its data, styles and scripts inside, which needs no other file and no network; without
    data, the page that requests them from /api/."""
    return rendered("page.html", STYLES, SCRIPTS, data, "'none'" if data else "'self'")


def rendered(
    template: str,
    styles: Sequence[str],
    scripts: Sequence[str],
    data: object = None,
    connects: str = "'none'",
    libraries: Sequence[str] = (),
    **values: object,
) -> str:
    """A page of its own: a template with its data, styles and scripts inside, and a policy that allows no others, and
    requests to `connects` only. `libraries` are further scripts, which may set styles and make HTML."""
    from jinja2 import Environment, FunctionLoader  # here, because only pages need it

    parts = {"styles": list(map(asset, styles)), "scripts": [*libraries, *map(asset, scripts)]}
    styled = "'unsafe-inline'" if libraries else hashes(parts["styles"])
    policy = f"default-src 'none'; style-src {styled}; script-src {hashes(parts['scripts'])}; img-src data: blob:"
    policy += f"; connect-src {connects}; {NOTHING_ELSE if libraries else NO_HTML}"
    page = Environment(autoescape=True, loader=FunctionLoader(asset)).get_template(template)
    return page.render(policy=policy, data=None if data is None else as_inert_json(data), **parts, **values)


def as_inert_json(data: object) -> str:
    """JSON without `<`, `>`, `&` and non-ASCII, so that it cannot end its HTML element or open another."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def hashes(texts: Sequence[str]) -> str:
    """The sources that a policy allows, by their SHA-256."""
    return " ".join(f"'sha256-{b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in texts)


# -- report.html

MOST_CASES = 2_000


def write_report(folder: RunFolder, announce: Announce) -> None:
    """Write report.html; an error is announced as a note, and does not end the run."""
    try:
        rollouts = RolloutIndex(folder.rollouts)
        rollouts.refresh()
        write_text(folder.report, run_page(page_data(folder, rollouts)), durable=False)
    except Exception as error:
        announce(Note(f"report.html could not be written: {type(error).__name__}: {error}"))


def page_data(folder: RunFolder, rollouts: RolloutIndex) -> JsonObject:
    """The data of report.html."""
    return {
        "summary": Overview(folder.path, rollouts).to_json(),
        "cases": cases_json(rollouts, MOST_CASES),
        "source": read_source(folder.environment_source),
        "episodes": [episode(rollouts, entry) for entry in choose(rollouts.entries)],
        "written": time.time(),
    }
