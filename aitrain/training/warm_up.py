"""One forward and backward pass with the longest possible shapes, before the first step.

Episodes get longer while a model learns; without the warm-up, a run may run out of memory after hours only.

Inside API of TRL 1.16 that it uses (tests/training/test_upstream.py):

    GRPOTrainer.use_adaptive_entropy    set to False during the pass: the loss would change the entropy coefficient
    GRPOTrainer._metrics                replaced during the pass
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from aitrain.batch import PassLimit
from aitrain.engines.scopes import gradient_checkpointing, replaced
from aitrain.errors import RunFailed
from aitrain.training.passes import MicroBatch
from aitrain.training.trainer import LOGPROBS, EpisodeTrainer, TrainerInputs


@dataclass(frozen=True)
class LongestShapes:
    """Tokens of the longest prompt and the longest completion of a run."""

    prompt: int
    completion: int


def longest_shapes(inputs: TrainerInputs) -> LongestShapes:
    """Longest shapes by the training cases and the options.

    Environment responses are limited by `rl_max_episode_tokens` and the context alone; without the former only the
    model's own tokens are counted. A prompt that the environment's opening makes is not counted.
    """
    prompt = max(1, *(inputs.prompts[case.env].length_of(case) for case in inputs.split.train))
    completion = 1
    for runner in inputs.runner.parts.values():
        own = runner.config
        of_episode = own.rl_max_episode_tokens or own.rl_max_turns * own.completion_tokens
        completion = max(completion, of_episode if runner.has_sessions else own.completion_tokens)
    if inputs.context_tokens is not None:
        completion = max(1, min(completion, inputs.context_tokens - prompt))
    return LongestShapes(prompt, completion)


def can_warm_up(trainer: EpisodeTrainer) -> bool:
    """Whether to warm up: on GPUs, without DeepSpeed, whose backward pass makes the step."""
    return trainer.accelerator.device.type == "cuda" and not trainer.is_deepspeed_enabled


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether the memory did not suffice: only torch's own error has a class, not those of CUDA, NCCL and Triton."""
    return any(words in str(error) for words in ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED"))


@contextmanager
def explain_out_of_memory(place: Callable[[], str], trainer: EpisodeTrainer) -> Iterator[None]:
    """Turn an error of too little memory into one that names the phase, and the option to continue with.

    Raises:
        RunFailed: the memory did not suffice.
    """
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        rows, prompts = trainer.pass_limit.completions, trainer.inputs.batch.prompts_per_step
        smaller = f"--batch-size {rows // 2} --rl-prompts-per-step {prompts}, " if rows > 1 else ""
        if tokens := trainer.pass_limit.tokens:
            smaller = f"--tokens-per-pass {tokens // 2}, "
        elif smaller and not trainer.trims:
            smaller = f"--resume-anyway {smaller}"  # the size of passes changes what is learned
        raise RunFailed(
            f"Out of memory in {place()}: {' '.join(str(error).split())[:160]}\n"
            f"Use {smaller}--peft, or --rl-kl-coef 0, which saves the reference model."
        ) from error


def fit_passes(trainer: EpisodeTrainer, lengths: LongestShapes) -> PassLimit:
    """Run the warm-up, with half as many completions in a forward pass until it fits; returns what fits. Every process
    must call this.

    Raises:
        RuntimeError: a single completion does not fit, or their number changes what is learned.
    """
    if trainer.is_fsdp_enabled:  # a process that fails would leave the others waiting inside of the pass
        warm_up(trainer, lengths)
        return trainer.pass_limit
    while True:
        error: RuntimeError | None = None
        try:
            warm_up(trainer, lengths)
        except RuntimeError as found:
            if not is_out_of_memory(found):
                raise
            error = found
        failed = torch.tensor(int(error is not None), device=trainer.accelerator.device)
        limit = trainer.pass_limit
        if not trainer.accelerator.reduce(failed, reduction="sum").item():
            return limit
        rows, _ = limit.largest(lengths.prompt + lengths.completion, trainer.args.per_device_train_batch_size)
        if rows == 1 or not trainer.trims:
            raise error or torch.OutOfMemoryError("another process is out of memory")
        trainer.pass_limit = replace(limit, completions=rows // 2)


def warm_up(trainer: EpisodeTrainer, lengths: LongestShapes) -> None:
    """Run the pass; gradients, metrics and random states are as before afterwards. Every process must call this.

    Raises:
        RuntimeError: the longest episodes do not fit.
    """
    model, arguments = trainer.model, trainer.args
    was_training = model.training
    model.train()
    trainer.current_gradient_accumulation_steps = 1  # as in a step
    # the memory of what later passes find: gradients, which several processes hold twice, and Adam's two moments
    copies = 2 if trainer.accelerator.num_processes > 1 and not trainer.is_fsdp_enabled else 1
    if "adam" in str(arguments.optim) and "bit" not in str(arguments.optim):
        copies += 2
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    reserved = [torch.empty_like(parameter) for parameter in trained for _ in range(copies)]
    own_state = {"use_adaptive_entropy": False, "_metrics": {"train": defaultdict(list)}}
    try:
        with (
            torch.random.fork_rng(devices=range(torch.cuda.device_count())),
            replaced(trainer, own_state),
            gradient_checkpointing(model, arguments),
        ):
            with trainer.compute_loss_context_manager():
                loss = trainer.loss_of_pass(model, _inputs(trainer, lengths), 1.0)
            trainer.accelerator.backward(loss)
    finally:
        del reserved
        model.zero_grad(set_to_none=True)
        model.train(was_training)
        torch.cuda.empty_cache()


def _inputs(trainer: EpisodeTrainer, lengths: LongestShapes) -> MicroBatch:
    """A micro-batch for TRL's loss: tensors of shape (rows, tokens), no token masked."""
    prompt, token = lengths.prompt, trainer.eos_token_ids[0]
    rows = trainer.args.per_device_train_batch_size
    rows, longest = trainer.pass_limit.largest(prompt + lengths.completion, rows)
    completion = max(1, longest - prompt)
    one = torch.ones((rows, completion))
    batch = {
        "prompt_ids": torch.full((rows, prompt), token),
        "prompt_mask": torch.ones((rows, prompt), dtype=torch.long),
        "completion_ids": torch.full((rows, completion), token),
        "completion_mask": one.long(),
        "tool_mask": one.long(),
        "advantages": torch.ones(rows),
        "num_items_in_batch": torch.tensor(float(rows * completion)),
        **dict.fromkeys(LOGPROBS, -one),
        **({"importance_sampling_ratio": one} if trainer.use_vllm else {}),
    }
    return {name: values.to(trainer.accelerator.device) for name, values in batch.items()}
