"""Run folders made by hand: one of each kind, as trainings, evals and sweeps leave them."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from optuna.distributions import CategoricalDistribution, FloatDistribution
from optuna.trial import TrialState, create_trial

from aitrain.runs.heartbeat import sign_of_life
from aitrain.runs.run_folder import RunFolder, append_lines, write_json
from aitrain.ui.sweep_page import open_study
from tests.runs import scorings
from tests.ui.conftest import record, write_run

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)><!-- &amp; \u2028\u2029 \ud800 \x00"
RENDERED = "<|im_start|>user\n<b>Book</b> me a room<|im_end|>\n<|im_start|>assistant\n"


def interval(mean: float) -> Any:
    return scorings.interval(mean, mean - 0.1, mean + 0.1, 8)


def held_out(case: int, phase: str, score: float, **differences: Any) -> dict[str, Any]:
    """An episode of a scoring."""
    step = 9 if phase.startswith("after") else 0
    return record(eval_phase=phase, row_number=case, case_idx=case, score=score, step=step, **differences)


def make_run(folder: Path, records: list[dict[str, Any]], status: str, **known: Any) -> RunFolder:
    """A run folder with a model, an environment and a status; `reward`s become metrics."""
    run = RunFolder(write_run(folder, records))
    run.config.write_text("model: Qwen/Qwen3-0.6B\nrl_env: my_envs.hotel:HotelEnv\nseed: 42\nmax_steps: 50\n")
    rewards = known.pop("rewards", [])
    append_lines(run.metrics, [{"step": n + 1, "reward": reward} for n, reward in enumerate(rewards)])
    run.write_status(status, **known)
    return run


def make_better(folder: Path) -> RunFolder:
    """A finished run whose held-out case got better."""
    records = [held_out(100, "before_sampled", 0.0), held_out(100, "after_sampled", 1.0)]
    messages = [{"role": "user", "content": "Book me a room"}, {"role": "assistant", "content": "Done"}]
    records += [record(rendered_prompt=RENDERED, messages=[*messages, {"role": "user", "content": "?"}])]
    records += [record(messages=messages, advantage=0.1)] * 3
    run = make_run(folder, records, "finished", step=9, steps=9, heartbeat=time.time() - 60, rewards=[0.1, 0.5, 0.9])
    table = {
        "sampled": {"before": interval(0.375), "after": interval(0.75), "change": {**interval(0.375), "p_value": 0.01}}
    }
    result = {"status": "finished", "steps": 9, "seconds": 90, "base_model": "tiny", "environment": "Arithmetic"}
    write_json(run.result, {**result, "scores": table, "eval_cases": 8})
    return run


def make_failed(folder: Path) -> RunFolder:
    """A run that failed at step 3, with a log."""
    reason = "Out of memory in step 4.\nLower --batch-size."
    error = {"kind": "raised", "place": "score_episode", "message": "ValueError: no"}
    known = {"step": 3, "steps": 50, "reason": reason, "heartbeat": time.time() - 4000}
    run = make_run(folder, [record(), record(score=None, error=error)], "failed", **known)
    run.log.write_text("loading\ntorch.OutOfMemoryError: <b>out</b> of memory\n")
    (run.checkpoints / "checkpoint-2").mkdir(parents=True)
    return run


def make_live(folder: Path) -> RunFolder:
    """A run of this process, at step 12 of 50, with a scoring at step 10."""
    known = {**sign_of_life(), "step": 12, "steps": 50, "phase": "training", "score_before": 0.25}
    records = [held_out(100 + case, "before_sampled", float(case == 0)) for case in range(4)]
    records += [held_out(100 + case, "step10_sampled", float(case < 2)) | {"weight_version": 10} for case in range(4)]
    run = make_run(folder, records, "running", **known, ends_at=time.time() + 630, rewards=[0.2, 0.4])
    append_lines(run.metrics, [{"step": 10, "eval_score": 0.5, "eval_cases": 4}])
    return run


def make_eval(folder: Path) -> RunFolder:
    """An eval of four cases with two samples."""
    samples = [held_out(n, "eval_sampled", float(n + k < 3), sample=k) for n in range(4) for k in range(2)]
    run = make_run(folder, samples, "finished", job="eval", step=8, steps=8, heartbeat=time.time() - 10)
    run.config.write_text("model: sums\nrl_env: my_envs.hotel:HotelEnv\nseed: 7\n")
    write_json(
        run.result,
        {"job": "eval", "status": "finished", "model": {"label": "sums, step 9"}, "environment": "Arithmetic",
         "cases": 4, "samples": 2, "seconds": 5.0, "scores": {"sampled": interval(0.625), "pass@2": interval(0.75)},
         "lengths": {"sampled": 2.0}},
    )  # fmt: skip
    return run


def make_sweep(folder: Path, text: str = "dapo") -> Path:
    """A sweep with two trials that finished and two that failed, with this text in it."""
    folder.mkdir(parents=True, exist_ok=True)
    study, space = open_study(folder, is_new=True), {"lr": FloatDistribution(1e-7, 1e-3, log=True)}
    more: dict[str, Any] = {"distributions": {**space, "rl_loss_type": CategoricalDistribution(["grpo", text])}}
    for number, score in enumerate((0.8, 0.4)):
        make_run(folder / f"trial-{number}", [record()], "finished", step=4, heartbeat=time.time() - 20)
        known = {"before": 0.2, "interval": interval(score), "seconds": 15.0}
        study.add_trial(create_trial(params=values(number, text), value=score, user_attrs=known, **more))
    for number in (2, 3):
        failed = {"state": TrialState.FAIL, "user_attrs": {"error": text}}
        study.add_trial(create_trial(params=values(number, text), **failed, **more))
    life = {"heartbeat": time.time() - 20}
    write_json(folder / "status.json", {"status": "finished", "job": "sweep", "step": 4, "steps": 4, **life})
    result = {"job": "sweep", "status": "finished", "seconds": 30.0, "score_before": 0.2, "score_after": 0.8}
    write_json(folder / "result.json", {**result, "base_model": "tiny", "environment": "envs.arithmetic"})
    return folder


def values(number: int, text: str) -> dict[str, object]:
    return {"lr": 10.0 ** (number - 7), "rl_loss_type": ("grpo", text)[number % 2]}
