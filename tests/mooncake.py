"""Mooncake, which moves KV caches between servers: installed here or, for these tests, in a folder of its own.

Its wheel needs libraries of the system (docs/engine-groups.md). Where they are missing, Debian's packages are unpacked
into the folder.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

WHEEL = "mooncake-transfer-engine-non-cuda==0.3.13.post1"
LIBRARIES = ("libibverbs1", "libnl-3-200", "libnl-route-3-200", "libnuma1", "libcurl4")
DOWNLOAD_S = 240


def mooncake(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Variables with which a process can import it. Skips the test where it cannot be downloaded."""
    if importable({}):
        return {}
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "mooncake"
    folder.mkdir(exist_ok=True)
    system = folder / "system"
    libraries = [system / "usr/lib/x86_64-linux-gnu", system / "lib/x86_64-linux-gnu"]
    environment = {"PYTHONPATH": str(folder / "site"), "LD_LIBRARY_PATH": ":".join(map(str, libraries))}
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not importable(environment):
            pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", "site", WHEEL]
            try:
                subprocess.run(pip, cwd=folder, check=True, timeout=DOWNLOAD_S)
                subprocess.run(["apt-get", "download", *LIBRARIES], cwd=folder, check=True, timeout=DOWNLOAD_S)
                for package in folder.glob("*.deb"):
                    subprocess.run(["dpkg", "-x", package, system], check=True, timeout=60)
            except (OSError, subprocess.SubprocessError) as error:
                pytest.skip(f"Mooncake is not installed and cannot be downloaded: {error}")
    assert importable(environment), "Mooncake was downloaded and cannot be imported"
    return environment


def importable(environment: dict[str, str]) -> bool:
    """Whether a process with these variables can import it."""
    done = subprocess.run(
        [sys.executable, "-c", "import mooncake.engine"], env=os.environ | environment, capture_output=True, timeout=60
    )
    return done.returncode == 0


def use_here(environment: dict[str, str]) -> None:
    """Makes this process, which has started without these variables, import it."""
    sys.path += [entry for entry in environment.get("PYTHONPATH", "").split(":") if entry]
    waiting = [
        library
        for folder in environment.get("LD_LIBRARY_PATH", "").split(":")
        if folder
        for library in sorted(Path(folder).glob("*.so.*"))
    ]
    for _ in range(len(waiting)):  # each after those that it needs
        for library in list(waiting):
            try:
                ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
            except OSError:
                continue
            waiting.remove(library)
