"""Seeds of episodes and of what is sampled in them."""

from __future__ import annotations

from aitrain.environment.seeds import EpisodeSeeds, SampleSeed, derived_seed


def test_seeds_follow_from_names_and_places() -> None:
    assert derived_seed(1, "a", 2) == derived_seed(1, "a", 2) != derived_seed(1, "a", 3)
    assert len({SampleSeed(5, position).request_seed for position in range(100)}) == 100
    assert SampleSeed(5, 3).token_seed(2) == SampleSeed(5, 5).token_seed(0) != SampleSeed(5, 5).request_seed
    seeds = EpisodeSeeds(5)
    assert len({seeds.next_call() for _ in range(100)}) == 100
