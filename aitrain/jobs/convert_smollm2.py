"""The job of `aitrain data smollm2`: `python -m aitrain.jobs.convert_smollm2 REQUEST.json`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from aitrain.errors import AitrainError
from aitrain.training.smollm2 import make_smollm2


def main() -> int:
    """Make the model in the request's folder, and print where it is."""
    folder = Path(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))["folder"])
    try:
        make_smollm2(folder)
    except AitrainError as error:
        print(f"aitrain: {error}", file=sys.stderr)
        return error.exit_code
    print(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
