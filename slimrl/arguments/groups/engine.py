"""Flags of the inference servers and router that slimrl itself uses; all others go through to the engines."""

from __future__ import annotations

import dataclasses

from slimrl.arguments.flag import flag


@dataclasses.dataclass
class EngineArguments:
    """Servers, router, health. Any other --sglang-<x> or --router-<x> goes to the engine or the router as its --<x>."""

    sglang_server_concurrency: int = flag(512, "requests in flight per engine (count)", at_least=1)
    sglang_router_ip: str | None = flag(
        None,
        "host of a running router to use, which sends requests to no other servers; with --sglang-router-port (slimrl"
        " starts its own)",
    )
    sglang_router_port: int | None = flag(
        None,
        "port of the router (a free one)",
        at_least=1,
        at_most=65535,
    )
    prefill_num_servers: int | None = flag(
        None,
        "engines that only read prompts, while the others write (count)",
        not_served="every engine does both; give --rollout-num-gpus",
    )
    sglang_config: str | None = flag(
        None,
        "YAML file that describes groups of engines",
        not_served="all engines are alike; give --rollout-num-gpus and --rollout-num-gpus-per-engine",
    )
    sglang_router_request_timeout_secs: int = flag(14400, "longest time one request may take (seconds)", at_least=1)
    use_fault_tolerance: bool = flag(
        False, "probe servers and router, and replace those that die or hang, while the run goes on"
    )
    rollout_health_check_interval: float = flag(
        30.0, "--use-fault-tolerance: time between two health probes (seconds)", above=0
    )
    rollout_health_check_timeout: float = flag(
        30.0, "how long a server may answer no probe, or make no progress, before it counts as lost (seconds)", above=0
    )
    rollout_health_check_first_wait: float = flag(
        0.0, "time before the first probe of a generation (seconds)", at_least=0
    )
