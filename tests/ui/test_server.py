"""`aitrain view` answers its own page on this machine and nobody else, with runs and nothing else."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import pytest

from aitrain.errors import ConfigError
from aitrain.runs.run_folder import append_lines
from aitrain.ui import episodes
from aitrain.ui.page import SERVED_SCRIPTS, STYLES
from aitrain.ui.run_registry import OpenRun, RunRegistry, places
from aitrain.ui.server import MAX_WAITING, PageServer
from tests.ui.conftest import record, said, write_run
from tests.ui.made_runs import make_sweep

Serve = Callable[..., PageServer]
Answer = tuple[int, dict[str, str], bytes]


def ask(server: PageServer, path: str, method: str = "GET", **headers: str) -> Answer:
    """Exactly this request; `Host` and the cookie are ours unless others are given."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=20)
    usual = {"Host": f"127.0.0.1:{server.server_port}", "Cookie": f"odd={{a; {server.cookie}={server.key}"}
    named = {**usual, **{name.replace("_", "-"): v for name, v in headers.items()}}
    connection.putrequest(method, path, skip_host=True)
    for name, value in named.items():
        connection.putheader(name, value)
    connection.endheaders()
    answer = connection.getresponse()
    result = answer.status, dict(answer.getheaders()), answer.read()
    connection.close()
    return result


def get(server: PageServer, what: str, **parameters: Any) -> Any:
    status, _, body = ask(server, f"/api/{what}?{urlencode(parameters)}")
    assert status == 200, body
    return json.loads(body)


def ready(server: PageServer, run: str) -> Any:
    """The run at a glance, as soon as its rollouts are read."""
    while not (shown := get(server, "run", run=run))["is_ready"]:
        time.sleep(0.05)
    return shown


@pytest.fixture
def server(real_runs: Path, serve: Serve) -> PageServer:
    return serve(real_runs)


@pytest.mark.slow
def test_the_page_and_its_parts_are_served_under_a_strict_policy(server: PageServer) -> None:
    status, headers, page = ask(server, "/")
    assert status == 200
    assert headers["Content-Security-Policy"].startswith("default-src 'none'; style-src 'self'; script-src 'self';")
    assert "unsafe" not in headers["Content-Security-Policy"]
    parts = re.findall(r'(?:src|href)="(/[^"]+)"', page.decode())
    assert len(parts) == len(STYLES) + len(SERVED_SCRIPTS)
    for part in parts:
        status, headers, _ = ask(server, part)
        assert status == 200
        assert headers["Content-Type"].split(";")[0] in ("text/css", "text/javascript")
        assert headers["X-Content-Type-Options"] == "nosniff"


def test_all_runs_of_a_folder_are_listed_and_shown(server: PageServer) -> None:
    assert {run["id"] for run in get(server, "runs")} == {"sums", "other"}
    shown = ready(server, "sums")
    assert shown["scores"]["sampled"]["change"]["count"] == 8
    assert {row["case"] for row in get(server, "cases", run="sums")["rows"] if row["is_held_out"]} != set()
    page = get(server, "episodes", run="sums", step=8, eval_phase="training")
    assert page["total"] == 16
    assert [file["name"] for file in get(server, "source", run="sums")] == ["arithmetic.py"]
    assert get(server, "episode", run="sums", n=page["rows"][0]["n"])["said"][0]["role"] == "assistant"


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD"])
def test_nothing_but_reading_is_allowed(method: str, server: PageServer) -> None:
    assert ask(server, "/api/runs", method=method)[0] == 405


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "localhost.evil.example", "127.0.0.2", "0.0.0.0",
     "[::1", "", "127.0.0.1@evil.example", "evil.example#127.0.0.1", "10.0.0.1"],
)  # fmt: skip
@pytest.mark.parametrize("path", ["/", "/api/runs", "/assets/page.js"])
def test_another_name_of_this_machine_is_refused(host: str, path: str, server: PageServer) -> None:
    """A page whose own host name was made to lead here is the same origin to a browser, but not to us."""
    status, _, body = ask(server, path, Host=host)
    assert status == 421
    assert b"sums" not in body


def test_the_address_has_a_key_without_which_nothing_is_answered(server: PageServer) -> None:
    """Other users of the machine reach the port as well."""
    for path in (
        "/",
        "/api/runs",
        "/api/source?run=sums",
        "/compare?a=sums&b=other",
        "/?key=",
        "/?key=%ff",
        "/nothing",
    ):
        for cookie in ("", server.cookie, f"{server.cookie}=", f"{server.cookie}=wrong", f"other={server.key}"):
            status, headers, body = ask(server, path, Cookie=cookie)
            assert status == 403
            assert b"sums" not in body
            assert "Set-Cookie" not in headers
    assert ask(server, f"/api/runs?key={server.key}", Cookie="")[0] == 403
    for path in ("/", "/?run=a%2Fb", "/compare?a=sums&b=other"):
        address = f"{path}{'&' if '?' in path else '?'}key={server.key}"
        status, headers, _ = ask(server, address, Cookie="", Sec_Fetch_Site="none")
        assert (status, headers["Location"]) == (303, path)
        cookie, *flags = headers["Set-Cookie"].split("; ")
        assert {"HttpOnly", "SameSite=Lax"} <= set(flags)
        assert ask(server, "/api/runs", Cookie=cookie)[0] == 200
    assert ask(server, f"/compare?key={server.key}", Cookie="", Sec_Fetch_Site="cross-site")[0] == 403


def test_a_forwarded_port_may_have_another_number(server: PageServer) -> None:
    assert ask(server, "/api/runs", Host="localhost:9999", Origin="http://localhost:9999")[0] == 200


@pytest.mark.parametrize(
    "headers",
    [{"Origin": "http://evil.example"}, {"Origin": "null"}, {"Origin": "http://127.0.0.1:1"},
     {"Sec_Fetch_Site": "cross-site"}, {"Sec_Fetch_Site": "same-site"}],
    ids=str,
)  # fmt: skip
def test_another_page_may_not_ask(headers: dict[str, str], server: PageServer) -> None:
    for path in ("/api/runs", "/api/run?run=sums", "/assets/page.js"):
        status, answered, body = ask(server, path, **headers)
        assert status == 403
        assert b"sums" not in body
        assert "Access-Control-Allow-Origin" not in answered


CLIMBS = [
    "../../", "../../../../etc/passwd", "..", ".", "/etc/passwd", "....//", "..\\..\\", "sums/../other", "sums/",
    "%2e%2e/", "\0", "file:///etc/passwd", "~", "sums\0", "C:\\",
]  # fmt: skip


@pytest.mark.parametrize("climb", CLIMBS, ids=repr)
def test_no_parameter_becomes_a_path(climb: str, server: PageServer) -> None:
    for what in ("run", "source", "cases", "episodes", "episode"):
        for raw in (quote(climb, safe=""), climb.replace("\0", "%00")):
            assert ask(server, f"/api/{what}?run={raw}&n=0")[0] == 404
    ready(server, "sums")
    for name in ("eval_phase", "step", "case", "low", "high", "failure", "stop", "text", "order", "start", "n"):
        for what in ("episodes", "episode"):
            status, _, body = ask(server, f"/api/{what}?run=sums&{name}={quote(climb, safe='')}")
            assert status in (200, 400, 404)
            assert b"root:" not in body


@pytest.mark.parametrize("climb", CLIMBS, ids=repr)
def test_no_address_becomes_a_path(climb: str, server: PageServer) -> None:
    for prefix in ("/", "/assets/", "/api/", "/assets/page.css/", "//", "http://127.0.0.1/"):
        for raw in (quote(climb, safe=""), quote(climb, safe="/.~:\\")):
            if prefix + raw not in ("/", "//"):
                status, _, body = ask(server, prefix + raw)
                assert status == 404, prefix + raw
                assert b"root:" not in body


@pytest.mark.parametrize(
    ("wrong", "status"),
    [("step=x", 400), ("step=-1", 400), ("step=99999999999999999", 400), ("low=x", 400), ("start=1e3", 400),
     ("&".join(f"a{n}=1" for n in range(40)), 400), ("step=%C2%B2", 400),
     ("step=12", 200), ("low=nan", 200), ("text=%ff%fe", 200)],
    ids=str,
)  # fmt: skip
def test_parameters_that_mean_nothing_are_refused_in_words(wrong: str, status: int, server: PageServer) -> None:
    answered, _, body = ask(server, f"/api/episodes?run=sums&{wrong}")
    assert answered == status
    json.loads(body)


def test_links_and_other_files_are_no_runs(real_run: Path, tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "linked").symlink_to(real_run)
    (tmp_path / "runs" / "notes").mkdir()
    (tmp_path / "runs" / "notes" / "secret.txt").write_text("secret")
    write_run(tmp_path / "runs" / "mine", [record()])
    assert set(RunRegistry([tmp_path / "runs"]).runs()) == {"mine"}


def test_a_single_rollouts_file_and_runs_of_the_same_name_can_be_shown(tmp_path: Path, serve: Serve) -> None:
    for place in ("one", "two"):
        write_run(tmp_path / place / "run", [said(place)])
    server = serve(
        tmp_path / "one" / "run", tmp_path / "two" / "run", tmp_path / "one" / "run" / "rollouts" / "rank0.jsonl"
    )
    assert [run["id"] for run in get(server, "runs")] == ["run", "run (2)", "rank0.jsonl"]
    for run, text in (("run", "one"), ("run (2)", "two"), ("rank0.jsonl", "one")):
        ready(server, run)
        assert get(server, "episode", run=run, n=0)["answer"] == text


def test_a_run_that_goes_on_is_followed(tmp_path: Path, serve: Serve) -> None:
    folder = write_run(tmp_path / "run", [record()])
    server = serve(folder)
    before = ready(server, "run")
    assert get(server, "run", run="run")["version"] == before["version"]
    append_lines(folder / "rollouts" / "rank0.jsonl", [record(step=2)])
    append_lines(folder / "metrics.jsonl", [{"step": 1, "reward": 0.25}])
    while (after := get(server, "run", run="run"))["episodes"]["all"] == 1:
        time.sleep(0.05)
    assert after["version"] != before["version"]
    assert after["curves"]["series"]["reward"] == [0.25]


def test_a_run_that_appears_later_is_listed(tmp_path: Path, serve: Serve) -> None:
    server = serve(tmp_path)
    assert get(server, "runs") == []
    write_run(tmp_path / "new", [record()])
    assert [run["id"] for run in get(server, "runs")] == ["new"]


def test_a_search_that_takes_too_long_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, serve: Serve) -> None:
    server = serve(write_run(tmp_path / "run", [said("word", step=step) for step in range(600)]))
    ready(server, "run")
    monkeypatch.setattr(episodes, "MOST_HITS", 10)
    found = get(server, "episodes", run="run", text="word")
    assert (found["total"], found["is_complete"]) == (10, False)
    monkeypatch.setattr(episodes, "SEARCH_SECONDS", -1.0)
    found = get(server, "episodes", run="run", text="ord")
    assert (found["total"], found["is_complete"]) == (0, False)


def test_a_run_that_vanishes_is_no_run_any_more(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", [record()])
    run = OpenRun("run", folder)
    while not run.summary()["is_ready"]:
        time.sleep(0.05)
    assert run.summary()["episodes"]["all"] == 1
    (folder / "rollouts" / "rank0.jsonl").unlink()
    while run.summary()["episodes"]["all"]:
        time.sleep(0.05)


# -- the command


@pytest.fixture
def viewing(real_runs: Path) -> Iterator[Callable[..., tuple[subprocess.Popen[str], str]]]:
    """`viewing("--port", "0")`: the command, and the address that it says."""
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str) -> tuple[subprocess.Popen[str], str]:
        command = [sys.executable, "-m", "aitrain", "view", "--no-browser", *arguments]
        started.append(subprocess.Popen(command, cwd=real_runs.parent, stdout=subprocess.PIPE, text=True))
        assert started[-1].stdout is not None
        return started[-1], started[-1].stdout.readline()

    yield start
    for one in started:
        one.kill()
        one.communicate()


def test_the_command_serves_until_it_is_interrupted(
    viewing: Callable[..., tuple[subprocess.Popen[str], str]],
) -> None:
    process, line = viewing("--port", "0", "sums")
    port, key = re.findall(r"http://127\.0\.0\.1:(\d+)/\?key=([\w-]+) ", line)[0]
    with socket.create_connection(("127.0.0.1", int(port))) as connection:
        said = f"GET /api/runs HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nCookie: aitrain-{port}={key}\r\n\r\n"
        connection.sendall(said.encode())
        answer = connection.makefile("rb").read()
    assert b'"id": "sums"' in answer
    assert b"other" not in answer
    os.kill(process.pid, signal.SIGINT)
    assert process.wait(30) == 0


def test_connections_that_say_nothing_or_break_off_keep_nobody_waiting(
    server: PageServer, capfd: pytest.CaptureFixture[str]
) -> None:
    place = ("127.0.0.1", server.server_port)
    with ExitStack() as stack:
        silent = [stack.enter_context(socket.create_connection(place)) for _ in range(MAX_WAITING + 9)]
        assert ask(server, "/api/runs")[0] == 200
        assert silent[0].recv(1) == b""
    for _ in range(3):
        with socket.create_connection(place) as broken:
            broken.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            broken.sendall(b"GET / HTTP/1.1\r\n")
    assert ask(server, "/api/runs")[0] == 200
    while server.waiting:
        time.sleep(0.01)
    assert capfd.readouterr().err == ""


def test_it_listens_on_this_machine_only(server: PageServer) -> None:
    assert server.server_address[0] == "127.0.0.1"


def test_a_port_that_is_taken_is_told_and_without_one_the_next_is_used(
    server: PageServer, here: Path, viewing: Callable[..., tuple[subprocess.Popen[str], str]]
) -> None:
    command = [sys.executable, "-m", "aitrain", "view", "--no-browser", str(here)]
    done = subprocess.run([*command, "--port", str(server.server_port)], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "Address already in use" in done.stderr
    _, first = viewing()
    _, second = viewing()
    assert first != second


def test_what_is_not_there_is_told_with_what_is(real_runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(real_runs.parent)
    assert places(["sums"]) == [Path("runs/sums")]
    with pytest.raises(ConfigError, match=r"There is no run, folder or file summs\. Did you mean sums\?"):
        places(["summs"])
    monkeypatch.chdir("/")
    with pytest.raises(ConfigError, match="no run to show yet"):
        places([])


# -- the pages of comparisons and sweeps


def test_two_runs_are_compared_on_a_page_that_brings_its_own_policy(tmp_path: Path, serve: Serve) -> None:
    for name, phase in (("a", "eval_sampled"), ("b", "after_sampled")):
        write_run(tmp_path / name, [record(eval_phase=phase, row_number=1)])
    server = serve(tmp_path)
    status, headers, page = ask(server, "/compare?a=a&b=b")
    assert status == 200
    assert headers["Content-Security-Policy"] == "frame-ancestors 'none'"
    assert b"script-src 'sha256-" in page
    assert ask(server, "/compare?a=a&b=b", Sec_Fetch_Site="cross-site")[0] == 403


def test_what_cannot_be_compared_or_is_not_there_is_told_on_a_page(tmp_path: Path, serve: Serve) -> None:
    for name, row in (("<b>a</b>", 1), ("b", 2)):
        write_run(tmp_path / name.replace("/", "-"), [record(eval_phase="eval_sampled", row={"answer": row})])
    server = serve(tmp_path)
    for address, wanted in (
        ("/compare?a=%3Cb%3Ea%3C-b%3E&b=b", 400),
        ("/compare?a=b&b=c", 404),
        ("/sweep?sweep=b", 404),
    ):
        status, headers, page = ask(server, address)
        assert (status, headers["Content-Type"]) == (wanted, "text/html; charset=utf-8")
        assert headers["Content-Security-Policy"].startswith("default-src 'none'")
        assert b'<a href="/">All runs</a>' in page
        assert b"<b>" not in page
        assert b'<script src="/assets/theme.js">' in page  # its colours


def test_trials_are_known_by_their_sweep_and_its_page_links_to_them(tmp_path: Path, serve: Serve) -> None:
    make_sweep(tmp_path / "one" / "lr")
    make_sweep(tmp_path / "two" / "lr")
    server = serve(tmp_path / "one", tmp_path / "two")
    rows = {row["id"]: row["sweep"] for row in get(server, "runs")}
    trials = {f"{sweep}/trial-{number}": sweep for sweep in ("lr", "lr (2)") for number in range(2)}
    assert rows == {"lr": None, "lr (2)": None, **trials}
    assert ready(server, "lr (2)/trial-1")["name"] == "trial-1"
    status, _, page = ask(server, "/sweep?sweep=lr%20%282%29")
    assert status == 200
    assert b"/?run=lr%20%282%29%2F{name}" in page
