"""The result of the state analysis: what calls write, and how accesses to shared state are classified."""

from __future__ import annotations

from dataclasses import dataclass, field

from aitrain.environment.abstract_values import EMPTY


@dataclass(frozen=True)
class WriteSite:
    """Location of one access in the user's code."""

    target: str
    """The state that is written, such as `self.case`."""
    function: str
    file: str
    line: int


@dataclass
class StateReport:
    """State that calls of an environment write, by name, each with the location of one write."""

    scratch: dict[str, WriteSite] = field(default_factory=dict)
    """Written by each call before that call reads it; calls need a copy of the object each."""
    carried: dict[str, WriteSite] = field(default_factory=dict)
    """A call may read what an earlier call wrote; calls must run one after another."""
    shared: set[str] = field(default_factory=set)
    """Safe for concurrent calls: logs, caches, lazily created values, and state guarded by a lock."""
    guarded: set[str] = field(default_factory=set)
    """The part of `shared` that is assigned, not only changed in place, under a lock."""
    unclear: WriteSite | None = None
    """The first place that the analysis could not follow; there may be more writes beyond it."""


@dataclass(frozen=True)
class StateAccess:
    """One read or write of shared state."""

    root: str
    kind: str
    """read (one item), look (at all of it), store, append, item (`x[key] = value`) or change (otherwise in place)."""
    place: WriteSite
    is_first: bool
    """Whether the call may access the state before it has stored its own value there."""
    is_locked: bool
    depends_on: frozenset[str] | None = None
    """What the value and the condition of the write depend on, apart from the item's key; None: the previous value."""


READS = ("read", "look")


def classify_accesses(accesses: list[StateAccess], unclear: WriteSite | None) -> StateReport:
    """Decide for each written root whether concurrent calls may share it."""
    report = StateReport(unclear=unclear)
    for root in dict.fromkeys(access.root for access in accesses if access.kind not in READS):
        _classify(root, accesses, report)
    return report


def _classify(root: str, every: list[StateAccess], report: StateReport) -> None:
    accesses = [access for access in every if access.root == root]
    writes = [access for access in accesses if access.kind not in READS]
    reads = [access for access in accesses if access.kind in READS]
    changes = [access for access in writes if access.kind != "store" and access.is_first]
    first_reads = [access for access in reads if access.is_first]
    place = (changes or writes)[0].place
    in_place = all(access.kind != "store" for access in writes)
    is_locked = all(access.is_locked for access in writes)
    above = [access.root[:-1] for access in every if access.root.endswith(".*")]
    is_read = bool(reads) or report.unclear is not None or root.startswith(tuple(above))
    if not changes and not first_reads and is_read:  # classes and modules cannot be copied per call
        is_own = root.startswith("self.") and root.count(".") == 1  # attributes of helpers are not copied
        (report.scratch if is_own else report.carried)[root] = place
    elif not is_read and not any(access.kind == "change" for access in changes):
        report.shared.add(root)  # a log
    elif is_locked and (in_place or all(read.is_locked for read in reads)):
        report.shared.add(root)
        report.guarded |= set() if in_place else {root}
    elif all(_is_cache(access, every) for access in writes) and not (
        any(access.kind == "item" for access in writes) and any(read.kind == "look" for read in reads)
    ):
        report.shared.add(root)
    else:
        report.carried[root] = place


def _is_cache(access: StateAccess, every: list[StateAccess], above: frozenset[str] = EMPTY) -> bool:
    """Whether every call writes the same value, so that their order does not matter."""
    if access.depends_on is None or not all(source.startswith("=") for source in access.depends_on):
        return False
    above |= {access.root}
    used = {source[1:] for source in access.depends_on}
    writes = [each for each in every if each.kind not in READS and each.root in used - {access.root}]
    return all(each.root not in above and _is_cache(each, every, above) for each in writes)
