"""A judge behind a URL: gets an answer as JSON, and returns its score."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from aitrain.environment.judges.model_judge import JudgeServer, is_offline


class RemoteJudge(JudgeServer, frozen=True):
    """Posts an answer, and takes a number or an object with `score` for its score; docs/judges.md has the fields."""

    key_name: str = "AITRAIN_JUDGE_KEY"
    """Environment variable that holds the server's key, which is sent if it is set."""

    async def __call__(self, text: str, case: Mapping[str, Any], **episode: Any) -> Any:
        """The score, as the server returns it.

        Raises:
            CallFailed: the server cannot be reached, or refuses the request.
        """
        if is_offline():
            return None
        asked = {name: episode.get(name) for name in ("prompt", "messages", "case_idx")}
        fields = {**asked, "response": text, "label": case.get("ground_truth"), "row": dict(case)}
        fields["extra_info"] = case.get("extra_info") or {}
        return await self.post("", json.loads(json.dumps(fields, default=str)))
