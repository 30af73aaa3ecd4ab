"""Answers of the policy as actions of an OpenEnv environment, and its observations as text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from aitrain.environment.adapters.settings import JsonMapping, JsonObject
from aitrain.errors import AitrainError

NOT_SHOWN = ("done", "reward", "metadata")
"""Fields of every action or observation, which are not the policy's."""


class ActionRefusedError(AitrainError):
    """The server does not accept an answer as an action; the message becomes the observation of the policy."""


@dataclass(frozen=True)
class OpenEnvText:
    """How actions are read and observations are shown."""

    action: JsonMapping
    """The JSON schema of actions."""
    field: str | None = None
    """The field that gets the policy's answer; None: the only required one, if there is one."""
    shown: Sequence[str] | None = None
    """Fields of observations that are shown; None: all."""

    @property
    def has_tools(self) -> bool:
        """Whether the actions are calls of MCP tools."""
        return {"tool_name", "arguments"} <= set(self.action["properties"])

    @property
    def fields(self) -> JsonObject:
        """Schemas of the fields that the policy sets."""
        return {name: schema for name, schema in self.action["properties"].items() if name not in NOT_SHOWN}

    @property
    def text_field(self) -> str | None:
        """The field that gets the policy's answer; None if the answer is the JSON object of an action."""
        required = [name for name in self.action.get("required", []) if name in self.fields]
        return self.field or (required[0] if len(required) == 1 else None)

    def action_of(self, reply: str) -> JsonObject:
        """The action that an answer is.

        Raises:
            ActionRefusedError: it holds no JSON object, where one is needed.
        """
        name = self.text_field
        if name is None:
            action = _json_object(reply)
            if not action:
                raise ActionRefusedError(f"answer with a JSON object with the fields {', '.join(self.fields)}")
            return action
        if self.fields.get(name, {}).get("type") == "string":
            return {name: reply}
        try:
            return {name: json.loads(reply)}
        except ValueError:
            return {name: reply.strip()}

    def text_of(self, observation: JsonMapping) -> str:
        """What the policy sees: the value of the only field, or all fields as JSON."""
        names = self.shown or [name for name in observation if name not in NOT_SHOWN]
        values = {name: observation.get(name) for name in names}
        value = values[names[0]] if len(names) == 1 else values
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _json_object(reply: str) -> JsonObject:
    """The JSON object that begins at the first brace; empty if there is none."""
    start = reply.find("{")
    try:
        return dict(json.JSONDecoder().raw_decode(reply[start:])[0]) if start >= 0 else {}
    except ValueError:
        return {}
