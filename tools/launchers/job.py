"""A job: a recipe, the nodes that it needs, and the script that every node runs."""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from slimrl.arguments.dry_run import NodeResources

ROOT = Path(__file__).resolve().parents[2]
# Linux gives outgoing connections ports from here on; a server's port above could be taken when it starts.
FIRST_EPHEMERAL_PORT = 32768
PLAN_TIMEOUT_S = 300
RESUMABLE = 75  # slimrl.cluster.command_line.EXIT_RESUMABLE
NAME_OF_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
NAME_OF_OBJECT = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")  # of Kubernetes, RFC 1035 label
LONGEST_NAME = 40  # operators append up to 23 characters, of 63 that a label has
# The value of such a variable must not stand in a job file. TOKENIZERS_PARALLELISM is none.
SECRET_NAME = re.compile(r"(^|_)(TOKEN|SECRET|PASSWORD|PASSWD|(API|ACCESS|SECRET|PRIVATE)_?KEY)($|_)", re.IGNORECASE)


class LaunchError(ValueError):
    """Everything that is wrong with the options of a job file; one sentence per line."""


@dataclasses.dataclass(frozen=True)
class Secret:
    """The environment variable `variable` has the value of `key` in the scheduler's secret `name`."""

    variable: str
    name: str
    key: str


@dataclasses.dataclass(frozen=True)
class Job:
    """What a scheduler is asked to run. `command` is the recipe with its arguments; paths are those on the nodes."""

    name: str
    command: tuple[str, ...]
    resources: NodeResources
    project: str | None  # the checkout; None: the folder that the scheduler starts in
    base: str  # models, data, checkpoints, run folders: a file system that all nodes share
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    secrets: tuple[Secret, ...] = ()
    activate: str | None = None  # script to source: the environment's bin/activate
    port: int = 6379
    max_restarts: int = 10
    join_timeout_s: int = 1800
    # A node waits this long for another try of the head; longer where the scheduler replaces single nodes.
    rejoin_timeout_s: int = 180
    network_interface: str | None = None
    ib_devices: str | None = None
    tensorboard_variable: str = "AIHC_TENSORBOARD_LOG_PATH"

    def __post_init__(self) -> None:
        """Raises LaunchError with every problem."""
        if problems := list(self._problems()):
            raise LaunchError("\n".join(problems))

    def _problems(self) -> Iterator[str]:
        if not NAME_OF_OBJECT.fullmatch(self.name) or len(self.name) > LONGEST_NAME:
            yield (
                f"--name {self.name}: schedulers take lower-case letters, digits and hyphens, beginning with a letter,"
                f" at most {LONGEST_NAME}: choose such a name."
            )
        if not 1024 <= self.port < FIRST_EPHEMERAL_PORT:
            yield (
                f"--port {self.port}: other processes may be given ports from {FIRST_EPHEMERAL_PORT} on, and ports"
                " below 1024 need root: give one between."
            )
        if self.max_restarts < 0:
            yield f"--max-restarts {self.max_restarts}: give 0 or more."
        if self.rejoin_timeout_s < 1:
            yield f"--rejoin-timeout-s {self.rejoin_timeout_s}: give 1 or more."
        for variable in (*self.environment, *(secret.variable for secret in self.secrets)):
            if not NAME_OF_VARIABLE.fullmatch(variable):
                yield f"{variable}: not a name of an environment variable: use letters, digits and underscores."
        for variable in self.environment:
            if SECRET_NAME.search(variable):
                yield (
                    f"--env {variable}: the value would stand in the job file: store it as a secret and give"
                    f" --secret {variable}=SECRET:KEY."
                )
        for path, option in ((self.base, "--base"), (self.project, "--project")):
            if path is not None and not path.startswith("/"):
                yield f"{option} {path}: give an absolute path, the same on all nodes."

    def node_script(self, rank_lines: Sequence[str], *, before_each_try: str = "") -> str:
        """The bash script of every node. `rank_lines` set WORLD_SIZE, RANK and MASTER_ADDR where a scheduler does not.

        `before_each_try` is a command that must succeed before the recipe, also when it is started again.
        """
        lines = ["#!/usr/bin/env bash", f"# {self.name}: written by tools/launch.py", "set -euo pipefail"]
        lines += [f"cd {shlex.quote(self.project)}"] if self.project else []
        if self.activate:
            lines += ["set +u", f"source {shlex.quote(self.activate)}", "set -u"]
        lines += rank_lines
        lines += [f"export {name}={shlex.quote(value)}" for name, value in self.variables().items()]
        lines += [f"export RAY_PORT={self.port} RAY_JOIN_TIMEOUT_S={self.join_timeout_s}"]
        name = self.tensorboard_variable
        lines += ["MORE=()", f'if [[ -n ${{{name}:-}} ]]; then MORE=(--tensorboard-dir "${name}"); fi']
        lines += [
            f"exec bash scripts/resume.sh --max-restarts {self.max_restarts}"
            f" --rejoin-timeout-s {self.rejoin_timeout_s} -- \\",
            *([f"   bash -c '{before_each_try} && exec \"$@\"' {self.name} \\"] if before_each_try else []),
            f'   {shlex.join(self.command)} "${{MORE[@]}}"',
        ]
        return "\n".join(lines) + "\n"

    def variables(self) -> dict[str, str]:
        """Environment variables of every node, sorted by name; those of the user win."""
        variables = {"BASE": self.base}
        if self.network_interface:
            variables |= {"GLOO_SOCKET_IFNAME": self.network_interface, "NCCL_SOCKET_IFNAME": self.network_interface}
        if self.ib_devices:
            variables["NCCL_IB_HCA"] = self.ib_devices
        return dict(sorted({**variables, **self.environment}.items()))


def planned_resources(command: Sequence[str], base: str, gpu_memory_gib: float | None) -> NodeResources:
    """The resources of the recipe's plan, by its own `--dry-run`. Raises LaunchError with what the plan rejects."""
    variables = {name: value for name, value in os.environ.items() if name not in ("RAY_ADDRESS", "WORLD_SIZE", "RANK")}
    path = str(Path(sys.executable).parent) + os.pathsep + variables.get("PATH", "")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "resources.json"
        words = [*command, "--dry-run", "--dry-run-resources", str(file)]
        if gpu_memory_gib is not None:
            words += ["--gpu-memory-gib", f"{gpu_memory_gib:g}"]
        try:
            done = subprocess.run(
                words,
                cwd=ROOT,
                env={**variables, "BASE": base, "PATH": path},
                capture_output=True,
                text=True,
                timeout=PLAN_TIMEOUT_S,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise LaunchError(f"{command[0]}: cannot be run: {error}") from error
        if done.returncode == 0 and file.exists():
            return NodeResources.read(file)
    reason = (done.stderr or done.stdout).strip() or f"it ended with exit code {done.returncode} without a plan"
    raise LaunchError(
        f"`{shlex.join(words[: len(command)])} --dry-run` has no plan:\n{reason}\nCorrect the flags; or give"
        " --nodes, --gpus-per-node, --memory-gib and --shm-gib, which replace the plan (for example where the model's"
        " config.json is not on this machine)."
    )
