"""The command line. Exit codes are those of `autopar.cli.app`."""

from autopar.cli.app import main

__all__ = ["main"]
