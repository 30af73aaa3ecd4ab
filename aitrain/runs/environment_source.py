"""The environment's source as it ran, kept in the run folder's `environment/`, with its secrets masked."""

import ast
import hashlib
import inspect
import linecache
import os
import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from aitrain.packages import is_installed, version_of
from aitrain.redaction import source_without_secrets
from aitrain.runs.run_folder import write_text

MOST_FILES = 50
MOST_BYTES = 1_000_000
"""Maximum bytes of all files together; one for which there is no room is left out."""


SourceFile = dict[str, str]
"""`name`, the path of a file inside `environment/`, and its `text`."""


def files_of(environment: object) -> list[Path]:
    """The user's files that an adapter's environment is made of, its `source_files`; else the file of its class; and
    the files beside them that they import."""
    files = getattr(environment, "source_files", None)
    if files is None:
        with suppress(TypeError, OSError):  # a class of a notebook
            files = filter(Path.is_file, [Path(inspect.getfile(type(environment)))])
    return with_imported(files or ())


def with_imported(files: Iterable[Path]) -> list[Path]:
    """Files, and those in the same folders that they import, by any of their statements."""
    found = list(files)
    for file in found:  # which grows meanwhile
        if is_installed(str(file)) or len(found) >= MOST_FILES:
            continue
        named = [file.with_name(f"{name}.py") for name in sorted(_imported(file))]
        found += [path for path in named if path not in found and path.is_file() and not path.is_symlink()]
    return found


def _imported(file: Path) -> set[str]:
    """All parts of the names in the import statements of a file."""
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return set()
    names = set[str]()
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {one.name for one in node.names} | {getattr(node, "module", None) or ""}
    return {part for name in names for part in name.split(".")}


def source_facts(environment: object) -> dict[str, object]:
    """What environment.json says of the source: module, class, its first file, the SHA-256 of all, and for an adapter's
    environment the package that it comes from, with its version."""
    files, package = files_of(environment), getattr(environment, "source_package", None)
    is_of_adapter = hasattr(environment, "source_package")
    return {
        "module": None if is_of_adapter else type(environment).__module__,
        "class": type(environment).__qualname__,
        "file": str(files[0]) if files else None,
        "sha256": source_hash(files),
        "package": f"{package} {version_of(package)}" if package else None,
    }


def source_hash(files: Iterable[Path]) -> str | None:
    """SHA-256 of files, one after another; None without a file, or if one is gone."""
    try:
        texts = [file.read_bytes() for file in files]
    except OSError:
        return None
    return hashlib.sha256(b"".join(texts)).hexdigest() if texts else None


def keep_source(environment: object, folder: Path) -> None:
    """Write the environment's file, and those that it imports, into the folder, which is emptied first."""
    shutil.rmtree(folder, ignore_errors=True)
    for one in kept_files(environment):
        path = folder / one["name"]
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, one["text"], durable=False)


def kept_files(environment: object) -> list[SourceFile]:
    """The files of an environment that are kept, within the limits; of a served one, those that its server sends, and
    of a class of a notebook its cell."""
    of_server = getattr(environment, "served_source", None)  # of a ServedEnvironment, which takes long to import
    if of_server is not None:
        return list(of_server())
    if files := files_of(environment):
        root = Path(os.path.commonpath([file.parent for file in files]))
        return _read(files, root.parent if (root / "__init__.py").is_file() else root)
    if getattr(environment, "source_files", None) is not None:
        return []
    kind = type(environment)
    functions = (value for value in vars(kind).values() if inspect.isfunction(value))
    cells = ("".join(linecache.getlines(function.__code__.co_filename)) for function in functions)
    text = source_without_secrets(next(filter(None, cells), ""))
    return [{"name": f"{kind.__name__}.py", "text": text}] if text else []


def read_source(folder: Path) -> list[SourceFile]:
    """The source that a run has kept; none of a folder that is a link."""
    return [] if folder.is_symlink() else _read(sorted(folder.rglob("*")), folder)


def _read(files: Iterable[Path], root: Path) -> list[SourceFile]:
    """Files within the limits, without links, by their paths below a folder."""
    kept: list[SourceFile] = []
    room = MOST_BYTES
    for path in files:
        try:
            size = path.stat().st_size
            if len(kept) < MOST_FILES and size <= room and path.is_file() and not path.is_symlink():
                text = path.read_text(encoding="utf-8", errors="replace")
                kept.append({"name": path.relative_to(root).as_posix(), "text": source_without_secrets(text)})
                room -= size
        except OSError:
            continue  # a file that cannot be read must not end the run
    return kept
