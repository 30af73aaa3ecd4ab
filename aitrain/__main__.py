"""Entry point of `python -m aitrain`."""

from aitrain.cli.main import main

if __name__ == "__main__":
    main()
