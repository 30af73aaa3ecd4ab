"""Secrets in real runs: what an environment raises, prints, logs and returns, and that none of it is left anywhere."""

from __future__ import annotations

import os
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import pytest

from aitrain import Result, TrainConfig
from aitrain.redaction import MASK, known_forms
from tests.conftest import read_lines
from tests.environments.leaky import SECRETS, Leaky
from tests.test_redaction import FORMS
from tests.training.test_processes import workers_in

ENVIRONMENT = Path(__file__).parents[1] / "environments" / "leaky.py"
PLANTED = {name: f'{name[:2].lower()}_planted-"{index}"-ä\\x' for index, name in enumerate(SECRETS)}
"""With what JSON, repr and addresses write differently."""
FORMED = {name: text % secret for name, (text, secret) in FORMS.items() if "\n" not in text}
LEAKED = {"LEAKED_TEXT": " ".join(FORMED.values())}
"""Secrets that aitrain was not told of."""
PLAIN = [f"planted-{mark}{index}{mark}" for index in range(len(SECRETS)) for mark in ('"', '\\"', "%22")]
PLAIN += [FORMS[name][1] for name in FORMED if FORMS[name][1] != "short"]


def leaks(folder: Path) -> list[str]:
    """Files in which any form of a secret stands."""
    files = [file for file in folder.rglob("*") if file.is_file()]
    assert len(files) > 5
    return [str(file) for file in files if any(text.encode() in file.read_bytes() for text in PLAIN)]


@pytest.mark.parametrize("isolation", ["thread", pytest.param("process", marks=pytest.mark.slow)])
def test_a_run_that_fails_with_secrets_leaves_none_of_them(
    isolation: str, small_model: Path, tmp_path: Path, preloaded_aitrain: Path
) -> None:
    command = [
        str(preloaded_aitrain / "aitrain"), "grpo", "--model", str(small_model), "--rl-env", str(ENVIRONMENT),
        "--project-name=run", "--output-dir=.", "--rl-max-new-tokens=4", "--rl-kl-coef=0", "--max-steps=3", "--lr=1e-3",
        f"--rl-env-isolation={isolation}",
    ]  # fmt: skip
    with (tmp_path / "said").open("wb") as file:
        known = {**os.environ, **PLANTED, **LEAKED}
        running = subprocess.Popen(command, cwd=tmp_path, env=known, stdout=file, stderr=file)
    seen: set[bytes] = set()
    while running.poll() is None:
        for pid in (running.pid, *workers_in(tmp_path)):
            with suppress(OSError):
                seen.add(Path(f"/proc/{pid}/cmdline").read_bytes())
        time.sleep(0.05)
    said = (tmp_path / "said").read_text()
    assert running.returncode == 0, said
    assert leaks(tmp_path) == []
    assert not any(text in said for text in PLAIN)
    assert not any(text.encode() in line for line in seen for text in PLAIN)
    assert len(seen) > 1
    assert f"ConnectionError: GET https://board/?key={MASK} {MASK} {MASK}" in said
    log = (tmp_path / "run" / "train.log").read_text()
    for channel in ("printed", "logged", "from a program"):
        assert f"{channel} {MASK}" in log
    records = list(read_lines(tmp_path / "run" / "rollouts" / "rank0.jsonl"))
    assert any(MASK in (record["error"] or {}).get("message", "") for record in records)
    assert all(MASK in record["prompt"] for record in records if record["case_idx"] < 24)


@pytest.mark.slow
def test_a_notebooks_run_masks_what_it_writes_and_shows(
    small_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    import aitrain

    for name, value in (PLANTED | LEAKED).items():
        monkeypatch.setenv(name, value)
    known_forms.cache_clear()
    config = TrainConfig(
        model=str(small_model), output_dir=str(tmp_path), max_steps=2, rl_max_new_tokens=4, rl_kl_coef=0
    )
    result: Result = aitrain.train(config, environment=Leaky())
    assert leaks(result.folder) == []
    shown = [line for line in capfd.readouterr().err.splitlines() if line.startswith("!")]
    assert any(MASK in line for line in shown)
    assert not any(text in line for line in shown for text in PLAIN)
