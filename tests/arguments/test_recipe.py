"""The Qwen3-4B recipe, flag for flag as users run it, is accepted with the documented meaning."""

from __future__ import annotations

import pickle
import re
import subprocess
import sys

import pytest

from slimrl.arguments import parse_args, read_args

SPLIT = "--actor-num-nodes 1 --actor-num-gpus-per-node 2 --rollout-num-gpus 6"


def test_colocated_recipe_is_accepted_and_derived(recipe):
    args, problems = read_args(recipe.line())
    assert problems == []
    assert args.global_batch_size == 256  # 32 prompts x 8 responses / 1 step
    assert args.num_steps_per_rollout == 1
    assert args.data_parallel_size == 4  # 8 GPUs / 2 tensor parallel
    assert args.rollout_num_gpus == 8  # the training GPUs
    assert args.padded_vocab_size == 152064  # 151936 = 593.5 x 256, so 594 x 256
    assert (args.kv_channels, args.num_query_groups, args.ffn_hidden_size) == (128, 8, 9728)
    assert (args.eps_clip, args.eps_clip_high) == (0.2, 0.28)
    assert (args.add_bias_linear, args.sequence_parallel, args.use_reference) == (False, True, True)
    assert (args.attention_dropout, args.hidden_dropout) == (0.0, 0.0)
    assert args.over_sampling_batch_size == 32
    assert args.start_rollout_id is None
    assert args.notes == []


def test_both_programs_accept_the_split_recipe(recipe):
    for entry in ("train.py", "train_async.py", "/somewhere/train_async.py"):
        args, problems = read_args(recipe.line(placement=SPLIT), entry=entry)
        assert problems == []
        assert (args.actor_num_gpus, args.data_parallel_size, args.rollout_num_gpus) == (2, 1, 6)


def test_eval_dataset_uses_the_eval_flag_then_the_rollout_flag(recipe):
    args, _ = read_args(recipe.line())
    (dataset,) = args.eval_datasets
    assert (dataset.name, dataset.path) == ("aime", f"{recipe.dir}/aime-2024.jsonl")
    assert (dataset.n_samples_per_eval_prompt, dataset.max_response_len, dataset.top_p) == (16, 16384, 0.7)
    assert (dataset.temperature, dataset.top_k) == (0.8, -1)
    assert (dataset.input_key, dataset.label_key, dataset.rm_type) == ("prompt", "label", "deepscaler")
    assert dataset.apply_chat_template


def test_flag_appended_to_the_recipe_wins(recipe):
    recipe.write_config(rope_theta=10000)
    args, problems = read_args(recipe.line("--rotary-base 10000"))
    assert problems == []
    assert args.rotary_base == 10000


def test_converter_accepts_only_the_model_flags(recipe):
    args, problems = read_args(recipe.model_line(), entry="tools/convert_hf_to_torch_dist.py")
    assert problems == []
    assert args.padded_vocab_size == 151936  # 1187 x 128, one GPU


def test_converter_rejects_flags_that_do_not_match_the_files(recipe):
    recipe.write_config(num_hidden_layers=28)
    _, problems = read_args(recipe.model_line(), entry="convert_hf_to_torch_dist.py")
    assert [str(problem) for problem in problems] == [
        "--num-layers is 36 and config.json says num_hidden_layers 28: give --num-layers 28."
    ]


def test_namespace_can_be_pickled_between_processes(recipe):
    args, _ = read_args(recipe.line())
    assert pickle.loads(pickle.dumps(args)) == args


def test_run_folder_is_named_by_flag_or_by_time_and_process(recipe):
    args, _ = read_args(recipe.line())
    assert re.fullmatch(r"runs/\d{8}-\d{6}-\d+", args.run_dir)
    dumps = "--save-debug-rollout-data {{run_dir}}/rollouts/{{rollout_id}}.jsonl"
    args, _ = read_args(recipe.line(f"--run-name quick --runs-dir out --use-tensorboard {dumps}"))
    assert (args.run_dir, args.tensorboard_dir) == ("out/quick", "out/quick/tensorboard")
    assert args.save_debug_rollout_data == "out/quick/rollouts/{rollout_id}.jsonl"
    args, _ = read_args(recipe.line("--use-tensorboard --tb-project-name p --tb-experiment-name e"))
    assert args.tensorboard_dir == "tensorboard_log/p/e"


def test_four_errors_are_reported_together_without_heavy_imports(recipe):
    line = recipe.line(
        "--global-batch-size 96 --rollout-shufle --custom-rm-path my_rewards.judge", without="--prompt-data"
    )
    line += ["--prompt-data", "/nowhere/train.jsonl"]
    program = """
import sys
from slimrl.arguments import parse_args
try:
    parse_args(sys.argv[1:])
finally:
    loaded = {"torch", "ray", "transformers", "sglang", "megatron", "numba", "aiohttp"} & sys.modules.keys()
    assert not loaded, loaded
"""
    done = subprocess.run([sys.executable, "-c", program, *line], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert done.stderr.splitlines() == [
        "train.py: 4 problems with the command line; nothing was started.",
        "  1. unknown flag --rollout-shufle: did you mean --rollout-shuffle?",
        "  2. --prompt-data /nowhere/train.jsonl does not exist (only / of it does): check the path.",
        "  3. --rollout-batch-size 32 x --n-samples-per-prompt 8 = 256 samples, but training takes"
        " --global-batch-size 96 x --num-steps-per-rollout 1 = 96: make the two products equal.",
        "  4. --custom-rm-path my_rewards.judge: there is no module my_rewards: check the spelling, or start from the"
        " folder that contains it.",
    ]


def test_parse_args_returns_a_valid_command_line(recipe):
    assert parse_args(recipe.line()).num_rollout == 3000


def test_invalid_command_line_exits_with_code_2(recipe, capsys):
    with pytest.raises(SystemExit) as stop:
        parse_args(recipe.line("--lr fast"))
    assert stop.value.code == 2
    assert "1. --lr fast is not a number." in capsys.readouterr().err


def test_help_lists_every_flag_and_starts_nothing(capsys):
    with pytest.raises(SystemExit) as stop:
        parse_args(["--help"])
    assert stop.value.code == 0
    assert "--rollout-batch-size integer" in capsys.readouterr().out
