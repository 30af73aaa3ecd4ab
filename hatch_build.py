"""Project URLs and README as package indexes show them, where a relative link would lead nowhere."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

PAGES_OF_A_PACKAGE = "\nThe pages that are named here are part of the package: the folder `aitrain/docs`.\n"


class CustomMetadataHook(MetadataHookInterface):
    """Fills `urls` and `readme` from the repository's address in pyproject.toml, which may be empty."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Called by hatchling with the table `project`."""
        repository = str(self.config.get("repository", "")).rstrip("/")
        if repository and not re.fullmatch(r"https://[^/\s]+/[^/\s]+/\S+", repository):
            raise ValueError(
                f"pyproject.toml: repository is to be an address like https://HOST/OWNER/NAME: {repository}"
            )
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        shown = readme(text, repository, f"v{metadata['version']}")
        metadata["readme"] = {"content-type": "text/markdown", "text": shown}
        metadata["urls"] = urls(repository)


def urls(repository: str) -> dict[str, str]:
    """The project's URLs; none without a repository."""
    if not repository:
        return {}
    changelog = f"{repository}/blob/HEAD/docs/changelog.md"
    return {"Repository": repository, "Issues": f"{repository}/issues", "Changelog": changelog}


def readme(text: str, repository: str, tag: str) -> str:
    """The README with links into the repository at this tag; without one, no link to a file and no picture."""
    if repository:
        text = re.sub(r"(!\[[^\]]*\]\()(?!\w+:|#)", rf"\g<1>{repository}/raw/{tag}/", text)
        text = re.sub(r"((?<!!)\[[^\]]*\]\()(?!\w+:|#)", rf"\g<1>{repository}/blob/{tag}/", text)
        return re.sub(r'(\b(?:src|srcset)=")(?!\w+:)', rf"\g<1>{repository}/raw/{tag}/", text)
    text = re.sub(r"<picture>.*?</picture>\n*", "", text, flags=re.DOTALL)
    text = re.sub(r'(?:<img\b[^>]*\bsrc="(?!\w+:)[^>]*>|!\[[^\]]*\]\((?!\w+:)[^)]*\))\n*', "", text)
    return re.sub(r"(?<!!)\[([^\]]*)\]\((?!\w+:|#)[^)]*\)", r"\1", text) + PAGES_OF_A_PACKAGE
