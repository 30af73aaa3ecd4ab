"""A vLLM server on another machine whose cable is cut while it answers; skipped where there are no namespaces."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.machines import test_two_machines
from tests.machines.namespaces import network

pytestmark = test_two_machines.pytestmark
SERVES = """
import socket, time
server = socket.create_server(("10.77.0.2", 8000))
print("serves", flush=True)
held = [server.accept()[0], server.accept()[0]]
time.sleep(600)
"""
ASKS = """
import asyncio, sys
from aitrain.errors import ServerGoneError
from aitrain.vllm import client

seconds = {client.socket.TCP_KEEPIDLE: 1, client.socket.TCP_KEEPINTVL: 1}
shorter = {**seconds, client.socket.TCP_KEEPCNT: 2, client.socket.TCP_USER_TIMEOUT: 3000}
client.KEEPALIVE = [(level, name, shorter.get(name, value)) for level, name, value in client.KEEPALIVE]

async def ask():
    try:
        await client.VLLMClient("http://10.77.0.2:8000").post("/v1/completions", {})
    except ServerGoneError as gone:
        return f"gone: {gone}"

async def main():
    asked = [asyncio.create_task(ask()) for _ in range(2)]
    await asyncio.sleep(1)
    print("asked", flush=True)
    print(await asyncio.gather(*asked), flush=True)

asyncio.run(main())
"""


def test_requests_to_a_server_that_is_cut_off_end_after_a_time_of_silence(tmp_path: Path) -> None:
    with network(tmp_path) as pair:
        ours, servers = pair.machines
        serves = subprocess.Popen(servers.inside(sys.executable, "-c", SERVES), stdout=subprocess.PIPE, text=True)
        assert serves.stdout is not None
        assert serves.stdout.readline() == "serves\n"
        asks = subprocess.Popen(ours.inside(sys.executable, "-c", ASKS), stdout=subprocess.PIPE, text=True)
        assert asks.stdout is not None
        assert asks.stdout.readline() == "asked\n"
        pair.cut()
        said, _ = asks.communicate(timeout=60)
        serves.kill()  # its child, on the machine, ends with that, and holds the pipe until then
        serves.wait()
    assert said.count("gone: /v1/completions: ReadError") == 2
