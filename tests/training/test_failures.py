"""Environments that fail: the run goes on without those episodes, says what happened, and leaves nothing behind."""

from __future__ import annotations

import json
import math
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from aitrain import EnvironmentFailed, Result
from aitrain.engines.hf import HFEngine
from aitrain.runs.checkpoint import checkpoints_of, step_of
from aitrain.runs.run_folder import RunFolder, read_lines
from aitrain.training import held_out_scoring
from aitrain.training.evaluation import EvalPhase, EvalScores, evaluate
from tests.environments.ill import SHARES, Gone, illness_of
from tests.training.conftest import rollouts
from tests.training.scripted_policy import scripted
from tests.training.test_processes import Command

Train = Callable[..., Result]
ENVIRONMENTS = Path(__file__).parents[1] / "environments" / "ill.py"

KINDS = {"raise": "raised", "sleep": "timed_out", "spin": "timed_out", "nan": "not_finite", "kill": "crashed"}
"""What aitrain calls the illnesses."""

LINES = {"raise": 'raise RuntimeError("ill")', "sleep": "time.sleep(3600)", "spin": "pow(3, 10**7)"}
"""Where they happen."""


class IllCommand(Command):
    """`aitrain grpo` with an environment of ill.py, whose processes note their ids."""

    def play(self, environment: str, *flags: str, **given: Any) -> subprocess.CompletedProcess[str]:
        place = [f"--rl-env={ENVIRONMENTS}:{environment}", f"--rl-env-config={json.dumps(given)}"]
        return self.run(environment, *place, "--save-strategy=no", "--eval-strategy=no", *flags)

    @property
    def metrics(self) -> list[dict[str, Any]]:
        return list(read_lines(self.folder / "run" / "metrics.jsonl"))

    def is_saved(self) -> bool:
        return (self.folder / "run" / "model" / "model.safetensors").exists()

    def pids(self) -> list[int]:
        """Of the processes that the environment's code ran in, and of those that started them."""
        return [int(note.name) for note in (self.folder / "notes").iterdir()]

    def left(self) -> list[str]:
        """Processes that still run: all that the command starts has its working directory."""
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            try:
                if (process / "cwd").resolve() == self.folder.resolve():
                    found.append((process / "cmdline").read_text())
            except OSError:
                continue
        return found


def notes_of_training(done: subprocess.CompletedProcess[str]) -> str:
    """What the command said, without the findings of the checks before training, which name failures as well."""
    return "\n".join(
        line for line in done.stderr.splitlines() if not line.startswith(("! Environment check", "Environment checks:"))
    )


@pytest.fixture
def command(
    small_model: Path, tmp_path: Path, preloaded_aitrain: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[IllCommand]:
    (tmp_path / "notes").mkdir()
    monkeypatch.setenv("NOTES", str(tmp_path / "notes"))
    command = IllCommand(small_model, tmp_path, str(preloaded_aitrain / "aitrain"))
    yield command
    assert command.left() == []


# -- a run that survives


def check_records(command: IllCommand, shares: dict[str, float]) -> None:
    """Every episode has come to what was to befall it, and the metrics say the same."""
    found: Counter[str] = Counter()
    for record in command.records():
        illness = illness_of(record["case_idx"], record["completion"], shares)
        found[illness or "none"] += 1
        if illness is None:
            assert record["error"] is None
            assert record["score"] is not None
            continue
        assert record["error"]["kind"] == KINDS[illness], record
        assert record["error"]["place"] == "score_episode"
        assert LINES.get(illness, "") in record["error"]["message"]
        assert record["stop"] == ("env_timeout" if KINDS[illness] == "timed_out" else "env_error")
        assert (record["score"], record["advantage"]) == (None, 0.0)
    assert set(found) == {"none", *shares}
    for kind in {KINDS[illness] for illness in shares}:
        share = sum(shares[illness] for illness in shares if KINDS[illness] == kind)
        count = sum(found[illness] for illness in shares if KINDS[illness] == kind)
        measured = sum(line[f"failed/{kind}"] for line in command.metrics) / len(command.metrics)
        assert measured == pytest.approx(count / found.total())
        assert share / 3 < measured < share * 3


@pytest.mark.slow
def test_a_run_survives_an_environment_that_raises_hangs_and_crashes_in_processes(command: IllCommand) -> None:
    done = command.play(
        "Ill", "--rl-env-isolation=process", "--rl-env-timeout=3", "--rl-env-workers=16", "--max-steps=10",
        "--rl-prompts-per-step=3", "--rl-num-generations=8", "--batch-size=24", "--rl-max-new-tokens=4", "--lr=3e-3",
        notes=str(command.folder / "notes"),
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    assert len(command.records()) == 10 * 24
    check_records(command, SHARES)
    for kind in set(KINDS.values()):
        assert (
            notes_of_training(done).count({"not_finite": "returned nan", "timed_out": "timed out"}.get(kind, kind)) == 1
        )
    assert len(command.pids()) > sum(
        record["error"]["kind"] == "crashed" for record in command.records() if record["error"]
    )
    assert not [pid for pid in command.pids() if Path(f"/proc/{pid}").exists()]


# -- one episode of each group


ANSWERS = ["abcz", "ayzz", "ill", "zzzz"]
SCORES = {"abcz": 0.75, "ayzz": 0.25, "zzzz": 0.0}


def raises(error: BaseException) -> Callable[[], Any]:
    def fall_ill() -> Any:
        raise error

    return fall_ill


def later(error: BaseException) -> Callable[[], Any]:
    async def fall_ill() -> Any:
        raise error

    return fall_ill


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("cannot be said")


ILLNESSES: dict[str, tuple[Callable[[], Any], str | None, str]] = {
    "raises": (raises(KeyError("no such case")), "raised", "KeyError: 'no such case'"),
    "raises_what_cannot_be_said": (raises(Unspeakable()), "raised", "Unspeakable"),
    "raises_later": (later(ValueError("no such word")), "raised", "ValueError: no such word"),
    "has_no_server": (raises(ConnectionRefusedError("no server")), "server", "ConnectionRefusedError: no server"),
    "exits": (raises(SystemExit(1)), "raised", "SystemExit: 1"),
    "interrupts": (raises(KeyboardInterrupt()), "raised", "KeyboardInterrupt"),
    "none": (lambda: None, None, ""),
    "none_with_metrics": (lambda: {"score": None, "words": 3}, None, ""),
    "nan": (lambda: float("nan"), "not_finite", "returned nan"),
    "inf": (lambda: math.inf, "not_finite", "returned inf"),
    "minus_inf": (lambda: -math.inf, "not_finite", "returned -inf"),
    "huge": (lambda: 1e30, "out_of_range", "returned 1e+30"),
    "huge_int": (lambda: 10**400, "not_finite", "returned inf"),
    "negative": (lambda: -0.5, "out_of_range", "returned -0.5"),
    "text": (lambda: "0.5", "wrong_type", "returned '0.5' (str)"),
    "list": (lambda: [0.5, 0.5], "wrong_type", "returned [0.5, 0.5] (list)"),
    "tuple": (lambda: (0.5, {}), "wrong_type", "returned (0.5, {}) (tuple)"),
    "tensor": (lambda: torch.zeros(3), "wrong_type", "(Tensor)"),
    "dict": (lambda: {"points": 1}, "wrong_type", 'a dict needs a "score"'),
    "object": (lambda: Result, "wrong_type", "(type)"),
}  # fmt: skip
"""What happens in one episode of each group, which kind of failure that is, and what is said of it."""


class Plain:
    """`score_episode`; each case has its illness."""

    illnesses = tuple(ILLNESSES)
    place = "score_episode"

    def build_dataset(self) -> list[dict[str, Any]]:
        return [{"prompt": f"say {name}: ", "illness": name} for name in self.illnesses]

    def build_eval_dataset(self) -> list[dict[str, Any]]:
        return [{"prompt": "say it", "illness": ""}]

    def score_episode(self, completion: str, illness: str) -> Any:
        return ILLNESSES[illness][0]() if illness and completion == "ill" else SCORES.get(completion, 0.0)


class Object(Plain):
    """`start` and `score`."""

    illnesses, place = ("raises", "exits", "interrupts", "none", "nan", "text", "raises_later"), "score"
    score_episode = None  # type: ignore[assignment]

    def start(self, illness: str) -> Object:
        mine = Object()
        mine.illness = illness
        return mine

    def step(self, reply: str) -> None:
        self.reply = reply

    def score(self) -> Any:
        return Plain.score_episode(self, self.reply, self.illness)


def answer_with(patch: pytest.MonkeyPatch, answer: Callable[[int, str], str]) -> None:
    """Let the policy answer what this makes of a prompt's position and text."""
    patch.setattr(HFEngine, "sample", scripted(lambda position, text: answer(position, text) + "<|im_end|>"))


@pytest.mark.parametrize(
    ("environment", "isolation"),
    [(Plain, "thread"), (Object, "process")],
)
def test_an_episode_that_has_no_score_is_left_out_of_its_group_and_counted_by_kind(
    environment: type[Plain], isolation: str, train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two steps, in which one episode of each group has its case's illness."""
    answer_with(monkeypatch, lambda position, _: ANSWERS[position % 4])
    count = len(environment.illnesses)
    result = train(
        environment(), max_steps=2, eval_cases=0, batch_size=4 * count, rl_prompts_per_step=count,
        rl_env_isolation=isolation, rl_env_timeout=20.0, rl_check=False,
    )  # fmt: skip

    assert len(rollouts(result)) == 2 * 4 * count
    for number, illness in enumerate(environment.illnesses):
        records = [record for record in rollouts(result) if record["case_idx"] == number]
        assert [record["completion"] for record in records] == ANSWERS * 2
        check_group(records, *ILLNESSES[illness][1:], environment.place)
    kinds = Counter(ILLNESSES[illness][1] for illness in environment.illnesses)
    for line in result.history:
        failed = {name.removeprefix("failed/"): share for name, share in line.items() if name.startswith("failed/")}
        assert failed == pytest.approx({kind: kinds[kind] / count / 4 for kind in failed})
        assert sum(failed.values()) == pytest.approx(line["stopped/env_error"])
        assert line["unscored"] == 0.25
        assert line["reward"] == pytest.approx(sum(SCORES.values()) / 3)


def check_group(records: list[dict[str, Any]], kind: str | None, told: str, place: str) -> None:
    """The third episode of each group has no score; the others' advantages are those of a group of three."""
    for record in records[2::4]:
        assert (record["score"], record["advantage"]) == (None, 0.0)
        assert record["stop"] == ("env_error" if kind else "done")
        if kind is None:
            assert record["error"] is None
            continue
        assert (record["error"]["kind"], record["error"]["place"]) == (kind, place)
        assert told in record["error"]["message"]
    others = [record for record in records if record["completion"] != "ill"]
    scores = torch.tensor(list(SCORES.values()))
    advantages = (scores - scores.mean()) / (scores.std() + 1e-4)
    for record, score, advantage in zip(others, [*SCORES.values()] * 2, [*advantages.tolist()] * 2, strict=True):
        assert (record["score"], record["error"], record["stop"]) == (score, None, "done")
        assert record["advantage"] == pytest.approx(advantage, abs=1e-5)


# -- nothing works any more


@pytest.mark.slow
def test_a_run_of_two_processes_whose_environment_has_stopped_working_ends_after_three_batches_and_is_saved(
    command: IllCommand,
) -> None:
    done = command.play(
        "Gone", "--max-steps=20", "--rl-max-new-tokens=4", "--num-processes=2", "--rl-env-isolation=process"
    )
    check_end(command, done)
    assert [line["failed/raised"] for line in command.metrics] == [1.0, 1.0]


def check_end(command: IllCommand, done: subprocess.CompletedProcess[str]) -> None:
    """The run has failed as its environment has stopped working, says so once, and is saved."""
    assert done.returncode == 3, done.stderr
    assert "The environment failed on every episode of 3 batches in a row" in done.stderr
    notes, _, error = notes_of_training(done).partition("aitrain: ")
    assert [text.count("RuntimeError: the board is gone") for text in (notes, error)] == [1, 1]
    assert 'raise RuntimeError("the board is gone")' in done.stderr
    assert "Traceback" not in done.stderr
    status, result = (
        json.loads((command.folder / "run" / name).read_text()) for name in ("status.json", "result.json")
    )
    assert (status["status"], result["status"]) == ("failed", "failed")
    assert "RuntimeError: the board is gone" in status["reason"]  # which the page of the run shows
    assert command.is_saved()


def test_what_was_learned_before_the_environment_stopped_working_is_saved(command: IllCommand) -> None:
    done = command.play("Gone", "--max-steps=20", "--rl-max-new-tokens=4", calls=4 * 8)

    check_end(command, done)
    assert json.loads((command.folder / "run" / "result.json").read_text())["steps"] == 6
    assert [line["failed/raised"] for line in command.metrics] == [0.0] * 4 + [1.0] * 2


def test_an_environment_that_fails_on_the_held_out_cases_is_refused_before_training(command: IllCommand) -> None:
    done = command.play("Gone", "--max-steps=20", "--rl-max-new-tokens=4", held_out=False)

    assert done.returncode == 3, done.stderr
    assert "The environment failed on all 1 held-out cases (raised)" in done.stderr
    assert 'raise RuntimeError("the board is gone")' in done.stderr
    assert not (command.folder / "run").exists()


@pytest.fixture
def evaluations(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The evaluations so far, with the one under way."""
    names: list[str] = []

    def counted(rollouts: Any, plan: Any, phase: EvalPhase, write: Any) -> EvalScores:
        names.append(phase.name)
        return evaluate(rollouts, plan, phase, write)

    monkeypatch.setattr(held_out_scoring, "evaluate", counted)
    return names


class NoJudge(Gone):
    """Works in training, and for the held-out case except in some evaluations."""

    def __init__(self, evaluations: list[str], without: Collection[str]) -> None:
        self.evaluations, self.without = evaluations, without

    def score_episode(self, completion: str, case_idx: int) -> float:
        if case_idx < 0 and self.evaluations[-1] in self.without:
            raise RuntimeError("no judge")
        return len(completion) % 5 / 5


def test_an_evaluation_without_scores_is_skipped_and_the_third_in_a_row_ends_the_run_with_a_checkpoint(
    train: Train, evaluations: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    options: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 1, "max_steps": 8, "project_name": "judged"}
    away = NoJudge(evaluations, {"step1", "step3", "step4", "step5"})
    with pytest.raises(EnvironmentFailed, match="3 evaluations in a row have no scores"):
        train(away, **options)

    said = capsys.readouterr().err
    assert said.count("is skipped: The environment failed on all 1 held-out cases (raised)") == 3
    assert "rl_env_retries" in said
    folder = RunFolder(tmp_path / "runs" / "judged")
    lines = list(read_lines(folder.metrics))
    assert [line["step"] for line in lines if "reward" in line] == [1, 2, 3, 4, 5]
    assert [line["step"] for line in lines if "eval_score" in line] == [2]
    assert [step_of(one) for one in checkpoints_of(folder)] == [5]

    result = train(NoJudge(evaluations, ()), **options, resume_from_checkpoint="auto")
    assert (result.steps, result.status) == (8, "finished")
    assert evaluations[-3:] == ["step6", "step7", "after"]


def test_a_run_whose_last_evaluation_has_no_scores_is_finished(train: Train, evaluations: list[str]) -> None:
    result = train(NoJudge(evaluations, {"after"}), max_steps=1, eval_strategy="no")

    assert (result.status, result.steps, result.score_after, result.verdict) == ("finished", 1, None, None)
    assert (result.model / "model.safetensors").exists()


@pytest.mark.slow
def test_a_run_whose_calls_hang_in_threads_ends_with_the_advice_to_use_processes_and_is_saved(
    command: IllCommand,
) -> None:
    done = command.play(
        "Hung", "--max-steps=20", "--rl-max-new-tokens=4", "--rl-env-timeout=0.5", "--rl-prompts-per-step=6",
        "--rl-num-generations=8", "--batch-size=48", "--rl-max-failed=1", "--no-rl-check",
    )  # fmt: skip

    assert done.returncode == 3, done.stderr
    assert done.stderr.count("A call to the environment hangs: its thread was abandoned") == 1
    assert "96 calls to the environment hang" in done.stderr
    assert "ill.py, line " in done.stderr.partition("96 calls")[2]
    assert "in score_episode: time.sleep(3600)  # for ever" in done.stderr.partition("96 calls")[2]
    assert "use --rl-env-isolation process" in done.stderr
    assert "Traceback" not in done.stderr
    assert json.loads((command.folder / "run" / "result.json").read_text())["status"] == "failed"
    assert command.is_saved()


# -- tools


OVER = threading.Event()
"""Set after a test, so that none of its threads runs on."""


@pytest.fixture
def nothing_endless() -> Iterator[None]:
    OVER.clear()
    yield
    OVER.set()


class Workshop:
    """One tool works, one is broken, one never comes back; the prompt says which to use."""

    concurrent = True

    def build_dataset(self) -> list[dict[str, Any]]:
        return [{"prompt": [{"role": "user", "content": tool}]} for tool in ("works", "wrong", "broken", "endless")]

    def build_eval_dataset(self) -> list[dict[str, Any]]:
        return [{**self.build_dataset()[0], "case_idx": -1}]

    def get_tools(self) -> list[Any]:
        return [self.works, self.broken, self.endless]

    def works(self, size: int) -> int:
        """Saw.

        Args:
            size: How long.
        """
        return size + 1

    def broken(self) -> None:
        """Drill."""
        raise OSError("no power")  # the bug

    def endless(self) -> None:
        """Sand."""
        while not OVER.is_set():
            time.sleep(0.01)

    def score_episode(self, text: str) -> float:
        return float(text == "done 6")


CALLS = {
    "works": '{"name": "works", "arguments": {"size": 5}}',
    "wrong": '{"name": "works", "arguments": {"size": "long"}}',
    "broken": '{"name": "broken", "arguments": {}}',
    "endless": '{"name": "endless", "arguments": {}}',
}


def use_the_tool(_: int, given: str) -> str:
    """Call the tool that the prompt names; then say what it said."""
    _, *said = given.split("<|im_start|>tool\n")
    if said:
        return "done " + said[0].partition("<|im_end|>")[0]
    asked = given.split("<|im_start|>user\n")[1].partition("<|im_end|>")[0]
    return f"<tool_call>\n{CALLS[asked]}\n</tool_call>"


@pytest.mark.usefixtures("nothing_endless")
@pytest.mark.parametrize("isolation", ["thread", pytest.param("process", marks=pytest.mark.slow)])
def test_a_tool_that_fails_is_the_environments_failure_and_a_wrong_call_is_the_models(
    train: Train, monkeypatch: pytest.MonkeyPatch, isolation: str
) -> None:
    answer_with(monkeypatch, use_the_tool)
    result = train(
        Workshop(), max_steps=1, rl_prompts_per_step=4, batch_size=8, rl_num_generations=2, rl_max_new_tokens=200,
        eval_cases=0, rl_check=False, rl_env_timeout=3.0, rl_env_isolation=isolation,
    )  # fmt: skip

    by_case: dict[int, list[dict[str, Any]]] = {}
    for record in rollouts(result):
        by_case.setdefault(record["case_idx"], []).append(record)
    works, wrong, broken, endless = (by_case[number] for number in range(4))
    for record in works:
        assert (record["score"], record["error"], record["stop"]) == (1.0, None, "done")
    for record in wrong:
        assert (record["score"], record["error"], record["stop"]) == (0.0, None, "done")
        assert record["messages"][2]["content"].startswith("error: works:")
    for record in broken:
        assert (record["score"], record["stop"], record["error"]["kind"]) == (None, "env_error", "raised")
        assert record["error"]["place"] == "the tool broken"
        assert 'raise OSError("no power")  # the bug' in record["error"]["message"]
    for record in endless:
        assert (record["score"], record["stop"], record["error"]["kind"]) == (None, "env_timeout", "timed_out")
        assert record["error"]["place"] == "the tool endless"
        assert "time.sleep(0.01)" in record["error"]["message"]
    (line,) = result.history
    assert (line["failed/raised"], line["failed/timed_out"], line["unscored"]) == (0.25, 0.25, 0.5)
    assert (line["tools/calls"], line["tools/wrong_calls"]) == (0.5, 0.25)


# -- what it prints


@pytest.mark.parametrize("isolation", ["thread", pytest.param("process", marks=pytest.mark.slow)])
def test_what_the_environment_prints_is_in_the_log_and_not_on_the_screen(command: IllCommand, isolation: str) -> None:
    done = command.play("Loud", "--max-steps=2", "--rl-max-new-tokens=100", f"--rl-env-isolation={isolation}")

    assert done.returncode == 0, done.stderr
    assert "said by" not in done.stdout + done.stderr
    log = (command.folder / "run" / "train.log").read_text()
    places = (
        "the module", "__init__", "build_dataset", "start", "get_tools", "the tool", "a program", "step", "score",
        "close",
    )  # fmt: skip
    assert [place for place in places if f"said by {place}" not in log] == []
    assert "said by a program to stderr" in log
    assert log.count("said by the tool") == len(list(read_lines(command.folder / "run" / "rollouts" / "rank0.jsonl")))
