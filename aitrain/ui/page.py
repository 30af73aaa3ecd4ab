"""The HTML page: one file with everything in it, or the same page with its parts served separately.

Text of models and environments is never HTML: the page has it as JSON without tags, and the scripts set it as text
only. The page's policy forbids any request and any script but its own.
"""

from __future__ import annotations

import hashlib
import json
from base64 import b64encode
from collections.abc import Sequence
from functools import cache
from html import escape
from importlib.resources import files

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
    "page.js",
)
SERVED_SCRIPTS = (*SCRIPTS[:-1], "runs.js", SCRIPTS[-1])
"""With the table of runs, which only `aitrain view` has."""
NOTHING_ELSE = "base-uri 'none'; form-action 'none'; require-trusted-types-for 'script'; trusted-types 'none'"


@cache
def asset(name: str) -> str:
    """A file of the package's assets folder."""
    return (files("aitrain.ui") / "assets" / name).read_text(encoding="utf-8")


def self_contained(data: object, style_names: Sequence[str] = STYLES, script_names: Sequence[str] = SCRIPTS) -> str:
    """The page with its data, styles and scripts inside: it needs no other file and no network. The assets are those of
    a run's page, unless others are named."""
    styles, scripts = [asset(name) for name in style_names], [asset(name) for name in script_names]
    policy = (
        f"default-src 'none'; style-src {hashes(styles)}; script-src {hashes(scripts)}; img-src data: blob:;"
        f" {NOTHING_ELSE}"
    )
    return _filled(
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        "\n".join(f"<style>{style}</style>" for style in styles),
        f'<script type="application/json" id="data">{as_inert_json(data)}</script>',
        "\n".join(f"<script>{script}</script>" for script in scripts),
    )


def served() -> str:
    """The page whose parts are at /assets/, and whose data are requested from /api/."""
    return _filled(
        "",
        "\n".join(f'<link rel="stylesheet" href="/assets/{name}">' for name in STYLES),
        "",
        "\n".join(f'<script src="/assets/{name}"></script>' for name in SERVED_SCRIPTS),
    )


def problem_page(text: str) -> str:
    """A served page that only says why another one cannot be shown."""
    styles = "\n".join(f'<link rel="stylesheet" href="/assets/{name}">' for name in STYLES)
    lines = "".join(f"<p>{escape(line)}</p>" for line in text.splitlines())
    said = f'<main><div class="card">{lines}<p><a href="/">All runs</a></p></div></main>'
    return _filled("", styles, "", '<script src="/assets/theme.js"></script>').replace('<div id="app"></div>', said)


SERVED_POLICY = (
    "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; img-src data: blob:;"
    f" frame-ancestors 'none'; {NOTHING_ELSE}"
)


def as_inert_json(data: object) -> str:
    """JSON without `<`, `>`, `&` and non-ASCII, so that it cannot end its HTML element or open another."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _filled(policy: str, styles: str, data: str, scripts: str) -> str:
    page = asset("page.html")
    for name, part in (("policy", policy), ("styles", styles), ("data", data), ("scripts", scripts)):
        before, mark, after = page.partition(f"<!-- {name} -->")
        assert mark, name
        page = before + part + after
    return page


def hashes(texts: list[str]) -> str:
    """The sources that a policy allows, by their SHA-256."""
    return " ".join(f"'sha256-{b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in texts)
