"""`python -m autopar.cli`, and what torchrun starts for `autopar profile`."""

from autopar.cli.app import main

main()
