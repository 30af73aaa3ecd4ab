"""`aitrain mcp`: aitrain's commands as tools of a Model Context Protocol server, for coding agents."""

from __future__ import annotations

from aitrain.errors import ConfigError


def mcp() -> int:
    """Serve aitrain's commands as tools to a coding agent, over standard input and output.

    Tools: check, plan, start, status, show, eval, compare, options. They work in the folder in which this command was
    started. A training that `start` began continues when the server ends. Needs pip install "aitrain[mcp]".
    """
    from aitrain.packages import installed  # here, because help needs none of it

    if installed("mcp") is None:
        raise ConfigError('The package mcp is not installed\nInstall it with: pip install "aitrain[mcp]"')
    from aitrain.ui.mcp_tools import make_server

    make_server().run("stdio")
    return 0
