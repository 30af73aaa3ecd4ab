"""A plain TRL training, as somebody would write it without aitrain: `plain_trl.py MODEL OUT ENVIRONMENT ARGUMENTS`."""

import importlib.util
import json
import sys

from datasets import Dataset
from peft import LoraConfig
from transformers import AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

model, out, environment, arguments = sys.argv[1:]
file, _, name = environment.partition(":")
spec = importlib.util.spec_from_file_location("environment", file)
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
env = getattr(module, name)()

tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
settings = json.loads(arguments)
lora = settings.pop("lora", None)


def reward(completion_ids, **_):  # TRL's `completions` lack the special tokens that the model wrote
    ended = tokenizer.eos_token_id
    texts = [tokenizer.decode(ids[:-1] if ids[-1] == ended else ids) for ids in completion_ids]
    return [sum(letter < "n" for letter in text) / max(1, len(text)) for text in texts]


trainer = GRPOTrainer(
    model=model,
    reward_funcs=reward,
    args=GRPOConfig(output_dir=out, **settings),
    train_dataset=Dataset.from_list(env.build_dataset(tokenizer)),
    processing_class=tokenizer,
    peft_config=LoraConfig(**lora) if lora else None,
)
trainer.train()
trainer.save_model(out)
