"""A package index shows a README whose links lead somewhere."""

from __future__ import annotations

from pathlib import Path
from runpy import run_path

ROOT = Path(__file__).parents[1]
PICTURE = '<picture><source srcset="docs/dark.png"><img src="docs/light.png" alt="A run"></picture>\n\n'
TEXT = (
    f"{PICTURE}![x](docs/x.png)\n\nThe [tutorial](docs/tutorial.md), [TRL](https://example.com) and [below](#below).\n"
)


def test_with_a_repository_links_lead_to_the_files_of_the_version() -> None:
    hook = run_path(str(ROOT / "hatch_build.py"))
    here = "https://example.com/a/b"
    assert hook["urls"](here)["Issues"] == f"{here}/issues"
    assert hook["readme"](TEXT, "", "v1").startswith("The tutorial, [TRL](https://example.com) and [below](#below).\n")
    shown = hook["readme"](TEXT, here, "v1")
    for link in (
        f'srcset="{here}/raw/v1/docs/dark.png"',
        f'src="{here}/raw/v1/docs/light.png"',
        f"![x]({here}/raw/v1/docs/x.png)",
        f"[tutorial]({here}/blob/v1/docs/tutorial.md)",
        "[TRL](https://example.com)",
        "[below](#below)",
    ):
        assert link in shown
