"""Entry point of `python -m autopar.cli`, which `autopar profile` also starts under torchrun."""

from autopar.cli.app import main

main()
