"""Renders the flags as docs/flags.md, docs/unsupported.md and `--help`, and the pages of `foreign_flags`.

    python -m slimrl.arguments.docs > docs/flags.md
    python -m slimrl.arguments.docs unsupported > docs/unsupported.md
    python -m slimrl.arguments.docs aiak > docs/coming-from-aiak-rlhf.md
    python -m slimrl.arguments.docs chatlearn > docs/coming-from-pai-chatlearn.md

All are generated from the declarations that the parser uses.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import inspect
import json
import sys
import textwrap
from collections.abc import Iterator

from slimrl.arguments.flag import Bounds, FlagSpec, ended, flag_specs
from slimrl.arguments.foreign_flags import OTHER_WORDS
from slimrl.arguments.foreign_flags.aiak import AIAK, AIAK_PAGE
from slimrl.arguments.foreign_flags.chatlearn import CHATLEARN_KEYS, CHATLEARN_PAGE, CHATLEARN_VARIABLES
from slimrl.arguments.foreign_flags.chatlearn_megatron import MODEL_FILE_KEYS
from slimrl.arguments.namespace import GROUPS, all_flag_specs

_INTRODUCTION = """\
# Flags

One flat list of flags for `train.py` and `train_async.py`. This page is generated from their declarations:
`python -m slimrl.arguments.docs > docs/flags.md`.

- Write flags in full, `--flag value` or `--flag=value`. If a flag is repeated, the last one counts.
- A switch takes no value. A flag marked `...` takes one or more values.
- Unknown flags, invalid values and invalid combinations are all reported together, before anything starts, with exit
  code 2.
- If the default is `-`, the meaning ends with the value or behaviour used instead, in brackets.
- Any other `--sglang-<x>` goes to the SGLang servers as their `--<x>`, any other `--vllm-<x>` to the vLLM servers, any
  other `--router-<x>` to the router.
- Functions are given by dotted import path (`package.module.function`); their contracts are in `slimrl/hooks/`.
- On a machine without GPUs, a GPU is a logical GPU of Ray: one process on the CPU.
- The list includes flags of Megatron-LM and slime that slimrl does not support: *unsupported* names the alternative.
  Their default value is accepted, so that scripts which set it explicitly run. [unsupported.md](unsupported.md) lists
  them by capability.
"""

_UNSUPPORTED = """\
# Unsupported features

Flags of Megatron-LM, SGLang or slime that slimrl does not support. This page is generated from the declarations of the
flags: `python -m slimrl.arguments.docs unsupported > docs/unsupported.md`.

A command line with such a flag is rejected before anything starts; the last column is the error. The default value of
the flag is accepted, so that scripts which set it explicitly run. Some flags are supported alone and rejected in
combination; the error then names both, and `--dry-run` finds it without starting anything ([dry-run.md](dry-run.md)).
"""


@dataclasses.dataclass(frozen=True)
class Capability:
    """A heading of docs/unsupported.md.

    `flags` are patterns for the names of its flags, `summary` describes the alternative. README.md names the
    capability if `in_readme`: it matters for the choice of a framework.
    """

    title: str
    flags: str
    summary: str
    in_readme: bool = True

    def has(self, spec: FlagSpec) -> bool:
        """True if the flag belongs to this capability."""
        name = spec.name.removeprefix("--").replace("-", "_")
        return any(fnmatch.fnmatch(name, pattern) for pattern in self.flags.split())


# A flag belongs to the first matching row.
CAPABILITIES = (
    Capability(
        "Other attention and layer types",
        "linear_* attention_output_gate use_gated_attention experimental_attention_variant qwen_gdn_backend dsa_*"
        " freeze_indexer allgather_cp is_hybrid_model *mamba_* hetero* hetereo* softmax_type window_* no_rope_freq"
        " qk_l2_norm squared_relu openai_gelu quick_geglu glu_linear_offset activation_func_clamp_value"
        " apply_residual_connection_post_layernorm position_embedding_type rotary_seq_len_interpolation_factor",
        "Models have softmax attention over the whole sequence, rotary positions and gated feed-forward blocks. Linear"
        " attention, sparse attention (DSA), Mamba, sliding windows and attention sinks are missing, and therefore all"
        " models that [families.md](families.md) does not list.",
    ),
    Capability(
        "Multi-token prediction in training",
        "mtp_* enable_mtp_training",
        "MTP layers are not trained; the conversion copies them from the original checkpoint, for speculative"
        " decoding.",
    ),
    Capability(
        "Further MoE options",
        "moe_* overlap_moe_* ep_overlap_* delay_wgrad_compute",
        "Experts work with expert, tensor, context and data parallelism ([parallelism.md](parallelism.md)), and with"
        " routing replay ([routing-replay.md](routing-replay.md)).",
    ),
    Capability(
        "Distributed Muon",
        "optimizer muon_fp32_matmul_prec qk_clip* use_stateless_adam reset_optimizer_states log_num_zeros_in_grad"
        " use_checkpoint_opt_param_scheduler log_max_attention_logit",
        "Optimizers are Adam, SGD and Muon ([parallelism.md](parallelism.md#optimizers)). Adam's state can be sharded"
        " or in host memory ([sharding.md](sharding.md)).",
    ),
    Capability(
        "Old policies of earlier rollouts",
        "keep_old_actor",
        "The old policy is the trainer's before the rollout's first step, or the engines' with `--use-rollout-logprobs`"
        " ([algorithms.md](algorithms.md#policies)).",
        in_readme=False,
    ),
    Capability(
        "Parts of LoRA",
        "lora_dropout",
        "Adapters are trained without dropout ([lora.md](lora.md)).",
        in_readme=False,
    ),
    Capability(
        "Precision recipes",
        "enable_autocast fp8_* fp4_* keep_fp8_* *_for_mxfp8_* *kitchen* quant_recipe",
        "bf16, fp16, float32 and the fp8 recipes of Transformer Engine (not run on a GPU so far) are supported; custom"
        " quantizers are not, nor weights that are kept in fp8 or fp4.",
        in_readme=False,
    ),
    Capability(
        "Offloading of activations",
        "cpu_offloading* no_cpu_offloading* *activation_offloading* offload_modules min_offloaded_tensor_size"
        " use_torch_optimizer_for_cpu_offload release_train",
        "Activations are recomputed instead; weights, gradients and optimizer state can be offloaded"
        " ([colocation.md](colocation.md)).",
    ),
    Capability(
        "Layouts",
        "pipeline_model_parallel_layout hierarchical_* hybrid_* max_seqlen_per_dp_cp_rank num_microbatches_with_*"
        " num_distributed_optimizer_instances outer_dp_sharding_strategy",
        "Tensor, sequence, pipeline (also virtual), context, expert and data parallelism can be combined"
        " ([parallelism.md](parallelism.md)); these variants are missing.",
        in_readme=False,
    ),
    Capability(
        "CUDA graphs in training",
        "*cuda_graph* use_te_rng_tracker",
        "Engines use CUDA graphs, training does not: packed micro-batches differ in size.",
    ),
    Capability(
        "Overlap of tensor-parallel communication",
        "*tp_comm_* tp_comm* no_async_tensor_model_parallel_allreduce use_ring_exchange_p2p",
        "Transformer Engine's user buffers are not used.",
        in_readme=False,
    ),
    Capability(
        "Weight files that are kept",
        "update_weight_*",
        "Files are removed when every engine has read them ([weight-updates.md](weight-updates.md#transports));"
        " `--save` keeps weights.",
        in_readme=False,
    ),
    Capability(
        "Megatron's own generation",
        "cache_mla_latents inference_* use_inference_* flash_decode mlp_chunks_* symmetric_ar_type transformer_impl",
        "The engines of `--rollout-engine` generate: SGLang or vLLM ([engines.md](engines.md)).",
        in_readme=False,
    ),
    Capability(
        "Gradient buffers and kernels",
        "*ddp_* *gradient_reduce* check_for_large_grads use_nccl_ub disable_symmetric_registration fsdp_*"
        " no_preserve_fp32_weights cross_entropy_* batch_invariant_mode defer_embedding_* wgrad_deferral_limit"
        " fused_single_qkv_rope"
        " overlap_param_gather_with_optimizer_step pipeline_model_parallel_comm_backend",
        "slimrl has its own implementation or uses Megatron-core's default.",
        in_readme=False,
    ),
    Capability(
        "Start-up, checkpoints and logs of Megatron-LM",
        "distributed_backend no_initialization use_cpu_initialization model_name enable_experimental no_save_rng"
        " ckpt_format use_distributed_post rollout_data_transport profile memory_recorder manual_gc*"
        " init_model_with_meta_device test_mode config_logger_dir no_barrier_with_*",
        "Switches of Megatron-LM's own programs without a counterpart in slimrl.",
        in_readme=False,
    ),
)


def capability_of(spec: FlagSpec) -> Capability:
    """The row of an unsupported flag. Raises LookupError if no row matches."""
    for row in CAPABILITIES:
        if row.has(spec):
            return row
    raise LookupError(f"{spec.name} has not_served= and no row of CAPABILITIES in slimrl/arguments/docs.py: add it")


def unsupported() -> str:
    """docs/unsupported.md: a table of capabilities, then the flags of each."""
    flags: dict[str, list[FlagSpec]] = {row.title: [] for row in CAPABILITIES}
    for spec in all_flag_specs():
        if spec.not_served is not None:
            flags[capability_of(spec).title].append(spec)
    lines = [_UNSUPPORTED, "| capability | alternative |", "| --- | --- |"]
    lines += [f"| [{row.title}](#{_anchor(row.title)}) | {row.summary} |" for row in CAPABILITIES]
    for row in CAPABILITIES:
        lines += ["", f"## {row.title}", "", "| flag | rejected values | error |", "| --- | --- | --- |"]
        lines += [_unsupported_row(spec) for spec in flags[row.title]]
    return "\n".join(lines) + "\n"


def _unsupported_row(spec: FlagSpec) -> str:
    accepted = [word for word in (_default(spec), *map(str, spec.served)) if word != "-"]
    values = f"all but {', '.join(f'`{word}`' for word in accepted)}" if accepted else "" if spec.is_switch else "all"
    sentence = ended((spec.not_served or "")[:1].upper() + (spec.not_served or "")[1:])
    return f"| `{spec.name}` | {values} | {_prose(sentence)} |".replace("  ", " ")


def _anchor(title: str) -> str:
    return "".join(letter for letter in title.lower() if letter.isalnum() or letter in " -").replace(" ", "-")


def markdown() -> str:
    """docs/flags.md."""
    return _INTRODUCTION + "".join(_section(group) for group in GROUPS)


def aiak() -> str:
    """docs/coming-from-aiak-rlhf.md."""
    own = {name for spec in all_flag_specs() for name in spec.on + spec.off}
    lines = ["| flag | program | default | slimrl | | answer |", "| --- | --- | --- | --- | --- | --- |"]
    for name, row in AIAK.items():
        programs = ", ".join({"rm": "RM", "ppo": "PPO"}[program] for program in row.programs.split())
        spelled, same = "--" + name.replace("-", "_"), f"--{name}" in own
        word = None if same else OTHER_WORDS[name]
        flag = f"--{name}" if word is None else word.flag
        answer = "*accepted*" if spelled in own else f"unknown flag {spelled}: did you mean {flag}?"
        answer = answer if word is None else _prose(word.sentence(spelled))
        default = f"`{row.default}`" if row.default else ""
        shown = f"`{flag}`" if flag else ""
        lines.append(f"| `{spelled}` | {programs} | {default} | {shown} | {row.note} | {answer} |")
    return AIAK_PAGE + "\n".join(" ".join(line.split()) for line in lines) + "\n"


def chatlearn() -> str:
    """docs/coming-from-pai-chatlearn.md."""
    head = ["| key | slimrl | |", "| --- | --- | --- |"]
    rows = {name: (flag, clause) for name, (_, flag, clause) in CHATLEARN_KEYS.items()}
    lines = [*head, *(_key_row(name, *row) for name, row in rows.items())]
    lines += ["", "## Keys of the models' files", "", _OF_FILES, "", *head]
    lines += [_key_row(name, *row) for name, row in MODEL_FILE_KEYS.items()]
    lines += ["", "## Variables of `train_grpo_qwen3.sh`", "", "| variable | key |", "| --- | --- |"]
    lines += [
        f"| `{name.replace('-', '_')}` | `{key.replace('-', '_')}` |" for name, key in CHATLEARN_VARIABLES.items()
    ]
    return CHATLEARN_PAGE + "\n".join(" ".join(line.split()) for line in lines) + "\n"


_OF_FILES = (
    "The files of `model_config_file` set these for every model of PPO, here as `models.<model>.<key>`. Sizes of\n"
    "`reward`, `value` and `ppo_value` have no flag: the reward model's are in its `config.json`, the critic has the\n"
    "policy's."
)


def _key_row(name: str, flag: str | None, clause: str) -> str:
    return f"| `{name.replace('-', '_')}` | {f'`{flag}`' if flag else ''} | {_prose(clause)} |"


def help_text(entry: str) -> str:
    """The supported flags as text for a terminal."""
    lines = [
        f"python3 {entry} <flags>; flags with their defaults in brackets (docs/flags.md has the unsupported ones too):"
    ]
    for group in GROUPS:
        served = [spec for spec in flag_specs(group) if spec.not_served is None or spec.served]
        lines += ["", _title(group)] if served else []
        for spec in served:
            default = "" if _default(spec) == "-" else f" [{_default(spec)}]"
            lines.append(f"  {', '.join(spec.on + spec.off)} {_value(spec)}".rstrip() + default)
            lines += textwrap.wrap(spec.help, 110, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return "\n".join(lines)


def _section(group: type) -> str:
    rows = "\n".join(_row(spec) for spec in flag_specs(group))
    return f"\n## {_title(group)}\n\n| flag | value | default | meaning |\n| --- | --- | --- | --- |\n{rows}\n"


def _title(group: type) -> str:
    return (inspect.getdoc(group) or group.__name__).splitlines()[0].split(". ")[0].rstrip(".")


def _row(spec: FlagSpec) -> str:
    names = ", ".join(f"`{name}`" for name in spec.on + spec.off)
    cells = (names, _value(spec), _default(spec), _prose(spec.help) + _unsupported_mark(spec))
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _prose(text: str) -> str:
    """`text` of a declaration as Markdown, with `<` and `*` escaped."""
    return text.replace("<", "&lt;").replace("*", "\\*")


def _unsupported_mark(spec: FlagSpec) -> str:
    if spec.not_served is None:
        return ""
    but = f" other than {', '.join(map(str, spec.served))}" if spec.served else ""
    return f" (*unsupported{but}*: {_prose(spec.not_served)})"


def _value(spec: FlagSpec) -> str:
    if spec.is_switch:
        return ""
    if spec.choices is not None:
        return ", ".join(map(str, spec.choices)) + (" ..." if spec.many else "")
    if spec.parse is not None and spec.value_type is not str:
        return "integer or list expression"
    kind = {int: "integer", float: "number", str: "text", dict: "JSON"}[spec.value_type]
    return " ".join([kind + (" ..." if spec.many else ""), *_limits(spec.bounds)])


def _limits(bounds: Bounds) -> Iterator[str]:
    for sign, limit in (
        ("≥", bounds.at_least),
        (">", bounds.above),
        ("≤", bounds.at_most),
        ("<", bounds.below),
        ("≠", bounds.other_than),
    ):
        if limit is not None:
            yield f"{sign} {limit:.10g}"


def _default(spec: FlagSpec) -> str:
    if spec.is_switch:
        return "-"
    if spec.default is None:
        return "-"
    if isinstance(spec.default, list):
        return " ".join(map(str, spec.default)) or "-"
    return json.dumps(spec.default) if isinstance(spec.default, dict) else str(spec.default)


if __name__ == "__main__":
    pages = {"unsupported": unsupported, "aiak": aiak, "chatlearn": chatlearn}
    print(pages.get(" ".join(sys.argv[1:]), markdown)(), end="")
