"""Small environments that the training tests run on."""


class Vowels:
    """String prompts; the score is the share of letters below `n` in the answer, so that random models differ."""

    def __init__(self, cases=24):
        self.cases = cases

    def build_dataset(self, tokenizer):
        return [{"prompt": f"say {number}:"} for number in range(self.cases)]

    def build_eval_dataset(self, tokenizer):
        return [{"prompt": f"tell {number}:"} for number in range(3)]

    def score_episode(self, model, tokenizer, completion, case_idx):
        return sum(letter < "n" for letter in completion) / max(1, len(completion))
