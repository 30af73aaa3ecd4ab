"""The real vLLM as a server that a run starts, feeds, watches and ends."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest

from aitrain import TrainConfig
from aitrain.packages import TINY_FOLDER
from aitrain.runs.run_folder import read_object
from aitrain.vllm.server_arguments import common_arguments, key_header
from aitrain.vllm.server_process import VLLMServer, running
from tests.conftest import episodes_of, processes_in
from tests.vllm import test_colocated
from tests.vllm.test_colocated import DEMO, check_agreement, run

pytestmark = test_colocated.pytestmark
SERVER = "--vllm-mode=server"


ASKS = '''
class Asks:
    """Plays its second turn itself, as AITraining's environments do."""

    def build_dataset(self, tokenizer):
        return [{"prompt": [{"role": "user", "content": f"say {number}:"}]} for number in range(16)]

    def score_episode(self, model, tokenizer, text, case_idx):
        ids = tokenizer(f"{text}{case_idx}", return_tensors="pt").to(model.device)
        output = model.generate(**ids, max_new_tokens=4, do_sample=False)
        assert output.shape[1] > ids["input_ids"].shape[1]
        return {"score": 0.5, "asked": 1.0}
'''


@pytest.mark.slow
def test_a_run_learns_with_copies_behind_one_address(tmp_path: Path) -> None:
    lines = run(tmp_path, SERVER, "--peft", "--lora-r=16", "--lr=5e-3",
                "--vllm-args=data_parallel_size=2", "--vllm-args=max_num_seqs=16", *DEMO, "--max-steps=40",
                "--eval-cases=64")  # fmt: skip

    ratios = [line["sampling/importance_sampling_ratio/mean"] for line in lines]
    assert 0.9 <= sum(ratios) / len(ratios) <= 1.1
    result = read_object(tmp_path / "runs" / "run" / "result.json")
    assert result["score_before"] <= 0.45
    assert result["score_after"] >= 0.6


def test_two_training_processes_ask_one_server_for_turns_and_for_what_environments_ask(tmp_path: Path) -> None:
    (tmp_path / "asks.py").write_text(ASKS)
    lines = run(tmp_path, SERVER, "--num-processes=2", "--rl-env=asks=asks.py", "--rl-env=guess=envs.guess_number",
                "--max-steps=6", "--rl-max-new-tokens=4", "--eval-cases=2", "--rl-prompts-per-step=4",
                "--batch-size=16", "--peft")  # fmt: skip

    check_agreement(lines)
    assert [line["env/asks/asked"] for line in lines] == [1.0] * 6
    assert max(line["turns"] for line in lines) > 1


@pytest.mark.slow
def test_a_server_asks_for_its_key_and_a_seed_decides_what_it_samples(tmp_path: Path) -> None:
    """Other users of the machine reach 127.0.0.1 as well: every path but its health asks for the key."""
    arguments = common_arguments(TrainConfig(), str(TINY_FOLDER), (), 8)
    server = VLLMServer({**arguments, "max_model_len": 64}, tmp_path / "log", timeout=180.0)
    with (
        running([server]),
        httpx.Client(base_url=server.url, trust_env=False) as http,
    ):
        known = http.get("/openapi.json", headers=key_header(server.key)).json()["paths"]
        calls = [(method, path) for path, methods in known.items() for method in methods]
        calls += [("get", path) for path in ("/docs", "//health", "/v1/models?x=/health")]
        answered = [path for method, path in calls if http.request(method, path).status_code != 401]

        def said(seed: int) -> str:
            body = {"model": name, "prompt": "3+4=", "max_tokens": 20, "temperature": 1.0, "seed": seed}
            answer = http.post("/v1/completions", json=body, headers=key_header(server.key)).json()
            return str(answer["choices"][0]["text"])

        name = http.get("/v1/models", headers=key_header(server.key)).json()["data"][0]["id"]
        first, again, other = said(5), said(5), said(6)
    assert answered == ["/health"]
    assert {"/collective_rpc", "/update_weights", "/v1/load_lora_adapter", "/v1/completions"} <= set(known)
    assert first == again != other


# -- several servers


KILLS = '''
import json, os, signal, threading
from pathlib import Path


def commands():
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            yield int(folder.name), (folder / "cmdline").read_bytes()
        except OSError:
            pass


class Kills:
    """Kills a server in the middle of the second batch of the first process."""

    concurrent = True

    def __init__(self):
        self.lock, self.turns = threading.Lock(), 0

    def build_dataset(self, tokenizer):
        return [{"prompt": f"say {number}:"} for number in range(16)]

    def kill(self):
        key = os.environ["VLLM_API_KEY"]
        one, _ = os.environ["AITRAIN_VLLM_SERVER"].split(",")
        files = [path for path in Path("runs/run").rglob("*") if path.is_file()]
        seen = [pid for pid, command in commands() if key.encode() in command]
        seen += [str(path) for path in files if key.encode() in path.read_bytes()]
        Path("seen.json").write_text(json.dumps(seen))
        port = f"--port={one.rpartition(':')[2]}".encode()
        for pid, command in commands():
            if port in command and b"process_tree.py" not in command:
                os.kill(pid, signal.SIGKILL)

    def episode(self, case_idx):
        reply = yield
        with self.lock:  # the others wait while one kills
            self.turns += 1
            if os.environ.get("RANK", "0") == "0" and self.turns == 24:
                self.kill()
        reply += yield "more:"
        return reply.count("e") / (1 + len(reply))
'''


@pytest.mark.slow
def test_two_servers_with_a_key_one_of_which_is_killed_in_a_batch_of_two_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    (tmp_path / "kills.py").write_text(KILLS)
    folder = tmp_path / "runs" / "run"

    lines = run(tmp_path, "--vllm-mode=server", "--vllm-servers=2", "--peft",
                "--num-processes=2", "--rl-env=kills.py", "--max-steps=4", "--eval-cases=0", "--rl-max-new-tokens=4",
                "--rl-prompts-per-step=4", "--batch-size=16", "--rl-env-timeout=500", "--no-rl-check")  # fmt: skip

    assert json.loads((tmp_path / "seen.json").read_text()) == []  # the key, in commands and files
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    check_agreement(lines)
    assert lines[-1]["vllm/restarts"] == 1
    records = episodes_of(folder)
    assert len(records) == 4 * 32
    assert not any(record["error"] for record in records)
    assert processes_in(tmp_path) == []
