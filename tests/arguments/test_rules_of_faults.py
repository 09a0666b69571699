"""Rules about fault tolerance, and about external engines and routers.

A split run passes, each violation is one error.
"""

from __future__ import annotations

import pytest

from slimrl.arguments import PassthroughFlag, read_args

TABLES = {
    "sglang": lambda: {
        "mem-fraction-static": PassthroughFlag("mem_fraction_static", type=float),
        "api-key": PassthroughFlag("api_key", type=str),
    },
    "router": lambda: {"policy": PassthroughFlag("policy", type=str)},
}
TRAINERS = "--actor-num-nodes 1 --actor-num-gpus-per-node 2"
EXTERNAL = "--rollout-external-engine-addrs"
ONE = f"{EXTERNAL} 10.0.0.1:30000"

# rule -> (flags that pass when appended to the trainers' GPUs, flags that do not with their error)
CASES: dict[str, tuple[list[str], list[tuple[str, str]]]] = {
    "limits_belong_to_their_features": (
        [
            "--rollout-num-gpus 6 --use-fault-tolerance --rollout-health-check-interval 60",
            "--rollout-num-gpus 6 --skip-failed-samples --max-failed-samples 0",
            "--rollout-external-engine-addrs 10.0.0.1:30000 --rollout-health-check-timeout 60",
        ],
        [
            (
                "--rollout-num-gpus 6 --rollout-health-check-timeout 60",
                "--rollout-health-check-timeout 60 belongs to --use-fault-tolerance: add it, or leave"
                " --rollout-health-check-timeout out.",
            ),
            (
                "--rollout-num-gpus 6 --max-failed-samples 3",
                "--max-failed-samples 3 belongs to --skip-failed-samples: add it, or leave --max-failed-samples out.",
            ),
        ],
    ),
    "elastic_engines_have_gpus_of_their_own": (
        [
            "--rollout-num-gpus 6 --use-fault-tolerance --rollout-max-num-gpus 8",
            "--rollout-num-gpus 6 --rollout-num-gpus-per-engine 1 --use-fault-tolerance --rollout-max-num-gpus 7",
        ],
        [
            (
                "--rollout-num-gpus 6 --rollout-max-num-gpus 8",
                "--rollout-max-num-gpus 8 needs --use-fault-tolerance: add it, or leave --rollout-max-num-gpus out.",
            ),
            (
                "--colocate --use-fault-tolerance --no-offload-rollout --rollout-max-num-gpus 8",
                "--rollout-max-num-gpus 8 needs engines on separate GPUs: leave --colocate out, or leave"
                " --rollout-max-num-gpus out.",
            ),
            (
                "--rollout-num-gpus 6 --use-fault-tolerance --offload-rollout --rollout-max-num-gpus 8",
                "--rollout-max-num-gpus 8 needs engines that keep their memory: leave --offload-rollout out, or leave"
                " --rollout-max-num-gpus out.",
            ),
            (
                f"{ONE} --use-fault-tolerance --rollout-max-num-gpus 8",
                f"--rollout-max-num-gpus 8 needs engines that the run starts: leave {EXTERNAL} out, or leave"
                " --rollout-max-num-gpus out.",
            ),
            (
                "--rollout-num-gpus 6 --use-fault-tolerance --rollout-max-num-gpus 6",
                "--rollout-max-num-gpus 6 is not --rollout-num-gpus 6 and the GPUs of one or more engines"
                " (--rollout-num-gpus-per-engine 2): give 8, for instance.",
            ),
            (
                "--rollout-num-gpus 6 --use-fault-tolerance --rollout-max-num-gpus 9",
                "--rollout-max-num-gpus 9 is not --rollout-num-gpus 6 and the GPUs of one or more engines"
                " (--rollout-num-gpus-per-engine 2): give 8, for instance.",
            ),
            (
                "--actor-num-gpus-per-node 8 --rollout-num-gpus 16 --rollout-num-gpus-per-engine 16"
                " --use-fault-tolerance --rollout-max-num-gpus 32",
                "--rollout-max-num-gpus 32: an engine of --rollout-num-gpus-per-engine 16 is on several nodes"
                " (--num-gpus-per-node 8) and cannot join a running job: lower --rollout-num-gpus-per-engine, or leave"
                " --rollout-max-num-gpus out.",
            ),
        ],
    ),
    "router_has_an_address": (
        [
            "--rollout-num-gpus 6 --sglang-router-ip 10.0.0.9 --sglang-router-port 30000",
            "--rollout-num-gpus 6 --sglang-router-port 30000 --router-policy round_robin",
        ],
        [
            (
                "--rollout-num-gpus 6 --sglang-router-ip 10.0.0.9",
                "--sglang-router-ip 10.0.0.9 needs the port of that router: give --sglang-router-port.",
            ),
            (
                "--rollout-num-gpus 6 --sglang-router-ip 10.0.0.9 --sglang-router-port 1 --router-policy round_robin",
                "--router-policy is for a router that slimrl starts, and --sglang-router-ip 10.0.0.9 is an external"
                " one: start that router with the option, or leave --sglang-router-ip out.",
            ),
        ],
    ),
    "external_engines_exclude_local_engine_flags": (
        [
            ONE,
            f"{ONE} host:1 --use-fault-tolerance",
            f"{EXTERNAL} [::1]:30000 --rollout-num-gpus-per-engine 8",
            f"{ONE} --sglang-api-key k",
        ],
        [
            (
                f"{EXTERNAL} http://10.0.0.1:30000",
                f"{EXTERNAL} http://10.0.0.1:30000 is not an address: give host:port, such as 10.0.0.1:30000.",
            ),
            (f"{ONE} 10.0.0.1:30000", f"{EXTERNAL} names a server twice: give each once."),
            (
                f"{ONE} --rollout-num-gpus 6",
                "--rollout-num-gpus is for servers that slimrl starts, and --rollout-external-engine-addrs names"
                " external ones: leave one of the two out.",
            ),
            (
                f"{ONE} --sglang-mem-fraction-static 0.8",
                "--sglang-mem-fraction-static is for servers that slimrl starts, and --rollout-external-engine-addrs"
                " names external ones: start those with the option, and leave it out here.",
            ),
        ],
    ),
}


@pytest.mark.parametrize(("rule", "more"), [(rule, more) for rule, (good, _) in CASES.items() for more in good])
def test_valid_flags_are_accepted(recipe, rule, more):
    _, problems = read_args(recipe.line(more, placement=TRAINERS), passthrough=TABLES)
    assert [str(problem) for problem in problems] == []


@pytest.mark.parametrize(
    ("rule", "more", "sentence"), [(rule, *case) for rule, (_, bad) in CASES.items() for case in bad]
)
def test_each_violation_is_one_error(recipe, rule, more, sentence):
    _, problems = read_args(recipe.line(more, placement=TRAINERS), passthrough=TABLES)
    assert [str(problem) for problem in problems] == [sentence]


def test_external_engines_need_no_gpus_of_this_run(recipe):
    line = recipe.line(f"{ONE} 10.0.0.2:30000 --rollout-num-gpus-per-engine 4", placement=TRAINERS)
    args, problems = read_args(line, passthrough=TABLES)
    assert problems == []
    assert (args.rollout_gpus, args.rollout_num_gpus) == (0, 8)
