"""Rules about engines: their slots, their nodes, and how SGLang divides the model over them.

An engine's slots are tensor parallel size x --sglang-pp-size; data-parallel attention and expert parallelism divide
the tensor parallel ranks again. What these rules say of SGLang was read from 0.5.20.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from slimrl.arguments.groups.rollout import DEFAULT_ROLLOUT_FUNCTION
from slimrl.arguments.namespace import Arguments
from slimrl.arguments.problem import Problem
from slimrl.arguments.rules.context import Context

UNITS = {"k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
SIZES = {"--sglang-pp-size": "pp_size", "--sglang-dp-size": "dp_size", "--sglang-ep-size": "ep_size"}
_PER_ENGINE = "--rollout-num-gpus-per-engine"


def _has_engines(args: Arguments, context: Context) -> bool:
    known = {"rollout_num_gpus", "rollout_num_gpus_per_engine", "num_gpus_per_node"}
    return args.rollout_num_gpus is not None and not args.debug_train_only and not known & context.broken


def _size(args: Arguments, name: str) -> int:
    return max(args.sglang_options.get(name, 1), 1)


def _tensor_parallel(args: Arguments) -> tuple[int, str] | None:
    """The engines' tensor parallel size and how it came about, None where the slots do not divide."""
    slots, stages = args.rollout_num_gpus_per_engine, _size(args, "pp_size")
    if slots % stages:
        return None
    words = f"{_PER_ENGINE} {slots}"
    return slots // stages, words if stages == 1 else f"{words} / --sglang-pp-size {stages} = {slots // stages}"


def engines_fill_their_slots(args: Arguments, context: Context) -> Iterator[Problem]:
    """Rollout slots = engines x slots per engine."""
    slots, per_engine = args.rollout_num_gpus, args.rollout_num_gpus_per_engine
    if not _has_engines(args, context) or slots % per_engine == 0:
        return
    cause = " (the training slots, by --colocate)" if "rollout_num_gpus" not in context.given else ""
    yield Problem(
        _PER_ENGINE,
        f"--rollout-num-gpus {slots}{cause} does not divide by {_PER_ENGINE} {per_engine}: choose a divisor.",
    )


def engine_sizes_are_counts(args: Arguments, context: Context) -> Iterator[Problem]:
    """Every division of an engine is at least into one."""
    for flag, name in SIZES.items():
        if (size := args.sglang_options.get(name, 1)) < 1:
            yield Problem(flag, f"{flag} {size} is no number of parts: give at least 1, or leave it out.")


def engines_fill_whole_nodes(args: Arguments, context: Context) -> Iterator[Problem]:
    """An engine that is larger than a node has all slots of its nodes."""
    per_engine, per_node = args.rollout_num_gpus_per_engine, args.num_gpus_per_node
    if not _has_engines(args, context) or per_engine <= per_node:
        return
    if per_engine % per_node:
        yield Problem(
            _PER_ENGINE,
            f"{_PER_ENGINE} {per_engine} is more than a node has and no multiple of --num-gpus-per-node {per_node}: an"
            " engine over several nodes fills them; choose a multiple, or say how many slots a node has.",
        )
    first = 0 if args.colocate or args.debug_rollout_only else args.actor_num_gpus
    if first % per_node and "actor_num_gpus_per_node" not in context.broken:
        yield Problem(
            _PER_ENGINE,
            f"{_PER_ENGINE} {per_engine} takes whole nodes of --num-gpus-per-node {per_node}, and the {first} training"
            f" slots before the engines leave {per_node - first % per_node} of a node over: let training fill its"
            " nodes, or choose smaller engines.",
        )


def engine_stages_divide(args: Arguments, context: Context) -> Iterator[Problem]:
    """Pipeline stages have equal slots, and nodes equal parts of them."""
    slots, per_node, stages = args.rollout_num_gpus_per_engine, args.num_gpus_per_node, _size(args, "pp_size")
    if not _has_engines(args, context) or stages == 1:
        return
    nodes = max(slots // per_node, 1)
    if slots % stages:
        yield Problem(
            "--sglang-pp-size",
            f"{_PER_ENGINE} {slots} does not divide by --sglang-pp-size {stages}: choose a divisor.",
        )
    elif nodes % stages and stages % nodes:
        yield Problem(
            "--sglang-pp-size",
            f"--sglang-pp-size {stages} does not fit the {nodes} nodes of an engine ({_PER_ENGINE} {slots} /"
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
            " trainers on their own slots only; give --colocate without --update-weight-transport disk, or divide"
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


def engine_context_holds_a_sample(args: Arguments, context: Context) -> Iterator[Problem]:
    """The engine refuses a request whose prompt and response are longer than its context."""
    given = args.sglang_options.get("context_length")
    if given is None or not _has_engines(args, context) or args.sglang_options.get("allow_auto_truncate"):
        return
    if args.rollout_function_path == DEFAULT_ROLLOUT_FUNCTION and args.custom_generate_function_path is None:
        lengths = (args.rollout_max_prompt_len, args.rollout_max_response_len, args.rollout_max_context_len)
        yield from _fits_context(given, "--rollout-max", *lengths)
        for dataset in args.eval_datasets:
            if args.eval_interval is not None and dataset.custom_generate_function_path is None:
                lengths = (dataset.max_prompt_len, dataset.max_response_len, dataset.max_context_len)
                yield from _fits_context(given, f"evaluation set {dataset.name}: max", *lengths)


def _fits_context(given: Any, name: str, prompt: int | None, response: int | None, limit: int | None):
    """`prompt`, `response` and `limit` (both together) in tokens; a prompt of unknown length has one token at least."""
    if response is None:
        return
    need = (1 if prompt is None else prompt) + response
    words = f"{name}-prompt-len {prompt}" if prompt is not None else "at least one token of prompt"
    words += f" + {name}-response-len {response} = {need}"
    if limit is not None and limit < need:
        need, words = limit, f"{name}-context-len {limit}"
    if tokens(given) < need:
        yield Problem(
            "--sglang-context-length",
            f"--sglang-context-length {given} is less than the longest sample, {words}: give at least {need}.",
        )


def tokens(given: int | str) -> int:
    """A number as SGLang reads it: 32768, "32k" (thousands) or "32Ki" (powers of 1024)."""
    text = str(given).strip()
    unit = next((unit for unit in sorted(UNITS, key=len, reverse=True) if text.endswith(unit)), "")
    return int(float(text.removesuffix(unit)) * UNITS.get(unit, 1))
