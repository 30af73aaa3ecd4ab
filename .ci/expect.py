"""Ends with an error unless the result of a demo is what the README promises."""

import json
import sys

result = json.load(open(sys.argv[1]))
assert result["status"] == "finished", result
assert result["score_before"] <= 0.45 and result["score_after"] >= 0.85, result
