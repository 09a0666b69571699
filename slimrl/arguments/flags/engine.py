"""Flags of the inference servers and the router, and of weight updates from training to the engines.

Only flags that slimrl itself uses are declared here; all others pass through to the engine or the router.
"""

from __future__ import annotations

import dataclasses

from slimrl.arguments.flag import flag


@dataclasses.dataclass
class EngineArguments:
    """Servers, router, health. Any other --sglang-<x>, --vllm-<x> or --router-<x> goes to engine or router as --<x>."""

    rollout_engine: str = flag(
        "sglang", "inference engine of the rollout; vllm has its own environment", choices=("sglang", "vllm")
    )
    vllm_python: str | None = flag(
        None,
        "--rollout-engine vllm: interpreter of the environment that has vllm, at the same path on every node (path;"
        " the interpreter of the run)",
    )
    sglang_server_concurrency: int = flag(512, "requests in flight per engine (count)", at_least=1)
    sglang_router_ip: str | None = flag(
        None,
        "host of a running router without other servers; needs --sglang-router-port (slimrl starts its own router)",
    )
    sglang_router_port: int | None = flag(
        None,
        "port of the router (a free one)",
        at_least=1,
        at_most=65535,
    )
    prefill_num_servers: int | None = flag(
        None,
        "engines that only prefill; the others decode (count; every engine does both)",
        at_least=1,
    )
    sglang_config: str | None = flag(
        None,
        "YAML file with the models that the run serves on the rollout GPUs: groups of servers with their own parallel"
        " sizes and options, and frozen models (path)",
    )
    sglang_router_request_timeout_secs: int = flag(14400, "timeout of one request (seconds)", at_least=1)
    use_fault_tolerance: bool = flag(
        False,
        "probe servers and router, and replace dead or hung ones while the run continues; with --save-interval also"
        " replace lost training ranks, which take over the state of their peers, or train again since the newest"
        " checkpoint",
    )
    rollout_health_check_interval: float = flag(
        30.0, "--use-fault-tolerance: time between two health probes (seconds)", above=0
    )
    rollout_health_check_timeout: float = flag(
        30.0, "time without an answer to a probe, or without progress, after which a server is lost (seconds)", above=0
    )
    rollout_health_check_first_wait: float = flag(
        0.0, "time before the first probe of a generation (seconds)", at_least=0
    )


@dataclasses.dataclass
class WeightUpdateArguments:
    """Weight updates."""

    update_weights_interval: int = flag(1, "train_async.py: update weights after every N rollouts (count)", at_least=1)
    max_weight_staleness: int | None = flag(
        None,
        "train_async.py: generate fully asynchronously, during training and across weight updates; maximum staleness"
        " of a token, the rollouts between the weights that sampled it and those that it trains (rollouts; one-step"
        " off-policy)",
        at_least=0,
    )
    update_weights_in_flight: bool | None = flag(
        None,
        "train_async.py: update weights with requests in flight, which continue with the new weights; without it,"
        " generation is drained first (on with --max-weight-staleness)",
        off=("--no-update-weights-in-flight",),
    )
    update_weight_buffer_size: int = flag(512 * 1024**2, "size of one bucket of weights in flight (bytes)", at_least=1)
    update_weight_transport: str = flag(
        "nccl",
        "nccl: process group (gloo on CPU), shared tensors with --colocate; disk: files; mooncake: RDMA or TCP, with"
        " --update-weight-transfer-mode p2p",
        choices=("nccl", "disk", "mooncake"),
    )
    update_weight_transfer_mode: str = flag(
        "broadcast",
        "to engines on GPUs of their own: gather and broadcast from trainer rank 0, or (p2p) send each trainer shard"
        " straight to the engine ranks that need it",
        choices=("broadcast", "p2p"),
    )
    update_weight_disk_dir: str | None = flag(
        None, "folder for --update-weight-transport disk, shared by training and engines (path)"
    )
    update_weight_mode: str = flag(
        "full",
        "send all weights, or (delta) the elements that changed since the last update; with --colocate it needs"
        " --no-offload-rollout",
        choices=("full", "delta"),
    )
    update_weight_disk_keep_files: bool = flag(
        False,
        "keep the files of --update-weight-transport disk",
        not_served="files are removed once every engine has read them; use --save to keep weights",
    )
    update_weight_delta_encoding: str | None = flag(
        None,
        "encoding of the changes of --update-weight-mode delta: new bytes XOR old ones, or places and new values"
        " (xor in files, which is the smaller one; overwrite without files, which have no other)",
        choices=("xor", "overwrite"),
    )
    update_weight_delta_checksum: str = flag(
        "xxh3-128",
        "checksum of each changed tensor of --update-weight-mode delta; blake3 needs the package of that name, and"
        " others than xxh3-128 need --update-weight-transport disk",
        choices=("xxh3-128", "blake3", "adler32"),
    )
    update_weight_local_checkpoint_dir: str | None = flag(
        None,
        "--update-weight-mode delta with --update-weight-transport disk: folder on each engine's host for a full"
        " checkpoint, which the changes keep current and the engines load (path)",
    )
    custom_update_weight_post_write_path: str | None = flag(
        None,
        "function that every training rank calls once weight files are written, with --update-weight-transport disk"
        " (dotted import path)",
    )
    check_weight_update_equal: bool = flag(
        False,
        "after the first weight update compare every engine's weights with the trainer's, and end the run if they"
        " differ",
    )
