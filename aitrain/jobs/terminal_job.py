"""A process that does something for a command, on its terminal: how its errors are shown, and how it ends. It is
started as `python -m aitrain.jobs.terminal_job MODULE FILE`, as Ctrl-C may come while the module imports torch."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable
from typing import NoReturn

from aitrain.errors import AitrainError, Interrupted, RunFailed
from aitrain.ui.error_line import show_error


def run_job(work: Callable[[], int], as_json: bool, what: str = "") -> int:
    """Do the work, and show its error; returns the exit code. An unexpected error is one line if the work has a name,
    such as `export`, else a traceback: it may be of the environment."""
    try:
        return work()
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
    """Run the module of the command line as `python -m MODULE FILE` would."""
    runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
    return 0


if __name__ == "__main__":
    sys.exit(run_job(run_module, as_json=False))
