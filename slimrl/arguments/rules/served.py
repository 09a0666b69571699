"""Flags that exist with a harmless default and that this version cannot serve with any other value."""

from __future__ import annotations

from collections.abc import Iterator

from slimrl.arguments.namespace import Arguments
from slimrl.arguments.problem import Problem
from slimrl.arguments.rules.context import Context

# field -> (the value that is served, what this version does instead)
_SERVED = {
    "pipeline_model_parallel_size": (1, "this version trains in one pipeline stage"),
    "decoder_first_pipeline_num_layers": (None, "this version trains in one pipeline stage"),
    "decoder_last_pipeline_num_layers": (None, "this version trains in one pipeline stage"),
    "context_parallel_size": (1, "this version keeps each sample on one slot"),
    "expert_model_parallel_size": (1, "this version trains dense models"),
    "expert_tensor_parallel_size": (1, "this version trains dense models"),
    "offload_train": (False, "this version keeps the training state in device memory"),
    "offload_rollout": (False, "this version keeps the engines' memory while it trains"),
    "use_fault_tolerance": (False, "this version ends the run when an engine dies"),
    "rollout_health_check_interval": (30.0, "this version watches the engines' processes"),
    "rollout_health_check_timeout": (30.0, "this version watches the engines' processes"),
    "rollout_health_check_first_wait": (0.0, "this version watches the engines' processes"),
    "distributed_backend": (None, "this version uses nccl on GPUs and gloo on CPU"),
    "sglang_router_ip": (None, "this version starts a router of its own"),
    "sglang_router_port": (None, "this version starts a router of its own, on a free port"),
}


def values_are_served(args: Arguments, context: Context) -> Iterator[Problem]:
    """Nothing is accepted and then ignored."""
    values = vars(args)
    for name, (served, instead) in _SERVED.items():
        value = values[name]
        if value != served:
            flag = "--" + name.replace("_", "-")
            shown = flag if value is True else f"{flag} {value}"
            yield Problem(flag, f"{shown} is not served yet, {instead}: leave it out.")
