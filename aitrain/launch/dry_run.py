"""Starts the process of a dry run, a training process that loads no weights, and waits for its end."""

from __future__ import annotations

import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from aitrain.errors import AitrainError, EnvironmentFailed, Interrupted, RunFailed
from aitrain.events import DRY_RUN_VARIABLE, Ended, Failed, Note, Phase, decode
from aitrain.execution.process_tree import ProcessTree
from aitrain.launch.local_processes import worker_command
from aitrain.launch.model_shape import folder_of
from aitrain.launch.preflight import RunPlan
from aitrain.launch.processes import process_variables
from aitrain.redaction import RedactedLog, disable_telemetry
from aitrain.runs.run_folder import RunFolder


def dry_run(
    plan: RunPlan,
    show_output: Callable[[str], None] | None = None,
    show_phase: Callable[[str], None] = lambda _: None,
) -> list[Note]:
    """Check a run in a process of its own, as far as that is possible without its weights; returns its notes.
    `show_output` gets what the libraries and the environment printed, `show_phase` what the process begins to do.

    Raises:
        AitrainError: the run would be refused, by the same error.
    """
    disable_telemetry(plan.config.telemetry)
    variables = {**process_variables(plan), DRY_RUN_VARIABLE: str(plan.batch.processes)}
    notes, phase, is_late = list[Note](), "starting", threading.Event()
    end: Failed | Ended | None = None
    with tempfile.TemporaryDirectory(prefix="aitrain-dry-run-") as parent:
        folder = RunFolder(Path(parent))
        folder.write_config(plan.config)
        log = RedactedLog(folder.log, variables)
        command = worker_command(plan, folder, plan.checkpoint)
        tree = ProcessTree(command, env=variables, stdout=subprocess.PIPE, stderr=log.pipe)

        def give_up() -> None:
            is_late.set()
            tree.kill()

        timer = threading.Timer(plan.config.stall_timeout, give_up)
        timer.start()
        try:
            for line in tree.stdout:
                match decode(line.decode(errors="replace")):
                    case Note() as note:
                        notes.append(note)
                    case Phase(phase):
                        show_phase(phase)
                    case Ended() | Failed() as end:
                        break
            else:
                tree.wait()
        except KeyboardInterrupt:
            raise Interrupted("Stopped.") from None
        finally:
            timer.cancel()
            code = tree.close()
            log.close()
            tree.stdout.close()
        if show_output is not None:
            show_output(folder.log.read_text(encoding="utf-8", errors="replace"))
    if end is None and is_late.is_set():
        late = f"The dry run took more than {plan.config.stall_timeout:g} seconds (--stall-timeout), while {phase}"
        raise EnvironmentFailed(late)
    if end is None:
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        raise RunFailed(f"The process ended without an error message while {phase}: {how}")
    if isinstance(end, Failed):
        error = AitrainError(end.message)
        error.exit_code = end.exit_code
        raise error
    return notes


def not_checked(plan: RunPlan, *, with_environment: bool = True) -> Iterator[str]:
    """What a dry run of this plan leaves to the run."""
    config = plan.config
    if not with_environment:
        yield "the environment, its dataset, the tokenizer, and what TRL refuses (--options-only)"
    is_here = folder_of(config.model) is not None
    yield f"the {'weights' if is_here else 'download'} of {config.model}"
    yield f"memory of the {'GPUs' if plan.gpus else 'CPU'}, beyond the estimate of aitrain plan"
    if with_environment:
        yield "how the environment takes the model's own answers (aitrain env check tries many)"
    if plan.checkpoint is not None:
        yield f"the weights and states in {plan.checkpoint}, and whether another process trains there"
    if plan.batch.processes > 1:
        yield f"the {plan.batch.processes} training processes and their connections"
    if config.distributed_backend == "fsdp2":
        yield "TRL's trainer with FSDP2, which needs all processes"
    if config.trl_table("model_init_kwargs"):
        yield "--trl model_init_kwargs, which are used with the weights"
    if config.use_vllm:
        urls = config.vllm_server_urls
        servers = f"the vLLM server{'s' if len(urls) > 1 else ''} at {', '.join(urls)}"
        yield servers if urls else "vLLM, which was not started"
    if config.quantization is not None:
        yield f"the quantization of the weights ({config.quantization})"
    if config.push_to_hub:
        yield "whether the token may write to the Hub"
    if config.log != "none":
        yield f"the login of {config.log}"
