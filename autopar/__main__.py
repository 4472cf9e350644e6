"""`python -m autopar`."""

from autopar.cli.app import main

main()
