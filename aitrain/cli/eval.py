"""`aitrain eval`: score models on an environment. Its flags are options of `EvalConfig`."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from rich.text import Text

from aitrain.cli.flags import (
    AsJson,
    ConfigFile,
    print_json,
    run_argument,
    run_names,
    with_options,
)
from aitrain.errors import ConfigError, did_you_mean
from aitrain.events import Phase
from aitrain.launch.preflight import RunPlan, absolute, check_eval
from aitrain.options.environment import EnvironmentOptions
from aitrain.options.reading import read_file, resolve
from aitrain.options.train import EVAL_FLAGS, OF_THE_RUN, EvalConfig
from aitrain.runs.heartbeat import sign_of_life
from aitrain.runs.held_out import interval_text
from aitrain.runs.model_reference import read_model, run_options
from aitrain.runs.result import JOB, EvalResult
from aitrain.runs.run_folder import RunFolder
from aitrain.ui.output import escape_controls


@with_options(EvalConfig, EVAL_FLAGS)
def eval(
    models: Annotated[
        list[str],
        run_argument(
            "MODEL",
            "A run folder or the name of a run in runs/, a checkpoint, an adapter, a model folder, a Hub name, or"
            " the address of an OpenAI-compatible server (key: OPENAI_API_KEY).",
        ),
    ],
    config: ConfigFile = None,
    *,
    as_json: AsJson = False,
    **flags: object,
) -> int:
    """Score models on the held-out cases of an environment.

    Options of a run, such as its environment, are taken over where no flag is given:
    aitrain eval tiny runs/sums --samples 4
    """
    plans = _plans(models, config, flags)
    from aitrain.cli.running import run_in  # these here, because help and refusals need none of them
    from aitrain.runs.new_folder import new_run_folder

    folders = list[Path]()
    try:
        for options, plan in plans:
            with new_run_folder(options) as folder:
                folder.write_config(options)
                claimed = folder.claimed(job=JOB, **sign_of_life())
                run_in(claimed, plan, [Phase(f"evaluating {options.model}")])
            folders.append(folder.path)
    finally:  # what was scored is shown before an error
        if folders:
            _print(folders, as_json)
    return 0


def _print(folders: Sequence[Path], as_json: bool) -> None:
    from rich.console import Console

    results = [EvalResult.read(folder) for folder in folders]
    if as_json:
        print_json([{**one.to_json(), "folder": str(one.folder)} for one in results])
        return
    console = Console(highlight=False)
    console.print(eval_table(results), soft_wrap=True)
    for line in _remarks(results):
        console.print(line, style="dim", soft_wrap=True, markup=False)


def _plans(models: Sequence[str], config: Path | None, flags: Mapping[str, object]) -> list[tuple[EvalConfig, RunPlan]]:
    """The options and the plan of each model, checked before the first one starts: options of the first run among the
    models, of the file, and of the flags."""
    given = {**(read_file(config) if config else {}), **flags}
    references = [read_model(model) for model in models]
    run = next((reference.run for reference in references if reference.run is not None), None)
    is_env_given = not given.keys().isdisjoint(("rl_env", "rl_env_module"))
    if run is None and not is_env_given:
        near = did_you_mean(models[0], run_names())
        raise ConfigError(
            f"rl_env: {models[0]} is not a run, whose environment would be taken.{near}\n"
            "Add --rl-env path/to/file.py:Class, or name a run; these are listed by: aitrain show"
        )
    taken = run_options(run, OF_THE_RUN)
    if run and isinstance(passes := taken.get("gradient_accumulation"), int):
        # cases are held out as for a step of all of the run's processes
        taken["gradient_accumulation"] = passes * RunFolder(run).processes
    if is_env_given:
        taken = {name: value for name, value in taken.items() if name not in EnvironmentOptions.model_fields}
    merged = {**taken, **given}
    if "eval_cases" in given:
        taken.pop("save_best", None)  # which would leave out the half of the cases that chose the step
    if merged.get("dtype") == "float16" or merged.get("quantization"):
        taken["peft"] = True  # as base of an adapter, a model may have any number format
    # vLLM as a server: an engine inside the process would be a second way to the same scores
    shared = resolve(EvalConfig, config, {"model": "tiny", "vllm_mode": "server", **flags}, taken)
    plans = list[tuple[EvalConfig, RunPlan]]()
    for reference in references:
        name = f"eval-{replace(reference, name=shared.model_name).label}"
        if "project_name" in given:
            name = shared.project_name
        # what a later start finds the same model by, from any folder
        place = str(reference.run) if reference.kind == "run" else reference.given
        options = shared.model_copy(update={"model": absolute(place), "project_name": name})
        plans.append((options, check_eval(options, reference)))
    return plans


# -- the table of results


def eval_table(results: Sequence[EvalResult]) -> Text:
    """One line for each model: scores with 95% intervals, pass@K."""
    from aitrain.ui.terminal import text_table

    names = dict.fromkeys(name for result in results for name in result.scores)
    labels = [str(result.model["label"]) for result in results]
    rows = list[list[str]]()
    for result, label in zip(results, labels, strict=True):
        name = label if labels.count(label) == 1 else escape_controls(str(result.model["given"]))
        rows.append([name, *(interval_text(result.scores.get(column)) for column in names)])
    return text_table([[Text(escape_controls(title), "bold") for title in ("model", *names)], *rows])


def _remarks(results: Sequence[EvalResult]) -> Iterator[str]:
    """What a reader of the table should know, one sentence each, and the folders."""
    first = results[0]
    samples = f", {first.samples} samples each" if first.samples > 1 else ""
    yield f"{first.environment}: {first.cases} cases{samples}, seed {first.seed}; scores with 95% intervals"
    for result in results:
        counts = {
            **{f"episodes left out, as the environment failed: {kind}": n for kind, n in result.failures.items()},
            "episodes have no score (None)": result.unscored,
            "episodes dropped, as their prompt leaves no room for an answer": result.dropped,
            f"of {result.cases} cases were trained on, or chose its step": result.overlap,
        }
        for what, count in counts.items():
            if count:
                yield f"{result.folder.name}: {count} {what}"
        yield f"eval folder: {result.folder}"
