"""The checks of `aitrain env check`."""
