"""Versions of installed libraries and conflicts between them, read from metadata without imports."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from aitrain.packages import installed

if TYPE_CHECKING:
    from packaging.specifiers import SpecifierSet


@dataclass(frozen=True)
class VersionConflict:
    """A requirement of a library that is missing or installed in another version."""

    library: str
    needed: SpecifierSet
    version: str | None

    def __str__(self) -> str:
        """`tokenizers>=0.22,<0.23, and 0.24.1 is installed: pip install ...`; without advice for local versions."""
        requirement = self.library + format_specifier(self.needed)
        state = "it is not installed" if self.version is None else f"{self.version} is installed"
        return f"{requirement}, and {state}" + ("" if "+" in requirement else f': pip install "{requirement}"')


def version_of(library: str) -> str | None:
    """Installed version of a distribution; None if it is not installed."""
    try:
        found = metadata.distribution(library)
    except metadata.PackageNotFoundError:
        return None
    header = (found.read_text("METADATA") or "").partition("\n\n")[0]
    line = re.search(r"^Version: *(\S+)", header, re.MULTILINE)  # `found.version` would parse the whole file
    return line[1] if line else found.version


def requirements_of(library: str, extra: str = "") -> dict[str, SpecifierSet]:
    """Requirements of an installed library that apply to this machine, by name; with those of an extra."""
    from packaging.requirements import Requirement  # comes with transformers and accelerate; only `doctor` uses it
    from packaging.utils import canonicalize_name

    try:
        lines = metadata.requires(library) or []
    except metadata.PackageNotFoundError:
        return {}
    needs: dict[str, SpecifierSet] = {}
    for requirement in map(Requirement, lines):
        if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
            name = canonicalize_name(requirement.name)
            needs[name] = requirement.specifier & needs[name] if name in needs else requirement.specifier
    return needs


def version_conflicts(library: str) -> list[VersionConflict]:
    """Requirements of an installed library that are not met."""
    found = [VersionConflict(name, needed, version_of(name)) for name, needed in requirements_of(library).items()]
    return [each for each in found if each.version is None or not is_compatible(each.version, each.needed)]


def is_compatible(version: str, needed: SpecifierSet) -> bool:
    """Whether a version meets a specifier; pre-releases may."""
    return needed.contains(version, prereleases=True)


def format_specifier(needed: SpecifierSet) -> str:
    """Text such as `>=5.17,<5.18`, with the lower bound first."""
    return ",".join(sorted(map(str, needed), reverse=True))


def torch_build() -> tuple[str, str] | None:
    """What torch was built for according to its version.py, `("cuda", "13.0")` or `("cpu", "")`; None if unknown."""
    found = installed("torch")
    file = Path(found.origin).with_name("version.py") if found and found.origin else None
    if file is None or not file.is_file():
        return None
    values = _constants(ast.parse(file.read_text(encoding="utf-8", errors="replace")).body)
    if "cuda" not in values:
        return None
    return next(((name, values[name]) for name in ("cuda", "hip", "xpu") if values.get(name)), ("cpu", ""))


def _constants(body: Iterable[ast.stmt]) -> dict[str, str]:
    """Values of assignments such as `cuda: Optional[str] = None` and `cuda = "13.0"`; "" for None."""
    values = {}
    for node in body:
        if not isinstance(node, ast.Assign | ast.AnnAssign):
            continue
        target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
        if isinstance(target, ast.Name) and isinstance(node.value, ast.Constant):
            values[target.id] = str(node.value.value or "")
    return values
