"""The launch scripts: valid bash, two real nodes of torchrun, and a manifest that the operator accepts."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
LAUNCH = ROOT / "scripts" / "launch"
BESIDE_PYTHON = Path(sys.executable).parent  # folder of torchrun and shellcheck
FIELDS = json.loads(Path(__file__).with_name("pytorchjob_fields.json").read_text())


def environment(**more: str) -> dict[str, str]:
    """An environment with torchrun on the PATH, where Python finds autopar."""
    path = f"{BESIDE_PYTHON}{os.pathsep}{os.environ['PATH']}"
    python_path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PATH": path, "PYTHONPATH": python_path, **more}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def test_shellcheck() -> None:
    program = shutil.which("shellcheck", path=environment()["PATH"])
    assert program is not None, "shellcheck is not installed: requirements-dev.txt has it"
    scripts = [*LAUNCH.glob("*.sh"), ROOT / "scripts" / "test", ROOT / "scripts" / "demo"]
    found = subprocess.run(
        [program, "-x", "--source-path=SCRIPTDIR", *scripts], cwd=ROOT, capture_output=True, text=True
    )
    assert found.returncode == 0, found.stdout


@contextmanager
def two_nodes(folder: Path, nodes: str, *words: str) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Two torchrun agents with one rank each on loopback; logs and the training's files go to `folder`."""
    settings = environment(RENDEZVOUS=f"127.0.0.1:{free_port()}", NODES=nodes, RANKS="1", JOB="loopback")
    command = [str(LAUNCH / "nodes.sh"), str(ROOT / "examples" / "resume.py"), *words]
    command += ["--folder", str(folder / "checkpoints"), "--losses", str(folder / "losses")]
    agents = []
    for node in range(2):
        with (folder / f"node{node}.log").open("wb") as log:
            agents.append(subprocess.Popen(command, env=settings, stdout=log, stderr=subprocess.STDOUT))
        if node == 0:  # this node hosts the rendezvous
            wait_for(lambda: agents[0].poll() is not None or listens(settings["RENDEZVOUS"]))
    try:
        yield agents
    finally:
        for agent in agents:
            agent.terminate()  # then torchrun ends its ranks, which a killed torchrun would leave running
            agent.wait()


def listens(address: str) -> bool:
    host, _, port = address.partition(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) == 0


def wait_for(happens: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 600
    while not happens():
        assert time.monotonic() < deadline, "nothing happens"
        time.sleep(0.1)


def entries(folder: Path) -> list[dict[str, Any]]:
    file = folder / "losses"
    return [json.loads(line) for line in file.read_text().split("\n")[:-1]] if file.exists() else []


def test_two_nodes_on_loopback(tmp_path: Path) -> None:
    """The nodes rendezvous by c10d and train together."""
    with two_nodes(tmp_path, "2", "--steps=4", "--every=2") as agents:
        for node, agent in enumerate(agents):
            assert agent.wait(timeout=600) == 0, (tmp_path / f"node{node}.log").read_text()[-5000:]
    first, *steps = entries(tmp_path)
    assert first == {"start": 0, "ranks": 2, "plan": "new"}
    assert [entry["step"] for entry in steps] == [1, 2, 3, 4]
    assert sorted(found.name for found in (tmp_path / "checkpoints").iterdir()) == ["step-00000002", "step-00000004"]


@pytest.mark.slow
def test_a_node_is_lost(tmp_path: Path) -> None:
    """The other node continues alone with its own plan, from the last complete checkpoint."""

    def starts() -> list[dict[str, Any]]:
        return [entry for entry in entries(tmp_path) if "start" in entry]

    with two_nodes(tmp_path, "1:2", "--steps=1000000", "--every=5") as agents:
        wait_for(lambda: bool(starts()) and starts()[-1]["ranks"] == 2 and len(entries(tmp_path)) > 20)
        lost = agents[1]
        ranks = Path(f"/proc/{lost.pid}/task/{lost.pid}/children").read_text().split()
        for process in (lost.pid, *map(int, ranks)):  # all processes of a machine
            os.kill(process, signal.SIGKILL)
        wait_for(lambda: starts()[-1]["ranks"] == 1 and "step" in entries(tmp_path)[-1])
    last = starts()[-1]
    assert last["plan"] == "new"
    assert last["start"] % 5 == 0 and last["start"] >= 5


def fake(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
    (folder / name).chmod(0o755)


def test_what_slurm_starts(tmp_path: Path) -> None:
    """SLURM's two commands and torchrun are replaced by programs that record how they are called."""
    fake(tmp_path, "scontrol", '[ "$*" = "show hostnames n[3-4]" ] && printf "n3\\nn4\\n"')
    fake(tmp_path, "srun", 'echo "srun $1"; shift; exec "$@"')
    fake(tmp_path, "torchrun", 'printf "%s\\n" "$@"; env | grep TORCH_')
    given = {"SLURM_SUBMIT_DIR": str(ROOT), "SLURM_JOB_NODELIST": "n[3-4]", "SLURM_JOB_ID": "12345"}
    given |= {"SLURM_JOB_NUM_NODES": "2", "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    script = shutil.copy(LAUNCH / "slurm.sh", tmp_path / "slurm_script")  # SLURM runs a copy of the script
    done = subprocess.run([script, "train.py", "--a b"], env=given, capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert lines[0] == "srun --kill-on-bad-exit=1"
    assert {"--nnodes=2", "--nproc-per-node=gpu", "--rdzv-backend=c10d", "--rdzv-endpoint=n3:29345"} <= set(lines)
    assert "--rdzv-id=12345-0" in lines
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in lines
    assert lines[lines.index("train.py") + 1] == "--a b"
    header = re.findall(r"^#SBATCH (--\S+)", Path(script).read_text(), re.MULTILINE)
    assert "--requeue" in header and "--ntasks-per-node=1" in header


def check(value: Any, kind: str, path: str) -> None:
    """Raise AssertionError unless a value of the manifest has the fields and types of its kind."""
    if listed := re.fullmatch(r"list\[(.*)\]", kind):
        assert isinstance(value, list), path
        for number, item in enumerate(value):
            check(item, listed[1], f"{path}[{number}]")
    elif mapped := re.fullmatch(r"dict\(str, (.*)\)", kind):
        assert isinstance(value, dict), path
        for name, item in value.items():
            # quantities may be numbers or text
            check(str(item) if path.endswith(".limits") else item, mapped[1], f"{path}.{name}")
    elif kind in FIELDS:
        assert isinstance(value, dict), path
        for name, item in value.items():
            assert name in FIELDS[kind], f"{path} has no field {name}"
            check(item, FIELDS[kind][name], f"{path}.{name}")
    else:
        assert type(value).__name__ == kind, f"{path} is {value!r} and must be of type {kind}"


def test_the_manifest_is_a_pytorchjob() -> None:
    job = yaml.safe_load((LAUNCH / "pytorchjob.yaml").read_text())
    check(job, "KubeflowOrgV1PyTorchJob", "job")
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    [(role, worker)] = job["spec"]["pytorchReplicaSpecs"].items()
    assert role == "Worker"  # elastic jobs have no master
    assert worker["restartPolicy"] in ("Always", "OnFailure", "Never", "ExitCode")
    pod = worker["template"]["spec"]
    [container] = pod["containers"]
    assert container["name"] == "pytorch"
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    assert int(job["spec"]["nprocPerNode"]) == container["resources"]["limits"]["nvidia.com/gpu"]
    policy = job["spec"]["elasticPolicy"]
    assert policy["minReplicas"] <= worker["replicas"] <= policy["maxReplicas"]
    assert all(isinstance(entry["value"], str) for entry in container["env"])


def test_the_manifest_sets_what_the_scripts_set() -> None:
    job = yaml.safe_load((LAUNCH / "pytorchjob.yaml").read_text())
    [container] = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"]
    there = {entry["name"]: entry["value"] for entry in container["env"]}
    here = dict(re.findall(r'^export (\w+)="\$\{\w+:-(\w+)\}"', (LAUNCH / "environment.sh").read_text(), re.MULTILINE))
    assert len(here) == 5
    assert here.items() <= there.items()
