"""Several processes started by torchrun convert one checkpoint with the same result as one process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from slimrl.platform.collective_errors import ConversionGroup
from tests.megatron.launch import free_port
from tests.tools.converting import ROOT, model_args
from tests.tools.saving_jobs import read_everything
from tests.weights.models import save_tiny

FLAGS = model_args("qwen3", tied=False)


def start(
    tool: str, arguments: list[object], launcher: Sequence[str] = (), **environment: object
) -> subprocess.Popen[str]:
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, *launcher, str(ROOT / "tools" / tool), *map(str, arguments)],
        env=variables | {name: str(value) for name, value in environment.items()},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run_together(tool: str, by_rank: list[list[object]]) -> list[tuple[int, str, str]]:
    """Exit code, stdout and stderr of each process; sets the variables of torchrun."""
    port = free_port()
    world = {"WORLD_SIZE": len(by_rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    processes = [start(tool, arguments, RANK=rank, LOCAL_RANK=rank, **world) for rank, arguments in enumerate(by_rank)]
    try:
        outputs = [process.communicate(timeout=120) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, *output) for process, output in zip(processes, outputs, strict=True)]


def run_by_torchrun(tool: str, arguments: list[object]) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of two processes that the real torchrun starts."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    process = start(tool, arguments, launcher)
    try:
        output, errors = process.communicate(timeout=200)
    finally:
        process.terminate()  # torchrun ends its processes
        process.wait()
    return process.returncode, output, errors


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """`hf`, converted by one process to `torch_dist` and back to `back`."""
    root = tmp_path_factory.mktemp("alone")
    save_tiny(root / "hf", "qwen3", tied=False)
    there = [*FLAGS, "--hf-checkpoint", root / "hf", "--save", root / "torch_dist"]
    back = ["--input-dir", root / "torch_dist", "--output-dir", root / "back", "--origin-hf-dir", root / "hf"]
    for tool, arguments in (
        ("convert_hf_to_torch_dist.py", there),
        ("convert_torch_dist_to_hf.py", [*back, "--chunk-size", 30000]),
    ):
        process = start(tool, arguments)
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
    yield root


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_two_processes_write_the_same_checkpoint_as_one(alone, tmp_path):
    arguments = [*FLAGS, "--hf-checkpoint", alone / "hf", "--save", tmp_path / "torch_dist"]
    code, output, errors = run_by_torchrun("convert_hf_to_torch_dist.py", arguments)
    assert code == 0, errors
    assert output.count("wrote") == 1
    release = tmp_path / "torch_dist" / "release"
    assert {path.name.split("_")[2] for path in release.glob("*.distcp")} == {"0", "1"}  # files of both
    mine, theirs = read_everything(release), read_everything(alone / "torch_dist" / "release")
    assert mine.keys() == theirs.keys() and len(mine) > 10
    assert all(torch.equal(mine[key], value) for key, value in theirs.items() if isinstance(value, torch.Tensor))
    assert (tmp_path / "torch_dist/latest_checkpointed_iteration.txt").read_text() == "release"
    assert [path.name for path in tmp_path.iterdir()] == ["torch_dist"]


@pytest.mark.slow
def test_two_processes_write_the_same_folder_as_one_byte_for_byte(alone, tmp_path):
    arguments = ["--input-dir", alone / "torch_dist", "--origin-hf-dir", alone / "hf", "--chunk-size", 30000]
    arguments += ["--output-dir", tmp_path / "back"]
    code, output, errors = run_by_torchrun("convert_torch_dist_to_hf.py", arguments)
    assert code == 0, errors
    assert output.count("wrote") == 1
    files = {path.name: path.read_bytes() for path in (tmp_path / "back").iterdir()}
    assert len(files) > 4 and files == {path.name: path.read_bytes() for path in (alone / "back").iterdir()}
    index = json.loads(files["model.safetensors.index.json"])
    originals = load_file(alone / "hf" / "model.safetensors")
    assert index["weight_map"].keys() == originals.keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in originals.values())


@pytest.mark.slow
def test_failure_of_one_process_ends_all_and_leaves_nothing(alone, tmp_path):
    arguments = ["--input-dir", alone / "torch_dist", "--origin-hf-dir", alone / "hf", "--chunk-size", 30000]
    arguments += ["--output-dir", tmp_path / "back"]
    # the second process sees a checkpoint with a damaged file, like a host whose disk has another copy
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    for path in (alone / "torch_dist" / "release").iterdir():
        (damaged / path.name).write_bytes(path.read_bytes())
    for path in damaged.glob("*.distcp"):
        path.write_bytes(path.read_bytes()[:1000])
    other = [damaged if word == alone / "torch_dist" else word for word in arguments]
    results = run_together("convert_torch_dist_to_hf.py", [arguments, other])
    assert [code for code, _, _ in results] == [2, 2], results
    assert "process 1 failed" in results[0][2] and "the checkpoint is damaged" in results[0][2]
    assert [path.name for path in tmp_path.iterdir()] == ["damaged"]


def test_rank_and_world_size_come_from_torchrun():
    group = ConversionGroup.from_environment({})
    assert (group.rank, group.size, group.is_rank_zero) == (0, 1, True)
    world = {"WORLD_SIZE": "4", "MASTER_ADDR": "host", "MASTER_PORT": "1"}
    group = ConversionGroup.from_environment({**world, "RANK": "3"})
    assert (group.rank, group.size, group.is_rank_zero) == (3, 4, False)
    for wrong, message in (
        ({**world, "RANK": "4"}, "RANK must be 0 to 3"),
        (world, "unset WORLD_SIZE to convert in one process"),
        ({"WORLD_SIZE": "2", "RANK": "0"}, "MASTER_ADDR is missing"),
    ):
        with pytest.raises(ValueError, match=message):
            ConversionGroup.from_environment(wrong)
