"""Rules about what may fail, and about engines and routers of the user's own."""

from __future__ import annotations

from collections.abc import Iterator

from slimrl.arguments.namespace import Arguments
from slimrl.arguments.problem import Problem
from slimrl.arguments.rules.context import Context

_HEALTH = ("rollout_health_check_interval", "rollout_health_check_first_wait")
_TIMEOUT = "rollout_health_check_timeout"  # also of servers and a router of the user's, which are always watched
_EXTERNAL = "--rollout-external-engine-addrs"


def limits_belong_to_what_they_limit(args: Arguments, context: Context) -> Iterator[Problem]:
    """Health probes without fault tolerance, and a limit of skipped samples where none is skipped, have no effect."""
    watched = bool(args.rollout_external_engine_addrs) or args.sglang_router_ip is not None
    for names, switch, on in (
        (_HEALTH, "--use-fault-tolerance", args.use_fault_tolerance),
        ((_TIMEOUT,), "--use-fault-tolerance", args.use_fault_tolerance or watched),
        (("max_failed_samples",), "--skip-failed-samples", args.skip_failed_samples),
    ):
        for name in names:
            if name in context.given and not on:
                flag = "--" + name.replace("_", "-")
                value = vars(args)[name]
                yield Problem(flag, f"{flag} {value:g} belongs to {switch}: add that, or leave this out.")


def router_has_an_address(args: Arguments, context: Context) -> Iterator[Problem]:
    """A running router is found by host and port, and is configured by whoever runs it."""
    if args.sglang_router_ip is None:
        return
    if args.sglang_router_port is None:
        yield Problem(
            "--sglang-router-port",
            f"--sglang-router-ip {args.sglang_router_ip} is a running router: say on which port, --sglang-router-port.",
        )
    if args.router_options:
        given = ", ".join(f"--router-{name.replace('_', '-')}" for name in sorted(args.router_options))
        yield Problem(
            "--sglang-router-ip",
            f"{given} is for a router that slimrl starts, and --sglang-router-ip {args.sglang_router_ip} runs already:"
            " give it to that one, or leave --sglang-router-ip out.",
        )


def external_engines_are_apart(args: Arguments, context: Context) -> Iterator[Problem]:
    """Running servers lie on slots of their own, and have been configured by whoever started them."""
    addresses = args.rollout_external_engine_addrs
    if not addresses:
        return
    for address in addresses:
        host, _, port = address.rpartition(":")
        if not host or not port.isdigit() or "/" in host:
            yield Problem(_EXTERNAL, f"{_EXTERNAL} {address} is no address: give host:port, such as 10.0.0.1:30000.")
    if len(set(addresses)) < len(addresses):
        yield Problem(_EXTERNAL, f"{_EXTERNAL} names a server twice: give each once.")
    given = {
        "--colocate": args.colocate,
        "--offload-rollout": bool(args.offload_rollout) and not args.colocate,
        "--debug-train-only": args.debug_train_only,
        "--rollout-num-gpus": "rollout_num_gpus" in context.given,
    }
    for flag, clashes in given.items():
        if clashes:
            yield Problem(
                flag,
                f"{flag} is for servers that slimrl starts on its slots, and {_EXTERNAL} names running ones:"
                " leave one of the two out.",
            )
    if options := args.sglang_options.keys() - {"api_key"}:  # that of the running servers is told by nobody else
        names = ", ".join(f"--sglang-{name.replace('_', '-')}" for name in sorted(options))
        yield Problem(
            _EXTERNAL,
            f"{names} is for servers that slimrl starts, and those of {_EXTERNAL} run already: start them with it, and"
            " leave it out here.",
        )
