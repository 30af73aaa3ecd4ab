"""Every option does something: away from its default, what is made of the configuration differs.

A configuration that merely holds another value proves nothing, so each entry names the function that hands the value
on: to TRL, to peft, to an engine, to the environment's calls, to a file or to a process.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from contextlib import closing, nullcontext
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import TrainerControl, TrainerState
from trl import GRPOTrainer

from aitrain import TrainConfig, activity
from aitrain.batch import CaseSchedule, plan_batch
from aitrain.engines.sampling import Sampling
from aitrain.environment.contract import Case
from aitrain.environment.dataset import Cases, build_cases
from aitrain.environment.loader import load_env
from aitrain.environment.locator import find_env
from aitrain.environment.runner import EnvRunner, EnvSession, start_runner
from aitrain.environment.score_parsing import parse_score
from aitrain.errors import AitrainError
from aitrain.execution.processes import ProcessPool
from aitrain.jobs import grpo, worker
from aitrain.jobs.environment_check import note_findings
from aitrain.launch import managed_server, preflight, processes
from aitrain.launch.processes import Processes
from aitrain.options.option import options_of
from aitrain.redaction import TELEMETRY_OFF
from aitrain.runs.metrics_line import MetricsLine
from aitrain.runs.run_folder import RunFolder
from aitrain.training import hub, model, preparation, rollout_setup
from aitrain.training.algorithm import Algorithm
from aitrain.training.batch_source import BatchSource, batch_source
from aitrain.training.callbacks import EvalCallback, EvalState, StopCallback
from aitrain.training.case_choice import case_choice
from aitrain.training.case_order import UniformOrder
from aitrain.training.custom_callbacks import custom_callbacks
from aitrain.training.early_stop import EarlyStop
from aitrain.training.mixed_order import MixedOrder
from aitrain.training.model import Precision, choose_precision
from aitrain.training.policy_rollouts import PolicyRollouts
from aitrain.training.run_context import RunContext, StopRequest
from aitrain.training.trainer import EpisodeTrainer
from aitrain.training.trl_arguments import grpo_arguments, grpo_config
from aitrain.training.warm_up import LongestShapes
from aitrain.vllm.addresses import KEY_VARIABLE
from tests.environments.vowels import Vowels
from tests.ray_standin import on_ray

CPU = Precision(torch.float32, bf16=False, fp16=False, use_cpu=True)
Observe = Callable[[TrainConfig], object]


@dataclass(frozen=True)
class Effect:
    """A value other than the default, where to look for its effect, and the other options that it takes."""

    value: Any
    observe: Observe
    others: dict[str, Any]


def seen(observe: Observe, value: Any, **others: Any) -> Effect:
    """One entry of EFFECTS: `"lr": seen(arguments, 1e-4)`."""
    return Effect(value, observe, others)


# -- where effects are seen


def arguments(config: TrainConfig) -> object:
    """What TRL is given."""
    return grpo_arguments(config, plan_batch(config, 1), CPU)


def trl_config(config: TrainConfig) -> object:
    """TRL's own configuration, `--trl` included."""
    return str(grpo_config(grpo_arguments(config, plan_batch(config, 1), CPU), config, Path("checkpoints")))


def sampled(config: TrainConfig) -> object:
    """The distribution that a token is drawn from, and what else vLLM is told."""
    sampling = Sampling.of(config)
    logits = torch.tensor([[3.0, 2.0, 1.0, -1.0]])
    counts = torch.tensor([[2.0, 0.0, 1.0, 0.0]])
    ended = sampling.without_ends(sampling.penalized(logits, counts > 0, counts), torch.tensor([1]), [3])
    said = [sampling.logprobs(ended, torch.tensor([token])).item() for token in range(3)]
    return said, ended.tolist(), sampling.vllm_extras([3], 10)


def score(config: TrainConfig) -> object:
    """What becomes of a score of 2."""
    return parse_score(2.0, config.score_bounds).score


def checked(config: TrainConfig) -> object:
    """What is noted about the environment before the training."""
    notes: list[object] = []
    context = RunContext(config, RunFolder(Path("run")), EnvRunner(Vowels(), config), notes.append)
    note_findings(context, {"": build_cases(Vowels(), None)})
    return len(notes)


def added(config: TrainConfig) -> object:
    """What is added to TRL's algorithm, and the user's callbacks."""
    return str(Algorithm.of(config)), [type(one) for one in custom_callbacks(config, print)]


def lora(config: TrainConfig) -> object:
    """The adapter that peft makes."""
    return str(model.lora_config(config))


def weights(config: TrainConfig) -> object:
    """What transformers is asked to load, on a machine with a GPU and bitsandbytes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model.AutoModelForCausalLM, "from_pretrained", lambda path, **options: f"{path} {options}")
        patch.setattr(model, "disable_dropout", lambda _: None)
        patch.setattr(model.importlib.util, "find_spec", lambda name: True)
        patch.setattr(torch.cuda, "is_available", lambda: config.quantization is not None)
        patch.setattr(torch.cuda, "is_bf16_supported", lambda **_: False)
        return model.load_model(config, choose_precision(config).dtype)


def precision(config: TrainConfig) -> object:
    """Number formats of the training."""
    return choose_precision(config)


def template(config: TrainConfig) -> object:
    """How the tokenizer writes conversations."""
    return model.load_tokenizer(config).chat_template


def context(config: TrainConfig) -> object:
    """Most tokens of prompt and completion, of a model that states 4,096."""
    text = SimpleNamespace(max_position_embeddings=4096)
    return model.context_length(config, SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: text)))  # type: ignore[arg-type]


def environment(config: TrainConfig) -> object:
    """The environment's object."""
    made = load_env(find_env(config), config.rl_env_config or {})
    return type(made).__qualname__, str(vars(made))


def turns(config: TrainConfig) -> object:
    """The cases of a batch, of several environments with nine each."""
    orders = {name: UniformOrder(9, 8, seed=None) for name in config.environments}
    return MixedOrder(orders, list(config.env_shares.values()), 8).batch(0)


def calls(config: TrainConfig) -> object:
    """What the environment's calls run in."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ProcessPool, "start", lambda *_: "processes")
        runner = start_runner(Vowels(), config)
    return runner.processes, runner.pool.max_threads, runner.pool.timeout


def tries(config: TrainConfig) -> object:
    """How often a call is made that always fails."""
    made: list[int] = []
    with closing(EnvRunner(Vowels(), config)) as runner:
        session = EnvSession(Case(0, "?", {}), 0)

        def fail() -> None:
            made.append(1)
            raise ValueError

        asyncio.run(runner._repeat([session], [fail], "score_episode"))
    return len(made)


def folder(config: TrainConfig) -> object:
    """The run folder that is made."""
    made = RunFolder.create(config)
    made.discard()
    return made.path


def plan(config: TrainConfig) -> object:
    """What would be started on a machine with four GPUs, or why it is refused."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
        patch.setattr(preflight, "check_packages", lambda _: None)
        try:
            made = preflight.check(config)
        except AitrainError as error:
            return str(error)
    return {field.name: str(getattr(made, field.name)) for field in fields(made) if field.name != "config"}


def workers(config: TrainConfig) -> object:
    """The command, the variables and the number of the training processes, of a run that goes on from a checkpoint."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "environ", {name: value for name, value in os.environ.items() if name not in TELEMETRY_OFF})
        patch.setattr(processes, "managed_server", lambda *_: nullcontext({}))
        started: list[tuple[list[str], dict[str, str], int]] = []
        patch.setattr(
            Processes,
            "_start",
            lambda self, _: started.append((self._command(), self._environment(), self.ranks.count)),
        )
        made = replace(preflight.check(config), checkpoint=Path("checkpoint-3"))
        Path("run").mkdir(exist_ok=True)
        with pytest.raises(AttributeError):  # there is no process to listen to
            Processes(made, RunFolder(Path("run")), lambda _: None).run()
    return [(command, {**given, activity.VARIABLE: ""}, count) for command, given, count in started]


def server(config: TrainConfig) -> object:
    """The command of the run's own vLLM server, and how often it is started again; nothing without one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
        patch.setattr(preflight, "check_packages", lambda _: None)
        started: list[object] = []
        patch.setenv(KEY_VARIABLE, "a key")
        patch.setattr(managed_server.VLLMServer, "start_all", lambda plans, _: started.append(str(plans)) or [HERE])
        patch.setattr(managed_server, "_ServerStates", lambda *_: None)
        watch = SimpleNamespace(watching=nullcontext)
        patch.setattr(managed_server, "_Restarter", lambda server, restarts, *_: started.append(restarts) or watch)
        with managed_server.managed_server(preflight.check(config), RunFolder(Path("run")), lambda _: None):
            return started


HERE = SimpleNamespace(url="http://127.0.0.1:1", ask_to_end=lambda: None, stop=lambda: None)


class _Begun(Exception):
    """TRL's part of the trainer was about to be made."""


@cache
def tiny_weights() -> Any:
    """The shipped model, loaded once."""
    return model.load_model(TrainConfig(model="tiny"), torch.float32)


def trainer(config: TrainConfig) -> object:
    """What the trainer of a real run is made of: cases, limits, callbacks, and what it counts failures with."""
    seen_of: dict[str, Any] = {}

    def make(parts: Any, hooks: Any) -> Any:
        begun = EpisodeTrainer.__new__(EpisodeTrainer)
        with pytest.raises(_Begun):
            EpisodeTrainer.__init__(begun, parts, hooks)
        seen_of.update(cases=len(parts.cases), limits=parts.limits, failures=rollouts(parts, hooks).failures)
        seen_of.update(callbacks=hooks.callbacks)
        accelerator = SimpleNamespace(is_main_process=False)
        add, arguments = hooks.callbacks.append, parts.arguments
        made = {"args": arguments, "hooks": hooks, "rollouts": None}
        return SimpleNamespace(zero_variance=None, add_callback=add, accelerator=accelerator, **made)

    def stop(*_: Any, **__: Any) -> None:
        raise _Begun

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GRPOTrainer, "__init__", stop)
        patch.setattr(preparation, "EpisodeTrainer", make)
        patch.setattr(preparation, "load_model", lambda *_: tiny_weights())
        Path("run").mkdir(exist_ok=True)
        plan = preparation.prepare(context_of(config, Vowels())).held_out.plan
    seen_of.update(held_out=len(plan.cases) * plan.samples)
    names = [(type(one).__name__, list(getattr(one, "trackers", ()))) for one in seen_of["callbacks"]]
    return str({**seen_of, "callbacks": names})


def rollouts(inputs: Any, hooks: Any) -> PolicyRollouts:
    """The rollouts of a trainer, which is there only as far as they are made of it."""
    accelerator = SimpleNamespace(unwrap_model=lambda model: model, num_processes=1)
    made: Any = SimpleNamespace(
        eos_token_ids=[0], sampling=Sampling(), use_vllm=False, accelerator=accelerator, model=torch.nn.Linear(1, 1),
        is_sharded=False, args=inputs.arguments, hooks=hooks,
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rollout_setup, "_hf_model", lambda trainer: None)
        return rollout_setup.make_rollouts(made, inputs)


def cases_chosen(config: TrainConfig) -> object:
    """What chooses the cases of a batch."""
    made: Any = SimpleNamespace(
        schedule=CaseSchedule(9, 2, 1, 1, 1), args=SimpleNamespace(seed=0, process_index=0), cases=Cases([], range(9)),
        shuffle_dataset=True, masks_truncated=False, rollouts=SimpleNamespace(gather=list),
    )  # fmt: skip
    choice = case_choice(made, EnvRunner(None, config))
    return type(choice.order).__name__, choice.refill and choice.refill.limit


def context_of(config: TrainConfig, environment: Any = None) -> RunContext:
    """The context of a run in the folder `run`, without a listener."""
    return RunContext(config, RunFolder(Path("run")), EnvRunner(environment, config), lambda _: None)


def watchdog(config: TrainConfig) -> object:
    """What the watchdog of a training process is given."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker, "Watchdog", lambda timeout, *_: timeout)
        return worker._own_watchdog(RunFolder(Path("run")), config)


def warmed_up(config: TrainConfig) -> object:
    """Whether a run on a GPU begins with its longest episodes."""
    shapes: list[object] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grpo, "can_warm_up", lambda _: True)
        patch.setattr(grpo, "longest_shapes", lambda _: LongestShapes(3, 4))
        patch.setattr(grpo, "warm_up", lambda _, lengths: shapes.append(lengths))
        grpo._warm_up(context_of(config), SimpleNamespace(trainer=None, inputs=None))  # type: ignore[arg-type]
    return shapes


def evaluations(config: TrainConfig) -> object:
    """Steps at which held-out cases are scored, and those after which a checkpoint is due because of it."""
    scored: list[int] = []
    saved: list[int] = []
    evaluator = EvalCallback(
        config,
        lambda step: (scored.append(step), MetricsLine(step=step, eval_score=0.5))[1],
        EvalState(),
        lambda step: step % 4 == 0,
    )
    for step in range(1, 11):
        control = TrainerControl()
        evaluator.on_step_end(None, TrainerState(global_step=step, max_steps=20, epoch=step / 4), control)  # type: ignore[arg-type]
        saved += [step] if control.should_save else []
    return scored, saved


def ends(config: TrainConfig) -> object:
    """The step after which a training ends that gets no better than in its fourth step."""
    state, stop = EvalState(before=0.1), StopRequest()
    early = EarlyStop(config, state, StopCallback(stop))
    for step in range(1, 11):
        control, score = TrainerControl(), min(step, 4) / 5
        state.add(MetricsLine(step=step, eval_score=score, eval_low=score - 0.1))
        early.on_step_end(None, TrainerState(global_step=step), control)  # type: ignore[arg-type]
        if control.should_training_stop:
            return step, stop.reason, control.should_save
    return None


def saved(config: TrainConfig) -> object:
    """What is written at the end."""
    written: list[str] = []
    accelerator = SimpleNamespace(is_main_process=True, wait_for_everyone=lambda: None)
    made = SimpleNamespace(state=SimpleNamespace(global_step=1), accelerator=accelerator)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grpo, "save_size", lambda *_, **__: 0)
        patch.setattr(grpo, "save_model", lambda *_: written.append("model"))
        patch.setattr(grpo, "merge_adapter", lambda *_: written.append("merged"))
        grpo._save(context_of(config), SimpleNamespace(trainer=made, precision=CPU))  # type: ignore[arg-type]
    return written


def uploaded(config: TrainConfig) -> object:
    """What the Hub is asked for."""
    asked: list[object] = []
    api = SimpleNamespace(
        whoami=lambda: {"name": "somebody"},
        create_repo=lambda name, **options: asked.append((name, options)) or SimpleNamespace(repo_id=name),
        upload_folder=lambda **_: None,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hub, "HfApi", lambda: api)
        hub.upload_model(config, Path("model"))
    return asked


def login(config: TrainConfig) -> object:
    """Whether a login is asked for before the training."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hub, "get_token", lambda: None)
        try:
            hub.check_hub_token(config)
        except AitrainError as error:
            return str(error)
    return None


# -- the table

ENV = {"model": "tiny", "rl_env": "envs.arithmetic"}
TINY = {"model": "tiny", "max_steps": 1, "eval_cases": 4}
VLLM = {**ENV, "use_vllm": True}
SERVER = {**VLLM, "vllm_mode": "server"}
ADAPTER = {**SERVER, "peft": True}
LORA = {"peft": True}
RAY = {**ENV, "launcher": "ray", "num_processes": 2}


def source(config: TrainConfig) -> object:
    """How batches are played."""
    parts: Any = SimpleNamespace()
    made = batch_source(config, BatchSource(parts, parts, parts, 4), parts)
    return type(made), getattr(made, "loads_between_turns", None)


EFFECTS = {
    "model": seen(weights, "tiny"),
    "dtype": seen(weights, "bfloat16", peft=True),
    "attn_implementation": seen(weights, "eager"),
    "chat_template": seen(template, "zephyr", model="tiny"),
    "model_max_length": seen(context, 512),
    "quantization": seen(weights, "int8", peft=True),
    "trust_remote_code": seen(weights, True),
    "rl_env": seen(environment, "tests/environments/vowels.py:ChatVowels", rl_env="envs.arithmetic"),
    "rl_env_module": seen(environment, "envs.guess_number", rl_env_module="envs.arithmetic"),
    "rl_env_class": seen(environment, "ChatVowels", rl_env="tests/environments/vowels.py", rl_env_class="Vowels"),
    "rl_env_config": seen(environment, {"cases": 7}, **ENV),
    "rl_env_weights": seen(turns, "3,1", rl_env=["a.py", "b.py"]),
    "rl_env_workers": seen(calls, 3),
    "rl_env_episodes": seen(calls, 2),
    "rl_env_isolation": seen(calls, "process"),
    "rl_env_timeout": seen(calls, 7.0),
    "rl_env_retries": seen(tries, 2),
    "rl_max_failed": seen(trainer, 0.25, **TINY),
    "rl_score_range": seen(score, "0,3"),
    "rl_check": seen(checked, False),
    "project_name": seen(folder, "other"),
    "output_dir": seen(folder, "elsewhere"),
    "seed": seen(arguments, 7),
    "epochs": seen(arguments, 3),
    "max_steps": seen(arguments, 3),
    "stop_when_flat": seen(trainer, 3, **TINY),
    "stall_timeout": seen(watchdog, 60.0),
    "telemetry": seen(workers, True, **ENV),
    "logging_steps": seen(arguments, 5),
    "log": seen(trainer, "tensorboard", **TINY),
    "resume_from_checkpoint": seen(plan, "no-such-checkpoint", **ENV),
    "resume_anyway": seen(workers, True, **ENV),
    "rl_prompts_per_step": seen(arguments, 6),
    "batch_size": seen(arguments, 4),
    "gradient_accumulation": seen(arguments, 8),
    "rl_trim_padding": seen(arguments, True),
    "tokens_per_pass": seen(arguments, 4096, rl_prompts_per_step=2),
    "rl_max_prompt_length": seen(server, 100, **SERVER, rl_max_episode_tokens=200),
    "lr": seen(arguments, 1e-4),
    "optimizer": seen(arguments, "sgd"),
    "scheduler": seen(arguments, "cosine"),
    "warmup_ratio": seen(arguments, 0.5),
    "weight_decay": seen(arguments, 0.1),
    "max_grad_norm": seen(arguments, 0.5),
    "rl_num_generations": seen(arguments, 8),
    "rl_kl_coef": seen(arguments, 0.0),
    "rl_clip_range": seen(arguments, 0.3),
    "rl_clip_range_high": seen(arguments, 0.3),
    "rl_loss_type": seen(arguments, "dapo"),
    "rl_importance_level": seen(arguments, "sequence"),
    "rl_scale_rewards": seen(arguments, "none"),
    "rl_mask_truncated_completions": seen(arguments, True),
    "rl_preset": seen(arguments, "gspo"),
    "rl_kl_estimator": seen(added, "k1"),
    "rl_kl_in": seen(added, "reward"),
    "rl_baseline": seen(added, "leave_one_out"),
    "rl_dual_clip": seen(arguments, 3.0),
    "rl_overlong_buffer": seen(added, 20),
    "rl_overlong_penalty": seen(added, 0.5, rl_overlong_buffer=20),
    "rl_entropy_coef": seen(arguments, 0.01),
    "rl_updates_per_rollout": seen(arguments, 4),
    "custom_loss": seen(added, "tests/environments/extensions.py:likelihood"),
    "custom_callbacks": seen(added, "tests/environments/extensions.py:Counting"),
    "rl_sampling": seen(cases_chosen, "difficulty"),
    "rl_refill_limit": seen(cases_chosen, 3, rl_sampling="refill"),
    "custom_sampler": seen(cases_chosen, "tests.training.test_case_sampling:hardest_first"),
    "rl_max_new_tokens": seen(arguments, 64),
    "rl_max_turns": seen(trainer, 3, **TINY),
    "rl_max_episode_tokens": seen(trainer, 200, **TINY),
    "rl_temperature": seen(arguments, 0.7),
    "rl_top_k": seen(arguments, 20),
    "rl_top_p": seen(arguments, 0.9),
    "rl_min_p": seen(sampled, 0.5),
    "rl_repetition_penalty": seen(sampled, 1.5),
    "rl_presence_penalty": seen(sampled, 0.5),
    "rl_frequency_penalty": seen(sampled, 0.5),
    "rl_min_new_tokens": seen(sampled, 4),
    "rl_stop": seen(sampled, ["</a>"]),
    "use_vllm": seen(arguments, True),
    "vllm_mode": seen(server, "server", **VLLM),
    "vllm_gpu_memory_utilization": seen(arguments, 0.5, **VLLM),
    "vllm_sleep_mode": seen(arguments, True, **VLLM),
    "vllm_server_url": seen(server, "http://127.0.0.1:1", **SERVER),
    "vllm_servers": seen(server, 2, **SERVER),
    "vllm_listen_address": seen(server, "localhost", **SERVER),
    "vllm_tensor_parallel_size": seen(arguments, 2, **VLLM),
    "vllm_server_gpus": seen(plan, 2, **SERVER),
    "vllm_sync": seen(server, "disk", **ADAPTER),
    "rl_ahead": seen(source, 1, **SERVER),
    "rl_ahead_turns": seen(source, True, **SERVER, rl_ahead=1),
    "vllm_quantization": seen(server, "fp8", **ADAPTER),
    "vllm_speculative": seen(server, {"method": "ngram", "num_speculative_tokens": 4}, **SERVER),
    "vllm_data_parallel_size": seen(server, 2, vllm_server_gpus=2, **SERVER),
    "vllm_args": seen(server, {"max_num_seqs": 64}, **SERVER),
    "vllm_max_restarts": seen(server, 7, **SERVER),
    "peft": seen(lora, True),
    "lora_r": seen(lora, 8, **LORA),
    "lora_alpha": seen(lora, 8, **LORA),
    "lora_dropout": seen(lora, 0.1, **LORA),
    "target_modules": seen(lora, "q_proj,v_proj", **LORA),
    "merge_adapter": seen(saved, False, **LORA),
    "eval_cases": seen(trainer, 2, **TINY),
    "eval_samples": seen(trainer, 3, **TINY),
    "eval_strategy": seen(evaluations, "no"),
    "eval_steps": seen(evaluations, 3, eval_strategy="steps"),
    "until": seen(ends, 0.5),
    "patience": seen(ends, 2),
    "save_strategy": seen(arguments, "no"),
    "save_steps": seen(arguments, 7),
    "save_total_limit": seen(arguments, 3),
    "save_best": seen(evaluations, True),
    "push_to_hub": seen(login, True),
    "username": seen(uploaded, "someone"),
    "repo_id": seen(uploaded, "some/thing"),
    "hub_private": seen(uploaded, False),
    "num_processes": seen(workers, 3, **ENV),
    "nnodes": seen(plan, 2, node_rank=0, master_addr="a", **ENV),
    "node_rank": seen(plan, 1, nnodes=2, master_addr="a", **ENV),
    "master_addr": seen(plan, "a", nnodes=2, node_rank=0, **ENV),
    "master_port": seen(plan, 29401, nnodes=2, node_rank=0, master_addr="a", **ENV),
    "mixed_precision": seen(precision, "bf16"),
    "disable_gradient_checkpointing": seen(arguments, True),
    "distributed_backend": seen(arguments, "fsdp2", model="tiny"),
    "warm_up": seen(warmed_up, False),
    "ddp_timeout": seen(arguments, 60),
    "launcher": seen(on_ray, "ray", **ENV, num_processes=2),
    "ray_address": seen(on_ray, "10.0.0.1:6379", **RAY),
    "max_failures": seen(on_ray, 7, **RAY),
    "trl": seen(trl_config, {"delta": 2.0}),
}
"""By option: a value that is not its default, and where its effect is seen."""


@pytest.fixture(autouse=True)
def machine(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty folder to work in, no GPU, and the test environments where a user's would be."""
    (here / "tests").symlink_to(Path(__file__).parents[1])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def test_every_option_has_an_entry() -> None:
    names = {option.name for option in options_of(TrainConfig)}
    missing, gone = sorted(names - EFFECTS.keys()), sorted(EFFECTS.keys() - names)
    assert not missing, (
        f"{', '.join(missing)}: add one line for each to EFFECTS in {Path(__file__).name}, such as"
        f' "{missing[0]}": seen(arguments, VALUE), with another value than the default and the function that shows what'
        " it does. An option that no function shows does nothing: remove it."
    )
    assert not gone, f"{', '.join(gone)}: take the line out of EFFECTS, as there is no such option"


@pytest.mark.parametrize("name", EFFECTS)
def test_an_option_does_something(name: str) -> None:
    effect = EFFECTS[name]
    without = TrainConfig(**effect.others)
    assert getattr(without, name) != effect.value
    with_it = TrainConfig(**effect.others | {name: effect.value})
    shown = effect.observe(without)
    assert not isinstance(shown, TrainConfig)
    assert shown == effect.observe(without), "what is observed differs by itself"
    assert shown != effect.observe(with_it), f"{name} changes nothing: remove it, or let it do what its sentence says"
