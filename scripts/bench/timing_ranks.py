"""Shared parts of scripts that profile this machine and measure steps on its ranks, in rounds."""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
import transformers
from side_by_side import keep_freed_memory


def timing_options(about: str | None) -> argparse.ArgumentParser:
    """The options that these scripts share."""
    parser = argparse.ArgumentParser(description=about.splitlines()[0] if about else "")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2, help="timed steps of a plan in a round")
    parser.add_argument("--profile-seconds", type=float, default=4.0)
    parser.add_argument("--clock", choices=("cpu", "wall"), default="cpu")
    return parser


def start_rank() -> None:
    """Initialise this process as a rank with one thread."""
    keep_freed_memory()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    dist.init_process_group("gloo")
