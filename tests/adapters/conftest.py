"""What tests of adapters share: an environment as a run loads it, and its sessions."""

from __future__ import annotations

import asyncio
import importlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from aitrain import ConfigError, TrainConfig
from aitrain.environment.contract import Case, ScoreResult
from aitrain.environment.dataset import build_cases
from aitrain.environment.loader import load_env
from aitrain.environment.requirements import with_requirements
from aitrain.environment.runner import start_runner
from aitrain.workbench.player import Player, Script
from tests.conftest import install_package, write
from tests.rehearsal import Rehearsed, rehearse


def tokenizer(text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
    """A token for each byte."""
    return {"input_ids": list(text.encode())}


@pytest.fixture(autouse=True)
def imports_of_its_own() -> Iterator[None]:
    """The files that a test imports are forgotten afterwards, as the next one has others of the same names."""
    path = list(sys.path)
    yield
    sys.path[:] = path
    for name in [name for name in sys.modules if name.startswith("aitrain_environment_")]:
        del sys.modules[name]
    importlib.invalidate_caches()


def made(rl_env: str, **settings: Any) -> Any:
    """The environment that `--rl-env` and `--rl-env-config` name, through everything that a run does to get it."""
    return load_env(TrainConfig(rl_env=rl_env, rl_env_config=settings))


def refusal(rl_env: str, **settings: Any) -> str:
    """The message with which it is refused."""
    with pytest.raises(ConfigError) as caught:
        made(rl_env, **settings)
    assert len(str(caught.value).splitlines()) <= 5
    return str(caught.value)


def cases_of(environment: Any) -> Sequence[Case]:
    """The cases of its dataset."""
    return build_cases(environment, tokenizer)[0]


def play(environment: Any, case: Case, replies: Sequence[str], seed: int = 0) -> tuple[list[str], ScoreResult]:
    """What the environment says, the prompt's last message first, and the score."""
    config = with_requirements(TrainConfig(rl_env="any.py", rl_env_isolation="thread"), environment)[0]
    player = Player(start_runner(environment, config.model_copy(update={"rl_max_turns": 99})))
    (episode,) = player.play([(case, Script(tuple(replies)))], [seed])
    prompt = episode.prompt
    said = [prompt] if isinstance(prompt, str) else [prompt[-1]["content"]]
    return said + [message["content"] for message in episode.messages if message["role"] != "assistant"], episode.result


def rows_of(environment: Any) -> list[dict[str, Any]]:
    """The rows of an environment that a server has."""
    return asyncio.run(environment.build_dataset())


def play_row(environment: Any, *replies: str, number: int = 0) -> Rehearsed:
    """One row of it, played with these replies."""
    row = rows_of(environment)[number]
    return rehearse(environment, replies, Case(number, row["prompt"], row, number))


@pytest.fixture
def install(here: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """`install("textarena", "0.7.4", {"textarena/__init__.py": ...})`: a small stand-in as an installed package."""
    site = here.parent / "site-packages"

    def put(distribution: str, version: str, files: Mapping[str, str]) -> None:
        write(site, files)
        install_package(site, distribution, version)
        monkeypatch.syspath_prepend(str(site))

    yield put
    for name in [name for name, module in sys.modules.items() if str(site) in str(getattr(module, "__file__", ""))]:
        del sys.modules[name]
