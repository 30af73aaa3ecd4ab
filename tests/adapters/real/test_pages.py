"""The commands of the adapters' pages in docs, run as they are there, with servers at the addresses that they name."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest

from tests.adapters.http_servers import NemoHandler, Server
from tests.adapters.real.conftest import ROOT, grpo, in_environment, server

BLOCK = re.compile(r"^```(sh|python file=\S+)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def run_page(name: str, folder: Path, url: str = "") -> None:
    """Write the page's files, and run its commands with this URL for the one that they name."""
    blocks = BLOCK.findall((ROOT / "docs" / f"adapters-{name}.md").read_text(encoding="utf-8"))
    assert any(kind == "sh" for kind, _ in blocks)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    for kind, text in blocks:
        if kind != "sh":
            (folder / kind.partition("=")[2]).write_text(text)
            continue
        command = re.sub(r"http://127\.0\.0\.1:\d+", url, text).replace(
            "aitrain grpo", f"{sys.executable} -m aitrain grpo"
        )
        small = f"{command.rstrip()} --rl-max-new-tokens 4 --eval-cases 1"
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", small],
            cwd=folder, env={**os.environ, "PATH": path}, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr


@contextmanager
def nemo_server(_: Path) -> Iterator[str]:
    with Server(NemoHandler).running() as running:
        yield running.url


@pytest.mark.parametrize(
    ("name", "start"),
    [
        pytest.param("inspect", lambda _: nullcontext(""), marks=in_environment("newest")),
        pytest.param("nemo-gym", nemo_server, marks=in_environment("newest")),
        pytest.param(
            "openenv",
            lambda folder: server("openenv_game.py", folder, "/health", SESSIONS="64"),
            marks=in_environment("older"),
        ),
        pytest.param("ors", lambda folder: server("ors_sums.py", folder, "/health"), marks=in_environment("older")),
    ],
)
def test_the_commands_of_a_page_train(name: str, start: object, here: Path, tmp_path: Path) -> None:
    with start(tmp_path) as url:  # type: ignore[operator]
        run_page(name, here, url)


@in_environment("newest")
def test_a_run_whose_server_dies_ends_with_what_happened(here: Path) -> None:
    tasks = [{"responses_create_params": {"input": f"Say {number}."}} for number in range(12)]
    (here / "tasks.jsonl").write_text("\n".join(map(json.dumps, tasks)))
    with Server(NemoHandler).running() as running:
        running.lives_for = 20
        done = grpo(here, f"nemo-gym:{running.url}", data="tasks.jsonl", score_range="0,1")
    assert done.returncode == 3
    said = " ".join(done.stderr.split())
    assert re.search(r"did not answer /(seed_session|verify): RemoteProtocolError", said), said
    # how many episodes the last answered requests complete depends on their order
    ends = "The environment failed on (every episode|all)|More than 50% of the episodes failed in 3 batches in a row"
    assert re.search(f"aitrain: ({ends})", said), said
    assert (here / "run" / "model").exists()
