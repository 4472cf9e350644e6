"""The commands, and their exit codes.

Exit codes: 0 done; 1 an unexpected error, a bug; 2 an error that the user can correct; 3 `check` found that the plan
does not fit; 130 interrupted by the user; 141 standard output was closed. Errors are one line on standard error; if
AUTOPAR_DEBUG is set in the environment, an unexpected error keeps its traceback.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

import autopar
from autopar.cli.measuring import profile
from autopar.cli.planning import check, compare, plan, search
from autopar.cli.reading import explain, report
from autopar.cli.simulating import simulate
from autopar.cli.zoo import zoo
from autopar.errors import AutoparError
from autopar.sources import one_line
from autopar.user_warnings import AutoparWarning

app = typer.Typer(
    name="autopar",
    help="Plans distributed training of a PyTorch model: sharding and recompute, under a memory budget.",
    epilog="Exit codes: 0 done; 2 wrong input or no plan, told in one line; 3 check: it does not fit; "
    "1 a bug in autopar. NO_COLOR turns colours off.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
EXAMPLES: dict[Callable[..., Any], str] = {
    plan: "autopar plan gpt2 --mesh 2x4 --batch 32 --memory 8GiB --out plan.json",
    explain: "autopar explain plan.json",
    compare: "autopar compare gpt2 --mesh 2x4 --batch 32 --against fsdp --tradeoff 6",
    report: "autopar report plan.json -o report.html",
    search: "autopar search llama-3-8b --devices 64 --batch 128",
    check: "autopar check mine:model_and_batch --mesh 8 --cluster a100 --memory 38GiB",
    simulate: "autopar simulate gpt2 --mesh 8 --batch 32 --trace step.json",
    profile: "autopar profile --mesh 8 -o cluster.json",
    zoo: "autopar zoo gpt2 bert-base --mesh 8 --batch 64",
}
for command, example in EXAMPLES.items():
    app.command(epilog=f"Example: {example}")(command)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit with a code as in the module's docstring."""
    try:
        with _short_warnings():
            code = app(arguments, prog_name="autopar", standalone_mode=False)
    except (AutoparError, typer.TyperException) as error:
        message = error.format_message() if isinstance(error, typer.TyperException) else str(error)
        message = "; ".join([message, *getattr(error, "__notes__", ())])
        context = getattr(error, "ctx", None)
        if message and context is not None:  # a missing or unknown argument
            message = f"{message.rstrip('.')}: see {context.command_path} --help"
        if message:  # empty if no command was given and help was shown
            print(f"error: {' '.join(message.split())}", file=sys.stderr)
        sys.exit(2)
    except (typer.Abort, KeyboardInterrupt):
        print("stopped", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:  # the reader of standard output has closed it, as `head` does
        sys.stderr.close()
        sys.exit(141)
    except Exception as error:
        if os.environ.get("AUTOPAR_DEBUG"):
            raise
        print(f"error: unexpected {one_line(error)} (AUTOPAR_DEBUG=1 shows the traceback)", file=sys.stderr)
        sys.exit(1)
    sys.exit(code or 0)


_HERE = str(Path(autopar.__file__).parent)  # warnings from files in this folder are autopar's


@contextmanager
def _short_warnings() -> Iterator[None]:
    """Print warnings of autopar on one line, as errors, without the source line that `warnings` adds."""
    before = warnings.formatwarning

    def formatted(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
    ) -> str:
        if issubclass(category, AutoparWarning) or filename.startswith(_HERE):
            return f"warning: {' '.join(str(message).split())}\n"
        return before(message, category, filename, lineno, line)

    warnings.formatwarning = formatted
    try:
        yield
    finally:
        warnings.formatwarning = before


def _version(is_asked: bool) -> None:
    if is_asked:
        print(f"autopar {autopar.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass
