"""The errors are one tree, which errors.py lists."""

from __future__ import annotations

import ast
from importlib import import_module
from pathlib import Path

from aitrain import errors
from aitrain.errors import AitrainError, CannotWriteError, Interrupted, RunFailed, to_aitrain_error

PACKAGE = Path(errors.__file__).parent


def public_exceptions() -> dict[str, str]:
    """Each public class of the package that inherits from an exception, with its module."""
    found = {}
    for file in sorted(PACKAGE.rglob("*.py")):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            bases = [ast.unparse(base) for base in node.bases] if isinstance(node, ast.ClassDef) else []
            if any(base.endswith(("Error", "Exception", "Failed", "Interrupted")) for base in bases):
                module = ".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts)
                found[node.name] = module  # type: ignore[attr-defined]
    del found["TrainingOver"]  # no error: the way out of a training that has reached its end already
    return {name: module for name, module in found.items() if not name.startswith("_")}


def test_every_public_error_is_listed_in_errors_and_belongs_to_the_one_family() -> None:
    listed = str(errors.__doc__)
    for name, module in public_exceptions().items():
        assert f" {name} " in listed, f"errors.py does not list {name}"
        assert issubclass(getattr(import_module(module), name), AitrainError)


def test_every_error_says_by_its_name_that_it_is_one() -> None:
    """The last two tell the user's code, or the user, that something was cut short."""
    endings = ("Error", "Failed", "Interrupted", "EpisodeTruncated")
    assert all(name.endswith(endings) for name in public_exceptions())


def test_an_error_of_a_library_becomes_one_short_message() -> None:
    assert str(to_aitrain_error(ValueError("a\n b"))) == "Training failed: ValueError: a b"
    assert isinstance(to_aitrain_error(KeyboardInterrupt()), Interrupted)
    known = CannotWriteError("full")
    assert to_aitrain_error(known) is known


def test_a_full_disk_is_told_as_such() -> None:
    error = to_aitrain_error(OSError(28, "No space left on device", "x.bin"))
    assert isinstance(error, RunFailed)
    assert str(error).startswith("Cannot write x.bin: No space left on device\n")
