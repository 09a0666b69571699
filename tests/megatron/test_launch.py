"""Test ranks can use GPUs: the fork server never initializes CUDA."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.megatron import launch

ROOT = Path(__file__).resolve().parents[2]

# A process on a machine with one GPU, as seen by torch's Python code: NVML counts it, and every other function of
# torch's CUDA extension is recorded when it is called. All of them initialize CUDA.
IMPORT_BESIDE_A_GPU = """
import importlib, json, sys, traceback
import torch

called = []

def extension(name):
    if not name.startswith("_cuda"):
        raise AttributeError(name)
    def function(*arguments, **named):
        places = [f"{frame.filename}:{frame.lineno}" for frame in traceback.extract_stack()[:-1]]
        called.append([name, *[place for place in places if "importlib" not in place][-2:]])
        return 1 if name == "_cuda_getDeviceCount" else None
    return function

torch._C.__getattr__ = extension
if hasattr(torch._C, "_cuda_getDeviceCount"):  # a build for GPUs
    for name in ("_cuda_getDeviceCount", "_cuda_init"):
        setattr(torch._C, name, extension(name))
torch.cuda._raw_device_count_nvml = lambda: 1
for name in sys.argv[1:]:
    importlib.import_module(name)
print(json.dumps({"gpus": torch.cuda.device_count(), "called": called}))
"""


def import_beside_a_gpu(environment: dict[str, str]) -> list[list[str]]:
    """Calls of torch's CUDA extension, with their callers, while the server's preloaded modules are imported."""
    inherited = {name: value for name, value in os.environ.items() if name not in launch.SERVER_ENVIRONMENT}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", IMPORT_BESIDE_A_GPU, *launch.PRELOADED],
        env={**inherited, "CUDA_VISIBLE_DEVICES": "0", "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["gpus"] == 1
    return result["called"]


@pytest.mark.slow
def test_server_imports_do_not_initialize_cuda():
    assert import_beside_a_gpu(launch.SERVER_ENVIRONMENT) == []


def surroundings(rank: int, world_size: int, init_method: str) -> tuple[int, dict[str, str]]:
    """The parent process of this rank, and its environment."""
    return os.getppid(), dict(os.environ)


def test_only_the_server_queries_nvml():
    ((server, environment),) = launch.run_ranks(surroundings, 1)
    assert server != os.getpid()
    assert launch.SERVER_ENVIRONMENT.items() <= psutil.Process(server).environ().items()
    assert not launch.SERVER_ENVIRONMENT.keys() & (environment.keys() | os.environ.keys())


def test_ranks_import_their_modules_when_a_fork_could_not_use_cuda(monkeypatch):
    monkeypatch.setattr(launch, "_forks_can_use_cuda", lambda: False)
    results = launch.run_ranks(surroundings, 2)
    assert [parent for parent, _ in results] == [os.getpid()] * 2
    assert all(environment["OMP_NUM_THREADS"] == "1" for _, environment in results)
