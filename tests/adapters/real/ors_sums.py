"""A server of the Open Reward Standard, made with the openreward package: sums."""

from __future__ import annotations

from typing import Any

from openreward.environments import Environment, Server, TextBlock, ToolOutput, tool
from pydantic import BaseModel
from serving import serve


class Answer(BaseModel):
    value: int


class Sums(Environment):
    @classmethod
    def list_splits(cls) -> list[str]:
        return ["train", "test"]

    @classmethod
    def list_tasks(cls, split: str) -> list[dict[str, Any]]:
        return [{"a": number, "b": 1} for number in range(12)]

    def get_prompt(self) -> list[TextBlock]:
        return [TextBlock(text=f"What is {self.task_spec['a']} + {self.task_spec['b']}?")]

    @tool
    def submit(self, params: Answer) -> ToolOutput:
        """Say the sum."""
        reward = float(params.value == self.task_spec["a"] + self.task_spec["b"])
        return ToolOutput(blocks=[TextBlock(text="thanks")], reward=reward, finished=True)

    @tool
    def hint(self) -> ToolOutput:
        """Get a hint."""
        return ToolOutput(blocks=[TextBlock(text="h" * 9000)])


if __name__ == "__main__":
    serve(Server([Sums]).app)
