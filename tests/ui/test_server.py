"""`aitrain view` answers its own page on this machine and nobody else, with runs and nothing else."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import pytest

from aitrain.ui.run_registry import runs_of
from aitrain.ui.server import PageServer
from tests.execution.waiting import eventually
from tests.ui.conftest import Serve, record, write_run
from tests.ui.made_runs import make_sweep

Answer = tuple[int, http.client.HTTPMessage, bytes]


def ask(server: PageServer, path: str, method: str = "GET", **headers: str) -> Answer:
    """Exactly this request; `Host` and the cookie are ours unless others are given."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    usual = {"Host": f"127.0.0.1:{server.port}", "Cookie": f"odd={{a; {server.cookie}={server.key}"}
    named = {**usual, **{name.replace("_", "-"): v for name, v in headers.items()}}
    connection.putrequest(method, path, skip_host=True)
    for name, value in named.items():
        connection.putheader(name, value)
    connection.endheaders()
    answer = connection.getresponse()
    result = answer.status, answer.headers, answer.read()
    connection.close()
    return result


def get(server: PageServer, what: str, **parameters: Any) -> Any:
    status, _, body = ask(server, f"/api/{what}?{urlencode(parameters)}")
    assert status == 200, body
    return json.loads(body)


def ready(server: PageServer, run: str) -> Any:
    """The run at a glance, as soon as its rollouts are read."""
    assert eventually(lambda: get(server, "run", run=run)["is_ready"])
    return get(server, "run", run=run)


@pytest.fixture
def server(kinds: Path, serve: Serve) -> PageServer:
    return serve(kinds)


def test_the_page_is_served_with_all_its_parts_under_a_strict_policy_on_this_machine_only(server: PageServer) -> None:
    assert server.listener.getsockname()[0] == "127.0.0.1"
    status, headers, page = ask(server, "/")
    assert (status, headers["X-Content-Type-Options"]) == (200, "nosniff")
    assert headers["Content-Security-Policy"] == "frame-ancestors 'none'"
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]+)"', page.decode())
    assert policy.startswith("default-src 'none'; style-src 'sha256-")
    assert "; connect-src 'self'; " in policy
    assert "unsafe" not in policy
    assert re.findall(r'(?:src|href)="(/[^"]+)"', page.decode()) == []
    assert ask(server, "/api/runs")[1]["Content-Security-Policy"] == "default-src 'none'; frame-ancestors 'none'"


HOSTS = [
    "evil.example", "evil.example:80", "127.0.0.1.evil.example", "localhost.evil.example", "127.0.0.2", "0.0.0.0",
    "[::1", "", "127.0.0.1@evil.example", "evil.example#127.0.0.1", "10.0.0.1",
]  # fmt: skip


def test_another_name_of_this_machine_and_other_methods_are_refused(server: PageServer) -> None:
    """A page whose own host name was made to lead here is the same origin to a browser, but not to us."""
    for host, path in product(HOSTS, ("/", "/api/runs")):
        status, _, body = ask(server, path, Host=host)
        assert status == 421, host
        assert b"better" not in body
    address = "http://localhost:9999"  # a forwarded port
    assert ask(server, "/api/runs", Host=address[7:], Origin=address)[0] == 200
    for method in ("POST", "DELETE", "OPTIONS", "HEAD"):
        assert ask(server, "/api/runs", method=method)[0] == 405


def test_the_address_has_a_key_without_which_nothing_is_answered(server: PageServer) -> None:
    """Other users of the machine reach the port as well."""
    own = ("/", "/api/runs", "/compare?a=better&b=live", "/?key=", "/?key=%ff", "/nothing")
    cookies = ("", f"{server.cookie}=", f"{server.cookie}=wrong", f"other={server.key}")
    for path, cookie in product(own, cookies):
        status, headers, body = ask(server, path, Cookie=cookie)
        assert status == 403
        assert b"better" not in body
        assert "Set-Cookie" not in headers
    for path in ("/api/runs?", "/compare?a=better&b=live&"):
        assert ask(server, f"{path}key={server.key}", Cookie="")[0] == 403
    status, headers, _ = ask(server, f"/?run=a%2Fb&key={server.key}", Cookie="", Sec_Fetch_Site="none")
    assert (status, headers["Location"]) == (303, "/?run=a%2Fb")
    cookie, *flags = headers["Set-Cookie"].split("; ")
    assert {"HttpOnly", "SameSite=lax"} <= set(flags)
    assert ask(server, "/api/runs", Cookie=cookie)[0] == 200
    assert ask(server, f"/compare?key={server.key}", Cookie="", Sec_Fetch_Site="cross-site")[0] == 403


def test_another_page_may_not_ask(server: PageServer) -> None:
    origins = [{"Origin": origin} for origin in ("http://evil.example", "null", "http://127.0.0.1:1")]
    for headers in (*origins, {"Sec_Fetch_Site": "cross-site"}, {"Sec_Fetch_Site": "same-site"}):
        for path in ("/api/runs", "/compare?a=better&b=live"):
            status, answered, body = ask(server, path, **headers)
            assert status == 403, headers
            assert b"better" not in body
            assert "Access-Control-Allow-Origin" not in answered


CLIMBS = [
    "../../", "../../../../etc/passwd", "..", ".", "/etc/passwd", "....//", "..\\..\\", "better/../live", "better/",
    "%2e%2e/", "\0", "file:///etc/passwd", "~", "better\0", "C:\\",
]  # fmt: skip


def test_no_parameter_and_no_address_becomes_a_path(server: PageServer) -> None:
    ready(server, "better")
    for climb in CLIMBS:
        for what in ("run", "source", "cases", "episodes", "episode"):
            for raw in (quote(climb, safe=""), climb.replace("\0", "%00")):
                assert ask(server, f"/api/{what}?run={raw}&n=0")[0] == 404, climb
        for name in ("eval_phase", "step", "case", "low", "failure", "stop", "text", "start", "n"):
            status, _, body = ask(server, f"/api/episodes?run=better&{name}={quote(climb, safe='')}")
            assert status in (200, 400, 404)
            assert b"root:" not in body
        for prefix in ("/", "/api/", "//", "http://127.0.0.1/"):
            for raw in (quote(climb, safe=""), quote(climb, safe="/.~:\\")):
                status, _, body = ask(server, prefix + raw)
                assert status in (400, 404), prefix + raw
                assert b"root:" not in body


@pytest.mark.parametrize("number", [-1, -999, 999])
def test_an_episode_outside_of_the_run_is_told(server: PageServer, number: int) -> None:
    ready(server, "better")
    assert ask(server, f"/api/episode?run=better&n={number}")[0] == 404


def test_links_and_other_files_are_no_runs(kinds: Path, tmp_path: Path) -> None:
    (tmp_path / "runs" / "notes").mkdir(parents=True)
    (tmp_path / "runs" / "linked").symlink_to(kinds / "better")
    (tmp_path / "runs" / "notes" / "config.yaml").write_text("model: secret")
    write_run(tmp_path / "runs" / "mine", [record()])
    assert set(runs_of([tmp_path / "runs"])) == {"mine"}


# -- the command


def test_the_command_serves_until_it_is_interrupted(kinds: Path) -> None:
    command = [sys.executable, "-m", "aitrain", "view", "--port", "0", "better"]
    with subprocess.Popen(command, cwd=kinds, stdout=subprocess.PIPE, text=True) as process:
        line = process.stdout.readline()
        port, key = re.findall(r"http://127\.0\.0\.1:(\d+)/\?key=([\w-]+) ", line)[0]
        with socket.create_connection(("127.0.0.1", int(port))) as connection:
            said = f"GET /api/runs HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nCookie: aitrain-{port}={key}\r\n"
            connection.sendall(f"{said}Connection: close\r\n\r\n".encode())
            answer = connection.makefile("rb").read()
        os.kill(process.pid, signal.SIGINT)
        assert process.wait() == 0
    assert b'"id": "better"' in answer
    assert b"live" not in answer


# -- the pages of comparisons and sweeps


def test_two_runs_are_compared_on_a_page_that_brings_its_own_policy_and_what_cannot_be_is_told_on_one(
    tmp_path: Path, serve: Serve
) -> None:
    for name, row, phase in (("a", 1, "eval_sampled"), ("b", 1, "after_sampled"), ("<b>c<-b>", 2, "eval_sampled")):
        write_run(tmp_path / name, [record(eval_phase=phase, row_number=1, row={"answer": row})])
    server = serve(tmp_path)
    status, headers, page = ask(server, "/compare?a=a&b=b")
    assert status == 200
    assert headers["Content-Security-Policy"] == "frame-ancestors 'none'"
    assert b"script-src 'sha256-" in page
    for address, wanted in (("/compare?a=%3Cb%3Ec%3C-b%3E&b=b", 400), ("/compare?a=d&b=b", 404)):
        status, headers, _ = ask(server, address)
        assert (status, headers["Content-Type"]) == (wanted, "text/plain; charset=utf-8")
        assert headers["Content-Security-Policy"].startswith("default-src 'none'")


def test_trials_are_known_by_their_sweep(tmp_path: Path, serve: Serve) -> None:
    make_sweep(tmp_path / "one" / "lr")
    make_sweep(tmp_path / "two" / "lr")
    server = serve(tmp_path / "one", tmp_path / "two")
    rows = {row["id"]: row["sweep"] for row in get(server, "runs")}
    trials = {f"{sweep}/trial-{number}": sweep for sweep in ("lr", "lr (2)") for number in range(2)}
    assert rows == {"lr": None, "lr (2)": None, **trials}
    assert ready(server, "lr (2)/trial-1")["name"] == "trial-1"
