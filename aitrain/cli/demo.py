"""`aitrain demo`: a whole run in a minute, on a shipped model and a shipped environment."""

from __future__ import annotations

from typing import Annotated

import typer

from aitrain.cli.verbosity import Verbosity
from aitrain.runs.run_folder import RUNS
from aitrain.ui.loading import loading


def demo(
    seed: Annotated[int, typer.Option(help="Seed of the run.")] = 42,
    project_name: Annotated[str, typer.Option(help="Name of the run folder.")] = "demo",
    output_dir: Annotated[str, typer.Option(help="Folder in which the run folder is made.")] = RUNS,
    *,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Show errors and the last line only.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show what the libraries print as well.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks and the libraries' output.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Write events as JSON lines.")] = False,
) -> int:
    """Teach the tiny model to add, in about a minute on two CPU cores."""
    verbosity = Verbosity(quiet, verbose, debug, as_json)
    with loading("checking the options", quiet):
        from aitrain.cli.running import start  # here, because help needs none of it
        from aitrain.launch.preflight import check
        from aitrain.options.reading import resolve
        from aitrain.options.train import TrainConfig

        flags = {"project_name": project_name, "output_dir": output_dir, "seed": seed}
        plan = check(resolve(TrainConfig, None, SETTINGS | flags))
    return start(plan, verbosity)


SETTINGS: dict[str, object] = {
    "model": "tiny",
    "rl_env": "envs.arithmetic",
    "rl_prompts_per_step": 16,
    "rl_num_generations": 8,
    "batch_size": 128,
    "rl_max_new_tokens": 8,
    "rl_kl_coef": 0.0,
    "rl_loss_type": "dapo",
    "lr": 4e-4,
    "max_steps": 80,
    "eval_cases": 200,
    "eval_strategy": "no",
    "disable_gradient_checkpointing": True,
}
"""The options of the demo."""
