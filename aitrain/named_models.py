"""Models that `--model` knows by a name of aitrain's own, and where they lie on this machine."""

from __future__ import annotations

import os
from pathlib import Path

from aitrain.packages import PACKAGE

TINY = "tiny"
"""The model that comes with aitrain."""
SMOLLM2 = "smollm2"
"""SmolLM2-135M-Instruct, which `aitrain data smollm2` makes from a package of pip's registry."""
NAMED_MODELS = (TINY, SMOLLM2)


def named_folder(name: str) -> Path | None:
    """Folder of a model with a name of aitrain's own, whether it exists or not; None for any other name."""
    if name == TINY:
        return PACKAGE / "tiny_model"
    return _cache() / SMOLLM2 if name == SMOLLM2 else None


def _cache() -> Path:
    """Folder of what aitrain keeps between runs (AITRAIN_CACHE)."""
    given = os.environ.get("AITRAIN_CACHE")
    return Path(given or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "aitrain")).expanduser()
