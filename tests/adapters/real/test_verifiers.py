"""verifiers itself, 0.3 or 0.4, and two published environments: five steps of training each."""

from __future__ import annotations

import json
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Run, write

MODES = {"processes": (), "threads": ("--rl-env-isolation", "thread"), "ranks": ("--num-processes", "2")}
SHORT = (
    "--max-steps", "5", "--rl-prompts-per-step", "2", "--rl-num-generations", "2", "--batch-size", "2",
    "--rl-max-new-tokens", "16", "--eval-cases", "2", "--project-name", "it",
)  # fmt: skip
LEGACY = {
    "verifiers:stardata.envs.constraint_gym:load_lipogram_env": {"score_range": "0,1"},
    "verifiers:sophistry-bench-sprint": {"score_range": "0,1", "size": 20, "passage_chars": 200},
    "verifiers:tools_env": {"score_range": "0,1.5"},
}
V1 = {"verifiers:add-v1": {"score_range": "0,1.5"}}
TOOLS_ENV = '''
import verifiers as vf
from datasets import Dataset

def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b

async def exact(completion, answer, parser):
    return float(parser.parse_answer(completion) == answer)

def short(completion):
    return max(0.0, 1 - len(completion[-1]["content"] or "") / 20)

def load_environment():
    rows = Dataset.from_list([{"question": f"{a}+{a}", "answer": str(2 * a)} for a in range(16)])
    rubric = vf.Rubric(funcs=[exact, short], weights=[1.0, 0.5], parser=vf.Parser())
    return vf.ToolEnv(tools=[add], dataset=rows, rubric=rubric, max_turns=3)
'''
ADD_V1 = """
import verifiers.v1 as vf

class AdditionData(vf.TaskData):
    answer: int

class AdditionTask(vf.Task[AdditionData]):
    @vf.reward(weight=1.0)
    async def exact(self, trace: vf.Trace) -> float:
        return float((trace.assistant_messages[-1].content or "").strip() == str(self.data.answer))

    @vf.reward(weight=0.5)
    async def short(self, trace: vf.Trace) -> float:
        return max(0.0, 1 - len(trace.assistant_messages[-1].content or "") / 20)

    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        return float(len(trace.assistant_messages[-1].content or ""))

class AdditionTaskset(vf.Taskset[AdditionTask, vf.TasksetConfig]):
    def load(self):
        for n in range(16):
            yield AdditionTask(AdditionData(prompt=f"{n}+{n}=", answer=2 * n), self.config.task)

__all__ = ["AdditionTaskset"]
"""


def installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


NEEDED = {"verifiers:stardata.envs.constraint_gym:load_lipogram_env": "staros-stardata"}
NEEDED["verifiers:sophistry-bench-sprint"] = "sophistry-bench-sprint"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("rl_env", "settings"), {**LEGACY, **V1}.items(), ids=[*LEGACY, *V1])
def test_five_steps_of_training(
    rl_env: str, settings: dict[str, Any], mode: str, small_model: Path, here: Path, aitrain_grpo: Run
) -> None:
    line = "0.3" if rl_env in LEGACY else "0.4"
    if not installed("verifiers").startswith(line) or not installed(NEEDED.get(rl_env, "verifiers")):
        pytest.skip(f"verifiers {line} or {rl_env} is not installed")
    write(here, {"tools_env.py": TOOLS_ENV, "add_v1.py": ADD_V1})
    named = ("--model", str(small_model), "--rl-env", rl_env, "--rl-env-config", json.dumps(settings))
    done = aitrain_grpo(*named, *SHORT, *MODES[mode])
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [json.loads(text) for text in (here / "runs/it/metrics.jsonl").read_text().splitlines()]
    assert len([line for line in lines if "reward" in line]) == 5
    assert all(not value for line in lines for name, value in line.items() if name.startswith("failed/"))
    assert any(name.startswith("env/") for line in lines for name in line)
