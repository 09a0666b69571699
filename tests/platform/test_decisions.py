"""Machine-dependent decisions at startup, row by row: on a CPU, and on described GPUs."""

from __future__ import annotations

from typing import Any

import pytest

from slimrl.platform.launch_env import (
    SUSPENDS_SINCE,
    Machine,
    Network,
    RunFacts,
    actor_environment,
    default_group,
    keeps_communicators,
    nccl_environment,
    network_of,
    of_driver,
    rank_environment,
    rank_without_gpu,
    this_machine,
)

CPU = Machine(cuda=False, cores=4)
H100 = Machine(cuda=True, gpus=8, cores=96, nccl=(2, 29, 7))
ONE_GPU = Machine(cuda=True, gpus=1, cores=16, nccl=(2, 27, 3))
SPLIT = RunFacts(broadcasts_weights=True)
COLOCATED = RunFacts(shares_gpus=True, offloads_training=True)
GUARD = {"RAY_kill_child_processes_on_worker_exit": "0"}


@pytest.mark.parametrize(
    ("machine", "inherited", "environment"),
    [
        (CPU, {}, {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "CUDA_VISIBLE_DEVICES": ""}),
        (
            CPU,
            {"OMP_NUM_THREADS": "3"},
            {"OMP_NUM_THREADS": "3", "TOKENIZERS_PARALLELISM": "false", "CUDA_VISIBLE_DEVICES": ""},
        ),
        (H100, {"OMP_NUM_THREADS": "1"}, {}),
    ],
)
def test_actor_environment_matches_the_table(machine: Machine, inherited: dict[str, str], environment: dict[str, str]):
    assert actor_environment(machine, inherited) == environment | GUARD


RANKS: dict[str, tuple[Machine, RunFacts, dict[str, Any], dict[str, str]]] = {
    "a CPU rank has what its actor has": (CPU, SPLIT, {}, {}),
    "flags reach a CPU rank": (CPU, SPLIT, {"given": {"A": "b"}}, {"A": "b"}),
    "colocated on 8 GPUs": (
        H100,
        COLOCATED,
        {"gpu": 3, "inherited": {"OMP_NUM_THREADS": "1"}},  # Ray's own, for an actor that reserves no CPU
        {"CUDA_VISIBLE_DEVICES": "3", "CUDA_DEVICE_MAX_CONNECTIONS": "1", "OMP_NUM_THREADS": "12"},
    ),
    "split": (
        H100,
        SPLIT,
        {"gpu": 1, "nccl": {"NCCL_CUMEM_ENABLE": "0"}},
        {
            "CUDA_VISIBLE_DEVICES": "1",
            "CUDA_DEVICE_MAX_CONNECTIONS": "1",
            "OMP_NUM_THREADS": "12",
            "NCCL_CUMEM_ENABLE": "0",
        },
    ),
    "FSDP gathers in several queues": (
        ONE_GPU,
        RunFacts(shares_gpus=True, megatron_fsdp=True),
        {},
        {"CUDA_VISIBLE_DEVICES": "0", "OMP_NUM_THREADS": "16"},
    ),
    "FSDP takes a number that somebody chose": (
        ONE_GPU,
        RunFacts(megatron_fsdp=True),
        {"inherited": {"CUDA_DEVICE_MAX_CONNECTIONS": "16"}},
        {"CUDA_VISIBLE_DEVICES": "0", "OMP_NUM_THREADS": "16", "CUDA_DEVICE_MAX_CONNECTIONS": "16"},
    ),
    "what the node sets": (
        ONE_GPU,
        COLOCATED,
        {"inherited": {"OMP_NUM_THREADS": "5", "CUDA_DEVICE_MAX_CONNECTIONS": "32"}},
        {"CUDA_VISIBLE_DEVICES": "0", "OMP_NUM_THREADS": "5", "CUDA_DEVICE_MAX_CONNECTIONS": "32"},
    ),
    "flags win, but for the GPU": (
        ONE_GPU,
        SPLIT,
        {
            "given": {"OMP_NUM_THREADS": "2", "NCCL_CUMEM_ENABLE": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "8"},
            "inherited": {"OMP_NUM_THREADS": "5", "NCCL_CUMEM_ENABLE": "0"},
            "nccl": {"NCCL_CUMEM_ENABLE": "1"},
        },
        {
            "CUDA_VISIBLE_DEVICES": "0",
            "OMP_NUM_THREADS": "2",
            "NCCL_CUMEM_ENABLE": "1",
            "CUDA_DEVICE_MAX_CONNECTIONS": "8",
        },
    ),
    "a CPU rank on a node that Ray knows by an address": (
        Machine(cuda=False, network=Network("10.0.0.1", "eth1")),
        SPLIT,
        {"given": {"A": "b"}},
        {"A": "b", "GLOO_SOCKET_IFNAME": "eth1", "NCCL_SOCKET_IFNAME": "=eth1"},
    ),
    "one whose user chose interfaces, by the node and by a flag": (
        Machine(cuda=False, network=Network("10.0.0.1", "eth1")),
        SPLIT,
        {"given": {"GLOO_SOCKET_IFNAME": "bond0"}, "inherited": {"NCCL_SOCKET_IFNAME": "^lo"}},
        {"GLOO_SOCKET_IFNAME": "bond0"},
    ),
    "a GPU rank on such a node": (
        Machine(cuda=True, gpus=1, cores=16, network=Network("fd00::1", "ib0")),
        COLOCATED,
        {},
        {
            "CUDA_VISIBLE_DEVICES": "0",
            "CUDA_DEVICE_MAX_CONNECTIONS": "1",
            "OMP_NUM_THREADS": "16",
            "GLOO_SOCKET_IFNAME": "ib0",
            "NCCL_SOCKET_IFNAME": "=ib0",
        },
    ),
    "one whose address is on no interface": (Machine(cuda=False, network=Network("10.0.0.1")), SPLIT, {}, {}),
    "the same bits each time": (
        ONE_GPU,
        RunFacts(shares_gpus=True, deterministic=True),
        {"given": {"NCCL_ALGO": "Tree"}, "inherited": {"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "1"}},
        {
            "CUDA_VISIBLE_DEVICES": "0",
            "CUDA_DEVICE_MAX_CONNECTIONS": "1",
            "OMP_NUM_THREADS": "16",
            "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
            "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
            "NCCL_ALGO": "Tree",
        },
    ),
    "a CPU rank needs no variables for it": (CPU, RunFacts(deterministic=True), {}, {}),
    "more GPUs than cores": (
        Machine(cuda=True, gpus=8, cores=4),
        COLOCATED,
        {},
        {"CUDA_VISIBLE_DEVICES": "0", "CUDA_DEVICE_MAX_CONNECTIONS": "1", "OMP_NUM_THREADS": "1"},
    ),
}


@pytest.mark.parametrize("row", RANKS)
def test_training_rank_environment_matches_the_table(row: str):
    machine, run, changes, environment = RANKS[row]
    assert (
        rank_environment(machine, run, **{"gpu": 0, "nccl": {}, "given": {}, "inherited": {}, **changes}) == environment
    )


@pytest.mark.parametrize(
    ("environment", "chosen"),
    [
        ({}, {}),
        ({"OMP_NUM_THREADS": "1"}, {}),  # Ray's own, for a driver that is a job
        ({"OMP_NUM_THREADS": "8", "HOME": "/root"}, {"OMP_NUM_THREADS": "8"}),
        ({"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}),
    ],
)
def test_driver_variables_for_ranks_are_selected(environment: dict[str, str], chosen: dict[str, str]):
    assert of_driver(environment) == chosen


@pytest.mark.parametrize(
    ("expected", "found", "why"),
    [
        (True, True, None),
        (False, False, None),
        (True, False, "torch 2.13.0 finds none here (CUDA_VISIBLE_DEVICES=3)"),
        (False, True, "torch finds a GPU here"),
    ],
)
def test_rank_whose_machine_differs_from_the_run_does_not_start(expected: bool, found: bool, why: str | None):
    said = rank_without_gpu(expected=expected, found=found, visible="3", torch_version="2.13.0")
    assert said is None if why is None else why in said


@pytest.mark.parametrize(
    ("machine", "run", "given", "inherited", "value"),
    [
        (CPU, SPLIT, {"NCCL_CUMEM_ENABLE": "1"}, {}, None),
        (H100, SPLIT, {}, {}, "0"),  # like SGLang when unset
        (H100, SPLIT, {}, {"NCCL_CUMEM_ENABLE": "1"}, "1"),
        (H100, SPLIT, {"NCCL_CUMEM_ENABLE": "0"}, {"NCCL_CUMEM_ENABLE": "1"}, "0"),
        (H100, RunFacts(broadcasts_weights=True, symmetric_memory=True), {}, {"NCCL_CUMEM_ENABLE": "0"}, "1"),
        (H100, COLOCATED, {}, {}, None),  # suspending communicators needs NCCL's default
        (H100, RunFacts(shares_gpus=True, offloads_training=True, suspends_nccl=False), {}, {}, "0"),
        (H100, RunFacts(shares_gpus=True, suspends_nccl=False), {}, {}, None),
    ],
)
def test_both_ends_of_a_weight_update_use_the_same_nccl_setting(
    machine: Machine, run: RunFacts, given: dict[str, str], inherited: dict[str, str], value: str | None
):
    expected = {} if value is None else {"NCCL_CUMEM_ENABLE": value}
    assert nccl_environment(machine, run, given=given, inherited=inherited) == expected


def test_ranks_and_deterministic_servers_have_the_same_channels_only_in_a_common_group():
    def channels(**facts: bool) -> set[str]:
        run = RunFacts(deterministic_engines=True, **facts)
        return nccl_environment(ONE_GPU, run, given={}, inherited={}).keys() - {"NCCL_CUMEM_ENABLE"}

    assert channels(broadcasts_weights=True) == {"NCCL_MIN_NCHANNELS", "NCCL_MAX_NCHANNELS"}
    assert channels(shares_gpus=True) == set()


@pytest.mark.parametrize(
    ("machine", "environment", "flags", "why"),
    [
        (H100, {}, {}, None),
        (H100, {"NCCL_CUMEM_ENABLE": "1"}, {}, None),
        (CPU, {}, {}, "no GPUs|without GPUs"),
        (H100, {}, {"suspends": False}, "--no-offload-train-nccl"),
        (ONE_GPU, {}, {}, "NCCL 2.27.3 cannot suspend them, 2.29.7 and later can"),
        (H100, {"NCCL_CUMEM_ENABLE": "0"}, {}, "NCCL_CUMEM_ENABLE=1, and it is 0"),
        (H100, {}, {"paired_stages": True}, "for each pair of stages"),
    ],
)
def test_communicators_stay_on_the_device_with_a_reason(
    machine: Machine, environment: dict[str, str], flags: dict[str, bool], why: str | None
):
    found = keeps_communicators(machine, environment, **{"suspends": True, "paired_stages": False, **flags})
    assert found is None if why is None else any(part in found for part in why.split("|"))
    assert SUSPENDS_SINCE == (2, 29, 7)


@pytest.mark.parametrize(("machine", "backend"), [(CPU, "gloo"), (H100, "nccl")])
def test_default_group_is_bound_to_no_device(machine: Machine, backend: str):
    assert default_group(machine) == {"backend": backend, "device_id": None}


def test_machine_is_described_once_and_correctly():
    import os

    import torch

    machine = this_machine()
    assert machine.cuda == torch.cuda.is_available() and machine.gpus == torch.cuda.device_count()
    assert machine.cores == len(os.sched_getaffinity(0))


def test_node_interface_is_the_one_with_its_address():
    assert network_of("127.0.0.1") == Network("127.0.0.1", "lo")
    assert network_of("192.0.2.77") == Network("192.0.2.77")  # an address reserved for documentation
