"""Flags of other frameworks are answered with slimrl's flag, once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slimrl.arguments import read_args
from slimrl.arguments.foreign_flags import _PREFIXES, OTHER_WORDS, aiak, chatlearn, chatlearn_megatron
from slimrl.arguments.namespace import all_flag_specs
from slimrl.arguments.parser import RETIRED_FLAGS, own_spellings, parse_line
from tests.arguments.conftest import MODEL, without

OWN = own_spellings(all_flag_specs())
DOCS = Path(__file__).parents[2] / "docs"


def sentences(line: str) -> list[str]:
    return [str(problem) for problem in parse_line(line.split(), all_flag_specs(), {}).problems]


@pytest.mark.parametrize(("word", "row"), OTHER_WORDS.items(), ids=list(OTHER_WORDS))
def test_each_foreign_flag_maps_to_an_existing_flag(word, row):
    from slimrl.engines.sglang.server_args import RESERVED, server_flags

    assert word == word.lower().strip("-").replace("_", "-")
    assert f"--{word}" not in OWN
    assert f"--{word}" not in RETIRED_FLAGS
    if row.flag is None:
        assert row.clause
    elif row.flag.startswith("--sglang-") and row.flag not in OWN:
        passed = server_flags()[row.flag.removeprefix("--sglang-")]
        assert passed.dest not in RESERVED
    else:
        assert row.flag in OWN


@pytest.mark.parametrize("row", [*OTHER_WORDS.values(), *_PREFIXES.values()])
def test_each_flag_in_a_hint_exists(row):
    of_engines = ("--sglang-", "--vllm-")  # passed through
    words = [word.strip(",;.()") for word in row.clause.split() if word.startswith("--")]
    named = [word for word in words if not word.startswith(of_engines)]
    assert [word for word in named if word not in OWN and word != "--flag"] == []


def test_common_flags_of_four_frameworks_are_covered():
    assert len(OTHER_WORDS) >= 60
    for owner in ("verl's", "OpenRLHF's", "TRL's", "ms-swift's"):
        assert sum(row.owner == owner for row in OTHER_WORDS.values()) >= 6


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        (
            "actor_rollout_ref.rollout.n=8",
            "actor_rollout_ref.rollout.n is verl's name: use --n-samples-per-prompt.",
        ),
        (
            "--colocate +trainer.total_epochs=15",
            "trainer.total_epochs is verl's name: use --num-epoch.",
        ),
        (
            "--colocate trainer.balance_batch=True",
            "trainer.balance_batch is verl's name and is not in the table of its counterparts: docs/coming-from-verl.md"
            " has the table, and docs/flags.md all flags, written --flag value.",
        ),
        ("--tis-upper-bound 2.0", "--tis-upper-bound is slime's name: use --tis-clip."),
        (
            "algorithm.rollout_correction.rollout_rs=sequence",
            "algorithm.rollout_correction.rollout_rs is verl's name: use --rs-level, with --use-rs.",
        ),
        ("--pretrain Qwen/Qwen3-4B", "--pretrain is OpenRLHF's name: use --hf-checkpoint."),
        (
            "--per_device_train_batch_size 4",
            "--per_device_train_batch_size is transformers' name: use --micro-batch-size, and"
            " --global-batch-size for a step.",
        ),
        (
            "--tp 2",
            "--tp is a short form: use --tensor-model-parallel-size, and --rollout-num-gpus-per-engine for the"
            " engines.",
        ),
        ("--pp=2", "--pp is a short form: use --pipeline-model-parallel-size."),
        ("--lr_scheduler cosine", "--lr_scheduler is transformers' name: use --lr-decay-style."),
        (
            "--lora-task-type CAUSAL_LM",
            "--lora-task-type is TRL's name and has no counterpart: docs/lora.md lists the flags of adapters, for"
            " example --lora-rank; leave it out.",
        ),
        (
            "--use-lora",
            "--use-lora is TRL's name: use --lora-rank, with --lora-alpha and --lora-target-modules.",
        ),
        (
            "--critic-num-gpus 8",
            "--critic-num-gpus is a critic flag and has no counterpart: leave it out; docs/flags.md lists the flags of"
            " a critic, for example --critic-lr.",
        ),
        ("--critic_learning_rate 9e-6", "--critic_learning_rate is OpenRLHF's name: use --critic-lr."),
        ("critic.optim.lr=1e-5", "critic.optim.lr is verl's name: use --critic-lr."),
        ("--vllm_mode colocate", None),
        ("--learning-rate 1e-6", "--learning-rate is transformers' name: use --lr."),
    ],
)
def test_flag_of_another_framework_is_answered_with_ours(line, sentence):
    found = sentences(line)
    assert len(found) == 1
    assert sentence is None or found == [sentence]


@pytest.mark.parametrize("line", ["--prompt-data data.jsonl=0.5 more.jsonl=0.5", "--rollout-stop a.b=c trainer.x"])
def test_values_that_look_like_settings_stay_values(line):
    parsed = parse_line(line.split(), all_flag_specs(), {})
    assert parsed.problems == []
    assert [parsed.values] == [{line.split()[0].strip("-").replace("-", "_"): line.split()[1:]}]


@pytest.mark.parametrize(
    "line",
    [
        "--lora-task-type 16",
        "--use-lora",
        "--critic-num-gpus 8",
        "--z-lora-rank 16",
        "--rollout-batch-sise 33",
        "--tp 3",
        "--pp 5",
        "--max-length 16",
        "--per_device_train_batch_size 3",
        "actor_rollout_ref.rollout.temperature=-1",
    ],
)
def test_guess_causes_no_second_error(recipe, line):
    assert len(read_args(recipe.line(line))[1]) == 1


@pytest.mark.parametrize(
    ("without", "instead"),
    [
        ("--hf-checkpoint", "--pretrain {dir}/hf"),
        ("--rollout-batch-size", "data.train_batch_size=32"),
        ("--rollout-max-response-len", "--generate_max_len 8192"),
        ("--num-rollout", "--num-rollot 3000"),
        ("--colocate", "--colocat"),
        ("--tensor-model-parallel-size", "--tp 2"),
        ("--max-tokens-per-gpu", "--max-token-per-gpu 9216"),
        ("--vocab-size", "--vocab_size 151936"),
    ],
)
def test_value_lost_to_a_misread_word_causes_no_second_error(recipe, without, instead):
    line = recipe.line(without=without) + instead.format(dir=recipe.dir).split()
    problems = read_args(line)[1]
    assert len(problems) == 1, problems
    assert instead.split()[0].partition("=")[0] in str(problems[0])


def test_errors_independent_of_a_misread_word_are_reported_together(recipe):
    problems = read_args(recipe.line("--rollout-batch-sise 32 --kl-coef 0.1 --kl-loss-coef 0.1"))[1]
    assert len(problems) == 2
    assert "count the KL twice" in str(problems[1])


# slime's mismatch helper ---------------------------------------------------------------------------------------------

# key of its YAML file, also with the value: flags with the same effect; the first one answers the key as a flag
HELPER = {
    "use_tis": "--use-tis",
    "tis_level": "--tis-level",
    "tis_mode: truncate": "--tis-mode truncate",
    "tis_mode: clip": "--tis-mode truncate",
    "tis_mode: mask": "--tis-mode mask",
    "tis_upper_bound": "--tis-clip",
    "tis_lower_bound": "--tis-clip-low",
    "tis_batch_normalize": "--tis-batch-normalize",
    "use_rs": "--use-rs",
    "rs_level": "--rs-level",
    "rs_lower_bound": "--rs-lower-bound",
    "rs_upper_bound": "--rs-upper-bound",
    "rs_veto_threshold": "--rs-veto-threshold",
    "mis_level": "--tis-level",
    "mis_mode": "--tis-mode",
    "mis_upper_bound": "--tis-clip",
    "mis_lower_bound": "--tis-clip-low",
    "mis_veto_threshold": "--rs-veto-threshold",
}


def test_each_key_of_slimes_mismatch_helper_is_answered_with_the_flag_of_the_table():
    section = (DOCS / "coming-from-slime.md").read_text().split("### Settings of the mismatch helper")[1]
    table = {}
    for row in section.split("\n## ")[0].splitlines():
        if row.startswith("| `"):
            keys, flags, _ = (cell.strip() for cell in row.strip("|").split(" | "))
            keys = keys.replace("tis_level: token, sequence, geometric", "tis_level")
            table |= dict(zip(keys.replace("`", "").split(", "), flags.replace("`", "").split(", "), strict=True))
    assert table == {key: flags for key, flags in HELPER.items() if not key.startswith("mis_")}
    for key, flags in HELPER.items():
        name = key.partition(":")[0]
        flag = flags.split()[0]
        word = "--" + name.replace("_", "-")
        assert flag in OWN and (word == flag if word in OWN else OTHER_WORDS[word.strip("-")].flag == flag)
        if word not in OWN:
            (sentence,) = sentences(f"--{name} 1")
            assert sentence.startswith(f"--{name} is slime's name: use {flag}")


# ratios 1/4, 1 and 4 with the bounds 1/2 and 2, as slime's modes weight them
@pytest.mark.parametrize(
    ("mode", "flags", "expected"),
    [
        ("truncate", "--tis-mode truncate", [0.25, 1.0, 2.0]),
        ("clip", "--tis-mode truncate --tis-clip-low 0.5", [0.5, 1.0, 2.0]),
        ("mask", "--tis-mode mask --tis-clip-low 0.5", [0.0, 1.0, 0.0]),
    ],
)
def test_modes_of_slimes_mismatch_helper_in_the_flags_of_the_table(recipe, mode, flags, expected):
    import torch

    from slimrl.algorithms.off_policy import importance_weights
    from slimrl.megatron.training.loss.policy_loss import importance_weighting

    assert flags.startswith(HELPER[f"tis_mode: {mode}"])
    args, problems = read_args(recipe.line(f"--use-tis --tis-clip 2 {flags}"))
    assert problems == []
    config = importance_weighting(args)
    ratios = torch.tensor([0.25, 1.0, 4.0], dtype=torch.float64)
    weights, _ = importance_weights(ratios.log(), low=config.low, high=config.high, masks=config.masks)
    torch.testing.assert_close(weights, torch.tensor(expected, dtype=torch.float64))


# AIAK-RLHF and ChatLearn ----------------------------------------------------------------------------------------------

AIAK_RM = """--save_path out --save_steps -1 --logging_steps 1 --eval_steps -1 --train_batch_size 128
 --micro_train_batch_size 1 --pretrain sft --bf16 --max_epochs 1 --max_len 2048 --zero_stage 3 --learning_rate 9e-6
 --dataset webgpt --dataset_probs 1 --flash_attn --tensorboard logs --gradient_checkpointing"""
AIAK_PPO = """--num_nodes 1 --num_gpus_per_node 8 --vllm_num_engines 8 --vllm_tensor_parallel_size 1
 --vllm_gpu_memory_utilization 0.9 --colocate_all --ref_reward_offload --pretrain sft --reward_pretrain judge
 --save_path out --micro_train_batch_size 8 --micro_rollout_batch_size 16 --rollout_batch_size 1024
 --max_samples 1000000 --max_epochs 1 --prompt_max_len 1024 --generate_max_len 1024 --zero_stage 3 --bf16
 --actor_learning_rate 5e-7 --critic_learning_rate 9e-6 --init_kl_coef 0.01 --prompt_data prompts
 --input_key context_messages --apply_chat_template --normalize_reward --adam_offload --flash_attn --tensorboard logs
 --gradient_checkpointing"""
# slimrl has them with dashes
SAME = {
    *("num-gpus-per-node", "rollout-batch-size", "prompt-data", "input-key", "apply-chat-template"),
    "normalize-reward",
}


@pytest.mark.parametrize(("program", "line"), [("rm", AIAK_RM), ("ppo", AIAK_PPO)])
def test_each_flag_of_an_aiak_command_line_is_accepted_or_answered_once(program, line):
    given = [word for word in line.split() if word.startswith("--")]
    names = [word.strip("-").replace("_", "-") for word in given]
    assert all(program in aiak.AIAK[name].programs for name in names)
    parsed = parse_line(line.split(), all_flag_specs(), {})
    assert parsed.values == {"bf16": True}
    assert [problem.flag for problem in parsed.problems] == [word for word in given if word != "--bf16"]
    for problem in parsed.problems:
        name = problem.flag.strip("-").replace("_", "-")
        if name in SAME:
            assert str(problem) == f"unknown flag {problem.flag}: did you mean --{name}?"
            assert parse_line([f"--{name}", "8"], all_flag_specs(), {}).values.keys() <= {name.replace("-", "_")}
        else:
            row = OTHER_WORDS[name]
            assert str(problem) == row.sentence(problem.flag)
            assert (f"use {row.flag}" if row.flag else "has no counterpart") in str(problem)


@pytest.mark.parametrize("zero_stage", [1, 3])
def test_aiak_reward_model_in_the_flags_of_its_page_passes_every_rule(recipe, tmp_path, zero_stage):
    pair = {"prompt": "1+1", "chosen": "2", "rejected": "3"}
    (tmp_path / "webgpt.jsonl").write_text(json.dumps(pair) + "\n")
    pairs = "--rollout-function-path slimrl.rollout.preference_rollout.generate_rollout"
    translated = f"""--loss-type reward_model_loss {pairs} --debug-train-only --n-samples-per-prompt 2
     --prompt-data {tmp_path}/webgpt.jsonl --save {{dir}}/ckpt --save-interval 100 --rollout-batch-size 64
     --global-batch-size 128 --micro-batch-size 2 --bf16 --num-epoch 1 --rollout-max-context-len 2048 --lr 9e-6
     --attention-backend flash --tensorboard-dir {{dir}}/logs --use-tensorboard --recompute-granularity selective
     --tensor-model-parallel-size 1"""
    if zero_stage == 3:
        translated += " --use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params"
    others = ["--use-dynamic-batch-size", "--sequence-parallel", "--apply-chat-template", "--colocate", "--eval"]
    others += [
        "--rollout-temperature",
        "--rollout-max-response-len",
        "--max-tokens-per-gpu",
        "--label-key",
        "--rm-type",
    ]
    others += ["--recompute", "--sglang", "--n-samples-per-eval", "--num-rollout"]
    kept = without(recipe.supervised_line(), *others)
    args, problems = read_args([*kept, *translated.format(dir=recipe.dir).split()])
    assert "\n".join(str(problem) for problem in problems) == ""
    assert args.trains_reward_model and args.rollout_max_context_len == 2048 and args.rollout_max_prompt_len is None


# each flag of AIAK_PPO as its page says; "" for one to leave out
TRANSLATED = {
    "num_nodes": "--actor-num-nodes 1",
    "num_gpus_per_node": "--num-gpus-per-node 8 --actor-num-gpus-per-node 8",
    "vllm_num_engines": "",  # with --colocate on all GPUs
    "vllm_tensor_parallel_size": "--rollout-num-gpus-per-engine 1",
    "vllm_gpu_memory_utilization": "--sglang-mem-fraction-static 0.9",
    "colocate_all": "--colocate --rm-colocate",
    "ref_reward_offload": "--rm-colocate --rm-num-gpus 8",
    "pretrain": "--hf-checkpoint {dir}/hf --ref-load {dir}/ref --load {dir}/ckpt",
    "reward_pretrain": "--rm-model {dir}/judge --rm-type reward_model",
    "save_path": "--save {dir}/ckpt",
    "micro_train_batch_size": "--micro-batch-size 8",
    "micro_rollout_batch_size": "",
    "rollout_batch_size": "--rollout-batch-size 1024 --n-samples-per-prompt 1",
    "max_samples": "--prompt-data {dir}/prompts.jsonl@[0:1000000]",
    "max_epochs": "",
    "prompt_max_len": "--rollout-max-prompt-len 1024 --rollout-truncate-prompt left",
    "generate_max_len": "--rollout-max-response-len 1024",
    "zero_stage": "--use-distributed-optimizer",
    "bf16": "--bf16",
    "actor_learning_rate": "--lr 5e-7",
    "critic_learning_rate": "--critic-lr 9e-6",
    "init_kl_coef": "--kl-coef 0.01",
    "prompt_data": "--prompt-data {dir}/prompts.jsonl@[0:1000000]",
    "input_key": "--input-key context_messages",
    "apply_chat_template": "--apply-chat-template",
    "normalize_reward": "--normalize-reward",
    "adam_offload": "--optimizer-cpu-offload --use-precision-aware-optimizer",
    "flash_attn": "--attention-backend flash",
    "tensorboard": "--tensorboard-dir {dir}/logs --use-tensorboard",
    "gradient_checkpointing": "--recompute-granularity selective",
}
# what AIAK does not have: the network, the length of the run, and the estimator and the sizes of a step by flags
OF_SLIMRL = """--advantage-estimator ppo --lambd 0.95 --num-rollout 8 --global-batch-size 128 --num-steps-per-rollout 8
 --tensor-model-parallel-size 1"""
WITHOUT_ADAM_OFFLOAD = {
    "adam_offload": "",
    "zero_stage": "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params",
}


@pytest.mark.parametrize("changes", [{}, WITHOUT_ADAM_OFFLOAD], ids=["its command line", "without adam_offload"])
def test_aiak_ppo_in_the_flags_of_its_page_passes_every_rule(recipe, tmp_path, changes):
    from slimrl.engines.sglang.server_args import server_flags

    given = [word.removeprefix("--") for word in AIAK_PPO.split() if word.startswith("--")]
    assert sorted(given) == sorted(TRANSLATED)
    for name, flags in TRANSLATED.items():
        row = OTHER_WORDS.get(name.replace("_", "-"))
        answer = "--" + name.replace("_", "-") if row is None else row.flag
        assert answer in flags.split() if flags else answer is None or name == "vllm_num_engines"
    translated = TRANSLATED | changes
    (tmp_path / "judge").mkdir()
    config = {"architectures": ["LlamaForSequenceClassification"], "id2label": {"0": "LABEL_0"}, "vocab_size": 10}
    (tmp_path / "judge/config.json").write_text(json.dumps(config))
    (tmp_path / "judge/tokenizer.json").touch()
    messages = [{"role": "user", "content": "1+1"}]
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"context_messages": messages}) + "\n")
    line = f"{MODEL} {OF_SLIMRL} {' '.join(translated.values())}".format(dir=recipe.dir)
    args, problems = read_args(line.split(), passthrough={"sglang": server_flags})
    assert [str(problem) for problem in problems] == []
    assert args.use_critic and args.normalize_reward and args.rm_colocate and args.use_reference
    assert args.optimizer_cpu_offload is not bool(changes) and args.use_megatron_fsdp is bool(changes)


def test_zero_3_and_adam_offload_of_the_page_exclude_each_other(recipe):
    line = f"{TRANSLATED['adam_offload']} {WITHOUT_ADAM_OFFLOAD['zero_stage']}"
    excluded = [str(problem) for problem in read_args(recipe.line(line))[1]]
    assert any(one.startswith("--use-megatron-fsdp keeps its state on the device: leave") for one in excluded)
    (sentence,) = sentences("--adam_offload")
    assert sentence.endswith("with --use-precision-aware-optimizer and without --use-megatron-fsdp.")
    (sentence,) = sentences("--zero_stage 3")
    assert sentence.endswith("Only the first can be combined with --optimizer-cpu-offload.")


def test_cloud_rows_are_declared_once_and_reach_the_parser():
    from slimrl.arguments.foreign_flags import _ROWS

    assert aiak.ROWS.keys() & _ROWS.keys() == chatlearn.ROWS.keys() & _ROWS.keys() == set()
    missing = [name for name in aiak.AIAK if f"--{name}" not in OWN and name not in OTHER_WORDS]
    assert missing == []


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("runtime_args.num_episode=200", "runtime_args.num_episode is PAI-ChatLearn's name: use --num-rollout."),
        ("runtime.num_episode=200", "runtime.num_episode is PAI-ChatLearn's name: use --num-rollout."),
        (
            "models.policy_trainer.optimizer.lr=2e-6",
            "models.policy_trainer.optimizer.lr is PAI-ChatLearn's name: use --lr.",
        ),
        (
            "models.policy_trainer.fsdp_size=8",
            "models.policy_trainer.fsdp_size is PAI-ChatLearn's name: use --use-megatron-fsdp, with"
            " --data-parallel-sharding-strategy.",
        ),
        (
            "--num_inference_per_prompt 32",
            "--num_inference_per_prompt is PAI-ChatLearn's name: use --n-samples-per-prompt.",
        ),
        (
            "models.policy.unknown_key=1",
            "models.policy.unknown_key is PAI-ChatLearn's name and is not in the table of its counterparts:"
            " docs/coming-from-pai-chatlearn.md has the table, and docs/flags.md all flags, written --flag value.",
        ),
    ],
)
def test_key_of_chatlearn_is_answered_with_a_flag(line, sentence):
    assert sentences(line) == [sentence]


# keys of ChatLearn's PPO, examples/megatron/configs/llama2/rlhf.yaml and vllm_rlhf.yaml
CHATLEARN_PPO = {
    "policy": "model_config_file num_gpu trainable batch_generation.ranking batch_generation.min_prompt_length"
    " free_memory force_free_memory",
    "reference": "model_config_file num_gpu trainable generation_batch_size free_memory",
    "reward": "model_config_file num_gpu trainable generation_batch_size free_memory",
    "value": "model_config_file num_gpu trainable generation_batch_size free_memory",
    "ppo_policy": "model_config_file num_gpu trainable lora.enable_lora lora.lora_dim lora.lora_layer"
    " lora.column_only_qkv lora.lora_dropout free_memory",
    "ppo_value": "model_config_file num_gpu trainable lora.enable_lora lora.lora_dim lora.lora_layer"
    " lora.column_only_qkv lora.lora_dropout free_memory",
}
CHATLEARN_RUNTIME = """colocation generation_batch_size train_micro_batch_size train_global_batch_size num_episode
 sample_per_episode num_training_epoch save_episode_interval data_path eval_data_path training_data_num_limit
 eval_data_num_limit eval_episode_interval data_checkpoint_path free_sync_collective_group exp_name output_dir debug
 validate_param_sync sync_memory_optimization_level"""
# of the files that these name, for each model
CHATLEARN_FILES = """load load_iteration num_layers hidden_size num_attention_heads ffn_hidden_size num_query_groups
 tensor_model_parallel_size pipeline_model_parallel_size use_distributed_optimizer gamma lam cliprange cliprange_value
 init_kl_coef fix_kl_coef target horizon scale_reward cliprange_reward lr min_lr lr_decay_style lr_decay_iters
 lr_warmup_iters weight_decay clip_grad adam_beta1 adam_beta2 recompute_granularity recompute_activations
 sequence_parallel tokenizer_model seq_length max_new_tokens num_inference_per_prompt bf16 swiglu"""


def test_each_key_of_chatlearns_ppo_has_a_row_and_is_answered_once():
    keys = [f"models.{model}.{key}" for model, of_model in CHATLEARN_PPO.items() for key in of_model.split()]
    keys += [f"runtime.{key}" for key in CHATLEARN_RUNTIME.split()]
    keys += [f"models.{model}.{key}" for model in CHATLEARN_PPO for key in CHATLEARN_FILES.split()]
    for key in keys:
        row = OTHER_WORDS[key.replace("_", "-")]
        assert sentences(f"{key}=1") == [row.sentence(key)]


# the fields of the classes of chatlearn/configs, by the part of a configuration that they describe
_EVERY_MODEL = "num_gpu num_cpu gpu_per_process cpu_per_process trainable generation_batch_size sync_frequency"
_PACKED = f"{_EVERY_MODEL} packing max_token_in_packing free_gpu_memory.offload_weights load num_replica"
_NETWORK = """attention_dropout hidden_dropout num_layers hidden_size num_attention_heads ffn_hidden_size
 num_query_groups max_position_embeddings swiglu normalization norm_epsilon position_embedding_type
 add_qkv_bias add_bias_linear rotary_base group_query_attention untie_embeddings_and_output_weights
 qk_layernorm vocab_size kv_channels num_experts moe_grouped_gemm moe_token_dispatcher_type
 moe_router_topk moe_router_load_balancing_type moe_router_dtype moe_router_pre_softmax
 moe_layer_freq moe_ffn_hidden_size moe_aux_loss_coeff q_lora_rank kv_lora_rank moe_router_num_groups
 moe_router_group_topk moe_shared_expert_intermediate_size moe_router_score_function
 moe_router_enable_expert_bias multi_latent_attention v_head_dim moe_router_topk_scaling_factor
 apply_rope_fusion disable_bf16_reduced_precision_matmul moe_shared_expert_overlap bias_swiglu_fusion
 bias_dropout_fusion rotary_scaling_factor"""
_MEGATRON = (
    " ".join(f"megatron_model_cfg.{name}" for name in _NETWORK.split())
    + """ tokenizer_type tokenizer_model seq_length sequence_parallel expert_tensor_parallel_size
 decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers moe_router_force_load_balancing
 bf16 seed attention_backend variable_seq_lengths tensor_model_parallel_size
 pipeline_model_parallel_size expert_model_parallel_size fsdp_size ulysses_sequence_parallel_size
 meta_init groupgemm use_expandable_segments"""
)
CHATLEARN_GRPO = {
    "runtime_args": """train_backend rollout_backend exp_name colocation concurrent_setup debug nsys output_dir
 profiler_dir data_path eval_data_path data_checkpoint_path num_episode sample_per_episode
 num_training_epoch train_micro_batch_size train_global_batch_size save_episode_interval
 enable_resume_training data_ratio data_shuffle data_rerank max_replay_episode replay_episode_offset
 consumed_samples max_data_ckpt_nums load_data_checkpoint_iteration stream_data_loader_type
 eval_episode_interval enable_eval_before_training coalesced_buffer_mb concurrent_comm
 param_sync_comm_type param_sync_max_workers routed_expert_regrouping_comm_type
 bucket_size_mb_in_memory_manager free_sync_collective_group cpu_schedule_strategy
 validate_param_sync policy_to_regroup_queue log_args_dict.log_dir log_args_dict.enable_tensorboard
 log_args_dict.tensorboard_dir log_args_dict.enable_wandb log_args_dict.wandb_dir
 log_args_dict.wandb_project log_args_dict.wandb_id log_args_dict.wandb_name
 log_args_dict.wandb_resume""",
    "models.policy": f"""{_PACKED} tensor_model_parallel_size pipeline_model_parallel_size expert_model_parallel_size
 max_new_tokens temperature top_p top_k presence_penalty frequency_penalty repetition_penalty
 eval_temperature eval_top_p eval_top_k eval_presence_penalty eval_frequency_penalty
 eval_repetition_penalty vllm_prompt_key vllm_input_ids_key max_num_batched_tokens
 max_seq_len_to_capture gpu_memory_utilization enforce_eager num_inference_per_prompt seq_length
 enable_thinking enable_stage_resume tokenizer seed""",
    "models.policy_trainer": f"""{_PACKED} {_MEGATRON} save save_interval log_interval train_iters
 use_checkpoint_opt_param_scheduler
 recompute_granularity use_distributed_optimizer no_load_optim no_load_rng no_load_scheduler finetune
 optimizer.lr optimizer.min_lr optimizer.weight_decay optimizer.clip_grad calculate_per_token_loss
 gradient_accumulation_fusion async_tensor_model_parallel_allreduce overlap_p2p_comm batch_p2p_comm
 deallocate_pipeline_outputs attention_softmax_in_fp32 pos_clip_ratio neg_clip_ratio diff_clip_ratio
 final_clip_ratio save_hf gradient_checkpointing learning_rate grad_clip use_group_sequence_policy
 train_micro_batch_size free_gpu_memory.free_grad_buffers free_gpu_memory.offload_optimizer_states""",
    "models.ref_policy": f"{_PACKED} {_MEGATRON}",
    "models.rollout_manager": f"""{_EVERY_MODEL} max_rollout_round max_gen_len num_inference_per_prompt
 mini_response_per_prompt rollout_ratio enable_thinking""",
}


@pytest.mark.parametrize("part", CHATLEARN_GRPO)
def test_each_field_of_chatlearns_configuration_has_a_row_and_is_answered_once(part):
    keys = [f"{part}.{key}" for key in CHATLEARN_GRPO[part].split()]
    assert [key for key in keys if key.replace("_", "-") not in OTHER_WORDS] == []
    assert sentences(" ".join(f"{key}=1" for key in keys)) == [
        OTHER_WORDS[key.replace("_", "-")].sentence(key) for key in keys
    ]


@pytest.mark.parametrize(
    ("key", "flag"),
    [
        ("models.policy_trainer.megatron_model_cfg.num_layers", "--num-layers"),
        ("models.policy_trainer.use_group_sequence_policy", "--advantage-estimator"),
        ("models.ref_policy.sequence_parallel", None),
        ("runtime_args.data_ratio", "--prompt-data"),
        ("runtime_args.param_sync_comm_type", "--update-weight-transfer-mode"),
        ("models.rollout_manager.max_rollout_round", "--partial-rollout"),
        ("models.value.load", "--critic-load"),
        ("models.ppo_value.load", "--critic-load"),
        ("models.ppo_value.lr", "--critic-lr"),
        ("models.value.num_gpu", "--critic-num-gpus-per-node"),
        ("models.reward.load", "--rm-model"),
        ("models.reward.num_gpu", "--rm-num-gpus"),
        ("models.reference.load", "--ref-load"),
        ("models.reference.num_gpu", None),
        ("models.ppo_policy.num_gpu", "--actor-num-gpus-per-node"),
        ("models.ppo_policy.lr", "--lr"),
        ("models.ppo_policy.gamma", "--gamma"),
        ("models.ppo_policy.lam", "--lambd"),
        ("models.ppo_policy.lora.lora_dim", "--lora-rank"),
        ("models.ppo_policy.num_layers", "--num-layers"),
        ("models.value.num_layers", None),
        ("models.policy.tensor_model_parallel_size", "--rollout-num-gpus-per-engine"),
        ("models.ppo_policy.tensor_model_parallel_size", "--tensor-model-parallel-size"),
        ("runtime.training_data_num_limit", "--prompt-data"),
        ("rlhf.num_ppo_episode", "--num-rollout"),
    ],
)
def test_key_of_chatlearns_ppo_is_answered_with_the_flag_of_its_model(key, flag):
    (sentence,) = sentences(f"{key}=1")
    assert (f"use {flag}" if flag else "has no counterpart") in sentence


def test_chatlearns_ppo_in_the_flags_of_its_page_passes_every_rule(recipe, tmp_path):
    (tmp_path / "judge").mkdir()
    config = {"architectures": ["LlamaForSequenceClassification"], "id2label": {"0": "LABEL_0"}, "vocab_size": 10}
    (tmp_path / "judge/config.json").write_text(json.dumps(config))
    (tmp_path / "judge/tokenizer.json").touch()
    translated = """--advantage-estimator ppo --rm-type reward_model --rm-model {dir}/judge --rm-colocate
     --rm-num-gpus 8 --critic-load {dir}/ref --micro-batch-size 2 --global-batch-size 512 --rollout-batch-size 1024
     --n-samples-per-prompt 1 --num-steps-per-rollout 2 --num-rollout 200 --save-interval 50 --save {dir}/ckpt
     --prompt-data {dir}/train.jsonl@[0:1000] --eval-interval 100 --run-name chatlearn --gamma 1 --lambd 0.95
     --eps-clip 0.2 --value-clip 0.1 --kl-coef 0.02 --lr 2.4e-7 --min-lr 1e-9 --critic-lr 5e-6 --lr-decay-style linear
     --lr-decay-iters 12000 --lr-warmup-iters 100 --weight-decay 0.01 --adam-beta1 0.9 --adam-beta2 0.95 --clip-grad 0.5
     --check-weight-update-equal --sequence-parallel --tensor-model-parallel-size 8 --rollout-num-gpus-per-engine 8
     --rollout-max-response-len 512"""
    dropped = {"--use-dynamic-batch-size", "--use-kl-loss"}
    line = recipe.line(translated, without="--max-tokens-per-gpu")
    args, problems = read_args([word for word in line if word not in dropped])
    assert [str(problem) for problem in problems] == []
    assert args.use_critic and args.use_reference and args.rm_colocate


def test_keys_of_model_files_with_the_same_name_are_flags():
    names = (*chatlearn_megatron.SAME_NAMES, *chatlearn_megatron.GRPO_NAMES)
    assert [name for name in names if f"--{name}" not in OWN] == []
