"""The server of an environment on one machine of a Ray cluster, without Ray."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from aitrain.environment.contract import Case
from aitrain.environment.served_environment import TOKEN_VARIABLE, connect
from aitrain.errors import EnvironmentFailed
from aitrain.jobs.env_loading import EnvServer

SOURCE = """
class Env:
    def __init__(self, rows=2):
        self.rows = rows

    def build_dataset(self, tokenizer):
        return [{"prompt": f"{n}+1="} for n in range(self.rows)]

    def score_episode(self, completion):
        print("printed" * 100_000)
        return 0.5
"""


def serve(folder: Path, **keywords: int) -> EnvServer:
    (folder / "task.py").write_text(SOURCE)
    options: dict[str, Any] = {
        "rl_env": "task.py:Env",
        "rl_env_config": keywords,
        "model": "tiny",
        "rl_env_timeout": 20.0,
    }
    options |= {"rl_env_workers": 2, "rl_env_isolation": "process"}
    request = {"command": "serve", "options": options, "serve": {"host": "127.0.0.1", "port": 0}}
    return EnvServer(request, str(folder), "of-the-run")


def test_an_environment_is_served_to_those_who_have_the_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = serve(tmp_path, rows=3)
    monkeypatch.setenv(TOKEN_VARIABLE, "of-the-run")
    try:
        environment = connect(server.url())
        assert len(environment.build_dataset(None)) == 3
        assert environment.session(Case(0, "0+1=", {})).score({"completion": "1"}).score == 0.5
    finally:
        server._tree.close()


def test_why_an_environment_cannot_be_served_is_told(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFailed, match="Env: got an unexpected keyword argument"):
        serve(tmp_path, wrong=1).url()
    with pytest.raises(FileNotFoundError, match="nowhere"):
        EnvServer({}, str(tmp_path / "nowhere"), "")
