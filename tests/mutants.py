"""Plants single faults in the package and reports which of them the tests notice.

    python -m tests.mutants --seed 1 --count 60            the fast suite
    python -m tests.mutants --seed 1 --count 60 --slow     all tests

A mutant is a copy of the checkout in which one expression is changed: a comparison turned, a sign, a constant, or a
return value left out, in a room that computes or keeps results. The test files that name the changed module run first,
the rest of the suite only if none of them fails. The same seed and checkout give the same mutants.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
ROOMS = ("training", "runs", "rollout", "environment", "execution", "engines", "redaction.py", "batch.py")
"""Rooms of the package that compute scores, advantages, losses and intervals, or keep records and secrets."""
HANGS_AFTER = 1800.0
"""Seconds after which tests that have not ended are taken for tests that a mutant hangs."""
NEGATIONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.GtE, ast.GtE: ast.Lt, ast.Gt: ast.LtE, ast.LtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """One change of a file: the bytes between two offsets, and what replaces them."""

    file: Path
    line: int
    start: int
    end: int
    old: str
    new: str

    def __str__(self) -> str:
        return f"{self.file.relative_to(ROOT)}:{self.line}: {' '.join(self.old.split())} -> {self.new}"


def changed(node: ast.AST) -> ast.AST | None:
    """The node with the fault of its kind; None for a node that no fault is planted in."""
    match node:
        case ast.Compare(left=left, ops=[op], comparators=comparators):
            return ast.Compare(left, [NEGATIONS[type(op)]()], comparators)
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub() as op, right=right):
            return ast.BinOp(left, ast.Sub() if isinstance(op, ast.Add) else ast.Add(), right)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return operand
        case ast.Constant(value=bool() as value):
            return ast.Constant(not value)
        case ast.Constant(value=int() | float() as value):
            return ast.Constant(value + 1)
        case ast.Return(value=ast.expr() as value) if ast.unparse(value) != "None":
            return ast.Return(ast.Constant(None))
    return None


def mutants_of(file: Path) -> Iterator[Mutant]:
    """All mutants of a module."""
    source = file.read_bytes()
    begins = [0]
    for line in source.splitlines(keepends=True):
        begins.append(begins[-1] + len(line))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.expr, ast.stmt)) and (fault := changed(node)) is not None:
            assert node.end_lineno is not None
            assert node.end_col_offset is not None
            start, end = begins[node.lineno - 1] + node.col_offset, begins[node.end_lineno - 1] + node.end_col_offset
            old, new = source[start:end].decode(), ast.unparse(fault)
            if isinstance(node, ast.expr) and not _is_source_of(old, node):
                continue  # Python 3.11 has wrong positions for expressions in f-strings
            text = new if isinstance(node, ast.stmt) else f"({new})"
            yield Mutant(file, node.lineno, start, end, old, text)


def _is_source_of(text: str, node: ast.expr) -> bool:
    with suppress(SyntaxError):
        return ast.unparse(ast.parse(f"({text})", mode="eval")) == ast.unparse(node)
    return False


def sample(seed: int, count: int) -> list[Mutant]:
    """Mutants of all rooms, chosen by the seed."""
    places = [ROOT / "aitrain" / room for room in ROOMS]
    files = sorted(file for place in places for file in ([place] if place.is_file() else place.rglob("*.py")))
    return random.Random(seed).sample([mutant for file in files for mutant in mutants_of(file)], count)


def test_files_of(file: Path, tests: Path) -> list[str]:
    """The test files that name a module of the package."""
    module = ".".join(file.relative_to(ROOT).with_suffix("").parts)
    package, _, name = module.rpartition(".")
    names = (module, f"from {package} import {name}")
    found = (path for path in sorted(tests.rglob("test_*.py")) if any(each in path.read_text() for each in names))
    return [str(path.relative_to(tests.parent)) for path in found]


def is_noticed(mutant: Mutant, checkout: Path, marks: list[str]) -> bool:
    """Whether a test fails in a checkout with the mutant."""
    file = checkout / mutant.file.relative_to(ROOT)
    before = file.read_bytes()
    file.write_bytes(before[: mutant.start] + mutant.new.encode() + before[mutant.end :])
    try:
        near = test_files_of(mutant.file, checkout / "tests")
        return any(_fails([*marks, *files], checkout) for files in (near, ["tests"]) if files)
    finally:
        file.write_bytes(before)


def _fails(arguments: list[str], checkout: Path) -> bool:
    options = ["-x", "-q", "-n", "3", "--dist", "loadfile", "--no-loadscope-reorder", "-p", "no:cacheprovider"]
    variables = {**os.environ, "PYTHONPATH": str(checkout), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", *options, *arguments]
    tests = subprocess.Popen(command, cwd=checkout, env=variables, stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        return tests.wait(HANGS_AFTER) not in (0, 5)  # 5: all tests of these files are slow
    except subprocess.TimeoutExpired:
        os.killpg(tests.pid, signal.SIGKILL)
        tests.wait()
        return True


def main() -> None:
    """Print each mutant with what became of it, and how many were noticed."""
    parser = argparse.ArgumentParser(description="Plant single faults and report which of them the tests notice.")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--slow", action="store_true", help="run the tests marked slow as well")
    options = parser.parse_args()
    mutants = sample(options.seed, options.count)
    with tempfile.TemporaryDirectory() as folder:
        checkout = Path(folder) / "checkout"
        shutil.copytree(ROOT, checkout, ignore=shutil.ignore_patterns(".venv*", ".git", "__pycache__", "runs", "site"))
        marks = [] if options.slow else ["-m", "not slow"]
        noticed = 0
        for mutant in mutants:
            is_found = is_noticed(mutant, checkout, marks)
            noticed += is_found
            print("noticed " if is_found else "SURVIVED", mutant, flush=True)
    print(f"{noticed} of {len(mutants)} noticed")


if __name__ == "__main__":
    main()
