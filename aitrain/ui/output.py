"""What a command, or a process that does something for it, writes to its terminal: text of models and environments
without control characters, and its error; and how such a process ends.

An error is a line on standard error, or an event on standard output for programs. The process is started as `python -m
aitrain.ui.output MODULE FILE`, as Ctrl-C may come while MODULE imports torch.
"""

import importlib
import json
import os
import sys
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from aitrain.errors import AitrainError, Interrupted, RunFailed
from aitrain.events import Failed, encode
from aitrain.redaction import redact

HARMLESS = "\n\t\u200c\u200d"
"""Line ends, tabs, and the zero-width joiner and non-joiner, which some scripts and emojis need."""
INVISIBLE = ("Cc", "Cf", "Cs", "Zl", "Zp")
"""Unicode categories of characters that move the cursor, change the direction of text, or cannot be encoded."""


def escape_controls(text: str) -> str:
    r"""The text with control and invisible characters escaped: an escape becomes `\x1b`."""
    return "".join(
        character
        if character in HARMLESS or unicodedata.category(character) not in INVISIBLE
        else ascii(character)[1:-1]
        for character in text
    )


def show_error(message: str, code: int, as_json: bool = False) -> int:
    """Show the error of a command, without secrets; returns its exit code."""
    if as_json:
        sys.stdout.write(encode(Failed(message, code)))
    else:
        shown = escape_controls(redact(message))
        print(shown if message.startswith("Usage:") else f"aitrain: {shown}", file=sys.stderr)
    return code


def run_job(work: Callable[[], int | None], as_json: bool = False, what: str = "") -> int:
    """Do the work, and show its error; returns the exit code, 0 unless the work has one. An unexpected error is one
    line if the work has a name, such as `export`, else a traceback: it may be of the environment."""
    try:
        return work() or 0
    except KeyboardInterrupt:
        print("\naitrain: stopped", file=sys.stderr)
        return Interrupted.exit_code
    except AitrainError as error:
        return show_error(str(error), error.exit_code, as_json)
    except BrokenPipeError:  # `aitrain chat runs/sums < questions | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return RunFailed.exit_code
    except Exception as error:
        if not what:
            raise
        text = " ".join(str(error).split())[:300]
        return show_error(f"The {what} failed: {type(error).__name__}: {text}", RunFailed.exit_code, as_json)


def exit_now(code: int) -> NoReturn:
    """End the process also if a thread of the environment still runs."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def run_module() -> int:
    """Call `main` of the module with the request, JSON in the file; returns the exit code."""
    module, file = sys.argv[1:]
    request = json.loads(Path(file).read_text(encoding="utf-8"))
    return int(importlib.import_module(module).main(request))


if __name__ == "__main__":
    exit_now(run_job(run_module))
