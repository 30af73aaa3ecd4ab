"""`python -m aitrain` is `aitrain`."""

from aitrain.cli.main import main

if __name__ == "__main__":
    main()
