"""The command line's output; every mistake ends with one clear line and exit code 2."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from commands import GOOD, refused, with_option
from commands import run as _run

from autopar.cli import app
from autopar.cluster import Cluster
from autopar.errors import InputError

_with = with_option


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["plan", "hf:GPT2LMHeadModl", *GOOD[2:]], "did you mean GPT2LMHeadModel?"),
        (["plan", "hf:GPT2Config", *GOOD[2:]], "no architecture 'GPT2Config'"),
        (["plan", "hf:GPT2Model", *GOOD[2:]], "returns no loss"),
        (["plan", "hf:PreTrainedModel", *GOOD[2:]], "is abstract"),
        (["plan", "GPT2LMHeadModel", *GOOD[2:]], "is not a model"),
        (["plan", "nowhere_to_be_found:f", *GOOD[2:]], "no module 'nowhere_to_be_found'"),
        (["plan", "there/users_models.py:alone", *GOOD[2:]], "name its module, users_models:alone"),
        (["plan", "users_models:alon", *GOOD[2:]], "did you mean alone?"),
        (["plan", "users_models:alone", *GOOD[2:]], "return (model, meta_args)"),
        (["plan", "users_models:text", *GOOD[2:]], "must return a torch.nn.Module"),
        (["plan", "users_models:broken", *GOOD[2:]], "ValueError: no such thing"),
        (["plan"], "Missing argument"),
        (GOOD[:4], "give --batch"),
        (GOOD[:2], "Missing option '--mesh'"),
        (["plan", "users_models:with_inputs", *GOOD[2:]], "leave --batch out"),
        (["plam"], "plam"),
        (_with("--mesh", "4*8"), "--mesh '4*8' is no mesh"),
        (_with("--mesh", "0x8"), "mesh shape"),
        (_with("--axis-names", "dp"), "one name an axis"),
        (_with("--axis-names", "dp,dp"), "repeat"),
        (_with("--cluster", "z80"), "'z80' is unknown"),
        (_with("--cluster", "missing.json"), "missing.json"),
        (_with("--cluster", "config.json"), "not a cluster"),
        (_with("--memory", "70"), "no unit"),
        (_with("--memory", "lots"), "'lots' is no amount of memory"),
        (_with("--memory", "0"), "'0' is no amount of memory: it must be more than zero bytes, like '70GiB'"),
        (_with("--memory", "-5GiB"), "'-5GiB' is no amount of memory: it must be more than zero bytes"),
        (_with("--memory", "0GiB"), "'0GiB' is no amount of memory: it must be more than zero bytes"),
        (_with("--batch", "0"), "--batch"),
        (_with("--batch", "four"), "--batch"),
        (_with("--micro-batches", "3"), "does not divide into 3 micro-batches"),
        (_with("--config", "missing.json"), "missing.json"),
        (_with("--config", "users_models.py"), "no config can be read"),
        (_with("--config", "typo.json"), "GPT2Config does not know 'n_layre': did you mean 'n_layer'?"),
        (_with("--config", "no_config.json"), "no_config.json holds no config: GPT2Config does not know its fields"),
        (_with("--seq", "4096"), "longer than the 1024 learned positions of transformer.wpe"),
        (_with("--precision", "int8"), "'int8' is unknown"),
        (_with("--optimizer", "lamb"), "'lamb' is unknown"),
        (_with("--constraint", "zero9"), "'zero9' is no preset"),
        (_with("--time-limit", "0"), "--time-limit"),
        (_with("--out", "nowhere/plan.json"), "no folder nowhere"),
        (_with("--out", "."), "is a folder"),
    ],
)
def test_mistakes(folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str) -> None:
    refused(capsys, arguments, words)


def test_a_wrong_figure_of_a_profile_is_told_with_its_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = Cluster.preset("cpu", (2,)).to_dict()
    data["axes"][0]["bytes_per_s"] = "fast"
    Path("ours.json").write_text(json.dumps(data))
    command = ["plan", "users_models:with_inputs", "--mesh", "2", "--cluster", "ours.json"]
    refused(capsys, command, "no cluster can be read from ours.json: axis 'axis0': bytes_per_s is 'fast', and must be")


def test_what_nobody_foresaw_is_told_in_one_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", "users_models:fails_when_called", "--mesh", "2", "--cluster", "cpu"]
    assert _run(*command) in (1, 2)
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert "nothing here" in error


def test_notes_of_an_error_stand_in_its_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: object, **__: object) -> None:
        error = InputError("no graph")
        error.add_note("Router is a leaf, because it asks")
        raise error

    monkeypatch.setattr(app, "app", fails)
    refused(capsys, GOOD, "error: no graph; Router is a leaf, because it asks")


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert _run("--version") == 0
    assert capsys.readouterr().out.startswith("autopar 0.")
    assert _run("plan", "--help") == 0
    assert "--memory" in capsys.readouterr().out


def test_a_plan_is_printed_written_and_explained_alike(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(*GOOD, "--config", "config.json", "--axis-names", "dp,tp", "--out", "plan.json") == 0
    printed = capsys.readouterr().out
    assert "dp=2 x tp=2" in printed
    assert _run("explain", "plan.json") == 0
    assert capsys.readouterr().out == printed


def test_a_function_of_the_users(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run("plan", "users_models:with_inputs", "--mesh", "2", "--cluster", "cpu") == 0
    assert "axis0=2" in capsys.readouterr().out


def test_a_reader_that_goes_away(folder: Path) -> None:
    code = "from autopar.cli import main; main(['plan', '--help'])"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    process.wait()
    assert "Traceback" not in process.stderr.read()
    process.stderr.close()


@pytest.mark.parametrize(
    ("function", "line"),
    [("fails_when_called", 'raise KeyError("nothing here")'), ("misbuilt", 'nn.Linear("8", 8)')],
)
def test_the_users_line_is_named(folder: Path, capsys: pytest.CaptureFixture[str], function: str, line: str) -> None:
    """Not the line in torch that raised the error."""
    assert _run("plan", f"users_models:{function}", "--mesh", "2", "--cluster", "cpu") == 2
    number = next(i for i, text in enumerate(Path("users_models.py").read_text().splitlines(), 1) if line in text)
    assert f"users_models.py:{number}]" in capsys.readouterr().err


def test_a_file_that_python_cannot_read_is_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("unreadable.py").write_text("import torch\ndef model(:\n")
    refused(capsys, ["plan", "unreadable:model", "--mesh", "2"], "unreadable.py:2]")


def test_the_package_itself_can_be_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """With `python -m autopar`."""
    monkeypatch.setattr(sys, "argv", ["autopar", "--version"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("autopar", run_name="__main__")
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("autopar ")
