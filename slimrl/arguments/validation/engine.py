"""Rules about engines: their GPUs and nodes, how SGLang divides the model, health checks, external servers and routers.

An engine's GPUs are tensor parallel size x --sglang-pp-size; data-parallel attention and expert parallelism divide
the tensor parallel ranks again. What these rules say of SGLang was read from 0.5.20.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator

from slimrl.arguments.engines import context_of_model, tokens
from slimrl.arguments.flag import Problem
from slimrl.arguments.flags.rollout import DEFAULT_ROLLOUT_FUNCTION
from slimrl.arguments.namespace import Arguments
from slimrl.arguments.validation.rule import Context

_LONGER = "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"  # SGLang's own permission
SIZES = {"--sglang-pp-size": "pp_size", "--sglang-dp-size": "dp_size", "--sglang-ep-size": "ep_size"}
_PER_ENGINE = "--rollout-num-gpus-per-engine"


def _has_engines(args: Arguments, context: Context) -> bool:
    known = {"rollout_num_gpus", "rollout_num_gpus_per_engine", "num_gpus_per_node"}
    return args.rollout_num_gpus is not None and not args.debug_train_only and not known & context.broken


def _size(args: Arguments, name: str) -> int:
    size: int = max(args.sglang_options.get(name, 1), 1)
    return size


def _tensor_parallel(args: Arguments) -> tuple[int, str] | None:
    """The engines' tensor parallel size and how it came about, None where the GPUs do not divide."""
    gpus, stages = args.rollout_num_gpus_per_engine, _size(args, "pp_size")
    if gpus % stages:
        return None
    words = f"{_PER_ENGINE} {gpus}"
    return gpus // stages, words if stages == 1 else f"{words} / --sglang-pp-size {stages} = {gpus // stages}"


def engines_fill_their_gpus(args: Arguments, context: Context) -> Iterator[Problem]:
    """Rollout GPUs = engines x GPUs per engine."""
    gpus, per_engine = args.rollout_num_gpus, args.rollout_num_gpus_per_engine
    if not _has_engines(args, context) or gpus % per_engine == 0:
        return
    shared = args.colocate and not args.debug_rollout_only
    cause = " (the training GPUs, by --colocate)" if shared or "rollout_num_gpus" not in context.given else ""
    yield Problem(
        _PER_ENGINE,
        f"--rollout-num-gpus {gpus}{cause} does not divide by {_PER_ENGINE} {per_engine}: choose a divisor.",
    )


def engine_sizes_are_counts(args: Arguments, context: Context) -> Iterator[Problem]:
    """Every division of an engine is at least into one."""
    for flag, name in SIZES.items():
        if (size := args.sglang_options.get(name, 1)) < 1:
            yield Problem(flag, f"{flag} {size} is no number of parts: give at least 1, or leave it out.")


def engines_fill_whole_nodes(args: Arguments, context: Context) -> Iterator[Problem]:
    """An engine that is larger than a node has all GPUs of its nodes."""
    per_engine, per_node = args.rollout_num_gpus_per_engine, args.num_gpus_per_node
    if not _has_engines(args, context) or per_engine <= per_node:
        return
    if per_engine % per_node:
        yield Problem(
            _PER_ENGINE,
            f"{_PER_ENGINE} {per_engine} is more than a node has and no multiple of --num-gpus-per-node {per_node}: an"
            " engine over several nodes fills them; choose a multiple, or say how many GPUs a node has.",
        )
    first = 0 if args.colocate or args.debug_rollout_only else args.actor_num_gpus
    if first % per_node and "actor_num_gpus_per_node" not in context.broken:
        yield Problem(
            _PER_ENGINE,
            f"{_PER_ENGINE} {per_engine} takes whole nodes of --num-gpus-per-node {per_node}, and the {first} training"
            f" GPUs before the engines leave {per_node - first % per_node} of a node over: let training fill its"
            " nodes, or choose smaller engines.",
        )


def engine_stages_divide(args: Arguments, context: Context) -> Iterator[Problem]:
    """Pipeline stages have equal GPUs, and nodes equal parts of them."""
    gpus, per_node, stages = args.rollout_num_gpus_per_engine, args.num_gpus_per_node, _size(args, "pp_size")
    if not _has_engines(args, context) or stages == 1:
        return
    nodes = max(gpus // per_node, 1)
    if gpus % stages:
        yield Problem(
            "--sglang-pp-size",
            f"{_PER_ENGINE} {gpus} does not divide by --sglang-pp-size {stages}: choose a divisor.",
        )
    elif nodes % stages and stages % nodes:
        yield Problem(
            "--sglang-pp-size",
            f"--sglang-pp-size {stages} does not fit the {nodes} nodes of an engine ({_PER_ENGINE} {gpus} /"
            f" --num-gpus-per-node {per_node}): choose a divisor or a multiple of {nodes}.",
        )


def engine_stages_can_be_updated(args: Arguments, context: Context) -> Iterator[Problem]:
    """SGLang gives the ranks of all stages the same places in a broadcast, and answers when the first one has read.

    So only memory that stays until the last stage has read it brings them the right weights.
    """
    stages = _size(args, "pp_size")
    if not _has_engines(args, context) or stages == 1 or args.debug_rollout_only:
        return
    if not args.colocate or args.update_weight_transport != "nccl":
        way = "a broadcast" if args.update_weight_transport == "nccl" else "--update-weight-transport disk"
        yield Problem(
            "--sglang-pp-size",
            f"--sglang-pp-size {stages} cannot be brought new weights by {way}: SGLang's pipeline stages take them from"
            " trainers on their own GPUs only; give --colocate without --update-weight-transport disk, or divide"
            " engines by tensor and expert parallelism alone.",
        )


def engine_layout_can_be_checked(args: Arguments, context: Context) -> Iterator[Problem]:
    """--check-weight-update-equal knows how tensor parallel ranks hold the weights, and no other division."""
    if not _has_engines(args, context) or not args.check_weight_update_equal:
        return
    for flag, name in SIZES.items():
        if (size := _size(args, name)) > 1:
            yield Problem(
                "--check-weight-update-equal",
                f"--check-weight-update-equal compares engines that are tensor parallel alone, and {flag} is {size}:"
                " leave one of them out.",
            )


def engine_attention_copies_divide(args: Arguments, context: Context) -> Iterator[Problem]:
    """Copies of the attention layers live inside an engine and share its tensor parallel ranks."""
    copies = _size(args, "dp_size")
    if not _has_engines(args, context) or copies == 1:
        return
    if not args.sglang_options.get("enable_dp_attention"):
        yield Problem(
            "--sglang-dp-size",
            f"--sglang-dp-size {copies} needs --sglang-enable-dp-attention: add it; whole copies of the model are"
            f" engines of their own here, by a smaller {_PER_ENGINE}.",
        )
    yield from _divides_tensor_parallel(args, "--sglang-dp-size", copies)


def engine_experts_divide(args: Arguments, context: Context) -> Iterator[Problem]:
    """Experts are divided over an engine's tensor parallel ranks."""
    size = _size(args, "ep_size")
    if _has_engines(args, context) and size > 1:
        yield from _divides_tensor_parallel(args, "--sglang-ep-size", size)


def _divides_tensor_parallel(args: Arguments, flag: str, size: int) -> Iterator[Problem]:
    tensor_parallel = _tensor_parallel(args)
    if tensor_parallel is not None and tensor_parallel[0] % size:
        yield Problem(
            flag,
            f"{flag} {size} does not divide the tensor parallel size of an engine ({tensor_parallel[1]}): choose a"
            " divisor.",
        )


# options of the server that quantise the weights which it serves
_QUANTISES = ("quantization", "modelopt_quant", "quantize_and_serve", "rl_quant_profile")


def engine_weights_are_those_of_training(args: Arguments, context: Context) -> Iterator[Problem]:
    """A weight update brings bf16 tensors under the checkpoint's names, and a quantised server has others."""
    if not context.is_training or args.debug_train_only or args.debug_rollout_only:
        return
    for name in _QUANTISES:
        if value := args.sglang_options.get(name):
            flag = f"--sglang-{name.replace('_', '-')}"
            shown = flag if value is True else f"{flag} {value}"
            yield Problem(
                flag,
                f"{shown} quantises the engines' weights, and weight updates bring them unquantised: leave it out.",
            )


def engines_have_no_adapters(args: Arguments, context: Context) -> Iterator[Problem]:
    """A server would hold adapters that no request asks for and no weight update brings."""
    for name, value in args.sglang_options.items():
        if value and "lora" in name:
            flag = f"--sglang-{name.replace('_', '-')}"
            yield Problem(flag, f"{flag} is about LoRA adapters, which are not served: leave it out.")


def engine_collectives_agree(args: Arguments, context: Context) -> Iterator[Problem]:
    """Both ends of the group for weight updates need one NCCL_CUMEM_ENABLE; symmetric memory makes SGLang set 1."""
    broadcasts = not args.colocate and args.update_weight_transport == "nccl"
    chosen = args.train_env_vars.get("NCCL_CUMEM_ENABLE", "1")
    if broadcasts and args.sglang_options.get("enable_symm_mem") and chosen != "1":
        yield Problem(
            "--train-env-vars",
            f"--train-env-vars has NCCL_CUMEM_ENABLE {chosen}, and --sglang-enable-symm-mem makes the engines set 1:"
            " the group for weight updates needs the same on both sides; leave one of them out.",
        )


def engine_context_holds_a_sample(args: Arguments, context: Context) -> Iterator[Problem]:
    """The engine refuses a request whose prompt and response are longer than its context, and that is its model's."""
    given = args.sglang_options.get("context_length")
    if not _has_engines(args, context) or args.sglang_options.get("allow_auto_truncate"):
        return
    if args.rollout_external_engine_addrs:
        return  # which were started with a context of their own
    of_model = context_of_model(args)
    if given is not None and of_model is not None and tokens(given) > of_model and _LONGER not in os.environ:
        yield Problem(
            "--sglang-context-length",
            f"--sglang-context-length {given} is more than the {of_model} tokens that config.json of --hf-checkpoint"
            f" says, and the engines would not start: lower it, or set {_LONGER}=1 where the model is known to read"
            " more.",
        )
        return
    limit = _Context(given, tokens(given)) if given is not None else _Context(None, of_model)
    own = args.rollout_function_path != DEFAULT_ROLLOUT_FUNCTION or args.custom_generate_function_path is not None
    if limit.tokens is None or own or "rollout_max_response_len" in context.broken:
        return
    lengths: _Lengths = (args.rollout_max_prompt_len, args.rollout_max_response_len, args.rollout_max_context_len)
    if not args.only_evaluates:
        yield from _fits_context(limit, "--rollout-max", *lengths)
    for dataset in args.eval_datasets:
        if args.eval_interval is not None and dataset.custom_generate_function_path is None:
            lengths = (dataset.max_prompt_len, dataset.max_response_len, dataset.max_context_len)
            yield from _fits_context(limit, f"evaluation set {dataset.name}: max", *lengths)


_Lengths = tuple[int | None, int | None, int | None]  # of a prompt, a response and both together


@dataclasses.dataclass(frozen=True)
class _Context:
    """What an engine takes, in tokens; `given` is --sglang-context-length, None where it is the model's own."""

    given: int | str | None
    tokens: int | None


def _fits_context(
    context: _Context, name: str, prompt: int | None, response: int | None, limit: int | None
) -> Iterator[Problem]:
    """`prompt`, `response` and `limit` (both together) in tokens; a prompt of unknown length has one token at least."""
    if response is None:
        return
    need = (1 if prompt is None else prompt) + response
    words = f"{name}-prompt-len {prompt}" if prompt is not None else "at least one token of prompt"
    words += f" + {name}-response-len {response} = {need}"
    if limit is not None and limit < need:
        need, words = limit, f"{name}-context-len {limit}"
    if context.tokens is None or context.tokens >= need:
        return
    if context.given is not None:
        yield Problem(
            "--sglang-context-length",
            f"--sglang-context-length {context.given} is less than the longest sample, {words}: give at least {need}.",
        )
    else:
        yield Problem(
            "--rollout-max-response-len",
            f"the model of --hf-checkpoint reads {context.tokens} tokens (config.json), less than the longest sample,"
            f" {words}: lower these lengths, or give a model that reads more.",
        )


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
    """Running servers are on GPUs of their own, and have been configured by whoever started them."""
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
                f"{flag} is for servers that slimrl starts on its GPUs, and {_EXTERNAL} names running ones:"
                " leave one of the two out.",
            )
    if options := args.sglang_options.keys() - {"api_key"}:  # that of the running servers is told by nobody else
        names = ", ".join(f"--sglang-{name.replace('_', '-')}" for name in sorted(options))
        yield Problem(
            _EXTERNAL,
            f"{names} is for servers that slimrl starts, and those of {_EXTERNAL} run already: start them with it, and"
            " leave it out here.",
        )
