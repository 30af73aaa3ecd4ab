"""`aitrain view`: runs as a page in the browser, also while they run."""

from __future__ import annotations

import json
import os
import signal
import sys
import webbrowser
from contextlib import suppress
from tempfile import NamedTemporaryFile
from typing import Annotated

import typer

from aitrain.cli.flags import AsJson, run_names
from aitrain.errors import ConfigError

PORT = 8765
TRIES = 20


def view(
    runs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN]...", autocompletion=run_names, help="Run folders, folders of them, or rollout files."
        ),
    ] = None,
    port: Annotated[int | None, typer.Option(min=0, max=65535, help="Port; unset: 8765, or the next free one.")] = None,
    no_browser: Annotated[bool, typer.Option("--no-browser", help="Only print the address.")] = False,
    as_json: AsJson = False,
) -> int:
    """Show runs as a page in the browser, on 127.0.0.1 only.

    The address holds a key, without which other users of the machine get nothing.
    """
    from aitrain.ui.run_registry import RunRegistry, places
    from aitrain.ui.server import PageServer

    registry, tried = RunRegistry(places(runs or [])), range(PORT, PORT + TRIES) if port is None else [port]
    for number in tried:
        with suppress(OSError):
            server = PageServer(registry, number)
            break
    else:
        raise ConfigError(f"port: cannot listen on 127.0.0.1:{tried[-1]}\nChoose another with --port.")
    with NamedTemporaryFile("w", suffix=".html") as page:
        typer.echo(json.dumps({"url": server.address}) if as_json else f"{server.address}  (stop with Ctrl-C)")
        has_desktop = sys.platform == "darwin" or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
        if not no_browser and has_desktop and not os.environ.get("SSH_CONNECTION"):
            page.write(f'<meta http-equiv="refresh" content="0; url={server.address}">')
            page.flush()
            webbrowser.open(f"file://{page.name}")  # other users see a browser's arguments, and cannot read the file
        signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell ignore it by default
        try:
            server.run()
        except KeyboardInterrupt:
            return 0
    return 0
