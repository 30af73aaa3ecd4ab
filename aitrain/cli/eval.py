"""`aitrain eval`: score models on an environment. Its flags are options of `EvalConfig`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from aitrain.cli.completion import run_names
from aitrain.cli.flags import Flag, given_flags, with_options
from aitrain.cli.verbosity import Verbosity
from aitrain.errors import AitrainError, ConfigError, EnvironmentFailed, Interrupted
from aitrain.options.documentation import help_text
from aitrain.options.evaluate import EVAL_FLAGS, OF_THE_RUN, EvalConfig
from aitrain.ui.loading import loading

if TYPE_CHECKING:
    from aitrain.runs.model_reference import ModelReference
    from aitrain.runs.run_folder import RunFolder

HIDDEN = {"eval_cases", "eval_samples", "model"}
"""Options with another flag here: --cases, --samples, and the argument."""
SHOWN = EVAL_FLAGS - HIDDEN
MAY_DIFFER = {
    *("project_name", "output_dir", "stall_timeout", "telemetry", "num_processes", "ddp_timeout", "rl_max_failed"),
    *("rl_env_workers", "rl_env_isolation", "rl_env_timeout", "rl_env_retries"),
    *("vllm_server_url", "vllm_servers", "vllm_listen_address", "vllm_server_gpus", "vllm_max_restarts"),
    "vllm_gpu_memory_utilization",
}
"""Options that a resumed eval may change: its episodes stay the same."""


def _show_help(ctx: typer.Context, wanted: bool) -> None:
    """Print the help; Typer's has no sections, and cuts long flags."""
    if wanted and not ctx.resilient_parsing:
        typer.echo(HELP + help_text(EvalConfig, min(100, shutil.get_terminal_size().columns), SHOWN))
        raise typer.Exit()


HELP = """\
Usage: aitrain eval MODEL... [OPTIONS]

  Score models on held-out cases of an environment:

    aitrain eval tiny runs/sums --rl-env path/to/file.py:Class

  A MODEL is a run folder or the name of a run in runs/, a checkpoint, an adapter, a model folder, a
  Hub name, or the address of an OpenAI-compatible server (key: OPENAI_API_KEY). Options of a run,
  such as its environment, are taken over where no flag is given.

Command:
  --cases INTEGER
        Held-out cases; unset: those of a training with these options.
  --samples INTEGER
        Sampled completions of each case; with several, pass@1 to pass@K are reported.
  --config FILE
        YAML file with options; flags override it.
  --resume
        Continue evals that were interrupted; finished ones are shown and not played again.
  --json
        Print the results as a JSON list.
  -q, --quiet
        Show errors and the results only.
  -v, --verbose
        Also show the output of the libraries and the environment.
  --debug
        Show tracebacks, and all output at the end.
  -h, --help
        Show this. A switch below has a --no- form as well; [..] is the default.

"""


@with_options(EvalConfig, SHOWN)
def eval(
    models: Annotated[list[str] | None, typer.Argument(metavar="MODEL...", autocompletion=run_names)] = None,
    config: Annotated[Path | None, typer.Option("--config")] = None,
    *,
    cases: Annotated[str | None, typer.Option("--cases")] = None,
    samples: Annotated[str | None, typer.Option("--samples")] = None,
    resume: Annotated[bool, typer.Option("--resume")] = False,
    as_json: Annotated[bool, typer.Option("--json")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v")] = False,
    debug: Annotated[bool, typer.Option("--debug")] = False,
    show_help: Annotated[bool, typer.Option("--help", "-h", is_eager=True, callback=_show_help)] = False,
    **flags: Flag,
) -> int:
    """Score models on the held-out cases of an environment."""
    given = given_flags(flags, eval_cases=cases, eval_samples=samples)
    asked = AskedEvals(models or [], given, config, "resume" if resume else "new", Verbosity(quiet, verbose, debug))
    folders = list[Path]()
    try:
        for folder in each_eval(asked):
            folders.append(folder)
    finally:  # what was scored is shown before the error
        if folders:
            _print(folders, as_json)
    return 0


def _print(folders: Sequence[Path], as_json: bool) -> None:
    from aitrain.runs.eval_result import EvalResult  # here, because help needs none of it
    from aitrain.ui.eval_table import eval_table, remarks

    results = [EvalResult.read(folder) for folder in folders]
    if as_json:
        typer.echo(json.dumps([{**one.to_json(), "folder": str(one.folder)} for one in results], indent=2))
        return
    from rich.console import Console

    console = Console(highlight=False)
    console.print(eval_table(results), soft_wrap=True)
    for line in (*remarks(results), *(f"eval folder: {folder}" for folder in folders)):
        console.print(line, style="dim", soft_wrap=True, markup=False)


@dataclass(frozen=True)
class AskedEvals:
    """The evals of one command."""

    models: Sequence[str]
    flags: Mapping[str, object]
    """Options that were given, by name."""
    config: Path | None = None
    existing: str = "new"
    """What happens to an eval that exists: `new` makes another folder, `resume` continues it and refuses other options,
    `reuse` takes it if its options are the same."""
    verbosity: Verbosity = field(default_factory=Verbosity)
    like: Path | None = None
    """Folder of a run or an eval whose options are taken over; unset: the first run among the models."""


def run_evals(asked: AskedEvals) -> list[Path]:
    """The folders of the evals, one for each model. All are checked before the first one starts.

    Raises:
        AitrainError: an option is wrong, or an eval failed.
    """
    return list(each_eval(asked))


def each_eval(asked: AskedEvals) -> Iterator[Path]:
    """The folders of the evals, each when it is done. A model that fails does not keep the others from being played.

    Raises:
        AitrainError: an option is wrong, or an eval failed.
    """
    with loading("checking the options", asked.verbosity.quiet):
        from aitrain.cli.eval_run import run_eval  # here, because help needs none of it
        from aitrain.launch.preflight import check_eval

        configs = _configs(asked)
        plans = [check_eval(config, reference) for reference, config in configs]
    failures = list[AitrainError]()
    for (reference, config), plan in zip(configs, plans, strict=True):
        folder = _existing(asked, reference, config)
        try:
            if folder is None or not _is_finished(folder):
                with _to_play_in(asked, reference, config) as folder:
                    if not _is_finished(folder):  # else another command has played it meanwhile
                        run_eval(plan, config, folder, asked.verbosity)
        except AitrainError as error:
            if error.exit_code in (Interrupted.exit_code, EnvironmentFailed.exit_code):  # the others would end so, too
                raise
            failures.append(error)
        else:
            yield folder.path
    if failures:
        first = failures[0]
        first.args = ("\n".join(map(str, failures)),)
        raise first


def _configs(asked: AskedEvals) -> list[tuple[ModelReference, EvalConfig]]:
    """Each model with its options: of the first run among the models, of the file, and of the flags."""
    from aitrain.launch.preflight import absolute
    from aitrain.options.environment import EnvironmentOptions
    from aitrain.options.reading import place_of_run, read_file, resolve
    from aitrain.runs.model_reference import ModelReference, read_model, run_options

    in_file = read_file(EvalConfig, asked.config) if asked.config else {}
    flags = {**(place_of_run(asked.config) if asked.config and asked.existing == "resume" else {}), **asked.flags}
    models = list(asked.models) or [str(in_file[name]) for name in ("model",) if name in in_file]
    if not models:
        raise ConfigError("Name a model: aitrain eval MODEL..., such as a run folder, a Hub name, or tiny")
    references = [read_model(model) for model in models]
    run = next((reference for reference in references if reference.run is not None), None)
    if asked.like is not None:
        run = ModelReference(str(asked.like), "run", "", run=asked.like)
    taken = {name: value for name, value in (run_options(run) if run else {}).items() if name in OF_THE_RUN}
    if {"rl_env", "rl_env_module"} & {*in_file, *asked.flags}:
        taken = {name: value for name, value in taken.items() if name not in EnvironmentOptions.model_fields}
    given = {**taken, **in_file, **asked.flags}
    if "eval_cases" in {*in_file, *asked.flags}:
        taken.pop("save_best", None)  # which would leave out the half of the cases that chose the step
    if given.get("dtype") == "float16" or given.get("quantization"):
        taken["peft"] = True  # as base of an adapter, a model may have any number format
    shared = resolve(EvalConfig, asked.config, {"model": "tiny", **flags}, taken)
    names = _names(references, shared, "project_name" in {*in_file, *asked.flags})
    return [
        (one, shared.model_copy(update={"model": absolute(_place(one)), "project_name": name}))
        for one, name in zip(references, names, strict=True)
    ]


def _place(reference: ModelReference) -> str:
    """What a later start finds the same model by, from any folder."""
    if reference.kind == "run" and reference.run is not None:
        return str(reference.run)
    return reference.given


def _names(references: Sequence[ModelReference], config: EvalConfig, is_named: bool) -> list[str]:
    """Names of the folders, each one once."""

    names: list[str] = []
    for reference in references:
        label = replace(reference, name=config.model_name).label
        name = config.project_name if is_named else f"eval-{label}"
        name = f"{name}-{label}" if is_named and len(references) > 1 else name
        names.append(next(one for one in (name, *(f"{name}-{n}" for n in range(2, 999))) if one not in names))
    return names


# -- evals that exist


@contextmanager
def _to_play_in(asked: AskedEvals, reference: ModelReference, config: EvalConfig) -> Iterator[RunFolder]:
    """The folder to play an eval in, locked until the block ends.

    Raises:
        ConfigError: another eval was begun there meanwhile.
    """
    from aitrain.runs.new_folder import is_foreign, locked, new_run_folder  # here, because help needs none of it
    from aitrain.runs.run_folder import RunFolder

    named = RunFolder(Path(config.output_dir).expanduser() / config.project_name)
    existing = _existing(asked, reference, config)
    if existing is None and (asked.existing == "new" or named.config.exists() or is_foreign(named)):
        with new_run_folder(config) as folder:
            yield folder
        return
    with locked(existing or named) as folder:
        if folder.config.exists() and (other := _differences(folder, reference, config)):
            raise ConfigError(f"{folder.path} has become another eval: {', '.join(other[:3])}\nRepeat the command.")
        yield folder


def _existing(asked: AskedEvals, reference: ModelReference, config: EvalConfig) -> RunFolder | None:
    """The folder of an earlier start of the same eval; None: it is to be made.

    Raises:
        ConfigError: the eval that is to be resumed is another one.
    """
    from aitrain.runs.run_folder import RunFolder

    if asked.existing == "new":
        return None
    named = RunFolder(Path(config.output_dir).expanduser() / config.project_name)
    begun = [RunFolder(file.parent) for file in named.path.parent.glob("*/config.yaml")]
    begun = [folder for folder in begun if folder.path.name.startswith(named.path.name)]
    same = [folder for folder in begun if not _differences(folder, reference, config)]
    if asked.existing == "resume" and named in begun and not same:
        raise ConfigError(
            f"--resume: {named.path} is another eval: {', '.join(_differences(named, reference, config)[:3])}\n"
            "Repeat its options, or omit --resume to start another one."
        )

    def rank(folder: RunFolder) -> tuple[bool, bool, int]:
        is_wanted = _is_finished(folder) == (asked.existing == "reuse")
        return is_wanted, folder == named, folder.config.stat().st_mtime_ns

    return max(same, key=rank, default=None)


def _differences(folder: RunFolder, reference: ModelReference, config: EvalConfig) -> list[str]:
    """What decides on the episodes and differs from the eval in a folder: options, weights, environment."""
    from aitrain.options.environment import DECLARED_OPTIONS
    from aitrain.options.reading import resolve
    from aitrain.runs.eval_result import JOB, changed_since
    from aitrain.runs.run_folder import read_object

    if read_object(folder.status).get("job") != JOB:
        return ["it is not an eval"]
    try:
        before, now = resolve(EvalConfig, folder.config).written(), config.written()
    except ConfigError as error:  # of another version
        return [str(error)]
    declared = {*DECLARED_OPTIONS.values()} - config.model_fields_set  # they are those of the environment
    names = sorted({*before, *now} - MAY_DIFFER - declared)
    differs = [f"other {name}" for name in names if before.get(name) != now.get(name)]
    changed = changed_since(folder, reference)
    return [*differs, *([f"{changed} has changed"] if changed else [])]


def _is_finished(folder: RunFolder) -> bool:
    from aitrain.runs.run_folder import read_object

    return read_object(folder.result).get("status") == "finished"
