"""verifiers itself, 0.3 or 0.4: five steps of training each."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.adapters.real.conftest import Train, in_environment
from tests.conftest import write

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

def broken(completion):
    raise ValueError("no dictionary")

def load_environment():
    rows = Dataset.from_list([{"question": f"{a}+{a}", "answer": str(2 * a)} for a in range(16)])
    rubric = vf.Rubric(funcs=[exact, short, broken], weights=[1.0, 0.5, 0.0], parser=vf.Parser())
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
            asked = [vf.SystemMessage(content="Own."), vf.UserMessage(content=f"{n}+{n}=")]
            yield AdditionTask(AdditionData(prompt=asked, answer=2 * n), self.config.task)

__all__ = ["AdditionTaskset"]
"""


@pytest.mark.parametrize(
    ("rl_env", "flag"),
    [
        pytest.param("verifiers:tools_env", "--rl-env-isolation=thread", marks=in_environment("older")),
        pytest.param("verifiers:add-v1", "--num-processes=2", marks=in_environment("newest")),
    ],
)
def test_five_steps_of_training(rl_env: str, flag: str, here: Path, train: Train) -> None:
    write(here, {"tools_env.py": TOOLS_ENV, "add_v1.py": ADD_V1})
    records = train(rl_env, "--rl-max-new-tokens=16", flag, score_range="0,1.5", system="Add.")
    assert [message["content"] for message in records[0]["messages"] if message["role"] == "system"] == ["Add."]
    assert all("exact" in record["metrics"] and "broken" not in record["metrics"] for record in records)
