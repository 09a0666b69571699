"""Rules about --rollout-engine vllm: flags of the other engine, and what vLLM's servers cannot do in a run."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

from slimrl.arguments.flag import Problem
from slimrl.arguments.namespace import Arguments, Context

_ENGINE, _PYTHON, _EXTERNAL = "--rollout-engine", "--vllm-python", "--rollout-external-engine-addrs"


def engine_flags_are_those_of_the_engine(args: Arguments, context: Context) -> Iterator[Problem]:
    """--vllm-* flags are for vLLM's servers, --sglang-* flags that pass through for SGLang's."""
    if "rollout_engine" in context.broken:
        return
    other, options = ("vllm", args.vllm_options) if args.rollout_engine == "sglang" else ("sglang", args.sglang_options)
    of_external = {"api_key"} if args.rollout_external_engine_addrs else set()
    flags = [f"--{other}-{name.replace('_', '-')}" for name in options if name not in of_external]
    if other == "vllm" and args.vllm_python is not None:
        flags.append(_PYTHON)
    for flag in flags:
        yield Problem(
            flag,
            f"{flag} is for {other} servers, and {_ENGINE} is {args.rollout_engine}: leave one of them out.",
        )


def vllm_has_an_interpreter(args: Arguments, context: Context) -> Iterator[Problem]:
    """--vllm-python is a program; without it this environment has vllm."""
    if not args.uses_vllm or args.debug_train_only or "vllm_python" in context.broken:
        return
    if args.rollout_external_engine_addrs:
        if args.vllm_python is not None:
            yield Problem(
                _PYTHON,
                f"{_PYTHON} is for servers that slimrl starts, and {_EXTERNAL} names external ones: leave it out.",
            )
        return
    if (python := args.vllm_python) is None:
        if importlib.util.find_spec("vllm") is None:
            yield Problem(
                _PYTHON,
                f"{_ENGINE} vllm needs vllm, which this environment does not have: give {_PYTHON}, the interpreter of"
                " one that has.",
            )
    elif not os.access(python, os.X_OK) or Path(python).is_dir():
        yield Problem(_PYTHON, f"{_PYTHON} {python} is not a program: give the path of a Python interpreter.")


def vllm_serves_the_run(args: Arguments, context: Context) -> Iterator[Problem]:
    """Nothing is asked of vLLM's servers that they cannot do."""
    if not args.uses_vllm or args.debug_train_only:
        return
    updates = not args.debug_rollout_only and not args.eval_only
    for given, flag, reason in (
        (args.check_weight_update_equal, "--check-weight-update-equal", "vLLM servers report no checksums"),
        (updates and args.update_weight_mode == "delta", "--update-weight-mode delta", "vLLM servers load all weights"),
        (args.prometheus_port is not None, "--prometheus-port", "the run's key protects the metrics of vLLM servers"),
    ):
        if given:
            yield Problem(flag.split()[0], f"{_ENGINE} vllm excludes {flag}, because {reason}: leave {flag} out.")
    if args.engines_have_adapters:
        yield Problem(
            "--lora-rank", f"{_ENGINE} vllm with --lora-rank sends the engines merged weights: add --lora-merge."
        )
    known = not context.broken & {"rollout_num_gpus_per_engine", "num_gpus_per_node"}
    if known and args.rollout_num_gpus_per_engine > args.num_gpus_per_node:
        yield Problem(
            "--rollout-num-gpus-per-engine",
            f"--rollout-num-gpus-per-engine {args.rollout_num_gpus_per_engine} is more than the GPUs of a node"
            f" (--num-gpus-per-node {args.num_gpus_per_node}), and a vLLM server has one node: lower it.",
        )
    if not updates or {"rollout_top_p", "rollout_top_k"} & context.broken:
        return
    for flag, value, off in (("--rollout-top-p", args.rollout_top_p, 1), ("--rollout-top-k", args.rollout_top_k, -1)):
        if value != off:
            yield Problem(
                flag,
                f"{flag} {value:g} limits the tokens, of which vLLM reports renormalised log-probabilities; those of"
                f" training are of all tokens: leave {flag} out, or use {_ENGINE} sglang.",
            )
