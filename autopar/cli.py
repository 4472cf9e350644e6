"""The command line: `autopar plan` makes a plan, `autopar explain` tells what a plan does.

Exit codes: 0 done; 2 something the user can mend; 1 something that nobody foresaw. Both are told in one line on
standard error; with AUTOPAR_DEBUG set in the environment, the second with its traceback.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

import autopar
from autopar.cluster import Cluster
from autopar.errors import AutoparError, InputError
from autopar.plans import Plan
from autopar.sizes import parse_bytes
from autopar.sources import load_source, told

app = typer.Typer(
    name="autopar",
    help="Plans distributed training of a PyTorch model: sharding and recompute, under a memory budget.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit, as the module says."""
    try:
        code = app(arguments, prog_name="autopar", standalone_mode=False)
    except (AutoparError, typer.TyperException) as error:
        message = error.format_message() if isinstance(error, typer.TyperException) else str(error)
        print(f"error: {' '.join(message.split())}", file=sys.stderr)
        sys.exit(2)
    except (typer.Abort, KeyboardInterrupt):
        print("stopped", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:  # the reader of our output went away, as `head` does
        sys.stderr.close()
        sys.exit(141)
    except Exception as error:
        if os.environ.get("AUTOPAR_DEBUG"):
            raise
        print(f"error: unforeseen {told(error)} (AUTOPAR_DEBUG=1 shows the traceback)", file=sys.stderr)
        sys.exit(1)
    sys.exit(code or 0)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"autopar {autopar.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


@app.command()
def plan(
    model: Annotated[
        str,
        typer.Argument(
            help="hf:ARCHITECTURE (hf:GPT2LMHeadModel), or module:function that returns "
            "a model, or (model, meta_args), or (model, meta_args, loss_fn)."
        ),
    ],
    mesh: Annotated[str, typer.Option(help="Devices along each mesh axis, slowest first: 8, 4x8, 2x4x8.")],
    batch: Annotated[
        int, typer.Option(min=1, help="Sequences or pictures of one optimizer step, all devices together.")
    ],
    cluster: Annotated[
        str, typer.Option(help="What the mesh is made of: a100, h100, cpu, or a profile (JSON).")
    ] = "h100",
    axis_names: Annotated[str | None, typer.Option(help="Names of the mesh axes: dp,tp.")] = None,
    memory: Annotated[
        str | None, typer.Option(help="Budget of one device, with unit: 70GiB. Default: all it has.")
    ] = None,
    seq: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a sequence. Default: what the config allows, at most 2048.")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="Hugging Face config (JSON) for hf:ARCHITECTURE.")] = None,
    precision: Annotated[
        str | None, typer.Option(help="bf16, fp16, fp32, fp64 or pure-bf16. Default: bf16 on GPUs, fp32 on CPU.")
    ] = None,
    optimizer: Annotated[str, typer.Option(help="adamw, sgd or sgd-momentum.")] = "adamw",
    micro_batches: Annotated[int, typer.Option(min=1, help="Backward passes of one optimizer step.")] = 1,
    constraint: Annotated[
        list[str] | None, typer.Option(help="ddp, fsdp, tp, ..., or a pin by name; may be repeated.")
    ] = None,
    time_limit: Annotated[float, typer.Option(min=0.1, help="Seconds for the solver.")] = 60,
    out: Annotated[Path | None, typer.Option(help="Write the plan here, as JSON.")] = None,
) -> None:
    """Plan the training of MODEL and print what the plan does. Needs no GPU and no memory for weights."""
    machine = _cluster(cluster, mesh, axis_names)
    budget = parse_bytes(memory) if memory is not None else None
    if batch % micro_batches:
        raise InputError(f"a batch of {batch} does not divide into {micro_batches} micro-batches")
    if out is not None and not out.resolve().parent.is_dir():
        raise InputError(f"--out {out}: there is no folder {out.parent}")
    with Console(stderr=True).status("building the model ...") as status:
        source = load_source(model, batch=batch // micro_batches, sequence=seq, config=config)
        status.update("planning ...")
        made = autopar.plan(
            source.model,
            source.meta_args,
            machine,
            memory_budget=budget,
            precision=precision,
            micro_batches=micro_batches,
            optimizer=optimizer,
            constraints=tuple(constraint or ()),
            loss_fn=source.loss_fn,
            time_limit=time_limit,
        )
    print(made.explain(), end="")
    if out is not None:
        _write(made, out)


@app.command()
def explain(
    path: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan that `autopar plan --out` wrote.")],
) -> None:
    """Tell what a plan does: layouts by layer, collectives, memory, recompute, seconds, certificate."""
    try:
        loaded = Plan.load(path)
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"no plan can be read from {path}: {error}") from error
    print(loaded.explain(), end="")


def _cluster(name: str, mesh: str, axis_names: str | None) -> Cluster:
    """The preset or profile `name` on the mesh."""
    if not re.fullmatch(r"[0-9]+(x[0-9]+)*", mesh):
        raise InputError(f"--mesh {mesh!r} is no mesh: write the devices along each axis, like 8 or 4x8")
    shape = tuple(map(int, mesh.split("x")))
    names = tuple(part.strip() for part in axis_names.split(",")) if axis_names is not None else None
    if not name.endswith(".json"):
        return Cluster.preset(name, shape, names)
    loaded = Cluster.load(name)
    if loaded.shape != shape or (names is not None and loaded.axis_names != names):
        there = "x".join(map(str, loaded.shape))
        raise InputError(
            f"the profile {name} was measured on a mesh of {there} ({', '.join(loaded.axis_names)}): ask for that one, "
            "or measure this one"
        )
    return loaded


def _write(made: Plan, out: Path) -> None:
    try:
        made.save(out)
    except OSError as error:
        raise InputError(f"the plan cannot be written to {out}: {error}") from error
    print(f"\nwritten to {out}", file=sys.stderr)


if __name__ == "__main__":
    main()
