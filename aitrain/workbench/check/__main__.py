"""The process of `aitrain env check`: `python -m aitrain.workbench.check FILE`."""

from aitrain.workbench.check.registry import main

main()
