"""A hook of mkdocs: removes what code blocks say for the tests that run them, and copies the pages for llms.txt."""

import re
import shutil
from pathlib import Path
from typing import Any

FENCE = re.compile(r"^(\s*```[a-z]+) [^\n`]+$", re.MULTILINE)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """The page with the language alone behind each fence, which is all that the site's renderer takes."""
    return FENCE.sub(r"\1", markdown)


def on_post_build(config: Any, **_: Any) -> None:
    """Copy the pages beside what was made of them."""
    docs = Path(config["docs_dir"])
    for page in docs.rglob("*.md"):
        shutil.copy(page, Path(config["site_dir"]) / page.relative_to(docs))
