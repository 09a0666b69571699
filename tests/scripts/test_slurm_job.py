"""The sbatch file of tools/launch.py, run on two machines with stand-ins for Slurm's commands."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.machines import ADDRESSES, two_machines, why_not
from tests.scripts.launched_jobs import FAILS_ONCE, RAY_ERRORS, job_file

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(why_not()), reason=f"two machines: {why_not()}"),
    pytest.mark.timeout(240),
]
# One process per machine; like srun's --kill-on-bad-exit and --wait, in short.
SRUN = """
#!{python}
import os, pathlib, signal, subprocess, sys, time
words = [word for word in sys.argv[1:] if not word.startswith("--")]
nodes = [
    subprocess.Popen([*prefix, "env", f"SLURM_PROCID={{rank}}", *words])
    for rank, prefix in enumerate({prefixes!r})
]
pathlib.Path("{folder}/nodes").write_text(" ".join(str(node.pid) for node in nodes))
def forward(number):
    for node in nodes:
        node.poll() is None and node.send_signal(number)
signal.signal(signal.SIGTERM, lambda *_: forward(signal.SIGKILL))  # as srun does
while all(node.poll() is None for node in nodes):
    time.sleep(0.2)
if any(node.poll() for node in nodes):
    forward(signal.SIGTERM)
sys.exit(max(node.wait({wait}) for node in nodes))
"""
SCONTROL = """
#!/usr/bin/env bash
echo "scontrol $*" >>{folder}/scontrol.log
if [[ $1 == show ]]; then printf '%s\\n' {addresses}; fi
"""
RUNS_LONG = """
import time, ray
ray.init(logging_level="error")
print("trains", flush=True)
time.sleep(600)
"""


def submit(machines, folder: Path, driver: str, wait: int) -> subprocess.Popen:
    """Runs the sbatch file of a recipe as Slurm does, on the first machine; its output is in job.log."""
    commands = folder / "bin"
    commands.mkdir()
    prefixes = [machines.command(rank) for rank in range(2)]
    texts = {
        "srun": SRUN.format(python=sys.executable, prefixes=prefixes, wait=wait, folder=folder),
        "scancel": f'#!/usr/bin/env bash\n[[ $* == "--signal=TERM 7" ]] && kill -TERM $(<{folder}/nodes)\n',
        "scontrol": SCONTROL.format(folder=folder, addresses=" ".join(ADDRESSES[:2])),
    }
    for name, text in texts.items():
        (commands / name).write_text(text.lstrip())
        (commands / name).chmod(0o755)
    (folder / "job.sbatch").write_text(job_file(folder, driver, "slurm", "--time", "1:00:00"))
    slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "machine[0-1]"}
    slurm["SLURM_CPUS_ON_NODE"] = "2"
    path = f"{commands}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    with open(folder / "job.log", "w") as log:
        return subprocess.Popen(
            machines.command(0, "bash", str(folder / "job.sbatch")),
            env={"PATH": path, "HOME": str(folder), "OMP_NUM_THREADS": "1", **slurm},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def end(job: subprocess.Popen) -> None:
    """Ends what a failed test has left."""
    for child in [*psutil.Process(job.pid).children(recursive=True), job] if job.poll() is None else []:
        child.kill()
    job.wait(20)


def test_lost_run_starts_again_on_both_machines_and_ends_well(tmp_path):
    with two_machines(tmp_path) as machines:
        job = submit(machines, tmp_path, FAILS_ONCE, wait=60)  # less than --rejoin-timeout-s
        try:
            code = job.wait(200)
        finally:
            end(job)
        said = (tmp_path / "job.log").read_text()
        assert code == 0, said
        assert said.count("GPUs 2.0 nodes 2") == 2, said
        assert "exit code 75: restart 1 of at most 10" in said
        assert "node 1 joins again in case the head starts another try" in said
        assert "node 1 ends: the run has ended" in said
        assert not RAY_ERRORS.search(said), said
        assert not (tmp_path / ".slimrl-jobs/7").exists()  # the token
        assert "requeue" not in (tmp_path / "scontrol.log").read_text()


def test_run_that_meets_its_time_limit_ends_in_order_and_is_queued_again(tmp_path):
    with two_machines(tmp_path) as machines:
        job = submit(machines, tmp_path, RUNS_LONG, wait=60)
        try:
            began = time.monotonic()
            while "trains" not in (tmp_path / "job.log").read_text() and time.monotonic() - began < 90:
                time.sleep(0.5)
            assert job.poll() is None, (tmp_path / "job.log").read_text()
            (batch,) = [one for one in psutil.Process(job.pid).children() if one.name() == "bash"] or [
                psutil.Process(job.pid)
            ]
            batch.send_signal(signal.SIGTERM)  # Slurm's --signal=B:TERM
            code = job.wait(90)
        finally:
            end(job)
        said = (tmp_path / "job.log").read_text()
        assert code == 143, said
        assert "slimrl: TERM: shutting down" in said
        assert "scontrol requeue 7" in (tmp_path / "scontrol.log").read_text()
