"""Describes this machine as data: GPUs, packages, driver, shared memory. All decisions use only this description.

Inspects the machine once; a separate process imports torch (`probe.py`). The report is safe to publish: it has no user,
no host name, no path and no environment variable outside `SHOWN_VARIABLES`.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import platform
import resource
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 20
PROBE_TIMEOUT_S = 180
SHOWN_VARIABLES = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "CUDA_LAUNCH_BLOCKING", "OMP_NUM_THREADS")
SHOWN_PREFIXES = ("NCCL_", "PYTORCH_")
# import name -> distribution: what checks ask for, and what a reader of the report wants to know
PACKAGES = {
    "torch": "torch",
    "megatron.core": "megatron-core",
    "sglang": "sglang",
    "sglang_router": "sglang-router",
    "ray": "ray",
    "transformers": "transformers",
    "transformer_engine": "transformer-engine",
    "transformer_engine_torch": "transformer-engine-torch",
    "pytest": "pytest",
    "torch_memory_saver": "torch-memory-saver",
    "flash_attn": "flash-attn-4",
    "flashinfer": "flashinfer-python",
    "sgl_kernel": "sglang-kernel",
    "deep_ep": "sgl-deep-ep",
    "apex": "apex",
    "triton": "triton",
}
# where the first is installed the others are, as a rule: they need not be named in a list for readers
_IMPLIED = {"megatron.core": ("torch", "transformers"), "sglang": ("torch_memory_saver", "sglang_router")}


@dataclasses.dataclass(frozen=True)
class Gpu:
    """One GPU as torch sees it."""

    name: str
    memory_bytes: int
    capability: tuple[int, int]  # CUDA's compute capability; (8, 0) and later have bf16 units


@dataclasses.dataclass(frozen=True)
class Machine:
    """The properties that checks use, and `facts` for the report.

    `gpus` are those that torch sees, `driver_gpus` the names of those that the driver lists. `packages` maps import
    names to versions ("" if importable with an unknown version).
    """

    gpus: tuple[Gpu, ...] = ()
    driver_gpus: tuple[str, ...] = ()
    packages: Mapping[str, str] = dataclasses.field(default_factory=dict)
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def has_gpu(self) -> bool:
        """Whether torch or the driver lists a GPU."""
        return bool(self.gpus or self.driver_gpus)


@dataclasses.dataclass(frozen=True)
class Needs:
    """Requirements of a check: a number of GPUs that torch sees, and packages by import name."""

    gpus: int = 1
    packages: tuple[str, ...] = ()

    def missing(self, machine: Machine) -> str | None:
        """Why this machine cannot run it, completing "skipped because ..."; None if it can."""
        absent = [PACKAGES.get(name, name) for name in self.packages if name not in machine.packages]
        if absent:
            return f"{_listed(absent)} {'is' if len(absent) == 1 else 'are'} not installed"
        if self.gpus > len(machine.gpus):
            return f"it needs {self.gpus} GPU{'s'[: self.gpus > 1]} and torch sees {len(machine.gpus)}"
        return None

    def text(self) -> str:
        """e.g. "2 GPUs, megatron-core, sglang", without packages that another one implies."""
        gpus = [f"{self.gpus} GPU{'s'[: self.gpus > 1]}"] if self.gpus else []
        implied = {below for name in self.packages for below in _IMPLIED.get(name, ())}
        return ", ".join([*gpus, *(PACKAGES.get(name, name) for name in self.packages if name not in implied)])


def _listed(words: list[str]) -> str:
    return " and ".join(", ".join(words).rsplit(", ", 1))


def look() -> Machine:
    """This machine, without the facts of tools that are missing or do not answer."""
    driver = _driver()
    packages = installed()
    seen = _torch_facts() if "torch" in packages else {}
    gpus = tuple(Gpu(gpu["name"], gpu["memory_bytes"], tuple(gpu["capability"])) for gpu in seen.get("gpus", []))
    facts = {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": _memory_bytes(),
        "shared_memory_bytes": _size_of("/dev/shm"),
        "locked_memory_limit": _limit(resource.RLIMIT_MEMLOCK),
        "open_files_limit": _limit(resource.RLIMIT_NOFILE),
        "network_interfaces": sorted(os.listdir("/sys/class/net")) if os.path.isdir("/sys/class/net") else [],
        "environment": shown_variables(os.environ),
        "driver": driver,
        "topology": _output("nvidia-smi", "topo", "-m") if driver.get("gpus") else None,
        "torch": seen,
        "packages": dict(packages),
    }
    return Machine(gpus, tuple(driver.get("gpus", ())), packages, facts)


def installed() -> dict[str, str]:
    """Version by import name of those of `PACKAGES` that can be imported."""
    found = {}
    for name, distribution in PACKAGES.items():
        try:
            spec = importlib.util.find_spec(name)
        except ModuleNotFoundError:  # the parent package is missing
            continue
        if spec is not None:
            found[name] = _version(distribution)
    return found


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def tested_versions(setup: Path = ROOT / "setup.py") -> dict[str, str]:
    """Version by distribution of setup.py's pins, parsed from its source without running it."""
    calls = [node for node in ast.walk(ast.parse(setup.read_text(encoding="utf-8"))) if isinstance(node, ast.keyword)]
    (required,) = (ast.literal_eval(call.value) for call in calls if call.arg == "install_requires")
    pinned = [line.split("==") for line in required if "==" in line]
    return {name.split("[")[0]: version for name, version in pinned}


def shown_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Environment variables that explain results and reveal nothing private."""
    return {
        name: value
        for name, value in sorted(environment.items())
        if name in SHOWN_VARIABLES or name.startswith(SHOWN_PREFIXES)
    }


def _driver() -> dict[str, Any]:
    text = _output("nvidia-smi", "--query-gpu=driver_version,name", "--format=csv,noheader")
    rows = [line.split(", ", 1) for line in (text or "").splitlines() if ", " in line]
    return {"version": rows[0][0], "gpus": [name for _, name in rows]} if rows else {}


def _output(*command: str) -> str | None:
    """A program's output; None if it is missing, fails or hangs."""
    program = shutil.which(command[0])
    if program is None:
        return None
    try:
        done = subprocess.run([program, *command[1:]], capture_output=True, text=True, timeout=TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.rstrip() if done.returncode == 0 else None


def _torch_facts() -> dict[str, Any]:
    """The output of `probe.py`, or {"error": its last line}."""
    command = [sys.executable, "-m", "tools.gpu_check.probe"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PROBE_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return {"error": f"torch did not answer within {PROBE_TIMEOUT_S} s"}
    if done.returncode != 0:
        return {"error": (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]}
    return json.loads(done.stdout.splitlines()[-1])


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _size_of(folder: str) -> int | None:
    return shutil.disk_usage(folder).total if os.path.isdir(folder) else None


def _limit(kind: int) -> int | str:
    soft, _ = resource.getrlimit(kind)
    return "unlimited" if soft == resource.RLIM_INFINITY else soft
