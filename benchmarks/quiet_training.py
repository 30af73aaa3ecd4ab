"""Short runs on the CPU of this process, with what they print kept for the case that they fail."""

from __future__ import annotations

import contextlib
import io
import tempfile
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aitrain import Result

SETTINGS: dict[str, Any] = {
    "model": "tiny",
    "rl_kl_coef": 0.0,
    "eval_strategy": "no",
    "save_strategy": "no",
    "disable_gradient_checkpointing": True,
}


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """What is printed meanwhile comes out only when it ends with an error."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            yield
    except BaseException:
        print(said.getvalue()[-8000:])
        raise


def train(environment: Any, folder: str, **settings: Any) -> Result:
    """A run of `aitrain.train`, in a run folder of its own inside of `folder`."""
    import aitrain

    where = tempfile.mkdtemp(dir=folder)
    with quietly():
        return aitrain.train(
            aitrain.TrainConfig(**(SETTINGS | {"output_dir": where} | settings)), environment=environment
        )
