"""The job of `aitrain data smollm2`: `python -m aitrain.jobs.convert_smollm2 REQUEST.json`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from aitrain.errors import AitrainError
from aitrain.training.smollm2 import make_smollm2
from aitrain.ui.error_line import show_error


def main() -> int:
    """Make the model in the request's folder, and print where it is."""
    request = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    folder, as_json = Path(request["folder"]), bool(request["as_json"])
    try:
        make_smollm2(folder)
    except AitrainError as error:
        return show_error(str(error), error.exit_code, as_json)
    print(json.dumps({"folder": str(folder)}) if as_json else folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
