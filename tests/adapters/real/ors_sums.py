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
        off_by = params.value - self.task_spec["a"] - self.task_spec["b"]
        if off_by == 99:
            raise ZeroDivisionError("division by zero")
        text, metadata = TextBlock(text="thanks"), {"off_by": off_by, "who": "x"}
        return ToolOutput(blocks=[text], reward=float(not off_by), finished=True, metadata=metadata)

    @tool
    def hint(self) -> ToolOutput:
        """Get a hint."""
        return ToolOutput(blocks=[TextBlock(text="two" + " " * 9000 + "words")])


if __name__ == "__main__":
    serve(Server([Sums]).app)
