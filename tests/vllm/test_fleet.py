"""Several real vLLM servers of one run, one of which is killed; skipped where vLLM is not installed."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from aitrain.runs.result import Result
from aitrain.runs.run_folder import read_lines
from tests.conftest import processes_in
from tests.vllm.test_colocated import check_agreement, run

pytestmark = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")

KILLS = '''
import json, os, signal, threading, time
from pathlib import Path

STATES = Path("runs/run/vllm-server.json")


def servers():
    return json.loads(STATES.read_text())["servers"]


def first():
    return next(iter(servers().values()))["state"]


def commands():
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            yield int(folder.name), (folder / "cmdline").read_bytes()
        except OSError:
            pass


class Kills:
    """Kills a server in the middle of the second batch of the first process. Half of the episodes continue at once,
    with the other server; the others wait until it is back."""

    concurrent = True

    def __init__(self):
        self.lock, self.turns = threading.Lock(), 0

    def build_dataset(self, tokenizer):
        return [{"prompt": f"say {number}:"} for number in range(16)]

    def kill(self):
        key = os.environ["VLLM_API_KEY"]
        one = next(iter(servers()))
        files = [path for path in STATES.parent.rglob("*") if path.is_file()]
        seen = [pid for pid, command in commands() if key.encode() in command]
        seen += [str(path) for path in files if key.encode() in path.read_bytes()]
        Path("seen.json").write_text(json.dumps(seen))
        port = f"--port={one.rpartition(':')[2]}".encode()
        for pid, command in commands():
            if port in command and b"process_tree.py" not in command:
                os.kill(pid, signal.SIGKILL)
        while first() != "starting":
            time.sleep(0.1)

    def episode(self, case_idx):
        reply = yield
        with self.lock:  # the others wait while one kills
            self.turns += 1
            if os.environ.get("RANK", "0") == "0" and self.turns == 24:
                self.kill()
            waits = self.turns > 24 and self.turns % 2
        while waits and first() != "running":
            time.sleep(0.2)
        reply += yield "more:"
        if first() == "starting":
            Path("moved").touch()
        return reply.count("e") / (1 + len(reply))
'''


@pytest.mark.slow
def test_two_servers_with_a_key_one_of_which_is_killed_in_a_batch_of_two_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    (tmp_path / "kills.py").write_text(KILLS)
    folder = tmp_path / "runs" / "run"

    lines = run(tmp_path, "--vllm-mode=server", "--vllm-servers=2", "--vllm-listen-address=127.0.0.2", "--peft",
                "--num-processes=2", "--rl-env=kills.py", "--max-steps=4", "--eval-cases=0", "--rl-max-new-tokens=4",
                "--rl-prompts-per-step=4", "--batch-size=16", "--rl-env-timeout=500", "--no-rl-check")  # fmt: skip

    assert json.loads((tmp_path / "seen.json").read_text()) == []  # the key, in commands and files
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    check_agreement(lines)
    assert Result.read(folder).vllm_restarts == 1
    records = [record for path in (folder / "rollouts").glob("rank*.jsonl") for record in read_lines(path)]
    assert len(records) == 4 * 32
    assert not any(record["error"] for record in records)
    assert (tmp_path / "moved").exists()
    assert set(json.loads((folder / "status.json").read_text())["vllm_servers"].values()) == {"live"}
    assert [line["vllm/servers"] for line in lines if line["step"] != 2] == [2, 2, 2]
    assert processes_in(tmp_path) == []
