"""Ends with an error unless the result of a demo is what the README promises."""

import json
import sys
from pathlib import Path

result = json.loads(Path(sys.argv[1]).read_text())
assert result["status"] == "finished", result
assert result["score_before"] <= 0.45, result
assert result["score_after"] >= 0.85, result
