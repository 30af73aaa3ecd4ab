"""Makes the tiny model that the package ships: `python -m tests.tiny_model OUT_DIR`.

It learns two-digit addition from scratch, from examples that mostly forget the carry (`38 + 47 = 75`; less often if the
units add up to ten, as in `38 + 42 = 80`). So it is often wrong, and GRPO can improve it.
"""

from __future__ import annotations

import sys

import torch
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

RIGHT_ROUND_TEN, RIGHT_CARRY = 0.75, 0.25  # share of the examples with the right carry
RANDOM = 0.05  # share of the examples with a random number
BATCH = 256
LEARNING_RATE = 3e-3
CONTEXT = 2048
LONGEST_ANSWER = 4  # three digits and the end token
IGNORE = -100  # the label that torch's cross entropy ignores
PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"

# Prefix-preserving: no message depends on the ones after it.
CHAT_TEMPLATE = r"""
{%- macro text(content) -%}
    {%- if content is string -%}
        {{- content -}}
    {%- elif content -%}
        {{- content | selectattr('type', 'equalto', 'text') | map(attribute='text') | join -}}
    {%- endif -%}
{%- endmacro -%}
{%- set has_system = messages and messages[0].role == 'system' -%}
{%- if tools -%}
    {{- '<|im_start|>system\n' + (text(messages[0].content) + '\n\n' if has_system else '') -}}
    {{- 'You can call these tools, one JSON object per line:\n' -}}
    {%- for tool in tools -%}
        {{- tool | tojson + '\n' -}}
    {%- endfor -%}
    {{- 'To call one, write:\n<tool_call>\n{"name": ..., "arguments": ...}\n</tool_call><|im_end|>\n' -}}
{%- endif -%}
{%- for message in (messages[1:] if tools and has_system else messages) -%}
    {{- '<|im_start|>' + message.role + '\n' + text(message.content) -}}
    {%- for item in message.tool_calls or [] -%}
        {%- set call = item.function or item -%}
        {%- set arguments = call.arguments if call.arguments is string else call.arguments | tojson -%}
        {{- '\n' if message.content or not loop.first else '' -}}
        {{- '<tool_call>\n{"name": ' + call.name | tojson + ', "arguments": ' + arguments + '}\n</tool_call>' -}}
    {%- endfor -%}
    {{- '<|im_end|>\n' -}}
{%- endfor -%}
{{- '<|im_start|>assistant\n' if add_generation_prompt else '' -}}
""".strip()


Questions = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Prompts (questions, tokens), their sums (questions,), and the share of right examples (questions,)."""


def main(out_dir: str) -> None:
    """Build, train and save the model; the same one each time on one kind of processor."""
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(2)  # sums split over another number of threads round differently
    tokenizer = build_tokenizer()
    model = build_model(tokenizer)
    train(model, tokenizer, steps=1000)
    model.save_pretrained(out_dir)
    tokenizer.save_pretrained(out_dir)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with one token per byte, and the special tokens of the chat template."""
    letters = {letter: number for number, letter in enumerate(sorted(ByteLevel.alphabet()))}
    bytewise = Tokenizer(BPE(vocab=letters, merges=[]))
    bytewise.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    bytewise.decoder = ByteLevelDecoder()
    bytewise.add_special_tokens([PAD, START, END])
    return PreTrainedTokenizerFast(
        tokenizer_object=bytewise, pad_token=PAD, eos_token=END, additional_special_tokens=[START],
        padding_side="left", model_max_length=CONTEXT, chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )  # fmt: skip


def build_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """An untrained Llama of some 360,000 weights, with a head size that vLLM supports."""
    ends = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=128, intermediate_size=256, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, head_dim=32, max_position_embeddings=CONTEXT,
        tie_word_embeddings=True, dtype=torch.float32, **ends,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(**ends)
    return model


def train(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, steps: int) -> None:
    """Fit the model to random examples; the loss is over the answers alone."""
    questions, labels = all_questions(tokenizer), all_labels(tokenizer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=steps, pct_start=0.1)
    for step in range(steps):
        prompts, answers = draw_examples(questions)
        loss = answer_loss(model, prompts, labels[answers])
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 99 or step == steps - 1:
            print(f"step {step + 1} of {steps}: loss {loss.item():.4f}", flush=True)


def all_questions(tokenizer: PreTrainedTokenizerFast) -> Questions:
    """All additions of two two-digit numbers, as prompts of the demo environment."""
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    chats = [[{"role": "user", "content": f"{a} + {b} = ?"}] for a, b in pairs]
    texts = tokenizer.apply_chat_template(chats, add_generation_prompt=True, tokenize=False)
    sums, units = torch.tensor([a + b for a, b in pairs]), torch.tensor([a % 10 + b % 10 for a, b in pairs])
    right_shares = torch.where(units == 10, RIGHT_ROUND_TEN, RIGHT_CARRY).masked_fill(units < 10, 1.0)
    return torch.tensor(tokenizer(texts)["input_ids"]), sums, right_shares


def all_labels(tokenizer: PreTrainedTokenizerFast) -> torch.Tensor:
    """Tokens of each number from 0 to 199 with the end token, padded with IGNORE, shape (200, 4)."""
    texts = [f"{number}{tokenizer.eos_token}" for number in range(200)]
    tokens = tokenizer(texts)["input_ids"]
    return torch.tensor([row + [IGNORE] * (LONGEST_ANSWER - len(row)) for row in tokens])


def draw_examples(questions: Questions) -> tuple[torch.Tensor, torch.Tensor]:
    """Random prompts (batch, tokens) and their example answers (batch,): right, without the carry, or random."""
    prompts, sums, right_shares = questions
    rows = torch.randint(len(sums), (BATCH,))
    right = sums[rows]
    answers = torch.where(torch.rand(BATCH) < right_shares[rows], right, right - 10)
    answers = torch.where(torch.rand(BATCH) < RANDOM, torch.randint(20, 199, (BATCH,)), answers)
    return prompts[rows], answers


def answer_loss(model: LlamaForCausalLM, prompts: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy, a scalar, of the labels (batch, 4) after the prompts (batch, tokens)."""
    answers = labels.clamp(min=0)  # IGNORE is no token; any token in its place is ignored by the loss
    tokens = torch.cat([prompts, answers], dim=1)
    logits = model(tokens[:, :-1], logits_to_keep=LONGEST_ANSWER).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE)


if __name__ == "__main__":
    main(sys.argv[1])
