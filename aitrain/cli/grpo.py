"""`aitrain grpo`: train a model on an environment. Its flags are the options of `TrainConfig`."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from aitrain.batch import RolloutSize
from aitrain.cli.flags import Flag, given_flags, with_options
from aitrain.cli.verbosity import Verbosity
from aitrain.errors import AitrainError, ConfigError
from aitrain.options.algorithms import described
from aitrain.options.documentation import common_help, help_text
from aitrain.options.run import NEWEST
from aitrain.options.train import TrainConfig
from aitrain.ui.escape_controls import escape_controls
from aitrain.ui.loading import loading

if TYPE_CHECKING:
    from aitrain.launch.preflight import RunPlan


def _show_help(ctx: typer.Context, wanted: bool) -> None:
    """Print the short help; Typer's has no sections, and cuts long flags."""
    if wanted and not ctx.resilient_parsing:
        typer.echo(f"{USAGE}{common_help(TrainConfig, _width())}\n\n{COMMAND}{MORE}")
        raise typer.Exit()


def _show_all(ctx: typer.Context, wanted: bool) -> None:
    if wanted and not ctx.resilient_parsing:
        typer.echo(f"{USAGE.rpartition(MOST_USED)[0]}{COMMAND}\n{help_text(TrainConfig, _width())}")
        raise typer.Exit()


def _width() -> int:
    return min(100, shutil.get_terminal_size().columns)


MOST_USED = "Options used most; [..] is the default:\n"
USAGE = f"""\
Usage: aitrain grpo [OPTIONS]

  Train a model with GRPO on your environment:

    aitrain grpo --model tiny --rl-env path/to/file.py:Class

{MOST_USED}"""
COMMAND = """\
Command:
  --config FILE
        YAML file with options; flags override it.
  --resume
        Resume from the newest complete checkpoint; short for --resume-from-checkpoint auto.
  --dry-run
        Check everything and show the plan: loads the environment, and trains nothing.
  --options-only
        With --dry-run: check options and files only, in a fraction of a second.
  -q, --quiet
        Show errors and the last line only.
  -v, --verbose
        Also show the output of the libraries and the environment.
  --debug
        Show tracebacks, and all output at the end.
  --json
        Write the run's events as JSON lines to standard output (aitrain schema events).
  -h, --help
        Show the options used most.
  --help-all
        Show all options. A switch has a --no- form as well; [..] is the default.
"""
MORE = """
All options: aitrain grpo --help-all
Options about something: aitrain options WORD, as in aitrain options clip
First steps: aitrain demo, then aitrain env init"""


@with_options(TrainConfig)
def grpo(
    config: Annotated[Path | None, typer.Option("--config")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run")] = False,
    options_only: Annotated[bool, typer.Option("--options-only")] = False,
    *,
    resume: Annotated[bool, typer.Option("--resume")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v")] = False,
    debug: Annotated[bool, typer.Option("--debug")] = False,
    as_json: Annotated[bool, typer.Option("--json")] = False,
    show_help: Annotated[bool, typer.Option("--help", "-h", is_eager=True, callback=_show_help)] = False,
    show_all: Annotated[bool, typer.Option("--help-all", is_eager=True, callback=_show_all)] = False,
    **flags: Flag,
) -> int:
    """Train a model with GRPO on your environment."""
    verbosity = Verbosity(quiet, verbose, debug, as_json)
    if options_only and not dry_run:
        raise ConfigError("--options-only: add --dry-run, or omit it to train")
    if dry_run and as_json:
        raise ConfigError("--json: for a plan as JSON use aitrain plan --json")
    with ExitStack() as locks:
        with loading("checking the options", quiet):
            from aitrain.launch.machines import find_nodes, launched_rank  # here, because help needs none of it
            from aitrain.launch.preflight import check

            options = train_options(config, flags, resume)
            group, rank = None, None if dry_run else launched_rank()
            if rank is not None:
                from aitrain.launch.launched_ranks import open_group, restarted

                group, store = open_group(rank)
                options = restarted(options, rank, store)
            try:
                plan = check(options, locks=None if dry_run else locks)
            except AitrainError as error:
                if not dry_run:
                    with suppress(AitrainError):  # the refusal itself is said below
                        if (nodes := find_nodes(options)) is not None:
                            from aitrain.cli.node_run import report_refusal

                            report_refusal(nodes, group, error)
                raise
        if dry_run:
            for line in (*plan_lines(plan), *checked_lines(plan, options_only, debug)):
                typer.echo(line)
            return 0
        with loading("starting", quiet):
            from aitrain.cli.running import start  # here, because a refused command needs none of it

        return start(plan, verbosity, options, group)


def train_options(config: Path | None, flags: Mapping[str, Flag], resume: bool) -> TrainConfig:
    """The options of a file and of flags. With --resume, the config.yaml of a run is that of the run which it is in."""
    from aitrain.options.reading import place_of_run, resolve  # here, because help needs none of it

    given = given_flags(flags, resume_from_checkpoint="auto" if resume else None)
    place = place_of_run(config) if config and given.get("resume_from_checkpoint") in NEWEST else {}
    return resolve(TrainConfig, config, {**place, **given})


NOT_CHECKED = "not checked: "


def checked_lines(plan: RunPlan, options_only: bool, debug: bool) -> Iterator[str]:
    """The notes of a plan, of the process that checks it, and what is not checked.

    Raises:
        AitrainError: the run would be refused.
    """
    from aitrain.launch.preflight import not_checked

    yield from (f"! {note}" for note in plan.notes)
    if options_only:
        yield from (f"{NOT_CHECKED}{what}" for what in not_checked(plan, with_environment=False))
        return
    from aitrain.launch.dry_run import dry_run  # here, because --options-only needs none of it
    from aitrain.launch.model_shape import folder_of

    sys.stdout.flush()  # the process takes seconds
    if folder_of(plan.config.model) is None:
        print(f"loading the tokenizer of {plan.config.model}, which is not on this machine", file=sys.stderr)
    with _phases_on_screen() as show_phase:
        notes = dry_run(plan, _print_output if debug else None, show_phase)
    yield from (note.mark + escape_controls(note.text) for note in notes)
    yield from (f"{NOT_CHECKED}{what}" for what in not_checked(plan))


@contextmanager
def _phases_on_screen() -> Iterator[Callable[[str], None]]:
    """Show what is being checked on a line of the terminal, which is removed at the end."""
    from rich.markup import escape  # here, because help needs none of these

    from aitrain.ui.terminal import can_be_drawn_over, on_standard_error

    console = on_standard_error()
    if not can_be_drawn_over(console):
        yield lambda _: None
        return
    with console.status("checking: starting") as status:
        yield lambda phase: status.update(f"checking: {escape(escape_controls(phase))}")


def _print_output(text: str) -> None:
    print(escape_controls(text), file=sys.stderr)


def _environments(plan: RunPlan) -> str:
    """Where the environment is; of several, the share of each in a batch, and in the held-out score."""
    given = plan.config.environments if any(source.adapter for source in plan.sources.values()) else {}
    places = {
        name: given[name].env_place if source.adapter else str(source.file or source.module)
        for name, source in plan.sources.items()
    }
    if len(places) < 2:
        return places.get("", "from Python")
    shares = plan.config.env_shares
    return f"\n{'':13}".join(f"{name}: {shares[name]:.1%} of the prompts, {place}" for name, place in places.items())


def _judges(plan: RunPlan) -> dict[str, str]:
    """What scores the rows of `--rl-env rows:FILE`."""
    judged = []
    for name, source in plan.sources.items():
        if source.adapter is not None and source.adapter.name == "rows":
            from aitrain.environment.judges.judge_set import Judges  # here, because no other plan needs it

            settings: Mapping[str, Any] = plan.config.environments[name].rl_env_config or {}
            judged.append(f"{name and name + ': '}{Judges.described(settings.get('judges'))}")
    return {"judges": f"\n{'':13}".join(judged)} if judged else {}


def plan_lines(plan: RunPlan) -> list[str]:
    """The plan of a run, as lines."""
    config, folder = plan.config, plan.folder
    updates = config.trl_integer("num_iterations", 1)
    repeated = f" x {updates} updates with each batch" if updates > 1 else ""
    rollout = RolloutSize.of(config, plan.batch)
    whole = "rounded up to whole rollouts" if rollout.steps > 1 else "rounded up"
    steps = (
        f"{config.max_steps}"
        if config.max_steps
        else f"{config.epochs} x training cases / {plan.batch.prompts_per_step}{repeated}, {whole}"
    )
    preset = list(described(config))
    where = folder.path if folder else Path(config.output_dir) / config.project_name
    machines = f", on each of {plan.nodes.count} machines" if plan.nodes else ""
    lines = {
        "model": config.model,
        "environment": _environments(plan),
        **_judges(plan),
        "batch": str(plan.batch),
        "rollout": str(rollout),
        **({"preset": "\n             ".join(preset)} if preset else {}),
        "loss": f"{config.custom_loss}, averaged as {config.rl_loss_type}" if config.custom_loss else str(config.loss),
        **_parts(config),
        "lr": f"{config.learning_rate:g}{'' if config.lr else ', for LoRA' if config.peft else ', for all weights'}",
        "steps": f"{steps}{_early_end(config)}",
        **({"cases": " ".join(_cases(config))} if list(_cases(config)) else {}),
        **({"ahead": _ahead(config)} if config.rl_ahead else {}),
        **({"callbacks": config.custom_callbacks} if config.custom_callbacks else {}),
        "processes": f"{plan.processes} on {'GPU ' + ', '.join(plan.gpus) if plan.gpus else 'CPU'}{machines}",
        **_servers(plan),
        "run folder": str(where),
        **({"resumes from": str(plan.checkpoint)} if plan.checkpoint else {}),
        **({"left to do": "nothing"} if plan.is_done else {}),
    }
    return [f"{name:12} {value}" for name, value in lines.items()]


def _parts(config: TrainConfig) -> dict[str, str]:
    """What else there is in the loss and in the rewards."""
    parts = {"KL term": f"{config.rl_kl_estimator} x {config.rl_kl_coef:g} in the {config.rl_kl_in}"}
    if not config.rl_kl_coef:
        parts["KL term"] = "none"
    if config.rl_baseline == "leave_one_out":
        parts["baseline"] = "the mean of the others in the group"
    if config.rl_dual_clip is not None:
        parts["dual clip"] = f"ratio at most {config.rl_dual_clip:g} where the advantage is negative"
    if config.rl_entropy_coef:
        parts["entropy"] = f"bonus x {config.rl_entropy_coef:g}"
    if config.overlong_buffer is not None:
        limit, first = config.rl_max_new_tokens, config.rl_max_new_tokens - config.overlong_buffer
        parts["overlong"] = f"rewards fall by {config.rl_overlong_penalty:g} from {first} to {limit} tokens"
    return parts


def _cases(config: TrainConfig) -> Iterator[str]:
    """How the cases of a batch are chosen, unless each is played once in an epoch."""
    if config.custom_sampler:
        yield f"chosen by {config.custom_sampler}{';' if config.rl_sampling == 'refill' else ''}"
    if config.rl_sampling == "difficulty":
        yield "drawn by how much their scores vary; an epoch is as many groups as there are cases"
    if config.rl_sampling == "refill":
        yield f"groups whose scores are all equal are replaced, at most {config.rl_refill_limit} times in a batch"


def _ahead(config: TrainConfig) -> str:
    """What --rl-ahead does."""
    turns = "; weights are also loaded between turns" if config.rl_ahead_turns else ""
    return f"the next rollout is sampled while one trains, with weights that are one rollout old{turns}"


def _servers(plan: RunPlan) -> dict[str, str]:
    if not plan.config.starts_vllm_servers:
        return {}
    from aitrain.launch.managed_server import servers_in_words  # here, because only these runs need it

    return {"vLLM servers": servers_in_words(plan)}


def _early_end(config: TrainConfig) -> str:
    """What --until and --patience add to the number of steps."""
    ends = [f"a held-out score whose interval begins at {config.until:g} or above"] if config.until is not None else []
    if config.patience is not None:
        ends.append(f"{config.patience} evaluations in a row without a better one")
    every = f"{config.eval_steps} steps" if config.eval_strategy == "steps" else "epoch"
    return f", fewer after {' or '.join(ends)}; an evaluation every {every}" if ends else ""
