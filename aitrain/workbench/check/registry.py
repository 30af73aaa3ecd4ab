"""All checks, in the order in which they run; and the process that runs them, see process.py."""

import faulthandler
import json
import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict

from aitrain.environment.dataset import dataset_note
from aitrain.environment.judges import model_judge
from aitrain.errors import AitrainError, ConfigError, did_you_mean, to_aitrain_error
from aitrain.execution.user_code import describe_error
from aitrain.options.reading import resolve
from aitrain.options.train import TrainConfig
from aitrain.workbench.check import episodes, rows, scores
from aitrain.workbench.check.probes import PROBES
from aitrain.workbench.check.process import Message
from aitrain.workbench.check.subject import (
    NO_TIME,
    SAMPLE,
    SLOW_SAMPLE,
    CheckResult,
    EnvCheck,
    EnvFinding,
    NotCheckedError,
    Subject,
)
from aitrain.workbench.opening import open_environment

SECONDS = 180.0
"""What all checks together may take; what is not checked by then is left out."""
CALL_SECONDS = 10.0
"""Deadline of a call to the environment, unless --rl-env-timeout is given: a hostile reply may hang it."""
PATIENCE = 100.0
"""Seconds for which code may hold the interpreter's lock until the process is taken to hang. Other calls have their
deadline."""


CHECKS = (
    EnvCheck("dataset", "prompts, roles and case_idx are usable", rows.dataset, False),
    # first of those that play: what an environment changes only once would not be seen later
    EnvCheck("side-effects", "episodes leave their process as it was, offline", episodes.side_effects),
    EnvCheck("repeatable-dataset", "fresh processes build the same rows", rows.repeatable, False),
    EnvCheck("model-use", "the scorer does not generate", scores.model_use, False),
    EnvCheck("repeatable", "the same replies get the same score, also at the same time", scores.repeatable),
    EnvCheck("reference", "the reference earns the highest score", scores.reference),
    # those after it also look at a column that is taken for the reference
    EnvCheck("duplicates", "prompts differ, held-out ones are apart", rows.duplicates, False),
    EnvCheck("leaked-answer", "no prompt names its answer", rows.leaked_answer, False),
    # before those that play much: slow environments leave no time for what comes last
    EnvCheck("latency", "steps wait little for the environment", episodes.latency),
    EnvCheck("equivalent-forms", "the reference earns it in other forms", scores.equivalent_answers),
    *PROBES,
    EnvCheck("episode-end", "episodes end by themselves", episodes.episode_end),
    EnvCheck("exceptions", "every reply gets a score in the range", scores.exceptions),
    EnvCheck("pickling", "rows and attributes can be sent to processes", rows.pickling, False),
)


def chosen(only: Sequence[str]) -> list[EnvCheck]:
    """The checks with these names; all of them if no name is given.

    Raises:
        ConfigError: there is no such check.
    """
    known = [check.name for check in CHECKS]
    for name in set(only) - set(known):
        raise ConfigError(
            f"--only: there is no check {name}.{did_you_mean(name, known)}\nThere are: {', '.join(known)}"
        )
    return [check for check in CHECKS if not only or check.name in only]


def run_check(subject: Subject, check: EnvCheck) -> CheckResult:
    """Run a check; it is skipped if there is no time for it, or the environment has not what it needs."""
    found, skipped = list[EnvFinding](), ""
    try:
        if check.needs_scores and subject.model.used:
            raise NotCheckedError("the scorer uses the model")
        if check.needs_scores and model_judge.not_asked:
            played = subject.play(subject.pairs)
            if all(one.result.score is None and one.result.failure is None for one in played):
                raise NotCheckedError("all scores are those of judges that were not asked (--ask-judges)")
        found.extend(check.find(subject))
    except NotCheckedError as stopped:
        skipped = "" if found else str(stopped)
    except ConfigError:  # a run would be refused
        raise
    except Exception as error:  # one check that fails must not hide what the others find
        skipped = f"the check itself failed: {describe_error(error)}"
    return CheckResult(check.name, check.description, found, skipped)


# -- the process


def check(request: Message, send: Callable[[Message], None], tokenizer_of: Callable[[TrainConfig], object]) -> None:
    """Construct the environment and run the checks; those before a training have `seconds`.

    Raises:
        AitrainError: the environment cannot be constructed, or not be checked before a training.
    """
    is_fast = "seconds" in request
    config = resolve(TrainConfig, None, {"rl_env_timeout": CALL_SECONDS, **request["options"]})
    opened = open_environment(config, tokenizer_of(config))
    environment = opened.runner.environment
    if request.get("digest"):
        send({"digest": rows.digest(environment, opened.cases), "episodes": 0})
        return
    checks = chosen(request["only"])
    quiet = [f"Not asked without --ask-judges: the judge at {url}." for url in sorted(model_judge.not_asked)]
    note = "\n".join(filter(None, (opened.note, dataset_note(environment), *quiet)))
    cases, held_out = len(opened.cases), len(opened.held_out)
    send({"opened": {"name": opened.runner.label, "cases": cases, "held_out": held_out, "note": note}})
    with closing(Subject(opened, SLOW_SAMPLE if is_fast else SAMPLE, SECONDS)) as subject:
        for one in checks:
            send({"running": one.name})
            send({"result": asdict(run_check(subject, one))})
            if subject.model.used and is_fast:
                raise AitrainError("its scores need the model")
        failures = [episode.result.failure for episode in subject.episodes]
    first = failures[0] if failures and all(failures) else None
    send({"episodes": len(failures), "all_failed": first and first.message})


def answer(request: Message, tokenizer_of: Callable[[TrainConfig], object]) -> None:
    """Run the checks of the request, and send what they find. Those before a training end after their seconds, and
    before the environment connects to something."""
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    seconds = request.get("seconds", math.inf)
    end = time.monotonic() + seconds

    def send(message: Message) -> None:
        channel.write(json.dumps(message, default=str) + "\n")  # one call, as the thread sends as well
        channel.flush()

    def leave(reason: str) -> None:
        send({"error": reason})
        os._exit(0)

    def keep_alive() -> None:
        while time.monotonic() < end:  # it ends the process also while code holds the interpreter's lock
            faulthandler.dump_traceback_later(min(seconds, PATIENCE), exit=True, file=2)
            time.sleep(1)
        leave(NO_TIME)

    threading.Thread(target=keep_alive, daemon=True).start()
    if "seconds" in request:
        episodes.connection_watchers().append(lambda address: leave(f"it connects to {address}"))
    try:
        if not request.get("ask_judges"):
            os.environ[model_judge.VARIABLE] = model_judge.OFFLINE
        check(request, send, tokenizer_of)
    except Exception as error:
        ours = to_aitrain_error(error)
        send({"error": str(ours).replace("Training failed: ", "The check failed: "), "exit_code": ours.exit_code})
