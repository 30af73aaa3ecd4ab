"""What diagnostics measure of a batch of episodes: how much completions depend on their prompt, and how much each of
the environment's metrics weighs in the score. Neither needs a forward pass.

A process measures its own episodes, which are a sample of all.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, pairwise
from typing import Any

import numpy as np

from aitrain.rollout.episode import Episode
from aitrain.rollout.trajectory import Trajectory

PROMPTS, COMPLETIONS, TOKENS = 8, 8, 64
"""Maximum prompts, completions of each, and tokens at the beginning and at the end of each, that are compared."""
SMOOTHING = 0.5
EXPLAINED = 0.98
"""Minimum share of the score's variance that the metrics must explain to be its components."""


def batch_diagnostics(episodes: Sequence[Episode]) -> dict[str, float]:
    """`prompt_dependence/...` and `score_weight/...` of a batch; those that cannot be measured are left out. Of several
    environments each is measured by itself, and its name begins the names of its metrics."""
    by_env: dict[str, dict[tuple[int, ...], list[Episode]]] = {}
    for episode in episodes:
        if not episode.is_dropped:
            prompts = by_env.setdefault(episode.case.env, {})
            prompts.setdefault(tuple(episode.trajectory.prompt_ids), []).append(episode)
    found = {}
    for env, by_prompt in by_env.items():
        groups = list(by_prompt.values())
        dependence = prompt_dependence([[_tokens(episode.trajectory) for episode in group] for group in groups])
        if dependence is not None:
            found[f"prompt_dependence/{env}".rstrip("/")] = dependence
        weights = score_weights([[(e.result.score, e.result.metrics) for e in group] for group in groups])
        found |= {f"score_weight/{env}/{name}".replace("//", "/", 1): weight for name, weight in weights.items()}
    return found


def _tokens(trajectory: Trajectory) -> list[int]:
    """The first and the last tokens that the policy sampled."""
    sampled = [token for token, is_sampled in zip(trajectory.ids, trajectory.mask, strict=True) if is_sampled]
    return sampled if len(sampled) <= 2 * TOKENS else sampled[:TOKENS] + sampled[-TOKENS:]


def prompt_dependence(groups: Sequence[Sequence[Sequence[int]]]) -> float | None:
    """Share of pairs of prompts whose completions can be told apart by their tokens: 1 if every completion shows which
    of two prompts it answers, about 0 if none does. None without two prompts that have two completions each.

    Like the mutual information of prompt and completion, it is 0 without any dependence. RAGEN-2 (arXiv 2604.06268)
    tells prompts apart by the policy's probabilities, which takes forward passes; here a Bernoulli model of each
    prompt's other completions does. All models leave out one completion, so that none has more data than another.
    """
    groups = [group[:COMPLETIONS] for group in groups if len(group) > 1][:PROMPTS]
    if len(groups) < 2:
        return None
    members = min(map(len, groups))
    present = _features([completion for group in groups for completion in group[:members]])
    present = present.reshape(len(groups), members, -1)
    without_one = present.sum(1, keepdims=True) - present
    chance = (without_one + SMOOTHING) / (members - 1 + 2 * SMOOTHING)
    odds, absent = np.log(chance / (1 - chance)), np.log(1 - chance).sum(2)
    # likelihood of member m of prompt g under prompt h, all without their members m
    likelihood = np.einsum("gmf,hmf->mgh", present, odds) + absent.T[:, None, :]
    own = np.einsum("mgg->mg", likelihood)[:, :, None]
    told = np.sign(np.round(own - likelihood, 6)).sum()  # 1 for each other prompt that is less likely, -1 if more
    return float(told / (members * len(groups) * (len(groups) - 1)))


def _features(completions: Sequence[Sequence[int]]) -> Any:
    """Which tokens, and pairs of neighbouring ones, are in each completion: one row each. Those in a single completion
    say nothing about another."""
    found = [set(tokens) | set(pairwise(tokens)) for tokens in completions]
    counts = Counter(chain.from_iterable(found))
    columns = {feature: place for place, feature in enumerate(f for f, n in counts.items() if 1 < n < len(found))}
    present = np.zeros((len(found), len(columns)))
    for row, features in enumerate(found):
        present[row, [columns[feature] for feature in features if feature in columns]] = 1.0
    return present


def score_weights(
    groups: Iterable[Sequence[tuple[float | None, Mapping[str, float]]]],
) -> dict[str, float]:
    """Weight of each of the environment's metrics in the score, by least squares within the groups; empty if the
    metrics do not explain the score, or their weights cannot be told apart.

    Of episodes with different metrics, as of several environments, each kind is measured by itself.
    """
    kinds: dict[tuple[str, ...], list[Any]] = defaultdict(list)
    for group in groups:
        rows: dict[tuple[str, ...], list[tuple[float, ...]]] = defaultdict(list)
        for score, metrics in group:
            if score is not None and metrics:
                names = tuple(sorted(metrics))
                rows[names].append((score, *(metrics[name] for name in names)))
        for names, values in rows.items():
            kinds[names].append(np.asarray(values, dtype=float) - np.mean(values, axis=0))
    found: dict[str, float] = {}
    for names, parts in kinds.items():
        together = np.concatenate(parts)
        scores, table = together[:, 0], together[:, 1:]
        moving = np.flatnonzero(np.abs(table).max(0) > 1e-9)
        free = len(together) - len(parts)
        if not np.isfinite(together).all() or np.abs(scores).max() < 1e-9 or free < 2 * len(moving) or not len(moving):
            continue
        weights, _, rank, _ = np.linalg.lstsq(table[:, moving], scores, rcond=None)
        rest = scores - table[:, moving] @ weights
        if rank == len(moving) and rest @ rest <= (1 - EXPLAINED) * (scores @ scores):
            found |= {names[place]: float(weight) for place, weight in zip(moving, weights, strict=True)}
    return found
