"""On a GPU: the profile contains its kernels, and the memory snapshot the allocating line."""

from __future__ import annotations

import gzip
import json
import pickle

import torch

from slimrl.arguments import Arguments
from slimrl.megatron.training.profiling import ACTOR, MemoryHistory, PartProfiler
from tests.gpu.conftest import needs

pytestmark = needs()


def test_profile_contains_kernels(tmp_path):
    args = Arguments(run_dir=str(tmp_path), use_pytorch_profiler=True, profile_target=[ACTOR])
    matrix = torch.ones(256, 256, device="cuda")
    with PartProfiler(args, 0, args.run_dir).part(ACTOR, 10):
        (matrix @ matrix).sum().item()
    path = tmp_path / "profile" / "rank0-rollout10-train_actor.json.gz"
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    assert any(event.get("cat") == "kernel" for event in events)


def test_memory_snapshot_has_the_line_of_an_allocation(tmp_path):
    args = Arguments(record_memory_history=True, memory_snapshot_dir=str(tmp_path), memory_snapshot_num_steps=1)
    history = MemoryHistory(args, 3)
    kept = torch.ones(12_345_678, device="cuda", dtype=torch.uint8)
    history.trained()
    snapshot = pickle.loads((tmp_path / "rank3-snapshot.pickle").read_bytes())
    blocks = [block for segment in snapshot["segments"] for block in segment["blocks"]]
    (block,) = [block for block in blocks if block["requested_size"] == kept.numel()]
    assert any(frame["filename"].endswith("test_profiling.py") for frame in block["frames"])
