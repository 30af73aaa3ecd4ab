"""Messages name arguments of TrainConfig when aitrain is called from Python."""

from __future__ import annotations

import pytest

import aitrain
from aitrain import ConfigError, TrainConfig
from aitrain.options.in_python import in_python
from aitrain.options.reading import resolve


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("Use a smaller model: --dtype bfloat16 --peft.", 'Use a smaller model: dtype="bfloat16" peft=True.'),
        ("Lower --lr, or raise --rl-kl-coef.", "Lower lr, or raise rl_kl_coef."),
        ("Name yours with --rl-env a/file.py:Class, or", 'Name yours with rl_env="a/file.py:Class", or'),
        ("""it with --rl-env-config '{"city": ...}'""", """it with rl_env_config={"city": ...}"""),
        ("use --trl num_iterations=2.", 'use trl={"num_iterations": 2}.'),
        ("Continue with --resume.", 'Continue with resume_from_checkpoint="auto".'),
        ("  aitrain grpo --config runs/x/c.yaml --resume", '  the same options and resume_from_checkpoint="auto"'),
        ("Start it with: vllm serve m --dtype float32", "Start it with: vllm serve m --dtype float32"),
    ],
)
def test_a_flag_becomes_the_argument(message: str, expected: str) -> None:
    assert in_python(message, TrainConfig.model_fields) == expected


def test_options_are_given_by_name_or_as_one_train_config() -> None:
    with pytest.raises(ConfigError, match="Use lr"):
        aitrain.train(learning_rate=1)
    for config, options in (({"model": "tiny"}, {}), ("tiny", {}), (TrainConfig(), {"lr": 1})):
        with pytest.raises(ConfigError, match="config"):
            aitrain.train(config, **options)  # type: ignore[arg-type]


def test_options_in_python_are_refused_by_their_names_and_options_of_a_command_by_their_flags() -> None:
    with pytest.raises(ConfigError) as in_code:
        TrainConfig(quantization="int4")
    with pytest.raises(ConfigError) as in_command:
        resolve(TrainConfig, None, {"quantization": "int4"})

    assert "add peft=True" in str(in_code.value)
    assert "add --peft" in str(in_command.value)
