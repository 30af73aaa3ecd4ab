"""The release script refuses what is not ready, and a package index shows a README whose links lead somewhere."""

from __future__ import annotations

import os
import shutil
import subprocess
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
FILES = {
    "pyproject.toml": 'version = "1.2.0"\nrepository = "https://example.com/a/b"\n',
    "aitrain/__init__.py": '__version__ = "1.2.0"\n',
    "docs/changelog.md": "# Changelog\n\n## 1.2.0, 2030-01-02\n\n## 1.1.0, 2029-01-02\n",
}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A repository that is ready for release 1.2.0, with stand-ins for what builds it and tries it."""
    for name, text in {**FILES, ".gitignore": "dist/\n.venv*/\n"}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    for place, code in {
        ".venv/bin/python": "mkdir -p dist; touch dist/aitrain-1.2.0-py3-none-any.whl dist/aitrain-1.2.0.tar.gz",
        ".venv-release/bin/python": 'echo "twine $3"',
        ".ci/overlay": "true",
        ".ci/wheel": 'echo "tried $1"',
    }.items():
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / place).write_text(f"#!/bin/sh\n{code}\n")
        (tmp_path / place).chmod(0o755)
    shutil.copy(ROOT / ".ci" / "release", tmp_path / ".ci" / "release")
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", "--all")
    git(tmp_path, "commit", "--quiet", "--message", "x")
    return tmp_path


def git(folder: Path, *arguments: str) -> str:
    named = {
        f"GIT_{who}_{what}": "someone@example.com" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")
    }
    done = subprocess.run(
        ["git", *arguments], cwd=folder, capture_output=True, text=True, check=True, env=os.environ | named
    )
    return done.stdout


def release(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    named = {"GIT_COMMITTER_NAME": "someone", "GIT_COMMITTER_EMAIL": "someone@example.com"}
    command = [str(folder / ".ci" / "release"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | named)


def test_a_release_is_built_checked_tried_and_tagged_when_asked(checkout: Path) -> None:
    shown = release(checkout, "1.2.0", "--tag").stdout.splitlines()
    assert shown.index("twine check") < shown.index("tried dist")
    assert git(checkout, "tag") == "v1.2.0\n"
    assert "the tag v1.2.0 exists" in release(checkout, "1.2.0").stderr


@pytest.mark.parametrize(
    ("file", "text", "version", "said"),
    [
        ("", "", "1.3.0", "pyproject.toml"),
        ("pyproject.toml", 'version = "1.3.0"', "1.3.0", "aitrain/__init__.py"),
        ("docs/changelog.md", "# Changelog", "1.2.0", "docs/changelog.md"),
        ("forgotten.txt", "", "1.2.0", "forgotten.txt"),
    ],
)
def test_what_is_not_ready_is_refused(checkout: Path, file: str, text: str, version: str, said: str) -> None:
    if file:
        (checkout / file).write_text(f"{text}\n")
    if text:
        git(checkout, "commit", "--quiet", "--all", "--message", "x")
    done = release(checkout, version)
    assert done.returncode == 1
    assert said in done.stderr
    assert not (checkout / "dist").exists()


@pytest.fixture(scope="module")
def hook() -> ModuleType:
    spec = spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PICTURE = '<picture><source srcset="docs/dark.png"><img src="docs/light.png" alt="A run"></picture>\n\n'
TEXT = (
    f"{PICTURE}![x](docs/x.png)\n\nThe [tutorial](docs/tutorial.md), [TRL](https://example.com) and [below](#below).\n"
)


def test_with_a_repository_links_lead_to_the_files_of_the_version(hook: ModuleType) -> None:
    here = "https://example.com/a/b"
    assert hook.urls(here)["Issues"] == f"{here}/issues"
    assert hook.readme(TEXT, "", "v1").startswith("The tutorial, [TRL](https://example.com) and [below](#below).\n")
    shown = hook.readme(TEXT, here, "v1")
    for link in (
        f'srcset="{here}/raw/v1/docs/dark.png"',
        f'src="{here}/raw/v1/docs/light.png"',
        f"![x]({here}/raw/v1/docs/x.png)",
        f"[tutorial]({here}/blob/v1/docs/tutorial.md)",
        "[TRL](https://example.com)",
        "[below](#below)",
    ):
        assert link in shown
