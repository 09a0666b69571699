"""Rules about GPUs, batches and how the weights are shared out.

Each rule lets the recipe and its neighbours pass, and says what is wrong in one sentence.
"""

from __future__ import annotations

import pytest

from slimrl.arguments import read_args

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
    "gpu_memory_is_planned_with": (
        ["--gpu-memory-gib 80 --dry-run"],
        [
            (
                "--gpu-memory-gib 80",
                "--gpu-memory-gib 80 is what --dry-run plans with: add it, or leave this out.",
            )
        ],
    ),
    "rollout_has_gpus": (["--rollout-num-gpus 8", "--rollout-num-gpus 4", "--rollout-num-gpus 16"], []),
    "training_gpus_fit_the_node": (
        ["--num-gpus-per-node 16"],
        [
            (
                "--num-gpus-per-node 4",
                "--actor-num-gpus-per-node 8 is more than the --num-gpus-per-node 4 of a node: lower it, or say how"
                " many GPUs a node has.",
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
                "--train-env-vars has NVTE_ALLOW_NONDETERMINISTIC_ALGO 1, with which kernels are free to differ from"
                " run to run: --deterministic-mode sets 0 by itself, leave NVTE_ALLOW_NONDETERMINISTIC_ALGO or the mode"
                " out.",
            )
        ],
    ),
    "placement_chooses_the_gpus": (
        ['--train-env-vars {{"OMP_NUM_THREADS":"4"}}'],
        [
            (
                '--train-env-vars {{"CUDA_VISIBLE_DEVICES":"0"}}',
                "--train-env-vars has CUDA_VISIBLE_DEVICES, and every rank sees the GPU that Ray reserved for it: leave"
                " it out; set it where Ray is started to keep Ray off some GPUs.",
            )
        ],
    ),
    "async_is_split": (
        ["--update-weights-interval 1"],
        [
            (
                "--update-weights-interval 2",
                "--update-weights-interval 2 belongs to train_async.py; train.py updates weights after every rollout:"
                " leave it out.",
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
    "global_batch_divides_over_gpus": (
        ["--rollout-batch-size 1 --n-samples-per-prompt 4"],
        [
            (
                "--rollout-batch-size 1 --n-samples-per-prompt 6",
                "--global-batch-size 6 does not divide by data parallel size 4: choose a multiple of 4.",
            )
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
                "--discard-surplus-groups generates finished groups again and --partial-rollout keeps even unfinished"
                " ones: give one of the two.",
            ),
        ],
    ),
}

# rules whose broken side is a flag taken away or a folder of another kind: below, or in a file of their own
TESTED_APART = {
    "model_divides_by_tensor_parallel",
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
        "--colocate lets training and generation take turns, and train_async.py runs them at once: give"
        " --rollout-num-gpus instead, or start train.py."
    ]
    line = recipe.line("--update-weights-interval 2", placement=SPLIT)
    assert read_args(line, entry="train_async.py")[1] == []


@pytest.mark.parametrize("gpus", [4, 16])
def test_gpus_of_engines_beside_colocate_are_not_used_and_said_to_be_so(recipe, gpus):
    args, _ = read_args(recipe.line(f"--rollout-num-gpus {gpus}"))
    assert args.rollout_num_gpus == 8
    said = f"--rollout-num-gpus {gpus} is not used: with --colocate the engines have the 8 training GPUs."
    assert args.notes.count(said) == 1


def test_the_same_number_of_gpus_twice_is_worth_no_line(recipe):
    args, _ = read_args(recipe.line("--rollout-num-gpus 8"))
    assert not [note for note in args.notes if "--rollout-num-gpus" in note]


def test_engines_alone_have_the_gpus_that_they_are_given(recipe):
    args, problems = read_args(recipe.line("--rollout-num-gpus 4 --debug-rollout-only"))
    assert problems == []
    assert args.rollout_num_gpus == 4
