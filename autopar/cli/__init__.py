"""The command line; `autopar.cli.app` lists its exit codes."""

from autopar.cli.app import main

__all__ = ["main"]
