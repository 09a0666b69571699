"""Rules about the critic. The recipe with a critic and its variants pass, each violation is one error."""

from __future__ import annotations

import json

import pytest

from slimrl.arguments import Arguments, read_args
from slimrl.arguments.checkpoints import MANIFEST_NAME, TRACKER_NAME, critic_start
from slimrl.arguments.layout import critic_layout, data_parallel_sizes
from slimrl.arguments.namespace import Context
from slimrl.arguments.validation.critic import critic_shares_gpus_with_engines
from slimrl.arguments.validation.parallel import gradients_can_be_sharded
from tests.arguments.conftest import QWEN3_4B_CONFIG
from tests.arguments.dry_run.test_files import safetensors

PPO = "--advantage-estimator ppo"
# rule -> (flags that pass when appended to the recipe, flags that do not with their error)
CASES: dict[str, tuple[list[str], list[tuple[str, str]]]] = {
    "critic_alpha_has_a_rank": (
        [
            "--advantage-estimator ppo --critic-lora-rank 8 --critic-lora-alpha 16",
            "--advantage-estimator ppo --critic-lora-rank 4 --lora-target-modules q_proj",
            "--advantage-estimator ppo --critic-lora-rank 4 --freeze-params-name-list embedding",
        ],
        [
            (
                "--advantage-estimator ppo --critic-lora-alpha 16",
                "--critic-lora-alpha belongs to --critic-lora-rank: add it, or leave --critic-lora-alpha out.",
            ),
        ],
    ),
    "critic_flags_have_a_critic": (
        [
            "--advantage-estimator ppo --gamma 0.99 --lambd 0.95 --value-clip 0.5 --normalize-advantages",
            "--advantage-estimator ppo --lambd 0.95 --critic-lambd 1 --num-critic-only-steps 3000",
            "--advantage-estimator ppo --critic-lr 1e-5 --critic-lr-warmup-iters 5 --num-critic-only-steps 3",
        ],
        [
            (
                "--critic-lambd 0.95",
                "--critic-lambd 0.95 belongs to a critic and --advantage-estimator is grpo: give --advantage-estimator"
                " ppo, or leave --critic-lambd out.",
            ),
            (
                "--advantage-estimator ppo --critic-lambd 1.5",
                "--critic-lambd 1.5 is too large: it must be at most 1.",
            ),
            ("--advantage-estimator ppo --lambd 1.5", "--lambd 1.5 is too large: it must be at most 1."),
            ("--advantage-estimator ppo --lambd -0.1", "--lambd -0.1 is too small: it must be at least 0."),
            ("--advantage-estimator ppo --gamma 1.5", "--gamma 1.5 is too large: it must be at most 1."),
            ("--advantage-estimator ppo --gamma -0.1", "--gamma -0.1 is too small: it must be at least 0."),
            (
                "--lambd 0.95",
                "--lambd 0.95 belongs to a critic and --advantage-estimator is grpo: give --advantage-estimator ppo, or"
                " leave --lambd out.",
            ),
            (
                "--critic-load elsewhere",
                "--critic-load elsewhere belongs to a critic and --advantage-estimator is grpo: give"
                " --advantage-estimator ppo, or leave --critic-load out.",
            ),
            (
                "--advantage-estimator ppo --loss-type custom_loss --custom-loss-function-path"
                " tests.megatron.custom_functions.loss --disable-compute-advantages-and-returns",
                "--advantage-estimator ppo trains a critic, and --loss-type custom_loss without advantages has no use"
                " for one: leave it out.",
            ),
        ],
    ),
    "advantages_have_one_lambda": (
        [
            "--advantage-estimator ppo --length-adaptive-gae-alpha 0.05",
            "--advantage-estimator ppo --length-adaptive-gae-alpha 0.05 --critic-lambd 0.95",
            "--advantage-estimator ppo --gamma 1 --length-adaptive-gae-alpha 0.05 --critic-lambd 1"  # VAPO
            " --num-critic-only-steps 50 --lr 1e-6 --critic-lr 2e-6 --eps-clip 0.2 --eps-clip-high 0.28"
            " --calculate-per-token-loss --positive-example-loss-coef 0.1 --positive-example-reward 1",
        ],
        [
            (
                "--advantage-estimator ppo --length-adaptive-gae-alpha 0.05 --lambd 0.95",
                "--length-adaptive-gae-alpha 0.05 gives the advantages of each response a lambda by its length, and"
                " --lambd 0.95 one for all: leave one of them out (the critic's lambda is --critic-lambd).",
            ),
            (
                "--advantage-estimator ppo --length-adaptive-gae-alpha 0.05 --custom-advantage-function-path"
                " examples.advantages.discounted",
                "--length-adaptive-gae-alpha 0.05 is for the built-in advantages, and --custom-advantage-function-path"
                " examples.advantages.discounted replaces them: leave it out.",
            ),
            (
                "--length-adaptive-gae-alpha 0.05",
                "--length-adaptive-gae-alpha 0.05 belongs to a critic and --advantage-estimator is grpo: give"
                " --advantage-estimator ppo, or leave --length-adaptive-gae-alpha out.",
            ),
            (
                "--advantage-estimator ppo --length-adaptive-gae-alpha 0",
                "--length-adaptive-gae-alpha 0 is too small: it must be above 0.",
            ),
        ],
    ),
    "critic_can_be_built": (
        ["--advantage-estimator ppo --only-train-params-name-list mlp"],
        [
            (
                "--advantage-estimator ppo --custom-model-provider-path tests.megatron.custom_functions.half_frozen",
                "--custom-model-provider-path tests.megatron.custom_functions.half_frozen builds the policy, and the"
                " critic of --advantage-estimator ppo would have other layers: leave it out, or use an estimator"
                " without a critic.",
            ),
        ],
    ),
    "critic_is_saved_apart": (
        ["--advantage-estimator ppo --critic-save {dir}/ckpt/value-model"],
        [
            (
                "--advantage-estimator ppo --critic-save {dir}/ckpt",
                "--critic-save {dir}/ckpt is also --save, where the policy's checkpoints have the same names:"
                " give another folder, or leave it out for the folder critic in it.",
            ),
            (
                "--advantage-estimator ppo --critic-save {dir}/ref",
                "--critic-save {dir}/ref holds --ref-load {dir}/ref: give another folder, or leave it out for the"
                " folder critic in --save.",
            ),
        ],
    ),
    "critic_schedule_is_complete": (
        ["--advantage-estimator ppo --critic-lr 1e-5 --min-lr 1e-6 --lr-decay-iters 50 --critic-lr-warmup-iters 5"],
        [
            (
                "--advantage-estimator ppo --critic-lr 1e-7 --min-lr 5e-7",
                "--min-lr 5e-07 is above --critic-lr 1e-07: lower it.",
            ),
            (
                "--advantage-estimator ppo --critic-lr 1e-7 --lr-warmup-init 5e-7",
                "--lr-warmup-init 5e-07 is above --critic-lr 1e-07: lower it.",
            ),
            (
                "--advantage-estimator ppo --critic-lr-warmup-iters 50 --lr-decay-iters 20",
                "--critic-lr-warmup-iters 50 is not below --lr-decay-iters 20: the decay begins after the warm-up.",
            ),
            (
                "--advantage-estimator ppo --num-critic-only-steps 3001",
                "--num-critic-only-steps 3001 is above --num-rollout 3000: lower it, or give the same number, which"
                " trains the critic alone.",
            ),
        ],
    ),
    "critic_has_weights": (
        ["--advantage-estimator ppo --debug-rollout-only"],
        [
            (
                "--advantage-estimator ppo --critic-load {dir}/nowhere",
                "--critic-load {dir}/nowhere does not exist (only {dir} of it does): give the folder of a critic's"
                " checkpoints or of a model.",
            )
        ],
    ),
}
CASES |= {
    "critic_fits_its_gpus": (
        [
            f"{PPO} --critic-num-nodes 1",
            f"{PPO} --critic-num-gpus-per-node 2",
            f"{PPO} --critic-num-gpus-per-node 8 --critic-num-nodes 2 --use-dynamic-batch-size --max-tokens-per-gpu 64",
        ],
        [
            (
                f"{PPO} --critic-num-gpus-per-node 16",
                "--critic-num-gpus-per-node 16 is more than the --num-gpus-per-node 8 of a node: lower it, or raise"
                " --num-gpus-per-node.",
            ),
            (
                f"{PPO} --critic-num-nodes 3 --critic-num-gpus-per-node 1 --actor-num-gpus-per-node 4"
                " --tensor-model-parallel-size 2 --rollout-num-gpus-per-engine 1",
                "--critic-num-nodes 3 x --critic-num-gpus-per-node 1 = 3 GPUs of the critic do not divide by"
                " --tensor-model-parallel-size 2, which also applies to the critic: give a multiple of 2 GPUs.",
            ),
            (
                f"{PPO} --critic-num-nodes 1 --critic-num-gpus-per-node 6",
                "--critic-num-gpus-per-node 6 gives the critic 6 GPUs, on which --global-batch-size 256 does not divide"
                " by data parallel size 3: choose a multiple of 3, or another number of GPUs.",
            ),
            (
                f"{PPO} --critic-num-gpus-per-node 8 --actor-num-gpus-per-node 4 --pipeline-model-parallel-size 2"
                " --num-virtual-stages-per-pipeline-rank 2 --rollout-batch-size 1 --n-samples-per-prompt 2",
                "--critic-num-gpus-per-node 8 gives the critic 8 GPUs, on which --global-batch-size 2 does not fill"
                " data parallel size 2 x 2 micro-batches of a virtual stage = 4: choose at least 4, or another number"
                " of GPUs.",
            ),
        ],
    ),
    "critic_shares_gpus_with_engines": (
        [f"{PPO} --critic-num-gpus-per-node 2 --colocate"],
        [
            (
                f"{PPO} --critic-num-gpus-per-node 4 --colocate --rollout-num-gpus-per-engine 8"
                " --actor-num-gpus-per-node 4",
                "--rollout-num-gpus-per-engine 8 does not divide the 4 GPUs of the policy, and one engine would be on"
                " GPUs of policy and critic: with --colocate and a critic on GPUs of its own choose a divisor.",
            ),
        ],
    ),
}
TESTED_APART = (
    "critic_overrides_have_an_effect",  # in test_config_file.py
    "critic_model_has_its_shape",
)
PASS = [(rule, line) for rule, (lines, _) in CASES.items() for line in lines]
FAIL = [(rule, *case) for rule, (_, cases) in CASES.items() for case in cases]


@pytest.mark.parametrize(("rule", "line"), PASS)
def test_valid_variant_passes(rule, line, recipe):
    assert [str(problem) for problem in read_args(recipe.line(line))[1]] == []


@pytest.mark.parametrize(("rule", "line", "sentence"), FAIL)
def test_violation_is_one_error(rule, line, sentence, recipe):
    assert [problem.sentence for problem in read_args(recipe.line(line))[1]] == [sentence.format(dir=recipe.dir)]


def checkpoint(root, name):
    """The files of a checkpoint that slimrl wrote, without contents."""
    folder = root / name
    folder.mkdir(parents=True)
    for file in ("metadata.json", ".metadata"):
        (folder / file).write_text("{}")
    content = {"program": "slimrl", "iteration": int(name[5:]), "files": {}}
    (folder / MANIFEST_NAME).write_text(json.dumps(content))
    (root / TRACKER_NAME).write_text(str(int(name[5:])))


def test_resumed_run_needs_the_critic_of_the_same_rollout(recipe, tmp_path):
    saved = tmp_path / "saved"
    flags = recipe.line(f"--advantage-estimator ppo --load {saved} --save {saved}")
    checkpoint(saved, "iter_0000004")
    checkpoint(saved / "critic", "iter_0000003")
    (problem,) = read_args(flags)[1]
    assert problem.sentence == (
        f"--load {saved} continues after rollout 4, and there is no critic of that rollout in {saved}/critic: give the"
        " folder of its checkpoints as --critic-load; or, for a policy that had no critic, --finetune, which starts"
        " anew from its weights with a new critic."
    )
    checkpoint(saved / "critic", "iter_0000004")
    assert read_args(flags)[1] == []


def test_folder_with_only_the_critic_of_a_killed_first_save_is_a_fresh_start(recipe, tmp_path):
    saved = tmp_path / "saved"
    checkpoint(saved / "critic", "iter_0000001")
    assert read_args(recipe.line(f"--advantage-estimator ppo --load {saved} --save {saved}"))[1] == []


def test_schedule_and_folder_of_the_critic_are_the_policys_by_default(recipe):
    args, problems = read_args(recipe.line("--advantage-estimator ppo --lr 2e-6 --lr-warmup-iters 7"))
    assert problems == []
    assert (args.critic_lr, args.critic_lr_warmup_iters, args.critic_save) == (2e-6, None, f"{recipe.dir}/ckpt/critic")


def test_critic_of_this_run_comes_before_the_one_that_it_started_from(recipe, tmp_path):
    saved, earlier = tmp_path / "saved", tmp_path / "earlier"
    for root in (saved, saved / "critic", earlier):
        checkpoint(root, "iter_0000004")
    line = f"--advantage-estimator ppo --load {saved} --save {saved} --critic-load {earlier}"
    args, problems = read_args(recipe.line(line))
    assert problems == [] and critic_start(args, 4).folder == saved / "critic/iter_0000004"
    for number in (0, 8):  # the number of the first rollout is the user's, the critic that of the checkpoint
        assert read_args(recipe.line(f"{line} --start-rollout-id {number}"))[1] == []


def test_folder_that_is_loaded_from_and_saved_to_may_be_empty_at_first(recipe, tmp_path):
    new = tmp_path / "critics"
    args, problems = read_args(recipe.line(f"--advantage-estimator ppo --critic-load {new} --critic-save {new}"))
    assert problems == [] and critic_start(args, None).folder == recipe.dir / "ref/release"


def test_folder_of_the_critic_without_a_folder_of_the_policy_is_an_error(recipe):
    _, problems = read_args(recipe.line("--advantage-estimator ppo --critic-save x", without="--save"))
    assert "--critic-save x is written whenever --save is, which is missing: give --save, or leave it out." in map(
        str, problems
    )


def test_number_that_is_left_out_is_the_policys(recipe):
    args, problems = read_args(recipe.line(f"{PPO} --critic-num-gpus-per-node 4"))
    assert problems == [] and (args.critic_num_nodes, args.critic_num_gpus, args.training_num_gpus) == (1, 4, 12)
    args, problems = read_args(recipe.line(f"{PPO} --critic-num-nodes 2"))
    assert problems == [] and (args.critic_num_gpus_per_node, args.critic_num_gpus) == (8, 16)
    assert read_args(recipe.line(PPO))[0].critic_num_gpus == 0  # in the policy's ranks


def test_engines_share_the_gpus_of_policy_and_critic(recipe):
    args, problems = read_args(recipe.line(f"{PPO} --critic-num-gpus-per-node 4 --colocate"))
    assert problems == [] and args.rollout_num_gpus == 12
    assert (
        read_args(recipe.line(f"{PPO} --critic-num-gpus-per-node 4 --num-rollout 0 --eval-interval 1"))[
            0
        ].rollout_num_gpus
        == 8
    )  # an evaluation has no critic


def test_sizes_of_data_parallelism_are_of_policy_and_critic(recipe):
    args, _ = read_args(recipe.line(f"{PPO} --critic-num-gpus-per-node 4"))  # tensor parallel size 2
    assert data_parallel_sizes(args) == (4, 2)
    assert data_parallel_sizes(read_args(recipe.line(PPO))[0]) == (4,)


def test_engines_with_stages_do_not_share_the_critics_gpus(recipe):
    args, _ = read_args(recipe.line(f"{PPO} --critic-num-gpus-per-node 2 --colocate"))
    args.sglang_options = {"pp_size": 2}
    (problem,) = critic_shares_gpus_with_engines(args, Context("train.py"))
    assert problem.sentence == (
        "--sglang-pp-size 2: engines with pipeline stages take weights only from trainers on their own GPUs, and with"
        " --colocate some are on the critic's: leave it out, or --critic-num-nodes and --critic-num-gpus-per-node."
    )


def test_weights_of_a_critic_on_one_gpu_cannot_be_sharded():
    flags = {"actor_num_gpus_per_node": 8, "critic_num_nodes": 1, "critic_num_gpus_per_node": 1}
    sharding = {"use_megatron_fsdp": True, "data_parallel_sharding_strategy": "optim_grads"}
    args = Arguments(advantage_estimator="ppo", actor_num_nodes=1, **flags, **sharding)
    assert list(gradients_can_be_sharded(args)) == []
    (problem,) = gradients_can_be_sharded(critic_layout(args), " of the critic")
    assert "leaves each weight of the critic on one GPU" in problem.sentence


def test_experts_of_a_critic_on_few_gpus_are_sharded_as_the_policys_are():
    args = Arguments(
        num_experts=8,
        expert_model_parallel_size=2,
        use_megatron_fsdp=True,
        data_parallel_sharding_strategy="optim_grads",
        advantage_estimator="ppo",
        actor_num_nodes=1,
        actor_num_gpus_per_node=8,
        critic_num_nodes=1,
        critic_num_gpus_per_node=2,
    )
    assert list(gradients_can_be_sharded(args)) == []  # four holders of each expert
    (problem,) = gradients_can_be_sharded(critic_layout(args), " of the critic")
    assert problem.sentence.startswith("--expert-model-parallel-size 2 leaves each expert of the critic on one GPU")


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({}, None),
        ({"architectures": ["Qwen3ForSequenceClassification"], "id2label": {"0": "score"}}, None),
        (
            {"num_hidden_layers": 12, "hidden_size": 1024},
            "--critic-load {dir}/critic has another network than the policy (--num-layers is 36 and config.json says"
            " num_hidden_layers 12; --hidden-size is 2560 and config.json says hidden_size 1024), and the critic has"
            " the policy's: give the folder of a model of that shape.",
        ),
        (
            {"architectures": ["Qwen3ForSequenceClassification"], "id2label": {"0": "a", "1": "b", "2": "c"}},
            "--critic-load {dir}/critic is a classifier with 3 outputs (id2label in its config.json), and a critic has"
            " one value: give a reward model with one output.",
        ),
    ],
)
def test_model_that_a_critic_starts_from_has_the_policys_shape_and_one_value(recipe, changes, sentence):
    folder = recipe.dir / "critic"
    folder.mkdir()
    safetensors(folder / "model.safetensors", {"a": [2]})
    (folder / "config.json").write_text(json.dumps({**QWEN3_4B_CONFIG, **changes}))
    found = [str(one) for one in read_args(recipe.line(f"{PPO} --critic-load {folder}"))[1]]
    assert found == ([] if sentence is None else [sentence.format(dir=recipe.dir)])
