"""Rules about GPUs, batches and the distribution of weights.

The recipe and its variants pass, each violation is one error.
"""

from __future__ import annotations

import pytest

from slimrl.arguments import read_args

FSDP = "--use-megatron-fsdp --data-parallel-sharding-strategy"
VIRTUAL = "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --rollout-batch-size 1"
SPLIT = "--actor-num-nodes 1 --actor-num-gpus-per-node 2 --rollout-num-gpus 6"

# rule -> (flags that pass when appended to the recipe, flags that do not with their error)
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
                "--use-megatron-fsdp with --data-parallel-sharding-strategy no_shard shards nothing: give optim,"
                " optim_grads or optim_grads_params, or leave --use-megatron-fsdp out.",
            ),
        ],
    ),
    "sharding_fits_the_run": (
        [
            f"{FSDP} optim --tensor-model-parallel-size 4",
            f"{FSDP} optim_grads_params --context-parallel-size 2 --freeze-params-name-list embedding",
        ],
        [
            (
                f"{FSDP} optim --no-use-distributed-optimizer",
                "--use-megatron-fsdp always shards the optimizer state: leave --no-use-distributed-optimizer out.",
            ),
            (
                f"{FSDP} optim --pipeline-model-parallel-size 2",
                "--use-megatron-fsdp does not support pipeline stages: leave --pipeline-model-parallel-size out, or"
                " --use-megatron-fsdp.",
            ),
            (
                f"{FSDP} optim --freeze-params-name-list embedding",
                "--use-megatron-fsdp with --data-parallel-sharding-strategy optim reduces the gradients of frozen"
                " weights, which have none: leave --freeze-params-name-list out, or also shard gradients"
                " (optim_grads).",
            ),
            (
                f"{FSDP} optim_grads --tensor-model-parallel-size 8",
                "--use-megatron-fsdp with --data-parallel-sharding-strategy optim_grads and"
                " --tensor-model-parallel-size 8 leaves each weight on one GPU, where it cannot shard its gradients:"
                " leave --use-megatron-fsdp out, or use --data-parallel-sharding-strategy optim.",
            ),
            (
                f"{FSDP} optim --use-precision-aware-optimizer",
                "--use-megatron-fsdp keeps its state in fp32: leave --use-precision-aware-optimizer out, or"
                " --use-megatron-fsdp.",
            ),
        ],
    ),
    "plan_flags_belong_to_dry_run": (
        ["--gpu-memory-gib 80 --dry-run-resources plan.json --dry-run"],
        [
            (
                "--gpu-memory-gib 80",
                "--gpu-memory-gib 80 is used by --dry-run only: add --dry-run, or leave it out.",
            ),
            (
                "--dry-run-resources plan.json",
                "--dry-run-resources plan.json is used by --dry-run only: add --dry-run, or leave it out.",
            ),
        ],
    ),
    "rollout_has_gpus": (["--rollout-num-gpus 8", "--rollout-num-gpus 4", "--rollout-num-gpus 16"], []),
    "training_gpus_fit_the_node": (
        ["--num-gpus-per-node 16"],
        [
            (
                "--num-gpus-per-node 4",
                "--actor-num-gpus-per-node 8 is more than the --num-gpus-per-node 4 of a node: lower it, or raise"
                " --num-gpus-per-node.",
            )
        ],
    ),
    "world_divides_by_model_gpus": (
        ["--tensor-model-parallel-size 8", "--tensor-model-parallel-size 1"],
        [
            (
                "--actor-num-gpus-per-node 3 --rollout-num-gpus-per-engine 1 --rollout-batch-size 3",
                "--actor-num-nodes 1 x --actor-num-gpus-per-node 3 = 3 training GPUs do not divide by"
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
    "deterministic_mode_is_not_undone": (
        [
            "--deterministic-mode",
            '--deterministic-mode --train-env-vars {{"NCCL_ALGO":"Tree","CUBLAS_WORKSPACE_CONFIG":":16:8"}}',
            '--train-env-vars {{"NVTE_ALLOW_NONDETERMINISTIC_ALGO":"1"}}',
        ],
        [
            (
                '--deterministic-mode --train-env-vars {{"NVTE_ALLOW_NONDETERMINISTIC_ALGO":"1"}}',
                "--train-env-vars has NVTE_ALLOW_NONDETERMINISTIC_ALGO 1, which allows nondeterministic kernels:"
                " --deterministic-mode sets 0; leave NVTE_ALLOW_NONDETERMINISTIC_ALGO or --deterministic-mode out.",
            )
        ],
    ),
    "train_env_sets_no_visible_devices": (
        ['--train-env-vars {{"OMP_NUM_THREADS":"4"}}'],
        [
            (
                '--train-env-vars {{"CUDA_VISIBLE_DEVICES":"0"}}',
                "--train-env-vars has CUDA_VISIBLE_DEVICES, and Ray assigns one GPU to every rank: leave it out; to"
                " use fewer GPUs of a node, set it for ray start.",
            )
        ],
    ),
    "async_excludes_colocate": (
        ["--update-weights-interval 1"],
        [
            (
                "--update-weights-interval 2",
                "--update-weights-interval 2 belongs to train_async.py; train.py updates weights after every rollout:"
                " leave it out.",
            )
        ],
    ),
    "debug_only_flags_exclude_each_other": (
        ["--debug-rollout-only"],
        [
            (
                "--debug-train-only",
                "--debug-train-only needs rollouts to train on: give --load-debug-rollout-data, or a"
                " --rollout-function-path that needs no engines.",
            )
        ],
    ),
    "rollout_samples_equal_trained_samples": (
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
    "global_batch_divides_over_gpus": (
        ["--rollout-batch-size 1 --n-samples-per-prompt 4", f"{VIRTUAL} --n-samples-per-prompt 6"],
        [
            (
                "--rollout-batch-size 1 --n-samples-per-prompt 6",
                "--global-batch-size 6 does not divide by data parallel size 4: choose a multiple of 4.",
            ),
            (
                f"{VIRTUAL} --n-samples-per-prompt 5",
                "--global-batch-size 5 does not divide by data parallel size 2: choose a multiple of 2.",
            ),
            (
                f"{VIRTUAL} --n-samples-per-prompt 2",
                "--global-batch-size 2 does not fill data parallel size 2 x 2 micro-batches of a virtual stage = 4:"
                " choose at least 4.",
            ),
        ],
    ),
    "dynamic_batches_have_a_cap": (["--max-tokens-per-gpu 4608"], []),
    "dynamic_batches_have_no_fixed_size": (
        [],
        [
            (
                "--micro-batch-size 1",
                "--micro-batch-size 1 is a fixed number of samples and --use-dynamic-batch-size fills each forward pass"
                " by --max-tokens-per-gpu: leave one of the two out.",
            )
        ],
    ),
    "over_sampling_reaches_the_batch": (
        ["--over-sampling-batch-size 64", "--over-sampling-batch-size 32"],
        [
            (
                "--over-sampling-batch-size 16",
                "--over-sampling-batch-size 16 is smaller than --rollout-batch-size 32: give at least 32.",
            )
        ],
    ),
    "partial_rollout_flags_are_exclusive": (
        ["--partial-rollout --mask-offpolicy-in-partial-rollout", "--discard-surplus-groups"],
        [
            (
                "--mask-offpolicy-in-partial-rollout",
                "--mask-offpolicy-in-partial-rollout needs --partial-rollout: add it, or leave the flag out.",
            ),
            (
                "--partial-rollout --discard-surplus-groups",
                "--discard-surplus-groups regenerates finished groups and --partial-rollout keeps even unfinished"
                " ones: give one of the two.",
            ),
        ],
    ),
}

# rules whose violation is a removed flag or another kind of folder: tested below, or in a separate file
TESTED_APART = {
    "model_divides_by_tensor_parallel",
}


@pytest.mark.parametrize(("rule", "more"), [(rule, more) for rule, (good, _) in CASES.items() for more in good])
def test_valid_flags_are_accepted(recipe, rule, more):
    _, problems = read_args(recipe.line(more))
    assert [str(problem) for problem in problems] == []


@pytest.mark.parametrize(
    ("rule", "more", "sentence"), [(rule, *case) for rule, (_, bad) in CASES.items() for case in bad]
)
def test_each_violation_is_one_error(recipe, rule, more, sentence):
    _, problems = read_args(recipe.line(more))
    assert [str(problem) for problem in problems] == [sentence.format(dir=recipe.dir)]


def test_static_batches_divide_by_gpus_and_micro_batch(recipe):
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
    line += VIRTUAL.split()
    _, problems = read_args([*line, "--n-samples-per-prompt", "8"])
    assert [str(problem) for problem in problems] == [
        "--global-batch-size 8 does not divide by data parallel size 2 x 2 micro-batches of a virtual stage x"
        " --micro-batch-size 8 = 32: choose a multiple of 32."
    ]
    assert read_args([*line, "--n-samples-per-prompt", "32"])[1] == []


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


def test_train_async_refuses_shared_gpus(recipe):
    _, problems = read_args(recipe.line(), entry="train_async.py")
    assert [str(problem) for problem in problems] == [
        "--colocate alternates training and generation, and train_async.py runs them concurrently: give"
        " --rollout-num-gpus instead, or start train.py."
    ]
    line = recipe.line("--update-weights-interval 2", placement=SPLIT)
    assert read_args(line, entry="train_async.py")[1] == []


@pytest.mark.parametrize("gpus", [4, 16])
def test_engine_gpu_count_with_colocate_is_ignored_with_a_note(recipe, gpus):
    args, _ = read_args(recipe.line(f"--rollout-num-gpus {gpus}"))
    assert args.rollout_num_gpus == 8
    said = f"--rollout-num-gpus {gpus} is ignored: with --colocate the engines use the 8 training GPUs."
    assert args.notes.count(said) == 1


def test_repeated_equal_gpu_count_gives_no_note(recipe):
    args, _ = read_args(recipe.line("--rollout-num-gpus 8"))
    assert not [note for note in args.notes if "--rollout-num-gpus" in note]


def test_engine_only_run_has_the_given_gpus(recipe):
    args, problems = read_args(recipe.line("--rollout-num-gpus 4 --debug-rollout-only"))
    assert problems == []
    assert args.rollout_num_gpus == 4
