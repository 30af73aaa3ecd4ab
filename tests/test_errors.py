"""What an error of a library becomes."""

from __future__ import annotations

from aitrain.errors import RunFailed, to_aitrain_error


def test_a_full_disk_is_told_as_such() -> None:
    error = to_aitrain_error(OSError(28, "No space left on device", "x.bin"))
    assert isinstance(error, RunFailed)
    assert str(error).startswith("Cannot write x.bin: No space left on device\n")
