"""What a notebook shows of an error: frames of the user's own code, and cells by their number."""

import re
import sys
import traceback

from aitrain.packages import is_users_file

_KERNEL_FILE = re.compile(r"[^\s\"']*ipykernel_\d+[/\\]\d+\.py")


def is_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and getattr(ipython.get_ipython(), "kernel", None) is not None


def name_cells(text: str) -> str:
    """The text with `Cell In[3]` in place of the temporary file that the kernel names a cell by."""
    return _KERNEL_FILE.sub(lambda file: _cell(file[0]), text)


def _cell(file: str) -> str:
    try:
        named = sys.modules["IPython"].get_ipython().compile.format_code_name(file)
    except (KeyError, AttributeError):
        named = None
    return file if named is None else " ".join(named)


def users_lines(error: BaseException) -> list[str]:
    """The frames of an exception and of its causes that are the user's own code, from the outermost, as text."""
    lines: list[str] = []
    cause: BaseException | None = error
    while cause is not None:
        while isinstance(cause, BaseExceptionGroup):
            cause = cause.exceptions[0]
        for frame in traceback.extract_tb(cause.__traceback__):
            if is_users_file(frame.filename):
                lines.append(f"{name_cells(frame.filename)}, line {frame.lineno}, in {frame.name}\n    {frame.line}")
        cause = cause.__cause__
    return list(dict.fromkeys(lines))
