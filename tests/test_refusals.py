"""Bad input: a few lines that say what to do, the right exit code, no traceback, and nothing left behind."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest

import aitrain
from aitrain import AitrainError, ConfigError, EnvironmentFailed, TrainConfig
from aitrain.environment.dataset import build_cases
from tests.conftest import Run, case_name, listing, write

BUILD = "    def build_dataset(self, tokenizer):\n        return [{'prompt': f'say {n}'} for n in range(20)]\n"
GOOD = "class Env:\n" + BUILD + "    def score_episode(self, completion):\n        return 0.5\n"
SINKS = GOOD + "    def __init__(self, city='Rome'):\n        assert city != 'Atlantis', 'it sank'\n"


@pytest.mark.parametrize(
    ("environment", "arguments", "code", "words"),
    [
        (GOOD, "--rl-num-generatons 4", 2, "Did you mean rl_num_generations?"),
        (SINKS, """--rl-env-config '{"city": "Atlantis"}' --output-dir deep/er""", 3, "env.py, line 7, in __init__"),
        ("input()\n" + GOOD, "", 3, "EOFError"),
        ("open('rows.txt')\n" + GOOD, "", 3, "env.py, line 1"),
    ],
    ids=case_name,
)
def test_a_bad_command_is_refused_in_a_few_lines_and_leaves_no_run(
    environment: str, arguments: str, code: int, words: str, here: Path, aitrain_grpo: Run
) -> None:
    write(here, {"env.py": environment})

    done = aitrain_grpo("--model", "tiny", "--rl-env", "env.py", *shlex.split(arguments))

    assert done.returncode == code, done.stderr
    assert words in done.stderr
    error = done.stderr[done.stderr.index("aitrain: ") :]  # after the lines with which a run starts
    assert len(error.splitlines()) <= 5
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    assert [path for path in here.rglob("*") if path.is_file()] == [here / "env.py"]


# -- datasets


class Good:
    """An environment that works; the refused ones differ from it in one thing."""

    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def build_dataset(self, tokenizer: Any) -> Any:
        return self.rows() if callable(self.rows) else self.rows

    def score_episode(self, completion: Any) -> Any:
        return 0.5


CHAT = [{"role": "user", "content": "say"}]


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([], ["returned no rows"]),
        ([*[{"prompt": "a"}] * 5, {"prompt": CHAT}], ["of row 0 and row 5, one has a string"]),
        (lambda: {}["words"], ["KeyError: 'words'", "in <lambda>"]),
        *(
            ([{"prompt": prompt}], ["row 0 of build_dataset has no valid prompt"])
            for prompt in (3, "", [], CHAT[0], [{"content": "x"}], None, range(2))
        ),
    ],
    ids=case_name,
)
def test_a_dataset_that_cannot_be_trained_on_is_refused_with_its_row(rows: Any, words: list[str]) -> None:
    with pytest.raises(EnvironmentFailed) as caught:
        build_cases(Good(rows), None)

    assert [word for word in words if word not in str(caught.value)] == []
    assert len(str(caught.value).splitlines()) <= 5


# -- in this process, as in a notebook: what only a model, a tokenizer or scores can show


# -- tokenizers


@pytest.mark.parametrize(
    ("template", "kind", "told"),
    [
        (None, ConfigError, "--chat-template chatml"),
        ("{{ raise_exception('Roles must alternate') }}", EnvironmentFailed, "Its last message: [{'role'"),
    ],
    ids=case_name,
)
def test_a_template_that_cannot_write_the_prompts_is_refused_with_the_way_out(
    template: str | None, kind: type[AitrainError], told: str, here: Path, small_model: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(small_model, tmp_path / "model"))
    (folder / "chat_template.jinja").unlink()
    if template:
        (folder / "chat_template.jinja").write_text(template)
    with pytest.raises(kind) as caught:
        aitrain.train(TrainConfig(model=str(folder), max_steps=1), environment=Good([{"prompt": CHAT}] * 20))

    assert told in str(caught.value)
    assert listing(here) == ["runs"]
