"""A hook of mkdocs: removes what code blocks say for tests, copies pages for llms.txt, makes search work offline."""

import re
import shutil
from pathlib import Path
from typing import Any

SHIM = "https://unpkg.com/iframe-worker/shim"
"""What the theme loads from elsewhere for the search of a page in a folder; search_offline.js does the same."""
FENCE = re.compile(r"^(\s*```[a-z]+) [^\n`]+$", re.MULTILINE)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """The page with the language alone behind each fence, which is all that the site's renderer takes."""
    return FENCE.sub(r"\1", markdown)


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """The HTML of a page, which loads nothing from elsewhere."""
    return output.replace(SHIM, "../" * page.url.count("/") + "search_offline.js")


def on_post_template(output_content: str, **_: Any) -> str:
    """The HTML of the page for addresses that a server does not know."""
    return output_content.replace(SHIM, "search_offline.js")


def on_post_build(config: Any, **_: Any) -> None:
    """Copy the pages beside what was made of them."""
    docs = Path(config["docs_dir"])
    for page in docs.rglob("*.md"):
        shutil.copy(page, Path(config["site_dir"]) / page.relative_to(docs))
