"""The plan's row about the transport of weight updates: bytes for each engine rank, and which transport suits."""

from __future__ import annotations

import pytest

from slimrl.arguments.dry_run import Machine, PlanContext
from slimrl.arguments.dry_run.render import render
from slimrl.arguments.dry_run.server_lines import weight_transport_rows
from tests.arguments.conftest import COLOCATED, SPLIT
from tests.arguments.dry_run.test_dry_run import H100S, HERE, plan_of

DISK = "--update-weight-transport disk --update-weight-disk-dir {dir}"
P2P = "--update-weight-transfer-mode p2p"
TWO_NODES = "--actor-num-nodes 1 --actor-num-gpus-per-node 8 --rollout-num-gpus 8"


@pytest.mark.parametrize(
    ("more", "placement", "around", "parts"),
    [
        # 4.02 billion parameters in bf16, in engines of two ranks
        ("", SPLIT, H100S, ["broadcast by NCCL", "8.04 GB into each of 6 engine ranks", "p2p sends about 4.02 GB"]),
        ("", SPLIT, H100S, ["p2p suits engines of several ranks, which each need a part"]),
        ("--rollout-num-gpus-per-engine 1", SPLIT, H100S, ["a broadcast suits few engines of one rank"]),
        ("--lora-rank 8", SPLIT, H100S, ["the LoRA adapters alone, in one call to each server"]),
        (
            DISK,
            SPLIT,
            H100S,
            ["files: rank 0 writes 8.04 GB", "(24.1 GB); NCCL is faster", "leave --update-weight-tran"],
        ),
        (
            f"--bf16 {DISK} --update-weight-mode delta --update-weight-local-checkpoint-dir local",
            SPLIT,
            H100S,
            ["writes what differs since the last update", "a checkpoint of 8.04 GB in local", "slow for whole models"],
        ),
        (DISK, COLOCATED, H100S, ["files: rank 0 writes 8.04 GB", "memory of the same GPUs"]),
        ("", COLOCATED, H100S, ["CUDA IPC: every engine rank reads 8.04 GB", "no weights cross the network"]),
        ("", COLOCATED, HERE, ["shared memory: every engine rank reads 8.04 GB", "a training rank on its node"]),
        (
            "--update-weight-mode delta",
            SPLIT,
            H100S,
            ["changes: what differs in bf16", "suit slow networks", "by NCCL"],
        ),
        (
            "--update-weight-mode delta --no-offload-rollout",
            COLOCATED,
            HERE,
            ["shared memory: every engine rank reads 8.04 GB", "changes of them from the second update on"],
        ),
        (P2P, SPLIT, H100S, ["point to point by NCCL: about 4.02 GB", "from 2 training ranks", "NCCL suits one node"]),
        (P2P, SPLIT, HERE, ["point to point by gloo", "gloo suits machines without a GPU"]),
        (
            f"{P2P} --update-weight-transport mooncake",
            SPLIT,
            HERE,
            ["point to point by Mooncake", "leave --update-weight-transport mooncake out"],
        ),
        (f"{P2P} --use-fault-tolerance", SPLIT, H100S, ["NCCL suits one node"]),
        (P2P, TWO_NODES, H100S, ["NCCL suits engines that stay"]),
        (f"{P2P} --gpu-memory-gib 80", SPLIT, HERE, ["point to point by NCCL", "NCCL suits one node"]),
        (
            f"{P2P} --use-fault-tolerance",
            TWO_NODES,
            H100S,
            ["Mooncake suits these nodes if they have RDMA devices", "add --update-weight-transport mooncake"],
        ),
    ],
)
def test_row_says_what_moves_and_which_transport_suits(recipe, more, placement, around, parts):
    plan = plan_of(recipe, f"--bf16 {more}", placement=placement, around=around)
    ((name, text),) = weight_transport_rows(plan)
    assert name == "weight transport" and text in render(plan)
    for part in parts:
        assert part in text, text


@pytest.mark.parametrize(
    ("servers", "calls"), [(64, None), (512, None), (4096, "61,440 calls, 15 buckets to 4096 servers")]
)
def test_row_counts_the_calls_that_announce_a_broadcast_where_they_take_seconds(recipe, servers, calls):
    # 8.04 GB are 15 buckets of 512 MiB; each of the 8 training ranks has up to 512 servers
    placement = f"--actor-num-nodes 1 --actor-num-gpus-per-node 8 --rollout-num-gpus {servers}"
    plan = plan_of(recipe, "--bf16 --rollout-num-gpus-per-engine 1", placement=placement, around=H100S)
    ((_, text),) = weight_transport_rows(plan)
    assert ("8 training ranks announce" in text) is (calls is not None) and (calls or "") in text, text
    assert calls is None or "which take about 3 s" in text


def test_runs_without_weight_updates_have_no_row(recipe):
    assert list(weight_transport_rows(plan_of(recipe, "--bf16 --debug-rollout-only", placement=SPLIT))) == []


def test_one_rank_is_one(recipe):
    machine = PlanContext(Machine(gpus=(), host=None))
    placement = "--actor-num-nodes 1 --actor-num-gpus-per-node 2 --rollout-num-gpus 1"
    plan = plan_of(recipe, f"--bf16 {P2P} --rollout-num-gpus-per-engine 1", placement=placement, around=machine)
    ((_, text),) = weight_transport_rows(plan)
    assert "about 8.04 GB into each of 1 engine rank, from 2 training ranks" in text
