"""Imported by Python at its start where this folder is on PYTHONPATH."""

import os
import sys

if "SHARD_ON_CPU" in os.environ and "aitrain.jobs.worker" in sys.orig_argv:
    import shard_on_cpu  # noqa: F401
