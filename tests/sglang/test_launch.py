"""How a server is started, row by row: its arguments and its environment on described GPUs."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from slimrl.engines.server_protocol import ServerLaunch
from slimrl.engines.sglang.server import (
    default_options,
    model_environment,
    server_environment,
    without_expandable_segments,
)
from slimrl.engines.sglang.server_args import has_plain_experts, server_flags
from slimrl.platform.launch_env import CHANNELS, Network

CPU = ServerLaunch(cuda=False, memory_saver=True)
GPU = ServerLaunch(cuda=True)
COLOCATED = ServerLaunch(cuda=True, memory_saver=True, shares_gpus=True, gpus=(2, 3))
SPLIT = ServerLaunch(cuda=True, nccl={"NCCL_CUMEM_ENABLE": "0"}, gpus=(5,))
NO_PREFILL_GRAPHS = {"cuda_graph_backend_prefill": "disabled"}
KNOWN = {flag.dest for flag in server_flags().values()}


@pytest.mark.parametrize(
    ("launch", "options", "defaults"),
    [
        (CPU, {"speculative_algorithm": "EAGLE"}, {}),
        (GPU, {}, NO_PREFILL_GRAPHS),
        (GPU, {"cuda_graph_backend_prefill": "breakable"}, {}),
        (GPU, {"cuda_graph_backend_decode": "breakable"}, NO_PREFILL_GRAPHS),
        (GPU, {"disable_prefill_cuda_graph": True}, {}),
        (GPU, {"disable_cuda_graph": True}, {}),
        (GPU, {"cuda_graph_config": json.dumps({"prefill": {"backend": "full"}})}, {}),
        (GPU, {"cuda_graph_config": json.dumps({"decode": {"max_bs": 64}})}, NO_PREFILL_GRAPHS),
        (GPU, {"speculative_algorithm": "EAGLE"}, NO_PREFILL_GRAPHS),  # nothing is released
        (COLOCATED, {}, NO_PREFILL_GRAPHS),
        (
            COLOCATED,
            {"speculative_algorithm": "EAGLE"},
            NO_PREFILL_GRAPHS | {"enable_draft_weights_cpu_backup": True},
        ),
        (COLOCATED, {"speculative_algorithm": "EAGLE", "enable_draft_weights_cpu_backup": True}, NO_PREFILL_GRAPHS),
    ],
)
def test_server_gets_these_options(launch: ServerLaunch, options: dict[str, Any], defaults: dict[str, Any]):
    assert default_options(launch, options, KNOWN) == defaults
    assert set(defaults) <= KNOWN  # of the installed server
    assert default_options(launch, options, set()) == {}  # of a server that has none of them


@pytest.mark.parametrize(
    ("launch", "known", "defaults"),
    [
        (GPU, {"image_processor_backend", "disable_fast_image_processor"}, {"image_processor_backend": "pil"}),
        (GPU, {"disable_fast_image_processor"}, {"disable_fast_image_processor": True}),
        (CPU, {"image_processor_backend"}, {}),  # of `cpu_patches`
    ],
)
def test_server_on_a_gpu_resizes_images_as_the_trainer_does(launch, known, defaults):
    assert default_options(launch, {}, known, has_images=True) == defaults
    assert default_options(launch, {}, known) == {}


@pytest.mark.parametrize(
    ("launch", "options", "defaults"),
    [
        (COLOCATED, {}, {"moe_runner_backend": "triton"}),
        (SPLIT, {"ep_size": 8}, {"moe_runner_backend": "triton"}),
        (GPU, {"moe_runner_backend": "flashinfer_cutlass"}, {}),
        (GPU, {"moe_a2a_backend": "none"}, {"moe_runner_backend": "triton"}),
        (GPU, {"moe_a2a_backend": "deepep"}, {}),  # needs deep_gemm
        (GPU, {"enable_waterfill": True}, {}),  # sets deepep
        (GPU, {"quantization": "fp8"}, {}),
        (CPU, {}, {}),
    ],
)
def test_server_on_a_gpu_keeps_experts_as_weight_updates_send_them(
    launch: ServerLaunch, options: dict[str, Any], defaults: dict[str, Any]
):
    found = default_options(launch, options, KNOWN, has_experts=True)
    assert {name: value for name, value in found.items() if name == "moe_runner_backend"} == defaults
    assert "moe_runner_backend" not in default_options(launch, options, KNOWN)
    assert {"moe_runner_backend", "moe_a2a_backend", "enable_waterfill", "quantization"} <= KNOWN


@pytest.mark.parametrize(
    ("config", "found"),
    [
        ({"num_experts": 128}, True),
        ({"n_routed_experts": 256}, True),
        ({"num_local_experts": 8}, True),
        ({"text_config": {"num_experts": 128}}, True),  # of a vision-language model
        ({"num_experts": 128, "quantization_config": {"quant_method": "fp8"}}, False),
        ({"num_experts": 0}, False),
        ({"hidden_size": 64}, False),
    ],
)
def test_model_with_experts_is_recognised(tmp_path: Path, config: dict[str, Any], found: bool):
    assert not has_plain_experts(tmp_path)  # a name of the hub
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert has_plain_experts(tmp_path) == found


def environment(launch: ServerLaunch, options: dict[str, Any], inherited: dict[str, str], ranks: int = 1) -> dict:
    found = server_environment(launch, options, inherited, ranks=ranks, base_gpu_id=0)
    assert found.pop("SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION") == "0"
    assert found.pop("SGLANG_VLM_CACHE_SIZE_MB") == "0"
    assert found.pop("SGLANG_TIMEOUT_KEEP_ALIVE") == "120"
    return found


def test_deterministic_server_has_the_channels_of_the_ranks_in_its_group():
    deterministic = {"enable_deterministic_inference": True}
    alone = environment(GPU, deterministic, {})
    of_group = dataclasses.replace(SPLIT, nccl={"NCCL_CUMEM_ENABLE": "0", **CHANNELS})
    in_group = environment(of_group, deterministic, {"SGLANG_DETERMINISTIC_NCCL_NCHANNELS": "4"})
    added = {"NCCL_MIN_NCHANNELS", "NCCL_MAX_NCHANNELS", "SGLANG_DETERMINISTIC_NCCL_NCHANNELS"}
    assert not added & alone.keys()
    assert {in_group[name] for name in added} == {"8"}
    assert not added & environment(SPLIT, {}, {}).keys()


def test_server_of_a_model_that_sglang_has_no_class_for_finds_it_here(tmp_path: Path):
    package = {"SGLANG_EXTERNAL_MODEL_PACKAGE": "slimrl.engines.sglang.models"}
    assert model_environment(tmp_path, {}) == {}  # a name of the hub, or no model
    for architecture, expected in (
        ("Qwen2ForRewardModel", {}),
        ("Qwen2ForProcessRewardModel", package),
        ("Qwen3MoeForSequenceClassification", package),
    ):
        (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture]}))
        assert model_environment(tmp_path, {}) == expected
        assert model_environment(tmp_path, {"SGLANG_EXTERNAL_MODEL_PACKAGE": "mine"}) == {}


ON_TWO_GPUS = {"CUDA_VISIBLE_DEVICES": "2,3", "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "false"}
GRAPHS_RELEASED = {"SGLANG_MEMORY_SAVER_CUDA_GRAPH": "1"}


@pytest.mark.parametrize(
    ("launch", "options", "inherited", "variables"),
    [
        (CPU, {}, {}, {"OMP_NUM_THREADS": "1"}),
        (GPU, {}, {}, {}),
        (SPLIT, {}, {}, {"CUDA_VISIBLE_DEVICES": "5", "NCCL_CUMEM_ENABLE": "0"}),
        (SPLIT, {}, {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, {"CUDA_VISIBLE_DEVICES": "5"} | {
            "NCCL_CUMEM_ENABLE": "0"}),
        (COLOCATED, {}, {}, ON_TWO_GPUS | GRAPHS_RELEASED),
        (COLOCATED, {"cuda_graph_backend_prefill": "breakable"}, {}, ON_TWO_GPUS),
        (COLOCATED, {"cuda_graph_config": '{"decode": {"backend": "breakable"}}'}, {}, ON_TWO_GPUS),
        (COLOCATED, {}, {"SGLANG_MEMORY_SAVER_CUDA_GRAPH": "0"}, ON_TWO_GPUS),
        (
            COLOCATED,
            {},
            {"SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "true"},
            {"CUDA_VISIBLE_DEVICES": "2,3"} | GRAPHS_RELEASED,
        ),
        (
            COLOCATED,
            {},
            {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True,max_split_size_mb:128"},
            ON_TWO_GPUS | GRAPHS_RELEASED | {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:128"},
        ),
    ],
)  # fmt: skip
def test_server_gets_these_variables(
    launch: ServerLaunch, options: dict[str, Any], inherited: dict[str, str], variables: dict[str, str]
):
    assert environment(launch, options, inherited) == variables


def test_only_a_cpu_server_gets_its_cores():
    assert set(environment(CPU, {}, {}, ranks=2)) - set(environment(GPU, {}, {}, ranks=2)) == {
        "OMP_NUM_THREADS",
        "SGLANG_CPU_OMP_THREADS_BIND",
    }
    assert environment(CPU, {}, {}, ranks=2)["SGLANG_CPU_OMP_THREADS_BIND"].count("|") == 1


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ("expandable_segments:True", ""),
        (" expandable_segments : true , backend:native", " backend:native"),
        ("roundup_power2_divisions:[256:1,512:2],expandable_segments:True", "roundup_power2_divisions:[256:1,512:2]"),
    ],
)
def test_allocator_keeps_other_settings(settings: str, kept: str):
    assert without_expandable_segments({"PYTORCH_ALLOC_CONF": settings}) == {"PYTORCH_ALLOC_CONF": kept}


@pytest.mark.parametrize("settings", [None, "", "expandable_segments:False", "max_split_size_mb:64"])
def test_allocator_settings_compatible_with_the_memory_saver_are_kept(settings: str | None):
    assert without_expandable_segments({} if settings is None else {"PYTORCH_CUDA_ALLOC_CONF": settings}) == {}


@pytest.mark.parametrize("cuda", [True, False])
@pytest.mark.parametrize(
    ("network", "inherited", "variables"),
    [
        (Network(), {}, {}),
        (Network("10.0.0.1"), {}, {}),  # no interface of this machine has this address
        (
            Network("10.0.0.1", "eth1"),
            {},
            {"GLOO_SOCKET_IFNAME": "eth1", "NCCL_SOCKET_IFNAME": "=eth1", "SGLANG_HOST_IP": "10.0.0.1"},
        ),
        (
            Network("10.0.0.1", "eth1"),
            {"GLOO_SOCKET_IFNAME": "bond0", "SGLANG_HOST_IP": "10.9.0.1"},
            {"NCCL_SOCKET_IFNAME": "=eth1"},
        ),
        (  # SGLang reads both names
            Network("10.0.0.1", "eth1"),
            {"HOST_IP": "10.9.0.1", "NCCL_SOCKET_IFNAME": "^docker"},
            {"GLOO_SOCKET_IFNAME": "eth1"},
        ),
    ],
)
def test_server_uses_the_network_interface_of_its_ray_address(
    cuda: bool, network: Network, inherited: dict[str, str], variables: dict[str, str]
):
    found = environment(ServerLaunch(cuda=cuda, network=network), {}, inherited)
    found.pop("OMP_NUM_THREADS", None)
    assert found == variables
