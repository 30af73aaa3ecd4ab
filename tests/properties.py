"""What must hold for anything that a person writes into a file or behind a flag: no traceback, and either an error that
says which option is meant, or a configuration that comes back the same when it is written and read.
"""

from __future__ import annotations

import io
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import yaml
from hypothesis import strategies as st

from aitrain import ConfigError, TrainConfig
from aitrain.cli import main
from aitrain.options.reading import read_yaml, resolve, write_yaml
from aitrain.options.section import options_of

# -- examples

OPTIONS = [option.name for option in options_of(TrainConfig)]
WORDS = [
    "true",
    "no",
    "1e-5",
    "-1",
    "0",
    "0x1F",
    "1_000",
    ".inf",
    "nan",
    "~",
    "@",
    "@/",
    "a,b",
    "{}",
    "[]",
    "auto",
    "'",
]
"""What programs read in more than one way."""

texts = st.one_of(
    st.text(max_size=20), st.sampled_from(WORDS), st.from_regex(r"[-+]?[0-9]{1,30}(\.[0-9]*)?", fullmatch=True)
)
scalars = st.one_of(
    st.none(), st.booleans(), st.integers(), st.integers(0, 64), st.floats(), st.floats(0, 1), texts,
    st.dates(), st.binary(max_size=4),
)  # fmt: skip
values = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.one_of(texts, scalars), inner, max_size=3)),
    max_leaves=6,
)
names = st.one_of(st.sampled_from(OPTIONS), texts)
mappings = st.dictionaries(st.one_of(names, scalars), values, max_size=4)
"""What a YAML file may hold, options and other things."""

right_values = {
    "switch": st.booleans(),
    "integer": st.integers(0, 2**40),
    "number": st.floats(0, 1),
    "text": st.sampled_from(["tiny", "adamw_torch", "a-b", "0", "no", "1e3", "2020-01-01"]),
    "JSON object": st.dictionaries(texts, st.one_of(st.integers(), texts), max_size=2),
}


def likely(name: str) -> st.SearchStrategy[Any]:
    """Values of the right kind for an option, so that many configurations are taken."""
    (option,) = (option for option in options_of(TrainConfig) if option.name == name)
    return st.sampled_from([*option.choices, False, None]) if option.choices else right_values[option.type_name]


likely_mappings = st.lists(st.sampled_from(OPTIONS), unique=True, max_size=3).flatmap(
    lambda chosen: st.fixed_dictionaries({name: likely(name) for name in chosen})
)
flag_values = st.one_of(texts, st.text(st.characters(blacklist_characters="\0"), max_size=40), values.map(str))
DEEP = 5_000


# -- what must hold


def holds_for_a_file_of_options(mapping: Mapping[Any, Any]) -> None:
    """A mapping as the file of --config."""
    try:
        text = yaml.safe_dump(dict(mapping), allow_unicode=True)
    except (yaml.YAMLError, TypeError):  # keys that cannot be written
        text = repr(mapping)
    holds_for_a_file(text)


def holds_for_a_file(text: str) -> None:
    """Any text as the file of --config."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "options.yaml"
        file.write_text(text, encoding="utf-8", errors="surrogatepass")
        _holds(lambda: resolve(TrainConfig, file), [*_keys(text), file.name])


def _keys(text: str) -> list[str]:
    """The keys of a YAML text as YAML reads them: 0E0 is the number 0.0."""
    try:
        read = read_yaml(text)
    except yaml.YAMLError:
        return []
    return [str(key) for key in read] if isinstance(read, dict) else []


def _holds(make: Callable[[], TrainConfig], named: list[str]) -> None:
    try:
        config = make()
    except ConfigError as error:
        _is_readable(str(error), named)
        return
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.yaml"
        file.write_text(write_yaml(config.written()), encoding="utf-8")
        again = resolve(TrainConfig, file)
    assert repr(again.written()) == repr(config.written())  # repr: NaN is not equal to itself


def _is_readable(message: str, named: list[str]) -> None:
    assert len(message.splitlines()) <= 5, message
    assert "Traceback" not in message
    assert any(name[:8] in message or repr(name[:8])[1:-1] in message for name in (*named, *OPTIONS)), (message, named)


def holds_for_a_flag(name: str, value: str) -> None:
    """Any text behind a flag, through the real command line; with --dry-run nothing is started."""
    flag = "--" + name.replace("_", "-")
    is_switch = any(option.name == name and option.is_switch for option in options_of(TrainConfig))
    given = [flag] if is_switch else [f"{flag}={value}"]
    code, out, err = run_in_process(
        "grpo", "--model=tiny", "--rl-env=envs.arithmetic", "--dry-run", "--options-only", *given
    )
    assert code in (0, 2, 3), (code, err)
    if code == 0:
        assert "batch        " in out
        return
    assert len(err.splitlines()) <= 6, err
    assert "Traceback" not in err
    assert flag in err or any(option in err for option in OPTIONS), err


def run_in_process(*arguments: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of the command, without a process; the streams are strict and
    lenient as Python's own are."""
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="strict")
    err = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="backslashreplace")
    with mock.patch.multiple(sys, argv=["aitrain", *arguments], stdout=out, stderr=err):
        code = main._run()
        out.flush()
        err.flush()
    return code, *(stream.buffer.getvalue().decode() for stream in (out, err))  # type: ignore[attr-defined]


@contextmanager
def built_once() -> Iterator[None]:
    """Typer makes its commands anew for each call, which takes longer than all the rest."""
    import typer

    with mock.patch.object(main, "app", typer.main.get_command(main.app)):
        yield
