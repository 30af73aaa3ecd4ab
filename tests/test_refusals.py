"""Bad input: a few lines that say what to do, the right exit code, no traceback, and nothing left behind."""

from __future__ import annotations

import math
import shlex
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pytest

import aitrain
from aitrain import AitrainError, ConfigError, EnvironmentFailed, TrainConfig
from aitrain.errors import EpisodesFailed
from tests.conftest import Run, listing, write

BUILD = "    def build_dataset(self, tokenizer):\n        return [{'prompt': f'say {n}'} for n in range(20)]\n"
SCORE = "    def score_episode(self, completion):\n        return 0.5\n"
GOOD = "class Env:\n" + BUILD + SCORE
TAKES_A_CITY = GOOD + "    def __init__(self, city='Rome'):\n        assert city != 'Atlantis', 'it sank'\n"


@dataclass(frozen=True)
class Refused:
    """A command that is refused; `aitrain grpo --model tiny --rl-env env.py` stands before the arguments."""

    arguments: str
    code: int
    words: list[str]
    files: Mapping[str, str | bytes | None] = field(default_factory=dict)


COMMANDS = {
    # the command line
    "unknown flag": Refused("--rl-num-generatons 4", 2, ["--rl-num-generatons", "Did you mean --rl-num-generations?"]),
    "flag of aitraining": Refused("--token x", 2, ["--token", "HF_TOKEN"]),
    "backend of aitraining": Refused("--distributed-backend horovod", 2, ["ddp", "fsdp2"]),
    "word too many": Refused("--use-vllm true", 2, ["true", "aitrain grpo --help"]),
    "value missing": Refused("--lr", 2, ["--lr"]),
    "value out of bounds": Refused("--lr -1", 2, ["lr: must be above 0, not -1"]),
    "value of another type": Refused("--batch-size two", 2, ["batch_size: must be a whole number, not two"]),
    "empty value": Refused("--model ''", 2, ["model: must not be empty"]),
    "no group": Refused("--rl-num-generations 1", 2, ["rl_num_generations: must be at least 2", "per prompt"]),
    "groups that would be cut": Refused(
        "--rl-num-generations 3", 2, ["rl_num_generations: 8 completions", "--rl-prompts-per-step 2"]
    ),
    "prompts that cannot be shared": Refused(
        "--rl-prompts-per-step 3 --batch-size 5", 2, ["rl_prompts_per_step: 3 prompts", "--batch-size 4"]
    ),
    "server without server mode": Refused(
        "--vllm-server-url http://x:8000", 2, ["vllm_server_url", "--use-vllm", "--vllm-mode server"]
    ),
    "name with a slash": Refused("--project-name a/b", 2, ["project_name: 'a/b' is not a folder name"]),
    # --trl
    "misspelt field of trl": Refused("--trl scale_reward=none", 2, ["--trl scale_reward:", "mean scale_rewards?"]),
    "field of trl without a value": Refused("--trl scale_rewards", 2, ["--trl scale_rewards: write KEY=VALUE"]),
    "field of trl with an option": Refused("--trl beta=0.1", 2, ["--trl beta", "--rl-kl-coef"]),
    "field of trl of another type": Refused("--trl num_iterations=two", 2, ["--trl num_iterations: must be int"]),
    # --config
    "config not there": Refused("--config none.yaml", 2, ["--config: there is no file none.yaml (looked from"]),
    "config elsewhere": Refused("--config c.yaml", 2, ["no file c.yaml (looked from", "There is more/c.yaml."],
                                {"more/c.yaml": "lr: 1"}),
    "config is a folder": Refused("--config .", 2, ["--config: . is a folder", "It holds no config.yaml either."]),
    "config is a run folder": Refused(
        "--config runs/a", 2, ["--config: runs/a is a folder", "Name the file in it: runs/a/config.yaml"],
        {"runs/a/config.yaml": "lr: 1"},
    ),
    "misspelt key": Refused(
        "--config c.yaml", 2, ["unknown option rl_num_generation (in c.yaml)", "mean rl_num_generations?"],
        {"c.yaml": "rl_num_generation: 4"},
    ),
    "nested keys": Refused("--config c.yaml", 2, ["unknown option params", "without an indent"],
                           {"c.yaml": "params:\n  lr: 1"}),
    "list for a config": Refused("--config c.yaml", 2, ["c.yaml must hold one option a line"], {"c.yaml": "- lr"}),
    "empty config": Refused("--config c.yaml", 2, ["c.yaml must hold one option a line"], {"c.yaml": "# later\n"}),
    "broken yaml": Refused("--config c.yaml", 2, ["c.yaml, line 2: "], {"c.yaml": "epochs: 1\n\tlr: 1"}),
    "key given twice": Refused("--config c.yaml", 2, ["c.yaml, line 2: duplicate key lr"],
                               {"c.yaml": "lr: 1\nlr: 2"}),
    "binary config": Refused("--config c.yaml", 2, ["c.yaml is not a YAML text"], {"c.yaml": b"\x00\xff\xfe"}),
    "null for an option that needs a value": Refused("--config c.yaml", 2, ["epochs: must be a whole number, not null"],
                                                  {"c.yaml": "epochs:\n"}),
    "list for the fields of trl": Refused("--config c.yaml --trl min_p=0", 2, ["trl: must be a table"],
                                          {"c.yaml": "trl: [1]"}),
    # the environment, found and read
    "module not found": Refused("--rl-env evn:Env", 2, ["rl_env: there is no module evn", "Did you mean env?"]),
    "file not found": Refused("--rl-env enf.py", 2, ["rl_env: there is no file enf.py", "Did you mean env.py?"]),
    "file of that name elsewhere": Refused(
        "--rl-env enf.py", 2, ["no file enf.py (looked from", "There is tasks/one/enf.py."],
        {"tasks/one/enf.py": GOOD},
    ),
    "folder for a file": Refused("--rl-env ./more", 2, ["rl_env: ./more is a folder"], {"more": None}),
    "class not found": Refused("--rl-env env.py:Evn", 2, ["rl_env_class: there is no class Evn", "Did you mean Env?"]),
    "two candidates": Refused("", 2, ["2 environments: Env, Two", "--rl-env-class Two"],
                              {"env.py": GOOD + GOOD.replace("Env", "Two")}),
    "keyword refused": Refused("""--rl-env-config '{"town": 1}'""", 2, ["Env does not take town", "It takes: city"],
                               {"env.py": TAKES_A_CITY}),
    "list for an object": Refused("--rl-env-config [1]", 2, ["rl_env_config: must be a JSON object", "not a list"]),
    "no json": Refused("--rl-env-config {city:1}", 2, ["rl_env_config: is not valid JSON", "single quotes"]),
    "json file not there": Refused("--rl-env-config @x.json", 2, ["rl_env_config: names a file that cannot be read"]),
    "not python": Refused("", 3, ["env.py, line 1: SyntaxError"], {"env.py": "class Env:: pass"}),
    # model and folders
    "model folder not there": Refused("--model ./modle", 2, ["model: there is no folder ./modle", "mean model?"],
                                      {"model/config.json": ""}),
    "run folder for a model": Refused("--model runs/a", 2, ["Did you mean runs/a/model?"],
                                      {"runs/a/model/config.json": ""}),
    "output below a file": Refused("--output-dir env.py/a", 2, ["output_dir: cannot make a run folder", "--output-d"]),
    "output is a file": Refused("--output-dir env.py", 2, ["output_dir: cannot make a run folder", "--output-dir"]),
    "no run to resume": Refused("--resume-from-checkpoint auto --project-name mine", 2,
                                ["resume_from_checkpoint: runs/mine is not a run"], {"runs/mine/thesis.tex": ""}),
    # the environment, imported and constructed: in the training process, before torch is
    "import error inside the module": Refused(
        "", 3, ["No module named 'not_there'", "env.py, line 1, in <module>: import not_there", "Install not_there"],
        {"env.py": "import not_there\n" + GOOD},
    ),
    "module that reads the command line": Refused(
        "", 3, ["SystemExit: 2", "env.py, line 2, in <module>: argparse", "reads the command line, which is aitrain's"],
        {"env.py": "import argparse\nargparse.ArgumentParser().parse_args(['--no'])\n" + GOOD},
    ),
    "module that asks": Refused(
        "", 3, ["EOFError", "env.py, line 1, in <module>: input()", "input() needs a terminal", "aitrain env play"],
        {"env.py": "input()\n" + GOOD},
    ),
    "module that stops in the debugger": Refused(
        "", 3, ["BdbQuit", "breakpoint() needs a terminal", "aitrain env play"],
        {"env.py": "breakpoint()\nx = 1\n" + GOOD},
    ),
    "data file that is elsewhere": Refused(
        "", 3, ["No such file or directory: 'rows.txt'", "Looked for it from", "There is data/rows.txt."],
        {"env.py": "open('rows.txt')\n" + GOOD, "data/rows.txt": ""},
    ),
    "misspelt name in the module": Refused(
        "", 3, ["NameError", "env.py, line 1, in <module>: prnt(1)", "Did you mean print?"],
        {"env.py": "prnt(1)\n" + GOOD},
    ),
    "constructor that raises": Refused(
        """--rl-env-config '{"city": "Atlantis"}' --output-dir deep/er""", 3,
        ["Env(city=...) raised: AssertionError: it sank", "env.py, line 7, in __init__"], {"env.py": TAKES_A_CITY},
    ),
    "keyword refused by what is inherited": Refused(
        """--rl-env-config '{"town": 1}'""", 2, ["Env does not take town", "It takes: city"],
        {"env.py": "from base import Base\nclass Env(Base): ...\n", "base.py": TAKES_A_CITY.replace("Env", "Base")},
    ),
    "no build_dataset": Refused("--rl-env-class Env", 3, ["Env has no build_dataset"],
                                {"env.py": "class Env:\n" + SCORE}),
    "no score_episode": Refused("", 3, ["Env has no score_episode"], {"env.py": "class Env:\n" + BUILD}),
}  # fmt: skip


@pytest.mark.parametrize("refused", COMMANDS.values(), ids=COMMANDS)
def test_a_bad_command_is_refused_within_a_second(refused: Refused, here: Path, aitrain_grpo: Run) -> None:
    assert_refused(refused, aitrain_grpo)


WITH_A_MODEL = {
    "model not on the hub": Refused("--model no-such/model", 2, ["model: cannot load no-such/model", "HF_TOKEN"]),
    "no prompt": Refused("", 3, ["row 0 of build_dataset has no prompt (it has: question)"],
                         {"env.py": GOOD.replace("'prompt'", "'question'")}),
    "unknown parameter": Refused("", 3, ["unknown parameter, case_id", "Did you mean case_idx?", "It may have: model"],
                                 {"env.py": GOOD.replace("completion", "case_id")}),
    "too few prompts": Refused("--rl-prompts-per-step 32", 2, ["One step needs 32 prompts and there are 20"]),
    "score that is not a number": Refused("--rl-max-new-tokens 4", 3,
                                          ["score_episode of case", "returned nan", "all 8 held-out cases"],
                                          {"env.py": GOOD.replace("0.5", "float('nan')")}),
}  # fmt: skip


@pytest.mark.parametrize("refused", WITH_A_MODEL.values(), ids=WITH_A_MODEL)
@pytest.mark.slow
def test_what_needs_a_tokenizer_or_a_model_to_see_is_refused_the_same_way(
    refused: Refused, small_model: Path, aitrain_grpo: Run
) -> None:
    assert_refused(refused, aitrain_grpo, str(small_model))


def assert_refused(refused: Refused, aitrain_grpo: Run, model: str = "tiny") -> None:
    here = Path.cwd()
    write(here, {"env.py": GOOD, **refused.files})
    before = listing(here)

    done = aitrain_grpo("--model", model, "--rl-env", "env.py", *shlex.split(refused.arguments))

    assert done.returncode == refused.code, done.stderr
    for word in refused.words:
        assert word in done.stderr
    error = done.stderr[done.stderr.index("aitrain: ") :]  # after the lines with which a run starts
    assert len(error.splitlines()) <= 5
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    assert listing(here) == before


def test_without_an_environment_the_ways_to_name_one_are_said(aitrain_grpo: Run) -> None:
    done = aitrain_grpo()

    assert done.returncode == 2
    assert "--rl-env path/to/file.py:Class" in done.stderr


def test_debug_shows_the_traceback_as_well(here: Path, aitrain_grpo: Run) -> None:
    write(here, {"env.py": "import not_there\n" + GOOD})

    done = aitrain_grpo("--model", "tiny", "--rl-env", "env.py", "--debug")

    assert done.returncode == 3
    assert "Traceback" in done.stderr
    assert 'env.py", line 1, in <module>' in done.stderr


# -- in this process, as in a notebook: what only a dataset, a tokenizer or scores can show


class Good:
    """An environment that works; the refused ones differ from it in one thing."""

    rows: ClassVar[Any] = [{"prompt": f"say {number}", "answer": number} for number in range(20)]

    def build_dataset(self, tokenizer: Any) -> Any:
        return self.rows

    def score_episode(self, completion: Any) -> Any:
        return 0.5


def building(rows: Any) -> Good:
    class Building(Good):
        def build_dataset(self, tokenizer: Any) -> Any:
            return rows

    return Building()


def scoring(value: Any) -> Good:
    class Scoring(Good):
        def score_episode(self, completion: Any) -> Any:
            return value() if callable(value) else value

    return Scoring()


class Raising(Good):
    def build_dataset(self, tokenizer: Any) -> Any:
        return [{"prompt": word} for word in {}["words"]]


class Leaving(Good):
    def build_dataset(self, tokenizer: Any) -> Any:
        raise SystemExit("no data today")


class AskingForMore(Good):
    def build_dataset(self, tokenizer: Any, split: str) -> Any:  # type: ignore[override]
        return self.rows


class AskingForAColumn(Good):
    rows: ClassVar[Any] = [{"prompt": "a", "answer": 1}, *({"prompt": "b"} for _ in range(9))]

    def score_episode(self, answer: Any) -> Any:
        return 1.0


CHAT = [{"role": "user", "content": "say"}]
IN_PROCESS: dict[str, tuple[Any, dict[str, Any], type[AitrainError], list[str]]] = {
    "class for an object": (Good, {}, ConfigError, ["environment: give an object, Good(...), not the class"]),
    "empty dataset": (building([]), {}, EnvironmentFailed, ["build_dataset returned no rows"]),
    "no dataset": (building(None), {}, EnvironmentFailed, ["build_dataset returned None", "list of dicts"]),
    "columns": (building({"prompt": ["a"]}), {}, EnvironmentFailed, ["returned a dict", "list of dicts"]),
    "rows that are text": (building(["a"] * 9), {}, EnvironmentFailed, ["row 0 of build_dataset is a str"]),
    "mixed prompts": (building([*[{"prompt": "a"}] * 5, {"prompt": CHAT}]), {}, EnvironmentFailed,
                      ["row 0 has a string, row 5 messages", "Use one of the two"]),
    "no prompt in one row": (building([{"prompt": "a"}, {"question": "b"}]), {}, EnvironmentFailed,
                             ["row 1 of build_dataset has no prompt (it has: question)"]),
    **{
        f"prompt {prompt!r}": (building([{"prompt": prompt}] * 9), {}, EnvironmentFailed,
                               ["row 0 of build_dataset has an invalid prompt", repr(prompt)[:60]])
        for prompt in (None, 3, "", [], ["a"], CHAT[0], [{"content": "x"}], [{"role": "user"}],
                       [{"role": "user", "content": None}], [{"role": "user", "content": 3}])
    },
    "build_dataset raises": (Raising(), {}, EnvironmentFailed,
                             ["build_dataset raised: KeyError: 'words'", "in build_dataset: return"]),
    "build_dataset leaves": (Leaving(), {}, EnvironmentFailed, ["SystemExit: no data today"]),
    "build_dataset asks for more": (AskingForMore(), {}, EnvironmentFailed, ["argument: 'split'"]),
    "column that only some rows have": (AskingForAColumn(), {}, EnvironmentFailed,
                                        ["unknown parameter, answer", "columns that every row has: none but prompt"]),
    "too many held out": (Good(), {"eval_cases": 20}, ConfigError, ["eval_cases: cannot hold out 20 of 20"]),
    "one prompt too few": (building(Good.rows[:1]), {}, ConfigError,
                           ["One step needs 2 prompts and there is 1", "rl_prompts_per_step=1"]),
    "prompts too long": (Good(), {"rl_max_prompt_length": 2}, ConfigError,
                         ["there are 0 to train on (20 had a prompt of more than 2 tokens)", "shorter prompts"]),
    "no room for a prompt": (Good(), {"rl_max_new_tokens": 2048}, ConfigError, ["rl_max_new_tokens: 2048"]),
    "layers that are not there": (Good(), {"peft": True, "target_modules": "foo"}, ConfigError, ["foo"]),
    "attention that is not there": (Good(), {"attn_implementation": "foo"}, ConfigError,
                                    ["attn_implementation: ", "Omit it"]),
    "template that is not there": (Good(), {"chat_template": "foo"}, ConfigError, ["chat_template: foo is neither"]),
    "text for a score": (scoring("0.5"), {}, EpisodesFailed, ["all 8 held-out cases (wrong_type)"]),
    "score above 1": (scoring(1.5), {}, EpisodesFailed, ["all 8 held-out cases (out_of_range)"]),
    "score that is infinite": (scoring(math.inf), {}, EpisodesFailed, ["all 8 held-out cases (not_finite)"]),
    "scoring that raises": (scoring(lambda: 1 / 0), {}, EpisodesFailed, ["all 8 held-out cases (raised)"]),
}  # fmt: skip


@pytest.mark.parametrize(("environment", "options", "kind", "words"), IN_PROCESS.values(), ids=IN_PROCESS)
@pytest.mark.slow
def test_what_only_the_run_can_see_is_refused_before_the_first_step(
    environment: Any, options: dict[str, Any], kind: type[AitrainError], words: list[str], here: Path, small_model: Path
) -> None:
    with pytest.raises(kind) as caught:
        aitrain.train(short(small_model, **options), environment=environment)

    assert type(caught.value) is kind
    assert len(str(caught.value).splitlines()) <= 5
    for word in words:
        assert word in str(caught.value)
    assert listing(here) == []


def short(model: Path, **options: Any) -> TrainConfig:
    quick = {"max_steps": 1, "rl_max_new_tokens": 4, "rl_kl_coef": 0.0, "save_strategy": "no"}
    return TrainConfig(**{"model": str(model), **quick, **options})


@pytest.mark.parametrize(
    ("value", "told"),
    [("0.5", "returned '0.5' (str)"), (math.nan, "returned nan"), (1.5, "returned 1.5"), (lambda: {}["x"], "KeyError")],
    ids=["text", "nan", "out of range", "raises"],
)  # fmt: skip
@pytest.mark.usefixtures("here")
@pytest.mark.slow
def test_a_failed_score_is_told_with_its_case(
    value: Any, told: str, small_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(EnvironmentFailed):
        aitrain.train(short(small_model), environment=scoring(value))

    assert f"score_episode of case 0 {'raised: ' if callable(value) else ''}{told}" in capsys.readouterr().err


@pytest.mark.parametrize(("value", "words"), [(math.nan, "failed on every episode"), (None, "a `return` missing")])
@pytest.mark.usefixtures("here")
@pytest.mark.slow
def test_a_run_in_which_nothing_was_scored_is_no_success(value: Any, words: str, small_model: Path) -> None:
    with pytest.raises(EnvironmentFailed, match=words):
        aitrain.train(short(small_model, eval_cases=0), environment=scoring(value))


def test_a_run_that_gives_up_keeps_what_it_points_to_though_nothing_was_logged_yet(
    here: Path, small_model: Path
) -> None:
    config = short(small_model, eval_cases=0, max_steps=9, logging_steps=50)

    with pytest.raises(EnvironmentFailed, match=r"3 batches in a row.*\n.*rollouts/"):
        aitrain.train(config, environment=scoring(math.nan))

    assert (here / "runs/project-name/rollouts/rank0.jsonl").exists()


# -- tokenizers


@pytest.fixture
def model_with(small_model: Path, tmp_path: Path) -> Callable[..., Path]:
    """`model_with(pad_token=None)`: the small model with another tokenizer."""

    def make(**changes: Any) -> Path:
        from tests.tiny_model import build_tokenizer

        folder = Path(shutil.copytree(small_model, tmp_path / "model"))
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            (folder / name).unlink(missing_ok=True)
        tokenizer = build_tokenizer()
        for name, value in changes.items():
            setattr(tokenizer, name, value)
        tokenizer.save_pretrained(folder)
        return folder

    return make


@pytest.mark.usefixtures("here")
@pytest.mark.slow
def test_chat_prompts_without_a_chat_template_are_refused_with_both_ways_out(model_with: Callable[..., Path]) -> None:
    model = model_with(chat_template=None)

    with pytest.raises(ConfigError, match="no chat template") as caught:
        aitrain.train(short(model), environment=building([{"prompt": CHAT}] * 20))

    assert 'chat_template="chatml"' in str(caught.value)
    assert "prompts that are strings" in str(caught.value)
    assert aitrain.train(short(model, chat_template="chatml"), environment=building([{"prompt": CHAT}] * 20)).steps == 1


@pytest.mark.usefixtures("here")
def test_a_chat_template_that_refuses_the_messages_is_told_with_the_prompt(model_with: Callable[..., Path]) -> None:
    model = model_with(chat_template="{{ raise_exception('Roles must alternate') }}")

    with pytest.raises(EnvironmentFailed, match="Roles must alternate") as caught:
        aitrain.train(short(model), environment=building([{"prompt": CHAT}] * 20))

    assert "The prompt: [{'role': 'user'" in str(caught.value)


@pytest.mark.usefixtures("here")
@pytest.mark.slow
def test_a_tokenizer_without_a_pad_token_pads_with_its_end_token(model_with: Callable[..., Path]) -> None:
    from aitrain.training.model import load_tokenizer

    config = short(model_with(pad_token=None))

    assert load_tokenizer(config).pad_token == load_tokenizer(config).eos_token
    assert aitrain.train(config, environment=Good()).steps == 1


def test_a_tokenizer_without_an_end_token_is_refused(here: Path, model_with: Callable[..., Path]) -> None:
    with pytest.raises(ConfigError, match="no end-of-text token") as caught:
        aitrain.train(short(model_with(pad_token=None, eos_token=None)), environment=Good())

    assert "Set eos_token" in str(caught.value)
    assert listing(here) == []


def test_a_folder_without_a_tokenizer_is_refused_in_one_line(here: Path, small_model: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(small_model, tmp_path / "model"))
    for file in model.glob("*token*"):
        file.unlink()

    with pytest.raises(ConfigError, match=r"cannot load .*: it has no tokenizer"):
        aitrain.train(short(model), environment=Good())

    assert listing(here) == []


def test_a_misspelt_run_is_not_only_a_model_that_the_hub_does_not_have(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from aitrain.training.model import load_tokenizer

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (here / "runs" / "sums").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"cannot load summs: .*\. Did you mean sums\?\nGive a folder"):
        load_tokenizer(TrainConfig(model="summs"))
