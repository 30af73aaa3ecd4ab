"""Says of a file that does not exist where it was looked for, and where one of its name is."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from aitrain.errors import did_you_mean

DEPTH, MOST_ENTRIES = 3, 5000
"""Levels below the working directory in which a file is looked for by its name, and directory entries looked at."""


def no_file(place: str | Path) -> str:
    """`there is no file env.py (looked from FOLDER).` and, if there is one, `There is tasks/env.py.`"""
    file = Path(os.path.expanduser(place))
    near = did_you_mean(file.name, [other.name for other in file.parent.glob("*" + file.suffix) if other.is_file()])
    return f"there is no file {place} (looked from {Path.cwd()}).{there_is(file.name) or near}"


def there_is(name: str) -> str:
    """`There is tasks/env.py.` on a line of its own, for the files of a name below the working directory."""
    found = list(islice(_files_named(name), 2))
    return f"\nThere is {' and '.join(found)}." if found else ""


def _files_named(name: str) -> Iterator[str]:
    """Paths of the files of a name below the working directory, which may be large."""
    seen = 0
    for folder, folders, files in os.walk("."):
        seen += len(folders) + len(files)
        if name in files:
            yield os.path.relpath(os.path.join(folder, name))
        is_deep = folder.count(os.sep) >= DEPTH or seen > MOST_ENTRIES
        folders[:] = [] if is_deep else [one for one in sorted(folders) if not one.startswith((".", "__", "runs"))]
