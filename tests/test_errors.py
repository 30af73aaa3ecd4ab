"""What an error of a library becomes."""

from __future__ import annotations

from aitrain.errors import CannotWriteError, Interrupted, RunFailed, to_aitrain_error


def test_an_error_of_a_library_becomes_one_short_message() -> None:
    assert str(to_aitrain_error(ValueError("a\n b"))) == "Training failed: ValueError: a b"
    assert isinstance(to_aitrain_error(KeyboardInterrupt()), Interrupted)
    known = CannotWriteError("full")
    assert to_aitrain_error(known) is known


def test_a_full_disk_is_told_as_such() -> None:
    error = to_aitrain_error(OSError(28, "No space left on device", "x.bin"))
    assert isinstance(error, RunFailed)
    assert str(error).startswith("Cannot write x.bin: No space left on device\n")
