"""Messages name arguments of TrainConfig when aitrain is called from Python."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

import aitrain
from aitrain import ConfigError, Result, TrainConfig
from aitrain.options.in_python import in_python
from aitrain.options.option import Option, options_of
from aitrain.options.reading import resolve

PACKAGE = Path(aitrain.__file__).parent
ROOMS = ("options", "environment", "execution", "rollout", "runs", "vllm", "engines", "training", "jobs", "launch")
OTHER_COMMANDS = ("doctor.py", "dry_run.py", "unchecked.py", "processes.py", "documentation.py", "in_python.py")
FIELDS = TrainConfig.model_fields


def translated(message: str) -> str:
    return in_python(message, FIELDS)


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("Use a smaller model: --dtype bfloat16 --peft.", 'Use a smaller model: dtype="bfloat16" peft=True.'),
        ("Lower --lr, or raise --rl-kl-coef.", "Lower lr, or raise rl_kl_coef."),
        ("saves memory: --no-merge-adapter", "saves memory: merge_adapter=False"),
        ("set --rl-kl-coef 0, which", "set rl_kl_coef=0, which"),
        ("Give one with --chat-template FILE.", 'Give one with chat_template="FILE".'),
        ("Name yours with --rl-env a/file.py:Class, or", 'Name yours with rl_env="a/file.py:Class", or'),
        ("with --rl-env-module and --rl-env-class.", "with rl_env_module and rl_env_class."),
        ("""it with --rl-env-config '{"city": ...}'""", """it with rl_env_config={"city": ...}"""),
        ("Sampling with --rl-stop ['a', 'b']: the", "Sampling with rl_stop=['a', 'b']: the"),
        ("--trl beta: TRL has no such field.", 'trl["beta"]: TRL has no such field.'),
        ("use --trl num_iterations=2.", 'use trl={"num_iterations": 2}.'),
        ("use --trl mode=token_truncate.", 'use trl={"mode": "token_truncate"}.'),
        ("Continue with --resume.", 'Continue with resume_from_checkpoint="auto".'),
        ("pass --resume-anyway to", "pass resume_anyway=True to"),
        ("  aitrain grpo --config runs/x/c.yaml --resume", '  the same options and resume_from_checkpoint="auto"'),
        ("(aitrain env check --model checks them)", "(aitrain env check --model checks them)"),
        ("Start it with: vllm serve m --dtype float32", "Start it with: vllm serve m --dtype float32"),
    ],
)
def test_a_flag_becomes_the_argument(message: str, expected: str) -> None:
    assert translated(message) == expected


def test_options_are_given_by_name_or_as_one_train_config() -> None:
    with pytest.raises(ConfigError, match=r"^unknown option learning_rate. Use lr\.$"):
        aitrain.train(learning_rate=1)
    for config, options in (({"model": "tiny"}, {}), ("tiny", {}), (TrainConfig(), {"lr": 1})):
        with pytest.raises(ConfigError, match=r"^config: give one TrainConfig, or options by name"):
            aitrain.train(config, **options)  # type: ignore[arg-type]


def test_a_question_that_comes_before_the_model_is_loaded_is_told_where_it_belongs() -> None:
    for ask in (Result(Path(), "finished", 1, 1.0, None, None, None, None).chat, partial(aitrain.chat, "tiny")):
        with pytest.raises(ConfigError, match=r"chat\(...\)\('2 \+ 2'\)"):
            ask("2 + 2")


def test_the_public_names_are_those_that_dir_shows() -> None:
    assert set(dir(aitrain)) == {*aitrain.__all__, "__version__"}


@pytest.mark.parametrize("option", options_of(TrainConfig), ids=lambda option: option.name)
def test_every_flag_is_known(option: Option) -> None:
    assert "--" not in translated(f"Use {option.flag}, or {option.flag} 3.")
    assert option.name in translated(f"Use {option.flag}.")


def sentences(tree: ast.AST) -> Iterator[str]:
    """The texts of a module, without docstrings; what an f-string inserts is the number 1."""
    docstrings = {
        id(each.value) for each in ast.walk(tree) if isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant)
    }
    inside = {id(part) for each in ast.walk(tree) if isinstance(each, ast.JoinedStr) for part in each.values}
    for each in ast.walk(tree):
        if isinstance(each, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "1" for part in each.values)
        elif isinstance(each, ast.Constant) and isinstance(each.value, str) and id(each) not in docstrings | inside:
            yield each.value


@pytest.mark.slow
def test_no_message_of_a_run_keeps_a_flag() -> None:
    files = [file for room in ROOMS for file in (PACKAGE / room).rglob("*.py") if file.name not in OTHER_COMMANDS]
    texts = {text for file in [*files, PACKAGE / "batch.py"] for text in sentences(ast.parse(file.read_text()))}
    ours = {option.flag for option in options_of(TrainConfig)} | {"--resume", "--debug", "--config"}
    named = [text for text in texts if any(re.search(rf"{flag}\b(?!-)", text) for flag in ours)]
    assert len(named) > 100
    left = {text: translated(text) for text in named}
    for text, said in left.items():
        without_commands = re.sub(r"(aitrain (env|grpo|eval)|vllm serve) .*", "", said)
        found = re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", without_commands)
        assert not set(found) & ours, f"{text!r} -> {said!r}"


def test_options_in_python_are_refused_by_their_names_and_options_of_a_command_by_their_flags() -> None:
    with pytest.raises(ConfigError) as in_code:
        TrainConfig(quantization="int4")
    with pytest.raises(ConfigError) as in_command:
        resolve(TrainConfig, None, {"quantization": "int4"})

    assert "add peft=True" in str(in_code.value)
    assert "add --peft" in str(in_command.value)
