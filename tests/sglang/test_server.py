"""Command line, environment and ports of a server, and the error message of one that dies at startup."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

import slimrl
from slimrl.engines.server_protocol import NodePart, ServerLaunch
from slimrl.engines.sglang.router import router_command
from slimrl.engines.sglang.server import (
    ServerProcess,
    rendezvous,
    server_command,
)
from slimrl.engines.sglang.server_args import kv_cache_tokens, with_defaults
from slimrl.processes import ManagedProcess, ProcessStartError
from slimrl.processes.child_process import LOWEST_PORT, claim_port, claim_ports

MANAGED = {"tp_size": 1, "port": 21000}
CPU, GPU = ServerLaunch(cuda=False), ServerLaunch(cuda=True)


def write_config(folder: Path, **values) -> str:
    config = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, **values}
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def test_cpu_server_is_the_same_server_with_another_launcher():
    arguments = {**MANAGED, "model_path": "/model"}, {"dtype": "bfloat16"}
    on_gpu, on_cpu = server_command(*arguments, GPU), server_command(*arguments, CPU)
    assert on_cpu[2] == "slimrl.engines.sglang.cpu_patches"
    assert {*on_gpu[4:]} - {*on_cpu[3:]} == {"--cuda-graph-backend-prefill=disabled"}
    assert [word for word in on_gpu[4:] if word in on_cpu] == on_cpu[3:]


def test_cpu_server_gets_its_defaults_and_user_options_win(tmp_path):
    for given in (["--model-path", write_config(tmp_path)], [f"--model-path={write_config(tmp_path)}"]):
        words = with_defaults([*given, "--dtype=bfloat16"])
        assert {"--device=cpu", "--attention-backend=torch_native", "--sleep-on-idle"} <= set(words)
        assert words.index("--dtype=float32") < words.index("--dtype=bfloat16")  # the last one counts
        assert "--max-total-tokens=65536" in words


def test_kv_cache_of_a_model_that_is_not_local_is_sized_by_the_server():
    words = with_defaults(["--model-path", "some/model"])
    assert not any(word.startswith("--max-total-tokens") for word in words)


def test_gpu_server_is_the_plain_sglang_server():
    command = server_command({**MANAGED, "model_path": "/model"}, {}, GPU)
    assert command == [
        sys.executable,
        "-m",
        "slimrl.engines.sglang.entry",
        "server",
        "--cuda-graph-backend-prefill=disabled",
        "--tp-size=1",
        "--port=21000",
        "--model-path=/model",
    ]


def test_option_set_by_slimrl_is_rejected():
    with pytest.raises(ValueError, match="--sglang-tp-size is set by slimrl itself"):
        server_command({**MANAGED, "model_path": "/model"}, {"tp_size": 2}, GPU)
    with pytest.raises(ValueError, match="--router-worker-urls is set by slimrl itself"):
        router_command("127.0.0.1", 1, 2, {"worker_urls": ["x"]})


@pytest.mark.parametrize(
    ("layers", "kv_heads", "head_dim", "tokens"),
    [
        (28, 8, 128, 8192),  # 28 x 8 x 128 x 2 (key, value) x 4 bytes = 229376 bytes per token; 2^30 / 229376 = 4681
        (12, 2, 64, 65536),  # 12 x 2 x 64 x 2 x 4 = 12288 bytes per token; 2^30 / 12288 = 87381
        (24, 4, 64, 21845),  # 24 x 4 x 64 x 2 x 4 = 49152 bytes per token
    ],
)
def test_kv_cache_of_a_cpu_server_is_bounded_by_memory(tmp_path, layers, kv_heads, head_dim, tokens):
    write_config(tmp_path, num_hidden_layers=layers, num_key_value_heads=kv_heads, head_dim=head_dim)
    assert kv_cache_tokens(tmp_path) == tokens


def test_data_parallel_attention_uses_a_reserved_port():
    assert rendezvous({}, "10.0.0.1", 22000) == {"nccl_port": 22000}
    assert rendezvous({"enable_dp_attention": True}, "10.0.0.1", 22000) == {
        "nccl_port": 22000,
        "dist_init_addr": "10.0.0.1:22001",
    }


def test_parts_of_a_multi_node_server_rendezvous_on_the_first():
    first = rendezvous({}, "10.0.0.1", 22000, NodePart(0, 2))
    second = rendezvous({}, "10.0.0.2", 23000, NodePart(1, 2, "10.0.0.1:22001"))
    assert first == {"nccl_port": 22000, "dist_init_addr": "10.0.0.1:22001", "nnodes": 2, "node_rank": 0}
    assert second == {"nccl_port": 23000, "dist_init_addr": "10.0.0.1:22001", "nnodes": 2, "node_rank": 1}
    command = server_command({**MANAGED, **second}, {"pp_size": 2, "enable_dp_attention": True}, GPU)
    assert {"--nnodes=2", "--node-rank=1", "--dist-init-addr=10.0.0.1:22001", "--enable-dp-attention"} <= set(command)
    assert [word for word in command if word.startswith("--pp")] == ["--pp-size=2"]
    with pytest.raises(ValueError, match="part 1 of a server needs the rendezvous address"):
        NodePart(1, 2)


def test_first_part_names_the_rendezvous_before_it_starts(tmp_path):
    server = ServerProcess("/model", log_path=tmp_path / "log", part=NodePart(0, 2))
    try:
        host, port = server.claim().split(":")
        assert host == "127.0.0.1"
        # its neighbours up to the 13th, used for the nodes' handshake, are also reserved
        for claimed in (server.port, int(port) - 1, int(port), int(port) + 13):
            with pytest.raises(OSError, match=f"port {claimed} "):
                claim_port(claimed, "127.0.0.1")
    finally:
        server.stop()
    claim_port(int(port), "127.0.0.1").release()


def test_router_defaults_detect_a_dead_server_fast_and_user_options_win():
    command = router_command("127.0.0.1", 23000, 23001, {"health_failure_threshold": 5, "request_timeout_secs": 9})
    assert {"--health-check-interval-secs=1", "--health-failure-threshold=5", "--request-timeout-secs=9"} <= set(
        command
    )
    assert {"--host=127.0.0.1", "--port=23000", "--prometheus-port=23001"} <= set(command)


def test_server_counts_as_started_when_it_has_a_process(tmp_path, monkeypatch):
    server = ServerProcess("/model", log_path=tmp_path / "log", launch=ServerLaunch(cuda=False))
    seen = []
    # meanwhile the actor's other threads ask a started server for its pid
    monkeypatch.setattr(ManagedProcess, "start", lambda process: seen.append(server.started))
    try:
        server.start()
    finally:
        server.stop()
    assert seen == [False] and server.started


def test_reserved_port_is_not_reserved_again_until_released():
    claim = claim_ports(3)
    assert claim.first >= LOWEST_PORT
    for port in range(claim.first, claim.first + 3):
        with pytest.raises(OSError, match=f"port {port} "):
            claim_port(port, "127.0.0.1")
    claim.release()
    claim_port(claim.first, "127.0.0.1").release()


def test_concurrent_reservations_are_distinct():
    claims = [claim_ports() for _ in range(200)]
    assert len({claim.first for claim in claims}) == 200
    for claim in claims:
        claim.release()


@pytest.mark.slow
def test_server_that_dies_at_startup_is_reported_with_exit_code_and_output(tmp_path):
    (tmp_path / "model").mkdir()
    server = ServerProcess(write_config(tmp_path / "model"), log_path=tmp_path / "log", options={"context_length": "x"})
    server.start()
    with pytest.raises(
        ProcessStartError, match=r"(?s)died with exit code 2; last lines of .*Invalid integer value: 'x'"
    ):
        server.wait_ready(120)
    server.stop()


LAUNCH = """
import sys, time
from pathlib import Path
from slimrl.engines.sglang.server import ServerProcess
server = ServerProcess(sys.argv[1], log_path=Path(sys.argv[2]), tensor_parallel_size=2)
server.start()
server.wait_ready(120)
print(server.pid, server.port, flush=True)
time.sleep(600)
"""


@pytest.mark.slow
def test_sigkill_of_the_parent_leaves_no_process_shared_memory_or_port(tmp_path, tiny_model):
    memory_before = set(os.listdir("/dev/shm"))
    parent = subprocess.Popen(
        [sys.executable, "-c", LAUNCH, str(tiny_model), str(tmp_path / "log")],
        env={**os.environ, "PYTHONPATH": str(Path(slimrl.__file__).parent.parent)},
        stdout=subprocess.PIPE,
        text=True,
    )
    subreaper, port = map(int, parent.stdout.readline().split())
    tree = psutil.Process(subreaper).children(recursive=True)
    own_memory = {m.path for p in tree for m in p.memory_maps() if m.path.startswith("/dev/shm/sgl")}
    assert len(tree) >= 4 and len(own_memory) >= 2  # HTTP server, two schedulers, detokenizer
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 60
    while any(p.is_running() for p in tree) or psutil.pid_exists(subreaper):
        assert time.monotonic() < deadline, [p for p in tree if p.is_running()]
        time.sleep(0.05)
    assert not any(map(os.path.exists, own_memory))
    assert not {name for name in set(os.listdir("/dev/shm")) - memory_before if f"/dev/shm/{name}" in own_memory}
    claim_port(port, "127.0.0.1").release()


def test_batch_invariant_operators_are_an_option_of_the_entry():
    managed = {**MANAGED, "model_path": "/model"}
    assert "--batch-invariant" not in server_command(managed, {}, CPU)
    command = server_command(managed, {}, ServerLaunch(cuda=False, batch_invariant=True))
    assert command[1:4] == ["-m", "slimrl.engines.sglang.cpu_patches", "--batch-invariant"]
    options = {"enable_deterministic_inference": True, "rl_on_policy_target": "fsdp"}
    command = server_command(managed, options, ServerLaunch(cuda=True, batch_invariant=True))
    assert command[1:5] == ["-m", "slimrl.engines.sglang.entry", "server", "--batch-invariant"]
    assert {"--attention-backend=fa3", "--enable-deterministic-inference"} <= set(command)
    assert not any("on-policy" in word for word in command)  # it would compute log-probabilities in bfloat16
