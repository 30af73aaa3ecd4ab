"""Starts a training process that is killed when the Ray worker above it ends: `python ray_child.py PARENT COMMAND...`.

Ray ends its workers with SIGKILL, and what they started would otherwise train on, beside the processes of the restart.
"""

import os
import sys

from aitrain.execution.fork_server import end_with

if __name__ == "__main__":
    end_with(int(sys.argv[1]))
    os.execv(sys.argv[2], sys.argv[2:])
