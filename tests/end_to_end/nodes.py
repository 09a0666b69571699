"""Runs of a recipe over machines of its own (`tests.machines`), as the user of a cluster starts them on every node."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil

from tests.end_to_end import harness
from tests.end_to_end.conftest import Tiny
from tests.end_to_end.harness import ROOT, Finished, Started
from tests.machines import ADDRESSES, Machines, machines

PATH = f"{Path(sys.executable).parent}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
TOKEN = os.urandom(32).hex()
# A recipe, with one logical GPU per node. The flags of its toy model are among its arguments.
RECIPE = """
set -euo pipefail
source scripts/lib/recipe.sh
recipe_model qwen3-4B qwen3 "$@"
GPUS_PER_NODE=1 MODEL_ARGS=()
recipe_run train.py
"""
# One rank on each of two nodes, and one engine over both.
OVER_TWO_NODES = {
    "actor_num_nodes": 2,
    "actor_num_gpus_per_node": 1,
    "num_gpus_per_node": 1,
    "rollout_num_gpus_per_engine": 2,
    "colocate": True,
}
# Ray closes its files in /dev/shm when it ends; Python's locks of a killed process are removed with the machine.
KEPT_IN_SHARED_MEMORY = re.compile(r"sem\.|__KMP_REGISTERED_LIB_")


@dataclasses.dataclass
class Cluster:
    """Machines with a folder that all of them see under the same path, and an own /tmp beside it."""

    machines: Machines
    shared: Path
    tiny: Tiny

    def script(
        self,
        number: int,
        flags: list[str],
        *,
        nodes: int = 2,
        name: str = "run",
        resume: bool = False,
        **variables: str,
    ) -> Started:
        """Starts the recipe of run `name` on machine `number` as node `RANK`, by default that of its number.

        With `resume` it runs under scripts/resume.sh, as in the files of tools/launch.py.
        """
        given = {"WORLD_SIZE": str(nodes), "RANK": str(number), "MASTER_ADDR": ADDRESSES[0], "RAY_AUTH_TOKEN": TOKEN}
        again = ["bash", "scripts/resume.sh", "--rejoin-timeout-s", "120", "--"] if resume else []
        return self.start(number, [*again, "bash", "-c", RECIPE, "recipe", *flags], name, **(given | variables))

    def start(self, number: int, command: list[str], name: str = "run", **variables: str) -> Started:
        """Starts a command on machine `number`, with its output in a file of the shared folder."""
        folder = self.shared / name
        folder.mkdir(exist_ok=True)
        return harness.launch(
            self.machines.command(number, *command),
            log=folder / f"node{number}-{len(list(folder.glob('node*.out')))}.out",
            run_dir=folder,
            cwd=ROOT,
            path=PATH,
            home=self.tiny.home,
            more={"TMPDIR": "/tmp", "PYTHONPATH": str(ROOT), "BASE": str(self.shared)} | variables,
            own_shared_memory=True,
        )

    def flags(self, name: str, **flags: object) -> list[str]:
        """The flags of a run whose folder is `<shared>/<name>`, as that of its nodes' output."""
        own = {"runs_dir": self.shared, "run_name": name}
        return self.tiny.flags(**own | flags)

    def left(self, number: int) -> list[str]:
        """Files of machine `number` that its processes should have removed, in shared memory and in /tmp."""
        files = self.machines.run(number, "sh", "-c", "ls /dev/shm; ls -d /tmp/slimrl-* 2>/dev/null || true").split()
        return [name for name in files if not KEPT_IN_SHARED_MEMORY.match(name)]


def end_with_power(started: Started) -> None:
    """Kills every process of a script at once, as a node that loses its power does."""
    for process in started.processes():
        children = []
        with contextlib.suppress(psutil.NoSuchProcess):
            children = process.children(recursive=True)  # a scheduler of SGLang overwrites its environment
        for one in [process, *children]:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.send_signal(signal.SIGKILL)


@contextlib.contextmanager
def cluster(tiny: Tiny, folder: Path, count: int) -> Iterator[Cluster]:
    """A cluster of `count` machines without any process; `folder` is the shared one."""
    with machines(folder, count) as made:
        for number in range(count):
            made.give_own_temporary_folder(number, folder.parents[1])
        yield Cluster(made, folder, tiny)


def outputs(*finished: Finished) -> str:
    """What the nodes said, for the message of a failed assertion."""
    return "\n\n".join(f"== node {number}, exit code {one.code}\n{one.output}" for number, one in enumerate(finished))
