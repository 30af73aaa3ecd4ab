"""The simulator of fleets: known answers, measured ones, and what it reads from a run."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import fleet as command
from benchmarks.fleet_simulation import Fleet, SimulatedEpisode, SimulatedTurn, saturation, simulate_step
from benchmarks.free_running import ANSWER_TOKENS, Slow, Times, all_alike, mostly_fast
from benchmarks.measured_run import MeasuredRun, calibrate, calibrate_servers

ONE_TURN = (SimulatedTurn(100, 0.0),)


def episodes(count: int, seed: int = 0) -> list[SimulatedEpisode]:
    chance = random.Random(seed)
    return [
        tuple(SimulatedTurn(chance.randint(1, 50), chance.random()) for _ in range(chance.randint(1, 4)))
        for _ in range(count)
    ]


def test_sequences_of_a_server_are_decoded_together_and_slow_each_other_down() -> None:
    fleet = Fleet(servers=1, token_seconds=0.01, sequence_seconds=0.001)

    assert simulate_step(fleet, [ONE_TURN]).rollout == pytest.approx(100 * 0.011)
    assert simulate_step(fleet, [ONE_TURN] * 8).rollout == pytest.approx(100 * 0.018)
    shorter = (SimulatedTurn(50, 0.0),)
    assert simulate_step(fleet, [ONE_TURN, shorter]).rollout == pytest.approx(50 * 0.012 + 50 * 0.011)


def test_a_server_decodes_no_more_than_its_sequences_at_a_time() -> None:
    fleet = Fleet(servers=1, token_seconds=0.01, sequences=2)

    assert simulate_step(fleet, [ONE_TURN] * 5).rollout == pytest.approx(3 * 100 * 0.01)


def test_episodes_are_spread_over_the_servers() -> None:
    fleet = Fleet(servers=4, token_seconds=0.01, sequences=1)

    assert simulate_step(fleet, [ONE_TURN] * 8).rollout == pytest.approx(2 * 100 * 0.01)


@pytest.mark.parametrize("servers", [None, 1])
def test_calls_wait_for_a_free_worker(servers: int | None) -> None:
    fleet = Fleet(servers=servers, token_seconds=1e-6, env_workers=2)
    slow = [(SimulatedTurn(1, 1.0),)] * 6

    step = simulate_step(fleet, slow)

    assert step.rollout == pytest.approx(3.0, abs=1e-4)
    assert step.worker_use == pytest.approx(1.0, abs=1e-4)


def test_rounds_wait_for_the_longest_completion_and_the_slowest_call_of_each_round() -> None:
    played = [(SimulatedTurn(10, 0.5), SimulatedTurn(30, 0.1)), (SimulatedTurn(20, 0.2),)]

    step = simulate_step(Fleet(token_seconds=0.01, sequence_seconds=0.001), played)

    assert step.generate == pytest.approx(20 * 0.012 + 30 * 0.011)
    assert step.environment == pytest.approx(0.5 + 0.1)
    assert step.rollout == pytest.approx(step.generate + step.environment)


def test_the_slowest_process_decides_how_long_a_step_takes() -> None:
    slow, fast = [(SimulatedTurn(100, 0.0),)] * 2, [(SimulatedTurn(10, 0.0),)] * 2

    step = simulate_step(Fleet(processes=2, token_seconds=0.01, train_seconds=0.001), slow + fast)

    assert step.rollout == pytest.approx(1.0)
    assert step.train == pytest.approx(0.2)


def test_weights_are_written_once_and_read_by_all_servers_at_the_same_time_until_the_link_is_full() -> None:
    fleet = Fleet(servers=4, sync_bytes=8.0, write_speed=4.0, read_speed=2.0)

    assert fleet.sync_seconds == pytest.approx(2 + 4)
    assert replace(fleet, link_speed=4.0).sync_seconds == pytest.approx(2 + 8)
    assert replace(fleet, servers=None).sync_seconds == 0


@pytest.mark.parametrize("seed", range(5))
def test_all_tokens_and_calls_are_played_on_every_fleet(seed: int) -> None:
    played = episodes(40, seed)
    calls = sum(turn.env_seconds for episode in played for turn in episode)
    for fleet in (Fleet(token_seconds=0.01), Fleet(servers=3, token_seconds=0.01, sequences=4, env_workers=5)):
        step = simulate_step(fleet, played)
        assert step.tokens == sum(turn.tokens for episode in played for turn in episode)
        assert step.worker_use * step.seconds * fleet.env_workers == pytest.approx(calls)
        longest = max(sum(turn.tokens * 0.01 + turn.env_seconds for turn in episode) for episode in played)
        assert step.rollout >= longest - 1e-9


MEASURED = {mostly_fast: (3.850, 2.372), all_alike: (3.935, 2.992)}
"""Seconds of a rollout in rounds and one by one, on a real vLLM server: the section free_running of benchmarks.md."""


@pytest.mark.parametrize(("kind", "measured"), MEASURED.items(), ids=lambda value: getattr(value, "__name__", ""))
def test_free_running_episodes_take_what_a_real_server_took_when_rounds_tell_its_speed(
    kind: Times, measured: tuple[float, float]
) -> None:
    in_rounds, freely = measured
    times = Slow(kind).seconds
    played = [tuple(SimulatedTurn(ANSWER_TOKENS, each) for each in (*one[1:], one[0])) for one in times]
    waiting = simulate_step(Fleet(), played).rollout
    each = (in_rounds - waiting) / (len(times[0]) * ANSWER_TOKENS) / len(times)  # half a step's, half its sequences'
    fleet = Fleet(token_seconds=each * len(times) / 2, sequence_seconds=each / 2)
    assert simulate_step(fleet, played).rollout == pytest.approx(in_rounds, rel=0.01)

    assert simulate_step(replace(fleet, servers=1), played).rollout == pytest.approx(freely, rel=0.15)


@pytest.mark.parametrize(
    ("fleet", "first"),
    [
        (Fleet(servers=1, token_seconds=1e-4, sequence_seconds=1e-3), "twice the servers"),
        (Fleet(servers=8, token_seconds=1e-2), "half the decoding latency"),
        (Fleet(servers=1, token_seconds=1e-6, env_workers=1), "twice the environment workers"),
        (Fleet(servers=1, token_seconds=1e-6, train_seconds=0.1), "twice the training processes"),
        (Fleet(servers=1, token_seconds=1e-6, sync_bytes=1e3, write_speed=1.0), "twice the sync speed"),
    ],
)
def test_what_saturates_first_is_what_shortens_the_step_most_when_there_is_more_of_it(fleet: Fleet, first: str) -> None:
    played = [(SimulatedTurn(100, 0.05 if first == "twice the environment workers" else 0.0),)] * 16

    gains = saturation(fleet, [played])

    assert next(iter(gains)) == first
    assert gains[first] > 1.5


# -- runs


def write_run(folder: Path, fleet: Fleet, steps: Sequence[Sequence[SimulatedEpisode]], **config: object) -> Path:
    """A run folder as a run on this fleet would have written it, with two episodes in each group."""
    (folder / "rollouts").mkdir(parents=True)
    (folder / "config.yaml").write_text(json.dumps(config))
    records, lines = [], []
    for number, played in enumerate(steps, start=1):
        step = simulate_step(fleet, played)
        rollout = {"time/generate": step.generate, "time/environment": step.environment}
        line = {"schema": 1, "step": number, "time/step": step.seconds, "time/optimize": step.train, **rollout}
        lines.append({**line, "sync/bytes": fleet.sync_bytes, "sync/seconds": fleet.sync_seconds})
        for index, episode in enumerate(played):
            turns = [{"tokens": turn.tokens, "weight_version": 0} for turn in episode]
            seconds = sum(turn.env_seconds for turn in episode)
            records.append({"schema": 1, "step": number, "group": index // 2, "turns": turns, "seconds": seconds})
    held_out = {"schema": 1, "step": 2, "eval_phase": "before_sampled", "turns": [{"tokens": 999}], "seconds": 99.0}
    text = "".join(json.dumps(record) + "\n" for record in [*records, held_out])
    (folder / "rollouts" / "rank0.jsonl").write_text(text)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def even(count: int, seed: int) -> list[SimulatedEpisode]:
    """Episodes whose calls all take as long: a record has only the sum of an episode's calls."""
    chance = random.Random(seed)
    return [
        tuple(SimulatedTurn(chance.randint(1, 50), 0.25) for _ in range(chance.randint(1, 3))) for _ in range(count)
    ]


def test_runs_of_two_sizes_tell_the_speed_of_a_fleet_that_generates_in_rounds(tmp_path: Path) -> None:
    fleet = Fleet(token_seconds=0.02, sequence_seconds=0.003, train_seconds=0.001, fixed_seconds=0.5)
    runs = [
        MeasuredRun.read(write_run(tmp_path / str(size), fleet, [even(size, seed) for seed in range(4)]))
        for size in (8, 32)
    ]

    found = calibrate(runs, Fleet())

    assert found.token_seconds == pytest.approx(0.02, rel=0.02)
    assert found.sequence_seconds == pytest.approx(0.003, rel=0.02)
    assert found.train_seconds == pytest.approx(0.001, rel=0.02)
    assert found.fixed_seconds == pytest.approx(0.5, rel=0.02)


def test_with_one_run_training_takes_as_long_as_there_are_tokens(tmp_path: Path) -> None:
    fleet = Fleet(token_seconds=0.02, train_seconds=0.001, env_workers=8)
    run = MeasuredRun.read(write_run(tmp_path / "run", fleet, [even(16, seed) for seed in range(4)]))

    found = calibrate([run], Fleet())

    assert (found.token_seconds, found.train_seconds) == (pytest.approx(0.02), pytest.approx(0.001))
    assert (found.sequence_seconds, found.fixed_seconds) == (0, 0)


def test_a_run_tells_the_speed_of_its_servers(tmp_path: Path) -> None:
    fleet = Fleet(servers=2, token_seconds=0.02, sequence_seconds=0.0002, train_seconds=0.001)
    run = MeasuredRun.read(write_run(tmp_path / "run", fleet, [even(16, seed) for seed in range(4)]))

    found = calibrate_servers(run, Fleet(servers=2))

    assert found.token_seconds == pytest.approx(0.02, rel=0.05)
    assert found.train_seconds == pytest.approx(0.001, rel=0.01)


def test_first_steps_and_held_out_cases_are_left_out_and_whole_groups_are_drawn(tmp_path: Path) -> None:
    steps = [even(8, seed) for seed in range(3)]

    run = MeasuredRun.read(write_run(tmp_path / "run", Fleet(token_seconds=0.01), steps))

    assert {step for step, _ in run.groups} == {2, 3}
    assert [*run.episodes_of(2)] == steps[1]
    pairs = [steps[step - 1][2 * group : 2 * group + 2] for step in (2, 3) for group in range(4)]
    drawn = run.draw(50)
    assert all(drawn[at : at + 2] in pairs for at in range(0, 100, 2))


def test_the_command_shows_a_run_on_other_fleets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fleet = Fleet(servers=1, token_seconds=0.02, sequence_seconds=0.0002, sync_bytes=1e9, write_speed=1e9)
    urls = {"use_vllm": True, "vllm_mode": "server", "vllm_server_url": "http://a:1"}
    folder = write_run(tmp_path / "run", fleet, [even(8, seed) for seed in range(3)], **urls)
    wanted = command.argparse.Namespace(run=folder, processes=None, servers=[1, 4], workers=None, groups=[64])

    assert command.show_run(wanted) == 0

    rows = capsys.readouterr().out.splitlines()[3:]
    assert [row.split()[:4] for row in rows] == [
        ["1", servers, "64", groups] for servers, groups in (("1", "4"), ("1", "64"), ("4", "4"), ("4", "64"))
    ]
    assert all(row.split()[4] == "1.00" for row in rows)
    assert float(rows[3].split()[5]) < float(rows[1].split()[5])


def test_a_run_without_timed_steps_is_refused(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", Fleet(), [even(2, 0)])

    with pytest.raises(ValueError, match="no timed steps"):
        MeasuredRun.read(folder)
