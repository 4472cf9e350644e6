"""The documentation's code blocks, run as a reader would: each page from top to bottom in one folder and namespace.

Python blocks run in this process. Shell blocks run line by line: `autopar` in this process (which saves importing torch
anew), all else in a shell. A `py` block under `<!-- file: NAME -->` is written to that file instead of being run, one
under `<!-- skip: next -->` is skipped, and a `text` block is the output of the shell line before it, except for
figures.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from sybil import Document, Example, Region, Sybil
from sybil.parsers.markdown import CodeBlockParser, PythonCodeBlockParser, SkipParser

from autopar.cli import main

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(path for path in DOCS.glob("*.md"))
_PRINTED, _LAST = "printed by each shell line", "the last shell line"


def run_page(page: Path) -> tuple[int, dict[str, str]]:
    """Run the examples of a page in the current folder; returns their number, and the output of each shell line."""
    parsers = [SkipParser(), PythonCodeBlockParser(doctest_optionflags=0), _shell(), _printed(), _files]
    document = Sybil(parsers=parsers, path=str(DOCS), pattern="*.md").parse(page)
    examples = list(document.examples())
    for example in examples:
        example.evaluate()
    printed: dict[str, str] = document.namespace.get(_PRINTED, {})
    return len(examples), printed


def _shell() -> CodeBlockParser:
    return CodeBlockParser(language="bash", evaluator=_run_lines)


def _printed() -> CodeBlockParser:
    return CodeBlockParser(language="text", evaluator=_compare)


def _run_lines(example: Example) -> None:
    text = str(example.parsed).replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line.split("#")[0].strip()]
    example.namespace.setdefault(_PRINTED, {}).update({line: _run(line) for line in lines})
    example.namespace[_LAST] = lines[-1]


def _run(line: str) -> str:
    words = shlex.split(line, comments=True)
    if words[0] != "autopar":
        return in_a_shell(line)
    target = None
    if ">" in words:
        words, target = words[: words.index(">")], words[words.index(">") + 1]
    printed, told = io.StringIO(), io.StringIO()
    code: object = 0
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(told):
        try:
            main(words[1:])
        except SystemExit as end:
            code = end.code
    assert code in (0, None, 3), f"{line}: {told.getvalue()}"  # 3 is an answer of `check`
    if target is not None:
        Path(target).write_text(printed.getvalue())
        return ""
    return printed.getvalue()


def in_a_shell(line: str) -> str:
    """The output of a line in a shell, where this interpreter's programs are on the path and autopar is importable."""
    here = str(Path(sys.executable).parent)
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    environment = {**os.environ, "PATH": here + os.pathsep + os.environ["PATH"], "PYTHONPATH": path}
    environment |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(["bash", "-c", line], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{line}\n{done.stderr[-3000:]}"
    return done.stdout


def _compare(example: Example) -> None:
    """Compare an output with its documentation, in which a line `...` stands for any number of lines."""
    shown = [_without_figures(line) for line in str(example.parsed).splitlines()]
    printed = [_without_figures(line) for line in example.namespace[_PRINTED][example.namespace[_LAST]].splitlines()]
    for line in shown:
        assert line == "..." or line in printed, f"{line!r} is not among {printed}"


def _without_figures(line: str) -> str:
    """Text without figures, their units and column widths, which change with every change of costs."""
    return " ".join(re.sub(r"[0-9][0-9.,]*( ?(GiB|MiB|KiB|TFLOP(/s)?|ms|µs|s|%|x))?", "#", line).split())


_FILE = re.compile(r"<!-- file: (?P<name>\S+) -->\n```[a-z]*\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)


def _files(document: Document) -> list[Region]:
    return [Region(m.start(), m.end(), m.groupdict(), _write) for m in _FILE.finditer(document.text)]


def _write(example: Example) -> None:
    Path(example.parsed["name"]).write_text(example.parsed["text"])
