"""Runs that many tests read: each is made once in a session of tests, by the first worker that asks for it.

Their folders are read-only: a test that resumes or damages a run copies it first.
"""

from __future__ import annotations

import io
import os
import shutil
import signal
from contextlib import redirect_stderr
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from filelock import FileLock

from tests.environments.vowels import Vowels

if TYPE_CHECKING:
    from aitrain import Result

SHORT: dict[str, Any] = {"max_steps": 3, "rl_max_new_tokens": 6, "rl_kl_coef": 0.0, "lr": 1e-3, "batch_size": 2}
EVERY_STEP: dict[str, Any] = {"max_steps": 6, "save_strategy": "steps", "save_steps": 1, "save_total_limit": None}
PLAIN: dict[str, Any] = {**SHORT, **EVERY_STEP, "max_steps": 4, "eval_strategy": "steps", "eval_steps": 1}
LORA: dict[str, Any] = {
    **SHORT, **EVERY_STEP, "peft": True, "lora_r": 4, "lora_dropout": 0.3, "rl_kl_coef": 0.1, "eval_strategy": "steps",
    "eval_steps": 2, "rl_updates_per_rollout": 2, "trl": {"num_iterations": 2},
}  # fmt: skip
TALK: dict[str, Any] = {
    **SHORT, **EVERY_STEP, "max_steps": 4, "rl_kl_coef": 0.1, "eval_strategy": "steps", "eval_steps": 2,
    "trl": {"num_iterations": 2},
}  # fmt: skip


class Talk:
    """Three turns, in two of which the environment says something that its seed chose; some have no score."""

    def __init__(self, chat=True, turns=3):
        self.chat, self.turns = chat, turns

    def build_dataset(self):
        asked = [f"say {number}:" for number in range(16)]
        return [{"prompt": [{"role": "user", "content": text}] if self.chat else text} for text in asked]

    def build_eval_dataset(self):
        return self.build_dataset()[:3]

    def episode(self, case_idx, seed):
        said = yield None
        for turn in range(self.turns - 1):
            said += yield f" more, {seed % 10}, {turn}? "
        return None if len(said) % 4 == 0 else sum(letter < "n" for letter in said) / max(1, len(said))


class Vault(Talk):
    """A number is behind a tool; every episode counts its own calls."""

    episode = None  # type: ignore[assignment]

    def start(self, case_idx):
        mine = Vault()
        mine.number, mine.calls = case_idx, 0
        return mine

    def get_tools(self):
        return [self.open]

    def open(self, code: int) -> dict[str, int]:
        """Open the vault.

        Args:
            code: The code.
        """
        self.calls += 1
        return {"number": self.number + code, "calls": self.calls}

    def step(self, reply):
        self.reply = reply
        return None

    def score(self):
        return float(getattr(self, "reply", None) == f"it is {self.number + 100}")


class Stops(Vowels):
    """Asks the run to stop in its n-th score, with one signal or two."""

    def __init__(self, at=0, *signals):
        super().__init__()
        self.left, self.signals = at, signals

    def score_episode(self, completion, case_idx):
        self.left -= 1
        for number in self.signals if self.left == 0 else ():
            signal.raise_signal(number)
        return super().score_episode(None, None, completion, case_idx)


class Words:
    """Prompts of different lengths, so that batches are padded; scores vowels."""

    def build_dataset(self, tokenizer):
        return [{"prompt": f"say {number}" + "a" * (number % 5)} for number in range(30)]

    def score_episode(self, completion):
        return sum(letter in "aeiou" for letter in completion) / max(1, len(completion))


RUNS: dict[str, tuple[type, dict[str, Any]]] = {"plain": (Stops, PLAIN), "lora": (Vowels, LORA), "talk": (Talk, TALK)}


class FinishedRuns:
    """`finished("plain")`: the result of a run, which is made if no test has asked for it yet."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder, self.model = folder, model

    def __call__(self, name: str) -> Result:
        from aitrain import Result

        self.make(name)
        return Result.read(self.folder / name)

    def make(self, name: str) -> Path:
        """The run's folder."""
        done = self.folder / f"{name}.done"
        with FileLock(self.folder / f"{name}.lock"):
            if not done.exists():
                shutil.rmtree(self.folder / name, ignore_errors=True)  # of a worker that failed
                with redirect_stderr(io.StringIO()), pytest.MonkeyPatch.context() as patch:
                    quick(patch)
                    self._train(name)
                done.touch()
        return self.folder / name

    def copy(self, name: str, folder: Path) -> Path:
        """A copy of its folder, which a test may change."""
        return Path(shutil.copytree(self.make(name), folder))

    def _train(self, name: str) -> None:
        import aitrain

        environment, options = RUNS[name]
        place = {"model": str(self.model), "output_dir": str(self.folder), "project_name": name}
        aitrain.train(aitrain.TrainConfig(**place, **options), environment=environment())


def quick(patch: pytest.MonkeyPatch) -> None:
    """Two thirds of a short run in this process would go to its heap, which is frozen already (tests/conftest.py)."""
    from aitrain.engines import scopes

    patch.setattr(scopes, "gc", SimpleNamespace(collect=int, freeze=int, unfreeze=int))


def shared_folder(factory: pytest.TempPathFactory) -> Path:
    """A folder that all workers of a session see."""
    own = factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "finished"
    folder.mkdir(exist_ok=True)
    return folder
