"""Rules about engines: supported parallel sizes, GPUs, nodes and options.

The recipe and its variants pass, each violation is one error.
"""

from __future__ import annotations

import ast
import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slimrl.arguments import PassthroughFlag, read_args
from slimrl.arguments.hf_config import context_of_model, stated_context, tokens
from slimrl.engines.sglang.server_args import server_flags

OPTIONS = {
    "pp-size": PassthroughFlag("pp_size", type=int),
    "dp-size": PassthroughFlag("dp_size", type=int),
    "ep-size": PassthroughFlag("ep_size", type=int),
    "enable-dp-attention": PassthroughFlag("enable_dp_attention", action="store_true"),
    "allow-auto-truncate": PassthroughFlag("allow_auto_truncate", action="store_true"),
    "enable-symm-mem": PassthroughFlag("enable_symm_mem", action="store_true"),
    "modelopt-quant": PassthroughFlag("modelopt_quant", type=str),
    "quantization": PassthroughFlag("quantization", type=str),
    "quantize-and-serve": PassthroughFlag("quantize_and_serve", action="store_true"),
    "enable-lora": PassthroughFlag("enable_lora", action="store_true"),
    "max-lora-rank": PassthroughFlag("max_lora_rank", type=int),
    "rl-quant-profile": PassthroughFlag("rl_quant_profile", type=str),
    "context-length": PassthroughFlag("context_length", type=str),
    "json-model-override-args": PassthroughFlag("json_model_override_args", type=str),
    "tp-size": PassthroughFlag("tp_size", type=int, managed_by="--rollout-num-gpus-per-engine"),
}
VLLM_OPTIONS = {"data-parallel-size": PassthroughFlag("data_parallel_size", type=int)}
TABLES = {"sglang": lambda: OPTIONS, "vllm": lambda: VLLM_OPTIONS}
FOUR_NODES = "--actor-num-nodes 4 --rollout-num-gpus-per-engine"  # of 8 GPUs each, colocated

# rule -> (flags that pass when appended to the recipe, flags that do not with their error)
CASES: dict[str, tuple[list[str], list[tuple[str, str]]]] = {
    "engines_fill_their_gpus": (
        ["--rollout-num-gpus-per-engine 8", "--rollout-num-gpus-per-engine 1"],
        [
            (
                "--rollout-num-gpus-per-engine 3",
                "--rollout-num-gpus 8 (the training GPUs, by --colocate) does not divide by"
                " --rollout-num-gpus-per-engine 3: choose a divisor.",
            )
        ],
    ),
    "engine_sizes_are_counts": (
        ["--sglang-pp-size 1 --sglang-dp-size 1 --sglang-ep-size 1"],
        [
            (
                "--sglang-ep-size 0",
                "--sglang-ep-size 0 is below 1: give at least 1, or leave it out.",
            )
        ],
    ),
    "engines_fill_whole_nodes": (
        [f"{FOUR_NODES} 16", f"{FOUR_NODES} 32"],
        [
            (
                "--actor-num-nodes 3 --rollout-num-gpus-per-engine 12 --rollout-batch-size 48",
                "--rollout-num-gpus-per-engine 12 is more than a node has and not a multiple of --num-gpus-per-node"
                " 8: an engine over several nodes fills them; choose a multiple, or correct --num-gpus-per-node.",
            ),
        ],
    ),
    "engine_stages_divide": (
        [
            "--rollout-num-gpus-per-engine 4 --sglang-pp-size 2",
            f"{FOUR_NODES} 32 --sglang-pp-size 2",
            f"{FOUR_NODES} 16 --sglang-pp-size 4",
        ],
        [
            (
                "--rollout-num-gpus-per-engine 4 --sglang-pp-size 3",
                "--rollout-num-gpus-per-engine 4 does not divide by --sglang-pp-size 3: choose a divisor.",
            ),
            (
                "--actor-num-nodes 3 --rollout-num-gpus-per-engine 24 --sglang-pp-size 2 --rollout-batch-size 48",
                "--sglang-pp-size 2 does not fit the 3 nodes of an engine (--rollout-num-gpus-per-engine 24 /"
                " --num-gpus-per-node 8): choose a divisor or a multiple of 3.",
            ),
        ],
    ),
    "engine_stages_can_be_updated": (
        ["--sglang-pp-size 2", "--sglang-pp-size 2 --debug-rollout-only"],
        [
            (
                "--sglang-pp-size 2 --update-weight-transport disk --update-weight-disk-dir {dir}/weights",
                "--sglang-pp-size 2 does not support weight updates by --update-weight-transport disk: SGLang's"
                " pipeline stages take weights only from trainers on their own GPUs; give --colocate without"
                " --update-weight-transport disk, or use tensor and expert parallelism only.",
            ),
        ],
    ),
    "engine_layout_can_be_checked": (
        ["--check-weight-update-equal", "--sglang-ep-size 2"],
        [
            (
                "--check-weight-update-equal --sglang-ep-size 2",
                "--check-weight-update-equal supports only tensor parallel engines, and --sglang-ep-size is 2: leave"
                " one of them out.",
            )
        ],
    ),
    "engine_weights_are_those_of_training": (
        ["--sglang-quantization fp8 --debug-rollout-only"],
        [
            (
                "--sglang-quantization fp8",
                "--sglang-quantization fp8 quantises the engines' weights, and weight updates send unquantised"
                " tensors: leave it out.",
            ),
            (
                "--sglang-quantize-and-serve",
                "--sglang-quantize-and-serve quantises the engines' weights, and weight updates send unquantised"
                " tensors: leave it out.",
            ),
        ],
    ),
    "engine_flags_are_those_of_the_engine": (
        ["--rollout-engine vllm --vllm-python /bin/sh", "--sglang-enable-symm-mem"],
        [
            (
                "--vllm-python /bin/sh",
                "--vllm-python is for vllm servers, and --rollout-engine is sglang: leave one of them out.",
            ),
            (
                "--rollout-engine vllm --vllm-python /bin/sh --sglang-enable-symm-mem",
                "--sglang-enable-symm-mem is for sglang servers, and --rollout-engine is vllm: leave one of them out.",
            ),
        ],
    ),
    "vllm_has_an_interpreter": (
        ["--rollout-engine vllm --vllm-python /bin/sh"],
        [
            (
                "--rollout-engine vllm",
                "--rollout-engine vllm needs vllm, which this environment does not have: give --vllm-python, the"
                " interpreter of one that has.",
            ),
            (
                "--rollout-engine vllm --vllm-python /bin",
                "--vllm-python /bin is not a program: give the path of a Python interpreter.",
            ),
        ],
    ),
    "vllm_serves_the_run": (
        [
            "--rollout-engine vllm --vllm-python /bin/sh --lora-rank 8 --lora-merge",
            "--rollout-engine vllm --vllm-python /bin/sh --debug-rollout-only --rollout-top-p 0.9",
        ],
        [
            (
                "--rollout-engine vllm --vllm-python /bin/sh --check-weight-update-equal",
                "--rollout-engine vllm excludes --check-weight-update-equal, because vLLM servers report no checksums:"
                " leave --check-weight-update-equal out.",
            ),
            (
                "--rollout-engine vllm --vllm-python /bin/sh --prometheus-port 9000",
                "--rollout-engine vllm excludes --prometheus-port, because the run's key protects the metrics of vLLM"
                " servers: leave --prometheus-port out.",
            ),
            (
                "--rollout-engine vllm --vllm-python /bin/sh --lora-rank 8",
                "--rollout-engine vllm with --lora-rank sends the engines merged weights: add --lora-merge.",
            ),
            (
                "--rollout-engine vllm --vllm-python /bin/sh --rollout-top-p 0.9",
                "--rollout-top-p 0.9 limits the tokens, of which vLLM reports renormalised log-probabilities; those of"
                " training are of all tokens: leave --rollout-top-p out, or use --rollout-engine sglang.",
            ),
            (
                f"{FOUR_NODES} 16 --rollout-engine vllm --vllm-python /bin/sh",
                "--rollout-num-gpus-per-engine 16 is more than the GPUs of a node (--num-gpus-per-node 8), and a vLLM"
                " server has one node: lower it.",
            ),
            (
                "--rollout-engine vllm --vllm-python /bin/sh --vllm-data-parallel-size 3",
                "--vllm-data-parallel-size 3 does not divide --rollout-num-gpus-per-engine 2, the GPUs of all"
                " replicas of an engine: choose a divisor.",
            ),
        ],
    ),
    "delta_updates_fit_the_run": (
        ["--bf16 --update-weight-mode delta --no-offload-rollout"],
        [
            (
                "--bf16 --update-weight-mode delta",
                "--offload-rollout (without --no-offload-rollout on with --colocate) gives up the engines' weights"
                " while training runs, and --update-weight-mode delta sends changes: leave one of them out.",
            ),
        ],
    ),
    "engine_collectives_agree": (
        [
            "--sglang-enable-symm-mem",
            '--train-env-vars {{"NCCL_CUMEM_ENABLE":"0"}}',
            '--sglang-enable-symm-mem --train-env-vars {{"NCCL_CUMEM_ENABLE":"0"}}',  # colocated: no such group
        ],
        [],
    ),
    "engine_attention_copies_divide": (
        [
            "--rollout-num-gpus-per-engine 8 --sglang-enable-dp-attention --sglang-dp-size 8",
            f"{FOUR_NODES} 32 --sglang-enable-dp-attention --sglang-dp-size 8 --sglang-ep-size 32",
            "--sglang-dp-size 1",
        ],
        [
            (
                "--rollout-num-gpus-per-engine 8 --sglang-dp-size 4",
                "--sglang-dp-size 4 needs --sglang-enable-dp-attention: add it; for more full copies of the model"
                " lower --rollout-num-gpus-per-engine.",
            ),
            (
                "--rollout-num-gpus-per-engine 8 --sglang-pp-size 2 --sglang-enable-dp-attention --sglang-dp-size 8",
                "--sglang-dp-size 8 does not divide the tensor parallel size of an engine"
                " (--rollout-num-gpus-per-engine 8 / --sglang-pp-size 2 = 4): choose a divisor.",
            ),
        ],
    ),
    "engine_experts_divide": (
        ["--rollout-num-gpus-per-engine 8 --sglang-ep-size 8", f"{FOUR_NODES} 16 --sglang-ep-size 4"],
        [
            (
                "--rollout-num-gpus-per-engine 8 --sglang-ep-size 3",
                "--sglang-ep-size 3 does not divide the tensor parallel size of an engine"
                " (--rollout-num-gpus-per-engine 8): choose a divisor.",
            )
        ],
    ),
    "engine_context_holds_a_sample": (
        [  # responses of 8192 tokens, and of 16384 in the evaluation
            "--sglang-context-length 32k",
            "--sglang-context-length 16385",
            "--sglang-context-length 9Ki --rollout-max-prompt-len 1024 --eval-max-response-len 8192",
            "--sglang-context-length 8192 --rollout-max-context-len 8192",
            "--sglang-context-length 4096 --sglang-allow-auto-truncate",
        ],
        [
            (
                "--sglang-context-length 16k",
                "--sglang-context-length 16k is less than the longest sample, at least one token of prompt + evaluation"
                " set aime: max-response-len 16384 = 16385: give at least 16385.",
            ),
            (
                "--sglang-context-length 9k --rollout-max-prompt-len 1024 --eval-max-response-len 8192",
                "--sglang-context-length 9k is less than the longest sample, --rollout-max-prompt-len 1024 +"
                " --rollout-max-response-len 8192 = 9216: give at least 9216.",
            ),
            (
                "--sglang-context-length 8000 --rollout-max-context-len 8192 --eval-max-context-len 4096",
                "--sglang-context-length 8000 is less than the longest sample, --rollout-max-context-len 8192: give at"
                " least 8192.",
            ),
            (  # the model reads 40960
                "--sglang-context-length 64k",
                "--sglang-context-length 64k is more than the 40960 tokens in config.json of --hf-checkpoint, and the"
                " engines would not start: lower it, or set SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=1 if the model"
                " supports a longer context.",
            ),
            (
                "--rollout-max-response-len 40960 --n-samples-per-prompt 8",
                "the model of --hf-checkpoint has a context of 40960 tokens (config.json), less than the longest"
                " sample, at least one token of prompt + --rollout-max-response-len 40960 = 40961: lower these"
                " lengths, or give a model with a longer context.",
            ),
            (
                "--rollout-max-response-len 39000 --rollout-max-prompt-len 2000",
                "the model of --hf-checkpoint has a context of 40960 tokens (config.json), less than the longest"
                " sample, --rollout-max-prompt-len 2000 + --rollout-max-response-len 39000 = 41000: lower these"
                " lengths, or give a model with a longer context.",
            ),
        ],
    ),
}


@pytest.mark.parametrize(("rule", "more"), [(rule, more) for rule, (good, _) in CASES.items() for more in good])
def test_valid_flags_are_accepted(recipe, rule, more):
    _, problems = read_args(recipe.line(more), passthrough=TABLES)
    assert [str(problem) for problem in problems] == []


@pytest.mark.parametrize(
    ("rule", "more", "sentence"), [(rule, *case) for rule, (_, bad) in CASES.items() for case in bad]
)
def test_each_violation_is_one_error(recipe, rule, more, sentence):
    _, problems = read_args(recipe.line(more), passthrough=TABLES)
    assert [str(problem) for problem in problems] == [sentence]


def test_engines_over_nodes_start_at_a_node_boundary(recipe):
    split = "--actor-num-nodes 1 --actor-num-gpus-per-node {} --rollout-num-gpus 16 --rollout-num-gpus-per-engine 16"
    _, problems = read_args(recipe.line("--rollout-num-gpus-per-engine 16", placement=split.format(8)))
    assert problems == []
    _, problems = read_args(recipe.line("--rollout-num-gpus-per-engine 16", placement=split.format(4)))
    assert [str(problem) for problem in problems] == [
        "--rollout-num-gpus-per-engine 16 takes whole nodes of --num-gpus-per-node 8, and the 4 training GPUs before"
        " the engines leave 4 GPUs of a node free: let training fill its nodes, or choose smaller engines."
    ]


def test_engine_pipeline_stages_on_separate_gpus_cannot_be_updated(recipe):
    split = "--actor-num-nodes 1 --actor-num-gpus-per-node 2 --rollout-num-gpus 6"
    _, problems = read_args(recipe.line("--sglang-pp-size 2", placement=split), passthrough=TABLES)
    assert [str(problem) for problem in problems] == [
        "--sglang-pp-size 2 does not support weight updates by a broadcast: SGLang's pipeline stages take weights"
        " only from trainers on their own GPUs; give --colocate without --update-weight-transport disk, or use tensor"
        " and expert parallelism only."
    ]


def test_symmetric_memory_engines_need_trainers_with_cumem(recipe):
    split = "--actor-num-nodes 1 --actor-num-gpus-per-node 2 --rollout-num-gpus 6"
    more = '--sglang-enable-symm-mem --train-env-vars {{"NCCL_CUMEM_ENABLE":"0"}}'
    _, problems = read_args(recipe.line(more, placement=split), passthrough=TABLES)
    assert [str(problem) for problem in problems] == [
        "--train-env-vars has NCCL_CUMEM_ENABLE 0, and --sglang-enable-symm-mem makes the engines set 1: the process"
        " group for weight updates needs the same value on both sides; leave one of them out."
    ]


def test_options_set_by_slimrl_are_rejected(recipe):
    _, problems = read_args(recipe.line("--sglang-tp-size 2"), passthrough=TABLES)
    assert [str(problem) for problem in problems] == [
        "--sglang-tp-size is set by slimrl itself (--rollout-num-gpus-per-engine): leave it out."
    ]


def test_option_names_match_the_engine():
    flags = server_flags()
    for name, flag in OPTIONS.items():
        real = flags[name]
        assert (real.dest, real.action, real.managed_by) == (flag.dest, flag.action, flag.managed_by)


def test_counts_are_parsed_like_in_the_engine():
    assert [tokens(given) for given in (4096, "4096", "25.6k", "2Ki", "1M")] == [4096, 4096, 25600, 2048, 1_000_000]


def test_every_lora_flag_of_the_installed_engine_is_rejected(recipe):
    switches = [name for name, passed in server_flags().items() if "lora" in name and passed.action == "store_true"]
    assert "enable-lora" in switches
    for name in switches:
        _, problems = read_args(recipe.line(f"--sglang-{name}"), passthrough={"sglang": server_flags})
        assert [problem.flag for problem in problems] == [f"--sglang-{server_flags()[name].dest.replace('_', '-')}"]


@pytest.mark.parametrize(
    ("more", "tokens"),
    [
        ("", 40960 - 6),
        ("--sglang-context-length 32k", 32000 - 6),
        ("--sglang-context-length 32k --sglang-allow-auto-truncate", None),
        ("--debug-train-only --load-debug-rollout-data {rollout_id}.jsonl", None),
    ],
)
def test_engine_options_are_validated_when_the_command_line_is_parsed(recipe, more, tokens):
    line = [*recipe.line(), *more.split()]
    assert read_args(line, passthrough=TABLES)[0].engine_context_len == tokens


def test_longer_context_may_be_allowed_by_the_sglang_option(recipe, monkeypatch):
    monkeypatch.setenv("SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN", "1")
    assert read_args(recipe.line("--sglang-context-length 64k"), passthrough=TABLES)[1] == []


CONFIGS = [
    {"max_position_embeddings": 4096},
    {"max_position_embeddings": 4096, "rope_scaling": {"type": "linear", "factor": 4.0}},
    {"max_position_embeddings": 40960, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
    {
        "max_position_embeddings": 163840,
        "rope_scaling": {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096},
    },
    {"max_position_embeddings": 32768, "seq_length": 2048},
]


@pytest.mark.parametrize("config", CONFIGS)
def test_model_context_matches_what_the_server_reads_from_config_json(config):
    source = Path(importlib.util.find_spec("sglang").origin).parent / "srt/utils/hf_transformers/common.py"
    tree = ast.parse(source.read_text())
    wanted = [
        node
        for node in tree.body
        if (isinstance(node, ast.FunctionDef) and node.name == "get_context_length")
        or (isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "CONTEXT_LENGTH_KEYS")
    ]
    servers: dict[str, Any] = {}
    # the server's own function, without the imports of its module
    exec(compile(ast.Module(wanted, []), str(source), "exec"), servers)
    assert stated_context(config) == servers["get_context_length"](SimpleNamespace(**config))


@pytest.mark.parametrize(
    ("config", "changes", "expected"),
    [
        ({}, {"max_position_embeddings": 131072}, 131072),
        ({}, {"rope_scaling": {"type": "linear", "factor": 2.0}}, 81920),
        ({"text_config": {"max_position_embeddings": 4096}}, {"text_config": {"max_position_embeddings": 8192}}, 8192),
        ({"text_config": {"max_position_embeddings": 4096}}, {"text_config": {"vocab_size": 7}}, 4096),
        ({}, {"seq_length": 2048}, 2048),
        ({}, {"vocab_size": 7}, 40960),
    ],
)
def test_context_follows_the_config_overrides_of_the_engines(recipe, config, changes, expected):
    recipe.write_config(**config)
    line = [*recipe.line(), "--sglang-json-model-override-args", json.dumps(changes)]
    args = read_args(line, passthrough=TABLES)[0]
    assert context_of_model(args) == expected


def test_longer_context_is_accepted_when_the_config_override_has_it(recipe):
    longer = [*recipe.line(), "--sglang-context-length", "131072"]
    (problem,) = read_args(longer, passthrough=TABLES)[1]
    assert "--sglang-context-length 131072 is more than the 40960 tokens" in str(problem)
    for changes in ('{"max_position_embeddings": 131072}', "{oops"):  # the server's own error
        line = [*longer, "--sglang-json-model-override-args", changes]
        assert read_args(line, passthrough=TABLES)[1] == []


def test_config_json_without_a_context_leaves_it_unknown(recipe):
    recipe.write_config(max_position_embeddings="absent")
    args, problems = read_args(recipe.line("--rollout-max-response-len 40960"))
    assert (args.engine_context_len, context_of_model(args), problems) == (None, None, [])
