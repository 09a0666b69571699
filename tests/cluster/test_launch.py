"""Decisions of the driver for all processes, and when it refuses to train on CPUs although GPUs exist."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from slimrl.arguments import Arguments
from slimrl.cluster import launch as launch_module
from slimrl.cluster.engines.engine_group import server_settings
from slimrl.cluster.launch import (
    BindConfig,
    DriverWithoutGpuError,
    Launch,
    MachineLacksOperatorsError,
    check_driver_sees_gpus,
    check_machine_has_operators,
    run_facts,
)
from slimrl.engines.server_protocol import ServerLaunch
from slimrl.engines.sglang.server import server_environment
from slimrl.platform.launch_env import Machine, RunFacts, rank_environment

CPU = Machine(cuda=False, cores=4)
GPU = Machine(cuda=True, gpus=8, cores=96, nccl=(2, 29, 7))
FLAGS: dict[str, Any] = {
    "colocate": False,
    "update_weight_transport": "nccl",
    "debug_train_only": False,
    "debug_rollout_only": False,
    "offload_train": False,
    "offload_train_nccl": True,
    "offload_rollout": False,
    "use_megatron_fsdp": False,
    "sglang_options": {},
    "deterministic_mode": False,
    "hf_checkpoint": "/model",
    "rollout_num_gpus_per_engine": 2,
    "rollout_seed": 42,
}


@pytest.mark.parametrize(
    ("changes", "facts"),
    [
        ({}, RunFacts(broadcasts_weights=True)),
        ({"update_weight_transport": "disk"}, RunFacts()),
        ({"debug_rollout_only": True}, RunFacts()),
        ({"debug_train_only": True}, RunFacts()),
        ({"colocate": True, "offload_train": True}, RunFacts(shares_gpus=True, offloads_training=True)),
        (
            {"colocate": True, "advantage_estimator": "ppo", "critic_num_nodes": 1, "critic_num_gpus_per_node": 2},
            RunFacts(shares_gpus=True, broadcasts_weights=True),
        ),
        ({"offload_train_nccl": False}, RunFacts(broadcasts_weights=True, suspends_nccl=False)),
        ({"deterministic_mode": True}, RunFacts(broadcasts_weights=True, deterministic=True)),
        ({"use_megatron_fsdp": True}, RunFacts(broadcasts_weights=True, megatron_fsdp=True)),
        (
            {"sglang_options": {"enable_symm_mem": True}},
            RunFacts(broadcasts_weights=True, symmetric_memory=True),
        ),
    ],
)
def test_flags_set_the_environment_variables(changes: dict[str, Any], facts: RunFacts):
    assert run_facts(Arguments(**FLAGS | changes)) == facts


@pytest.mark.parametrize(("nodes", "ray", "by_ray"), [(1, "0", False), (1, None, True), (2, "0", True)])
def test_actors_set_their_variables_themselves_where_the_only_node_of_ray_keeps_subreapers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, nodes: int, ray: str | None, by_ray: bool
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launch_module, "node_address", lambda: "127.0.0.1")
    name = "RAY_kill_child_processes_on_worker_exit"
    monkeypatch.delenv(name, raising=False)
    if ray is not None:
        monkeypatch.setenv(name, ray)
    setup = Launch.decide(CPU, RunFacts(), {}, {}).placed(BindConfig(nodes)).actor_setup()
    assert (setup.folder, setup.by_ray) == (tmp_path, by_ray)
    assert setup.options() == ({"runtime_env": {"env_vars": setup.environment}} if by_ray else {})
    monkeypatch.chdir("/")
    monkeypatch.setattr(os, "environ", dict(os.environ))
    setup.enter()
    assert (Path.cwd(), os.environ["OMP_NUM_THREADS"], os.environ[name]) == (tmp_path, "1", "0")


def test_trainer_variables_do_not_reach_engines():
    launch = Launch.decide(GPU, RunFacts(shares_gpus=True), {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, {})
    assert "PYTORCH_CUDA_ALLOC_CONF" not in launch.environment
    on_cpu = Launch.decide(CPU, RunFacts(), {"OMP_NUM_THREADS": "7"}, {})
    assert on_cpu.environment["OMP_NUM_THREADS"] == "1"


@pytest.mark.parametrize(
    ("run", "nccl"), [(RunFacts(broadcasts_weights=True), {"NCCL_CUMEM_ENABLE": "0"}), (RunFacts(), {})]
)
def test_servers_use_the_nccl_setting_of_the_sending_ranks(run: RunFacts, nccl: dict[str, str]):
    launch = Launch.decide(GPU, run, {}, {})
    settings = server_settings(Arguments(**FLAGS), 0, launch)
    assert (launch.nccl, settings.nccl, settings.cuda) == (nccl, nccl, True)


def test_ranks_and_servers_agree_when_their_nodes_differ():
    launch = Launch.decide(GPU, RunFacts(broadcasts_weights=True), {}, {"NCCL_CUMEM_ENABLE": "1"})
    of_rank = rank_environment(
        GPU, launch.run, gpu=0, nccl=launch.nccl, given={}, inherited={"NCCL_CUMEM_ENABLE": "0"} | launch.driver
    )
    of_server = server_environment(
        ServerLaunch(cuda=True, nccl=launch.servers_nccl),
        {},
        {"NCCL_CUMEM_ENABLE": "0"},
        ranks=1,
        base_gpu_id=0,
    )
    assert of_rank["NCCL_CUMEM_ENABLE"] == of_server["NCCL_CUMEM_ENABLE"] == "1"


def test_server_outside_the_rank_groups_keeps_its_node_setting():
    facts = RunFacts(shares_gpus=True, offloads_training=True, suspends_nccl=False)
    launch = Launch.decide(GPU, facts, {}, {})
    assert (launch.nccl, launch.servers_nccl) == ({"NCCL_CUMEM_ENABLE": "0"}, {})


def test_driver_setting_reaches_ranks_on_other_nodes():
    launch = Launch.decide(GPU, RunFacts(), {}, {"CUDA_DEVICE_MAX_CONNECTIONS": "32", "OMP_NUM_THREADS": "1"})
    node = {"CUDA_DEVICE_MAX_CONNECTIONS": "8", "OMP_NUM_THREADS": "1"}
    found = rank_environment(GPU, launch.run, gpu=0, nccl={}, given={}, inherited=node | launch.driver)
    assert (found["CUDA_DEVICE_MAX_CONNECTIONS"], found["OMP_NUM_THREADS"]) == ("32", "12")


H100S = {"CPU": 192.0, "GPU": 16.0, "accelerator_type:H100": 2.0}


def test_driver_without_gpu_is_rejected_when_ray_has_gpus():
    with pytest.raises(DriverWithoutGpuError, match=r"16 GPUs \(H100\) .*accelerator-type\": \"H100\"") as refused:
        check_driver_sees_gpus(CPU, H100S, {})
    assert "CUDA_VISIBLE_DEVICES" in str(refused.value)


@pytest.mark.parametrize(
    ("machine", "resources", "environment"),
    [
        (GPU, H100S, {}),
        (CPU, {"CPU": 4.0, "GPU": 8.0}, {}),  # logical GPUs have no type
        (CPU, {"CPU": 4.0, "accelerator_type:H100": 1.0}, {}),  # Ray was started with --num-gpus 0
        (CPU, H100S, {"CUDA_VISIBLE_DEVICES": ""}),  # hidden deliberately, as the quickstart does
    ],
)
def test_driver_that_matches_the_ray_node_continues(
    machine: Machine, resources: dict[str, float], environment: dict[str, str]
):
    check_driver_sees_gpus(machine, resources, environment)


def test_batch_invariant_operators_of_the_other_kind_of_machine_are_rejected():
    with pytest.raises(MachineLacksOperatorsError, match="computes in float32 on CPUs only, .* has a GPU: give --bf16"):
        check_machine_has_operators(GPU, bf16=False, gpu_flags=[])
    fix = "give --no-bf16, and leave --sglang-attention-backend and --attn-implementation out"
    with pytest.raises(MachineLacksOperatorsError, match=f"this machine has no GPU: {fix}"):
        check_machine_has_operators(CPU, bf16=True, gpu_flags=["--sglang-attention-backend", "--attn-implementation"])
    check_machine_has_operators(CPU, bf16=False, gpu_flags=[])
    check_machine_has_operators(GPU, bf16=True, gpu_flags=["--sglang-attention-backend"])
