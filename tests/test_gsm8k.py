"""aitrain/envs/gsm8k.py, its two judges, and `aitrain data gsm8k`, which makes its files."""

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from aitrain.environment import loader, locator
from aitrain.environment.contract import Case, check_contract
from aitrain.environment.score_parsing import ScoreResult
from aitrain.errors import ConfigError, EnvironmentFailed
from aitrain.options.train import TrainConfig
from tests.rehearsal import rehearse

ORIGINAL = Path(__file__).parent / "data" / "gsm8k_original"


def row(truth: Any = "72", source: str = "openai/gsm8k") -> dict[str, Any]:
    return {
        "data_source": source,
        "prompt": [{"role": "user", "content": "30 + 42?"}],
        "reward_model": {"style": "rule", "ground_truth": truth},
    }


def write_rows(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def load(**config: Any) -> Any:
    return loader.load_env(locator.find_env(TrainConfig(model="any", rl_env_module="envs.gsm8k")), config)


def score(environment: Any, text: str, case_idx: int = 0) -> ScoreResult:
    case = environment.build_dataset(None)[case_idx]
    return rehearse(environment, [text], Case(case_idx, case["prompt"], case)).scored


def convert(input_dir: Path, out_dir: Path) -> "subprocess.CompletedProcess[str]":
    command = [
        sys.executable,
        "-m",
        "aitrain",
        "data",
        "gsm8k",
        "--input-dir",
        str(input_dir),
        "--out-dir",
        str(out_dir),
    ]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture
def module(tmp_path: Path) -> ModuleType:
    return sys.modules[type(load(data_path=str(write_rows(tmp_path / "rows.jsonl", row())))).__module__]


# -- the exact judge

RIGHT = [
    ("#### 72", "72"),
    ("#### 1,000", "1000"),
    ("#### -5", "-5"),
    ("#### 72 dollars", "72"),
    ("#### 72%", "72"),
    ("#### 72<|im_end|>", "72"),
    ("#### 10\n#### 72", "72"),
    ("30 + 42 = 72\n" * 100 + "#### 72", "72"),
    ("#### 72" + "x" * 293, "72"),
]
WRONG = [
    "####72",
    "####  72",
    "#### $72",
    "#### 72.",
    "#### 72.0",
    "#### **72**",
    "\\boxed{72}",
    "#### 72" + " so it is" * 34,
    "#### 72" + "x" * 294,
    "#### 0072",
    "0072",
    "#### 73",
    "#### 72\n#### 10",
    "72",
    "",
]


@pytest.mark.parametrize(("text", "truth"), RIGHT)
def test_the_exact_judge_accepts_what_xtuner_accepts(module: ModuleType, text: str, truth: str) -> None:
    assert module.exact(text, truth)


@pytest.mark.parametrize("text", WRONG)
def test_the_exact_judge_refuses_what_xtuner_refuses(module: ModuleType, text: str) -> None:
    assert not module.exact(text, "72")


# -- the lenient judge


@pytest.mark.parametrize(("text", "truth"), RIGHT)
def test_the_lenient_judge_accepts_all_that_the_exact_one_does(module: ModuleType, text: str, truth: str) -> None:
    assert module.lenient(text, truth)


@pytest.mark.parametrize(
    ("text", "truth"),
    [
        ("####72", "72"),
        ("####  72", "72"),
        ("#### $72.", "72"),
        ("#### 72.0", "72"),
        ("#### **72**", "72"),
        ("#### **$72.00**", "72"),
        ("#### \\(\\boxed{72}\\)", "72"),
        ("#### 0072", "72"),
        ("#### 72, which is 30 more than 42", "72"),
        ("#### 72" + " so it is" * 34, "72"),
        ("#### 2. Adding up\n30 + 42 = 72", "72"),
        ("#### **2.** Adding up\n30 + 42 = 72", "72"),
        ("#### Step 2\n30 + 42 = 72", "72"),
        ("\\boxed{72}", "72"),
        ("\\[ \\boxed{\\$72 \\text{ in 3 days}} \\]", "72"),
        ("\\boxed{1{,}000}", "1000"),
        ("\\boxed{1,\\!000}", "1000"),
        ("\\boxed{1\\,000}", "1000"),
        ("It is 1\u202f000 rolls.", "1000"),
        ("It is 1,234,567 rolls.", "1234567"),
        ("The answer is **72**", "72"),
        ("The answer is 72.", "72"),
        ("The answer is...72", "72"),
        ("So 30 + 42 = 72 pears", "72"),
        ("72 cm^2", "72"),
        ("It is $.50", "0.5"),
        ("#### -$5", "-5"),
        ("#### \u22125", "-5"),
        ("3-8=-5", "-5"),
        ("the result of 10-5", "5"),
        ("answer-72", "72"),
        ("#### 18", "18."),
    ],
)
def test_the_lenient_judge_accepts_the_right_number_in_other_forms(module: ModuleType, text: str, truth: str) -> None:
    assert module.lenient(text, truth)


@pytest.mark.parametrize(
    "text",
    ["", "no number", "####", "#### 73", "#### -72", "\\boxed{7}2", "72 or 73", "#### 720", "#### 72.5", "#### 1,72"],
)
def test_the_lenient_judge_refuses_other_numbers(module: ModuleType, text: str) -> None:
    assert not module.lenient(text, "72")


@pytest.mark.parametrize("text", ["#" * 50_000, "9" * 50_000, "1,234" * 10_000, "boxed{" * 10_000, "-$" * 25_000])
def test_judging_an_answer_that_rambles_is_quick(module: ModuleType, text: str) -> None:
    start = time.process_time()
    assert not module.lenient(text, "72")
    assert time.process_time() - start < 2


# -- the environment


def test_a_row_is_scored_by_the_contract(tmp_path: Path) -> None:
    environment = load(data_path=str(write_rows(tmp_path / "rows.jsonl", row(), row("5"))))
    check_contract(environment, environment.build_dataset(None)[0])
    assert score(environment, "#### 72").score == 1.0
    assert score(environment, "#### 72", case_idx=1).score == 0.0
    assert score(environment, "\\boxed{72}").score == 0.0


def test_the_lenient_judge_is_chosen_by_name(tmp_path: Path) -> None:
    environment = load(data_path=str(write_rows(tmp_path / "rows.jsonl", row())), judge="lenient")
    assert score(environment, "\\boxed{72}").score == 1.0


def test_the_data_source_selects_the_judge(tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", row(), row(source="my/sums"))
    environment = load(data_path=str(rows), judge={"my/sums": "lenient"})
    assert [score(environment, "**72**", case_idx).score for case_idx in (0, 1)] == [0.0, 1.0]


def test_the_reference_is_a_right_answer_to_every_row(tmp_path: Path) -> None:
    shutil.copytree(ORIGINAL, tmp_path / "original")
    assert convert(tmp_path / "original", tmp_path).returncode == 0
    environment = load(data_path=str(tmp_path / "train.jsonl"), eval_path=str(tmp_path / "test.jsonl"))
    assert [score(environment, environment.reference(case_idx), case_idx).score for case_idx in range(3)] == [1.0] * 3
    assert environment.reference(3) == "#### 24"


def test_held_out_rows_come_from_eval_path_only_when_it_is_given(tmp_path: Path) -> None:
    rows, held_out = write_rows(tmp_path / "a.jsonl", row()), write_rows(tmp_path / "b.jsonl", row("5"))
    assert load(data_path=str(rows), eval_path=str(held_out)).build_eval_dataset(None) == [row("5")]
    assert not callable(load(data_path=str(rows)).build_eval_dataset)


def test_blank_lines_and_unicode_line_separators_are_no_row_ends(tmp_path: Path) -> None:
    odd = row() | {"prompt": [{"role": "user", "content": "one\u2028two"}]}
    path = tmp_path / "rows.jsonl"
    path.write_text(f"\n{json.dumps(odd, ensure_ascii=False)}\r\n\n", encoding="utf-8")
    assert load(data_path=str(path)).build_dataset(None) == [odd]


def test_an_unknown_data_source_is_an_error_that_names_it_and_its_row(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", row(), row(source="my/sums"))
    with pytest.raises(EnvironmentFailed, match=r"rows\.jsonl, line 2: unknown data_source 'my/sums' \(known: openai"):
        load(data_path=str(path))


@pytest.mark.parametrize("judge", ["strict", {"openai/gsm8k": "strict"}])
def test_an_unknown_judge_is_an_error_that_lists_them(tmp_path: Path, judge: Any) -> None:
    path = write_rows(tmp_path / "rows.jsonl", row())
    with pytest.raises(EnvironmentFailed, match="no judge 'strict'; there is: exact, lenient"):
        load(data_path=str(path), judge=judge)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: not a JSON object with prompt"),
        ("[1]", "line 2: not a JSON object with prompt"),
        ("\udcff", "line 2: not a JSON object with prompt"),
        ('{"question": "a", "answer": "b"}', "`aitrain data gsm8k` makes such rows"),
        (json.dumps(row() | {"reward_model": {}}), "line 2: not a JSON object with prompt"),
        (json.dumps(row(72)), "line 2: ground_truth is 72, not a number as a string"),
        (json.dumps(row("1,000")), "line 2: ground_truth is '1,000', not a number as a string"),
    ],
)
def test_a_row_in_another_format_is_an_error_with_its_file_and_line(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(f"{json.dumps(row())}\n{line}\n", encoding="utf-8", errors="surrogateescape")
    with pytest.raises(EnvironmentFailed) as caught:
        load(data_path=str(path))
    assert str(path) in str(caught.value)
    assert message in str(caught.value)
    assert len(str(caught.value).splitlines()) <= 5


def test_a_missing_or_empty_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFailed, match=r"No such file.*missing\.jsonl"):
        load(data_path=str(tmp_path / "missing.jsonl"))
    with pytest.raises(EnvironmentFailed, match=r"empty\.jsonl has no rows"):
        load(data_path=str(write_rows(tmp_path / "empty.jsonl")))


def test_data_path_is_asked_for() -> None:
    with pytest.raises(ConfigError, match="GSM8K also needs data_path"):
        load()


# -- aitrain data gsm8k


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_original_rows_become_rows_of_xtuner(tmp_path: Path) -> None:
    done = convert(ORIGINAL, tmp_path / "new" / "out")
    assert (done.returncode, done.stderr) == (0, "")
    assert "3 rows in" in done.stdout
    original, made = read(ORIGINAL / "train.jsonl"), read(tmp_path / "new" / "out" / "train.jsonl")
    assert list(made[1]) == ["data_source", "prompt", "ability", "reward_model", "extra_info"]
    question = original[1]["question"]
    asked = question + ' Let\'s think step by step and output the final answer after "####".'
    assert made[1] == {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": asked}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "1234"},
        "extra_info": {"split": "train", "index": 1, "answer": original[1]["answer"], "question": question},
    }
    assert [made_row["reward_model"]["ground_truth"] for made_row in made] == ["72", "1234", "-5"]
    assert made[2]["extra_info"]["question"] == original[2]["question"]
    assert [made_row["extra_info"]["split"] for made_row in read(tmp_path / "new" / "out" / "test.jsonl")] == ["test"]


@pytest.mark.slow
def test_a_clone_from_the_hub_gives_the_same_rows(tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    (tmp_path / "clone" / "main").mkdir(parents=True)
    (tmp_path / "clone" / "socratic").mkdir()
    rows = read(ORIGINAL / "train.jsonl")
    for shard, part in enumerate((rows[:2], rows[2:])):
        table = pyarrow.Table.from_pylist(part)
        parquet.write_table(table, tmp_path / "clone" / "main" / f"train-0000{shard}-of-00002.parquet")
    assert convert(tmp_path / "clone", tmp_path / "of_parquet").returncode == 0
    assert convert(ORIGINAL, tmp_path / "of_lines").returncode == 0
    assert read(tmp_path / "of_parquet" / "train.jsonl") == read(tmp_path / "of_lines" / "train.jsonl")


@pytest.mark.parametrize(
    ("second_line", "message"),
    [
        (
            '{"question": "1 + 1?", "answer": "It is 2."}',
            "line 2: needs a question, and an answer with `#### <number>`",
        ),
        ('{"answer": "#### 2"}', "line 2: needs a question"),
        ("[]", "line 2: needs a question"),
        ("{", "line 2: not a JSON object"),
        ("\udcff", "line 2: not a JSON object"),
    ],
)
@pytest.mark.slow
def test_a_bad_row_is_an_error_with_its_line_and_nothing_is_written(
    tmp_path: Path, second_line: str, message: str
) -> None:
    write_rows(tmp_path / "train.jsonl", {"question": "1 + 2?", "answer": "#### 3"})
    good = (tmp_path / "train.jsonl").read_text(encoding="utf-8")
    (tmp_path / "test.jsonl").write_text(f"{good}{second_line}\n", encoding="utf-8", errors="surrogateescape")
    done = convert(tmp_path, tmp_path / "out")
    assert done.returncode == 2
    assert f"test.jsonl, {message}" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_folder_without_gsm8k_is_an_error_that_says_what_is_looked_for(tmp_path: Path) -> None:
    done = convert(tmp_path / "nowhere", tmp_path / "out")
    assert done.returncode == 2
    assert "there is no GSM8K in" in done.stderr
    assert "train-*.parquet" in done.stderr


def test_a_pointer_of_git_lfs_is_no_parquet_file(tmp_path: Path) -> None:
    (tmp_path / "train-00000-of-00001.parquet").write_text("version https://git-lfs.github.com/spec/v1\n")
    done = convert(tmp_path, tmp_path / "out")
    assert done.returncode == 2
    assert "git-lfs" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_empty_file_is_an_error(tmp_path: Path) -> None:
    write_rows(tmp_path / "train.jsonl")
    done = convert(tmp_path, tmp_path / "out")
    assert (done.returncode, "has no rows" in done.stderr) == (2, True)


def test_the_original_files_are_not_overwritten(tmp_path: Path) -> None:
    shutil.copytree(ORIGINAL, tmp_path / "original")
    done = convert(tmp_path / "original", tmp_path / "original" / ".." / "original")
    assert done.returncode == 2
    assert "would be overwritten" in done.stderr
    assert read(tmp_path / "original" / "train.jsonl") == read(ORIGINAL / "train.jsonl")


def test_an_out_dir_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("a file")
    done = convert(ORIGINAL, tmp_path / "out")
    assert done.returncode == 2
    assert "out_dir: cannot write" in done.stderr


@pytest.mark.parametrize("judge", ["exact", "lenient"])
def test_the_lenient_score_stands_beside_the_score(judge: str, tmp_path: Path) -> None:
    environment = load(data_path=str(write_rows(tmp_path / "rows.jsonl", row())), judge=judge)
    for text, exact in (("#### 72", 1.0), ("It is 72.", 0.0), ("#### 71", 0.0)):
        scored = score(environment, text)
        lenient = float("72" in text)
        assert (scored.score, scored.metrics) == (exact if judge == "exact" else lenient, {"lenient": lenient})
