"""Rules about files, slots and batches.

Each rule lets the recipe and its neighbours pass, and says what is wrong in one sentence.
"""

from __future__ import annotations

import pytest

from slimrl.arguments import read_args
from slimrl.arguments.rules import MODEL_RULES, TRAINING_RULES

THEMES = ("required", "served", "paths", "checkpoints", "layout", "batches", "sharding", "profiling")
FSDP = "--use-megatron-fsdp --data-parallel-sharding-strategy"
SPLIT = "--actor-num-nodes 1 --actor-num-gpus-per-node 2 --rollout-num-gpus 6"

# rule -> (what passes when appended to the recipe, what does not and the sentence for it)
CASES: dict[str, tuple[list[str], list[tuple[str, str]]]] = {
    "sharding_has_its_switch": (
        ["--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads --fsdp-double-buffer"],
        [
            (
                "--data-parallel-sharding-strategy optim",
                "--data-parallel-sharding-strategy belongs to --use-megatron-fsdp: add it, or leave"
                " --data-parallel-sharding-strategy out.",
            ),
            (
                "--suggested-communication-unit-size 1000",
                "--suggested-communication-unit-size belongs to --use-megatron-fsdp: add it, or leave"
                " --suggested-communication-unit-size out.",
            ),
            (
                "--use-megatron-fsdp",
                "--use-megatron-fsdp with --data-parallel-sharding-strategy no_shard shares nothing out: give optim,"
                " optim_grads or optim_grads_params, or leave --use-megatron-fsdp out.",
            ),
        ],
    ),
    "sharding_fits_the_run": (
        [f"{FSDP} optim --tensor-model-parallel-size 4", f"{FSDP} optim_grads_params --context-parallel-size 2"],
        [
            (
                f"{FSDP} optim --no-use-distributed-optimizer",
                "--use-megatron-fsdp shares out the optimizer's state in any case: leave --no-use-distributed-optimizer"
                " out.",
            ),
            (
                f"{FSDP} optim --pipeline-model-parallel-size 2",
                "--use-megatron-fsdp knows no pipeline stages: leave --pipeline-model-parallel-size out, or"
                " --use-megatron-fsdp.",
            ),
            (
                f"{FSDP} optim --freeze-params-name-list embedding",
                "--use-megatron-fsdp hooks into the gradient of every weight: leave --freeze-params-name-list out, or"
                " --use-megatron-fsdp.",
            ),
            (
                f"{FSDP} optim --use-precision-aware-optimizer",
                "--use-megatron-fsdp keeps its state in fp32: leave --use-precision-aware-optimizer out, or"
                " --use-megatron-fsdp.",
            ),
        ],
    ),
    "context_parallelism_has_one_level": (
        ["--context-parallel-size 2 --cp-comm-type a2a"],
        [
            (
                "--context-parallel-size 2 --cp-comm-type a2a+p2p",
                "--cp-comm-type a2a+p2p needs two levels of context parallelism and one is served: use p2p, all_gather"
                " or a2a.",
            )
        ],
    ),
    "profiling_flags_have_their_switch": (
        [
            "--use-pytorch-profiler --profile-step-start 1 --profile-step-end 2 --profile-ranks 1",
            "--record-memory-history --memory-snapshot-num-steps 1",
        ],
        [
            (
                "--profile-step-start 1",
                "--profile-step-start belongs to --use-pytorch-profiler: add it, or leave --profile-step-start out.",
            ),
            (
                "--memory-snapshot-dir {dir}",
                "--memory-snapshot-dir belongs to --record-memory-history: add it, or leave --memory-snapshot-dir out.",
            ),
        ],
    ),
    "profiler_has_something_to_profile": (
        [
            "--use-pytorch-profiler --profile-step-start 0 --profile-step-end 1"
            " --profile-target train_actor train_log_probs"
        ],
        [
            (
                "--use-pytorch-profiler --profile-step-start 3 --profile-step-end 3",
                "--profile-step-end 3 is not above --profile-step-start 3: no rollout would be profiled.",
            ),
            (
                "--use-pytorch-profiler --profile-step-end 4000 --profile-step-start 3500 --num-rollout 3500",
                "--profile-step-start 3500 is not below --num-rollout 3500: no rollout would be profiled; lower it.",
            ),
            (
                "--use-pytorch-profiler --profile-step-start 0 --profile-ranks 0 99",
                "--profile-ranks 99: there are the ranks 0 to 7.",
            ),
            (
                "--use-pytorch-profiler --profile-step-start 0 --profile-target train_overall train_actor",
                "--profile-target train_overall holds the other parts: give it alone, or the others without it.",
            ),
            (
                "--use-pytorch-profiler --profile-step-start 0 --debug-rollout-only",
                "--use-pytorch-profiler profiles training and --debug-rollout-only has none: leave one out.",
            ),
        ],
    ),
    "memory_record_has_training": (
        ["--record-memory-history"],
        [
            (
                "--record-memory-history --debug-rollout-only",
                "--record-memory-history is about training and --debug-rollout-only has none: leave one out.",
            )
        ],
    ),
    "recorded_rollouts_have_one_use": (
        [],
        [
            (
                "--load-debug-rollout-data-subsample 0.5 --rollout-batch-size 64",
                "--load-debug-rollout-data-subsample 0.5 is a part of recorded rollouts: give --load-debug-rollout-data"
                " too.",
            ),
        ],
    ),
    "checks_have_their_switch": (
        [
            "--ci-test --ci-disable-kl-checker --ci-train-rollout-logprob-abs-diff-threshold 0.01",
            "--ci-save-grad-norm {dir}/{{role}}_{{rollout_id}}_{{step_id}}.txt",
        ],
        [
            (
                "--ci-disable-kl-checker",
                "--ci-disable-kl-checker belongs to --ci-test: add it, or leave --ci-disable-kl-checker out.",
            ),
            (
                "--ci-save-grad-norm {dir}/{{rollout_id}}.txt",
                "--ci-save-grad-norm {dir}/{{rollout_id}}.txt gives every optimizer step of a rollout the same file:"
                " put {{step_id}} into the path.",
            ),
            (
                "--ci-save-grad-norm {dir}/{{rollout_id}}{{step_id}} --ci-load-grad-norm"
                " {dir}/{{rollout_id}}{{step_id}}",
                "--ci-load-grad-norm {dir}/{{rollout_id}}{{step_id}} is --ci-save-grad-norm too, which writes it anew:"
                " give another path.",
            ),
        ],
    ),
    "run_has_a_length": (["--num-epoch 2", "--num-rollout 0"], []),
    "values_are_served": (
        ["--pipeline-model-parallel-size 1", "--update-weight-mode full"],
        [
            (
                "--distributed-backend gloo",
                "--distributed-backend gloo is not served: the backend follows from the machine; leave it out.",
            ),
            (
                "--memory-recorder memray",
                "--memory-recorder memray is not served: --record-memory-history records the GPU's memory with torch;"
                " leave it out.",
            ),
        ],
    ),
    "outputs_can_be_written": (
        ["--runs-dir {dir}/new/runs", "--load {dir}/new/ckpt --save {dir}/new/ckpt"],
        [
            (
                "--runs-dir {dir}/train.jsonl/runs",
                "--runs-dir {dir}/train.jsonl/runs cannot be a folder, {dir}/train.jsonl is a file: choose another"
                " path.",
            )
        ],
    ),
    "dump_templates_name_the_rollout": (
        ["--save-debug-rollout-data {dir}/dump_{{rollout_id}}.jsonl"],
        [
            (
                "--save-debug-rollout-data {dir}/dump.jsonl",
                "--save-debug-rollout-data {dir}/dump.jsonl gives every rollout the same file: put {{rollout_id}} into"
                " the path.",
            ),
            (
                "--load-debug-rollout-data {dir}/dump_{{rollout_id}}.jsonl",
                "--load-debug-rollout-data {dir}/dump_{{rollout_id}}.jsonl matches no file: check the path.",
            ),
        ],
    ),
    "disk_transport_has_a_folder": (
        ["--update-weight-transport disk --update-weight-disk-dir {dir}/weights"],
        [
            (
                "--update-weight-transport disk",
                "--update-weight-transport disk needs --update-weight-disk-dir: give a folder.",
            ),
            (
                "--update-weight-disk-dir {dir}/weights",
                "--update-weight-disk-dir {dir}/weights is used by --update-weight-transport disk only: add it, or"
                " leave the folder out.",
            ),
        ],
    ),
    "slot_memory_is_planned_with": (
        ["--slot-memory-gib 80 --dry-run"],
        [
            (
                "--slot-memory-gib 80",
                "--slot-memory-gib 80 is what --dry-run plans with: add it, or leave this out.",
            )
        ],
    ),
    "rollout_has_slots": (
        ["--rollout-num-gpus 8"],
        [
            (
                "--rollout-num-gpus 4",
                "--rollout-num-gpus 4 differs from the --actor-num-nodes 1 x --actor-num-gpus-per-node 8 = 8 training"
                " slots that --colocate shares: leave it out, or leave --colocate out.",
            )
        ],
    ),
    "training_slots_fit_the_node": (
        ["--num-gpus-per-node 16"],
        [
            (
                "--num-gpus-per-node 4",
                "--actor-num-gpus-per-node 8 is more than the --num-gpus-per-node 4 of a node: lower it, or say how"
                " many slots a node has.",
            )
        ],
    ),
    "world_divides_by_model_slots": (
        ["--tensor-model-parallel-size 8", "--tensor-model-parallel-size 1"],
        [
            (
                "--actor-num-gpus-per-node 3 --rollout-num-gpus-per-engine 1 --rollout-batch-size 3",
                "--actor-num-nodes 1 x --actor-num-gpus-per-node 3 = 3 training slots do not divide by"
                " --tensor-model-parallel-size 2: choose a divisor.",
            ),
        ],
    ),
    "worker_environment_is_text": (
        ['--train-env-vars {{"NCCL_DEBUG":"INFO"}}'],
        [
            (
                '--train-env-vars {{"OMP_NUM_THREADS":4}}',
                '--train-env-vars has OMP_NUM_THREADS 4, which is not text: write "OMP_NUM_THREADS": "4".',
            )
        ],
    ),
    "async_is_split": (
        ["--update-weights-interval 1"],
        [
            (
                "--update-weights-interval 2",
                "--update-weights-interval 2 belongs to train_async.py; train.py pushes after every rollout: leave it"
                " out.",
            )
        ],
    ),
    "only_one_side_is_left_out": (
        ["--debug-rollout-only"],
        [
            (
                "--debug-train-only",
                "--debug-train-only needs rollouts to train on: give --load-debug-rollout-data, or a"
                " --rollout-function-path that needs no engines.",
            )
        ],
    ),
    "produced_equals_consumed": (
        ["--global-batch-size 256", "--num-steps-per-rollout 2", "--global-batch-size 64 --num-steps-per-rollout 4"],
        [
            (
                "--num-steps-per-rollout 3",
                "--rollout-batch-size 32 x --n-samples-per-prompt 8 = 256 samples, which --num-steps-per-rollout 3 does"
                " not divide: choose a divisor.",
            ),
            (
                "--global-batch-size 128",
                "--rollout-batch-size 32 x --n-samples-per-prompt 8 = 256 samples, but training takes"
                " --global-batch-size 128 x --num-steps-per-rollout 1 = 128: make the two products equal.",
            ),
        ],
    ),
    "global_batch_divides_over_slots": (
        ["--rollout-batch-size 1 --n-samples-per-prompt 4"],
        [
            (
                "--rollout-batch-size 1 --n-samples-per-prompt 6",
                "--global-batch-size 6 does not divide by data parallel size 4: choose a multiple of 4.",
            )
        ],
    ),
    "dynamic_batches_have_a_cap": (["--max-tokens-per-gpu 4608"], []),
    "over_sampling_reaches_the_batch": (
        ["--over-sampling-batch-size 64", "--over-sampling-batch-size 32"],
        [
            (
                "--over-sampling-batch-size 16",
                "--over-sampling-batch-size 16 is smaller than --rollout-batch-size 32: give at least 32.",
            )
        ],
    ),
    "cut_off_groups_have_one_fate": (
        ["--partial-rollout --mask-offpolicy-in-partial-rollout", "--discard-surplus-groups"],
        [
            (
                "--mask-offpolicy-in-partial-rollout",
                "--mask-offpolicy-in-partial-rollout masks what --partial-rollout continues: give that too, or leave it"
                " out.",
            ),
            (
                "--partial-rollout --discard-surplus-groups",
                "--discard-surplus-groups generates finished groups anew and --partial-rollout keeps even unfinished"
                " ones: give one of the two.",
            ),
        ],
    ),
}

# rules whose broken side is a flag taken away or a folder of another kind: below, or in a file of their own
TESTED_APART = {
    "model_flags_are_given",
    "training_flags_are_given",
    "saving_is_complete",
    "hf_models_agree",
    "saved_apart_from_a_model",
    "retention_fits_saving",
    "exports_have_a_place",
    "model_divides_by_tensor_parallel",
    "hf_checkpoint_exists",
    "weights_have_a_source",
    "ref_load_is_a_checkpoint",
    "load_is_a_checkpoint_or_new",
}


@pytest.mark.parametrize(("rule", "more"), [(rule, more) for rule, (good, _) in CASES.items() for more in good])
def test_what_keeps_a_rule_passes(recipe, rule, more):
    _, problems = read_args(recipe.line(more))
    assert [str(problem) for problem in problems] == []


@pytest.mark.parametrize(
    ("rule", "more", "sentence"), [(rule, *case) for rule, (_, bad) in CASES.items() for case in bad]
)
def test_what_breaks_a_rule_is_one_sentence(recipe, rule, more, sentence):
    _, problems = read_args(recipe.line(more))
    assert [str(problem) for problem in problems] == [sentence.format(dir=recipe.dir)]


def test_every_rule_of_these_themes_is_tested():
    rules = {rule.__name__ for rule in MODEL_RULES + TRAINING_RULES if rule.__module__.rpartition(".")[2] in THEMES}
    assert rules == set(CASES) | TESTED_APART


@pytest.mark.parametrize(
    ("without", "sentence"),
    [
        ("--num-rollout", "the run has no length: give --num-rollout or --num-epoch."),
        ("--prompt-data", "--prompt-data is missing: every run needs it."),
        ("--rollout-batch-size", "--rollout-batch-size is missing: every run needs it."),
        ("--rollout-max-response-len", "--rollout-max-response-len is missing: every run needs it."),
        ("--hf-checkpoint", "--hf-checkpoint is missing: every run needs it."),
        ("--rm-type", "nothing judges the responses: give --rm-type or --custom-rm-path."),
        (
            "--eval-prompt-data",
            "--eval-interval 5 has nothing to evaluate on: give --eval-prompt-data or --eval-config.",
        ),
        ("--save", "--save-interval 20 needs --save: give a folder."),
        (
            "--max-tokens-per-gpu",
            "--use-dynamic-batch-size needs --max-tokens-per-gpu: give the tokens one forward pass may hold.",
        ),
        (
            "--use-dynamic-batch-size",
            "--max-tokens-per-gpu 9216 caps dynamic batches only: add --use-dynamic-batch-size, or leave it out.",
        ),
        (
            "--colocate",
            "the engines have no slots: give --rollout-num-gpus (slots of their own) or --colocate (shared slots).",
        ),
        (
            "--recompute-method",
            "--recompute-granularity full needs --recompute-method and --recompute-num-layers, for example uniform"
            " and 1.",
        ),
        (
            "--num-layers",
            "--num-layers missing: give the flags that describe the model, for example from scripts/models/.",
        ),
    ],
)
def test_a_flag_taken_away_is_one_sentence(recipe, without, sentence):
    _, problems = read_args(recipe.line(without=without))
    assert [str(problem) for problem in problems] == [sentence]


def test_a_flag_with_a_bad_value_is_not_also_called_missing(recipe):
    _, problems = read_args(recipe.line("--rollout-batch-size many", without="--rollout-batch-size"))
    assert [str(problem) for problem in problems] == ["--rollout-batch-size many is not a whole number."]


def test_static_batches_divide_by_slots_and_micro_batch(recipe):
    line = recipe.line("--micro-batch-size 3", without="--use-dynamic-batch-size")
    at = line.index("--max-tokens-per-gpu")
    del line[at : at + 2]
    _, problems = read_args(line)
    assert [str(problem) for problem in problems] == [
        "--global-batch-size 256 does not divide by data parallel size 4 x --micro-batch-size 3 = 12: choose a"
        " multiple of 12."
    ]
    line[line.index("--micro-batch-size") + 1] = "8"
    assert read_args(line)[1] == []


def test_one_step_per_rollout_is_the_default(recipe):
    args, problems = read_args(recipe.line(without="--num-steps-per-rollout"))
    assert problems == []
    assert (args.global_batch_size, args.num_steps_per_rollout) == (256, 1)
    args, problems = read_args(recipe.line("--global-batch-size 64", without="--num-steps-per-rollout"))
    assert problems == []
    assert args.num_steps_per_rollout == 4
    _, problems = read_args(recipe.line("--global-batch-size 96", without="--num-steps-per-rollout"))
    assert [str(problem) for problem in problems] == [
        "--rollout-batch-size 32 x --n-samples-per-prompt 8 = 256 samples, which --global-batch-size 96 does not"
        " divide: choose a divisor."
    ]


def test_train_async_refuses_shared_slots(recipe):
    _, problems = read_args(recipe.line(), entry="train_async.py")
    assert [str(problem) for problem in problems] == [
        "--colocate lets training and generation take turns, and train_async.py runs them at once: give"
        " --rollout-num-gpus instead, or start train.py."
    ]
    line = recipe.line("--update-weights-interval 2", placement=SPLIT)
    assert read_args(line, entry="train_async.py")[1] == []


def test_recorded_rollouts_need_no_engines(recipe):
    (recipe.dir / "dump_0.jsonl").touch()
    line = recipe.line("--load-debug-rollout-data {dir}/dump_{{rollout_id}}.jsonl", without="--colocate")
    args, problems = read_args(line)
    assert problems == []
    assert args.debug_train_only
    _, problems = read_args([*line, "--debug-rollout-only"])
    assert [str(problem) for problem in problems] == [
        "--debug-train-only (implied by --load-debug-rollout-data) and --debug-rollout-only leave nothing to run:"
        " give one."
    ]


def test_recorded_rollouts_are_replayed_beside_engines_or_without_whole_or_in_part(recipe):
    (recipe.dir / "dump_0.jsonl").touch()
    dumps = "{dir}/dump_{{rollout_id}}.jsonl"
    args, problems = read_args(recipe.line(f"--load-forge-rollout-data {dumps}"))
    assert problems == [] and not args.debug_train_only
    assert args.replayed_rollouts == dumps.format(dir=recipe.dir)
    said = {
        f"--load-forge-rollout-data {dumps} --load-debug-rollout-data {dumps}": "--load-forge-rollout-data trains on"
        " recorded rollouts with engines running and --load-debug-rollout-data without: give one of them.",
        f"--load-forge-rollout-data {dumps} --debug-rollout-only": "--load-forge-rollout-data trains beside running"
        " engines and --debug-rollout-only leaves one side out: leave --debug-rollout-only out.",
        "--load-forge-rollout-data {dir}/none_{{rollout_id}}": "--load-forge-rollout-data {dir}/none_{{rollout_id}}"
        " matches no file: check the path.",
    }
    for more, sentence in said.items():
        assert [str(problem) for problem in read_args(recipe.line(more))[1]] == [sentence.format(dir=recipe.dir)]

    # a quarter of 32 groups of 8
    part = f"--load-debug-rollout-data {dumps} --load-debug-rollout-data-subsample 0.25"
    args, problems = read_args(recipe.line(part))
    assert problems == [] and (args.prompts_trained_per_rollout, args.global_batch_size) == (8, 64)
    _, problems = read_args(recipe.line(f"{part} --global-batch-size 256"))
    assert [str(problem) for problem in problems] == [
        "--rollout-batch-size 32 x --load-debug-rollout-data-subsample 0.25 x --n-samples-per-prompt 8 = 64 samples,"
        " but training takes --global-batch-size 256 x --num-steps-per-rollout 1 = 256: make the two products equal."
    ]


def test_all_details_go_into_one_folder_but_for_what_has_a_place(recipe):
    args, problems = read_args(recipe.line("--dump-details {dir}/all --save-debug-rollout-data {dir}/{{rollout_id}}"))
    assert problems == []
    assert args.save_debug_rollout_data == f"{recipe.dir}/{{rollout_id}}"
    assert args.save_debug_train_data == f"{recipe.dir}/all/train_data/{{rollout_id}}.pt"
    args, _ = read_args(recipe.line("--dump-details {dir}/all"))
    assert args.save_debug_rollout_data == f"{recipe.dir}/all/rollout_data/{{rollout_id}}.jsonl"
    same = "--save-debug-rollout-data {dir}/{{rollout_id}} --save-debug-train-data {dir}/{{rollout_id}}"
    assert [str(problem) for problem in read_args(recipe.line(same))[1]] == [
        f"--save-debug-train-data {recipe.dir}/{{rollout_id}} is --save-debug-rollout-data too: one would overwrite the"
        " other; give two paths."
    ]


@pytest.mark.parametrize("content", ["[]", "3", "null"])
def test_a_config_json_that_holds_no_object_is_refused(recipe, content):
    (recipe.dir / "hf" / "config.json").write_text(content)
    _, problems = read_args(recipe.line())
    assert [str(problem) for problem in problems] == [
        f"--hf-checkpoint: {recipe.dir}/hf/config.json is not a JSON object: copy the model again."
    ]
