"""`--dry-run` as a user runs it: its output, errors, duration, and that it starts nothing."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from slimrl.arguments import read_args
from slimrl.arguments.dry_run import Machine, PlanContext, make_plan, plan_errors, warnings
from slimrl.arguments.dry_run.render import render
from slimrl.arguments.dry_run.server_lines import table
from slimrl.engines.sglang.server_args import server_flags
from tests.arguments.conftest import COLOCATED, SPLIT, make_checkpoint
from tests.arguments.dry_run.test_files import safetensors

ROOT = Path(__file__).resolve().parents[3]
GIB = 2**30
HERE = PlanContext(Machine(gpus=(), host=None))
H100S = PlanContext(Machine(gpus=(80 * GIB,) * 8, host=None))


def plan_of(recipe, more="", *, placement=COLOCATED, around=HERE, entry="train.py"):
    args, problems = read_args(
        recipe.line(f"--dry-run --run-name x {more}", placement=placement),
        entry=entry,
        passthrough={"sglang": server_flags},
    )
    assert problems == []
    return make_plan(args, entry, around)


def sentences(plan):
    return [problem.sentence for problem in plan_errors(plan)]


def test_recipe_plan_shows_its_numbers(recipe):
    make_checkpoint(recipe.dir / "ckpt", "iter_0000019")
    text = render(plan_of(recipe, "--bf16 --gpu-memory-gib 80 --sglang-mem-fraction-static 0.4"))
    flat = re.sub(r"[ ]+", " ", text)
    for expected in (
        "rollouts 20 to 2999 (2980)",
        "training 8 0: 0-7",
        "TP 2 shard each layer's matrices [0,1] [2,3] [4,5] [6,7]",
        "DP 4 copies of the model, each with its own samples [0,2,4,6] [1,3,5,7]",
        "samples 256 32 x --n-samples-per-prompt 8",
        "samples per step and data parallel rank 64 256 / 4 ranks",
        "parameters 4,022,468,096 4.02 B",
        "on one training GPU 2,011,495,936 2.01 B",
        f"weights --load {recipe.dir}/ckpt/iter_0000019 (after rollout 19)",
        "continues with rollout 20",
        "slimrl.rollout.sglang_rollout.generate_rollout",
        "3 0: 6-7 45 runs/x/logs/sglang3.log",
        f"--model-path {recipe.dir}/hf --tp-size 2 --mem-fraction-static 0.4",
        "weights 3.75 GiB",
        "gradients 7.49 GiB",
        "optimizer state 5.62 GiB",
        "KV cache 72.0 KiB per token",
        "0.4 of the GPU = 32.00 GiB",
    ):
        assert expected in flat, expected
    assert re.search(r"rollout_function\.py:\d+", text)


def test_split_roles_show_their_own_nodes(recipe):
    flat = re.sub(r"[ ]+", " ", render(plan_of(recipe, "--rollout-num-gpus 14", placement=SPLIT)))
    assert "training 2 0: 0-1" in flat
    assert "engines 14 0: 2-7; 1: 0-7" in flat
    assert "16 GPUs, on 2 nodes of 8 GPUs each" in flat


PPO = "--advantage-estimator ppo --bf16 --gpu-memory-gib 80 --critic-num-gpus-per-node"


def test_critic_shows_its_gpus_and_memory(recipe):
    plan = plan_of(recipe, f"{PPO} 4 --use-kl-loss --kl-loss-coef 0.01", placement=SPLIT)
    flat = re.sub(r"[ ]+", " ", render(plan))
    assert "training 2 0: 0-1" in flat and "critic 4 0: 2-5" in flat and "engines 6 0: 6-7; 1: 0-3" in flat
    assert "12 GPUs, on 2 nodes" in flat and "the critic's 4 ranks: the same, with DP 2" in flat
    body = 2_011_495_936 - 75_968 * 2560  # of a policy on two tensor-parallel GPUs, without half of the tied embedding
    value = body + 75_968 * 2560 + 2560  # the embedding of the first layer, and the head
    (critic,) = plan.memory.critic
    assert (critic.parameters, critic.weights, critic.gradients) == (value, 2 * value, 4 * value)
    assert critic.optimizer == pytest.approx(12 * value / 2, rel=1e-6)  # over two data-parallel ranks
    rows = {line.strip()[:17].strip(): line for line in render(plan).splitlines()}
    assert rows["weights"].split()[-4:] == ["3.75", "GiB", "3.75", "GiB"]
    (policy,) = plan.memory.stages
    assert policy.critic == 0 and policy.host > 0 and critic.host == 0  # the reference is the policy's


def test_critic_that_does_not_fit_and_gpus_that_are_missing_are_rejected(recipe):
    more = f"{PPO} 2".replace("80", "34")
    found = sentences(plan_of(recipe, more, placement="--actor-num-gpus-per-node 8 --rollout-num-gpus 2"))
    assert len(found) == 1
    assert re.match(
        r"the critic needs 35.32 GiB of a GPU that has 34.00 GiB \(--gpu-memory-gib\): weights 3.75", found[0]
    )
    assert "give it more GPUs (--critic-num-nodes)" in found[0]
    around = PlanContext(Machine(gpus=(), host=None), nodes=[8])
    found = sentences(plan_of(recipe, f"{PPO} 4", placement=SPLIT, around=around))
    assert found == [
        "the flags ask for 12 GPUs (2 for training and 4 for the critic, 6 for engines) and the Ray cluster has 8:"
        " start Ray with more, or lower --actor-num-nodes, --actor-num-gpus-per-node or --rollout-num-gpus, or"
        " --critic-num-gpus-per-node."
    ]


@pytest.fixture
def reward_model_folder(tmp_path):
    """A reward model of 3000 weights in bfloat16."""
    folder = tmp_path / "judge"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForSequenceClassification"]}))
    (folder / "tokenizer.json").write_text("{}")
    safetensors(
        folder / "model.safetensors", {"model.layers.0.mlp.up_proj.weight": [50, 40], "score.weight": [1, 1000]}
    )
    return folder


@pytest.mark.parametrize(("placement", "total", "where"), [(SPLIT, 12, "1: 2-3"), (COLOCATED, 10, "1: 0-1")])
def test_reward_model_has_its_own_gpus_servers_and_memory(recipe, reward_model_folder, placement, total, where):
    more = f"--rm-type reward_model --rm-model {reward_model_folder} --rm-num-gpus 2 --rm-num-gpus-per-engine 2"
    plan = plan_of(recipe, f"{more} --rollout-num-gpus 8", placement=placement)
    flat = re.sub(r"[ ]+", " ", render(plan))
    assert f"reward model 2 {where}" in flat and f"{total} GPUs" in flat
    assert f"reward model: 1 server more, at {where}" in flat
    assert f"with: --model-path {reward_model_folder} --tp-size 2 --is-embedding" in flat
    assert plan.reward_weights == (3000 * 2 // 2,) * 2  # two bytes each, over two GPUs
    as_floats = plan_of(
        recipe, more + ' --rm-server-options {{"dtype":"float32"}} --rollout-num-gpus 8', placement=placement
    )
    assert as_floats.reward_weights == (3000 * 4 // 2,) * 2


def test_colocated_reward_model_has_the_first_gpus_and_leaves_room_to_the_engine(recipe, reward_model_folder):
    more = f"--rm-type reward_model --rm-model {reward_model_folder} --rm-num-gpus 2 --rm-colocate"
    plan = plan_of(recipe, more)
    flat = re.sub(r"[ ]+", " ", render(plan))
    assert "reward model 2 0: 0-1" in flat and "8 GPUs, both roles on the same ones" in flat
    full = plan_of(recipe, f"{more} --gpu-memory-gib 80 --sglang-mem-fraction-static 0.9999999999")
    assert any("of --rm-colocate has weights of" in sentence for sentence in sentences(full))


def test_reward_model_that_does_not_fit_is_rejected(recipe, reward_model_folder):
    flags = f"--rm-type reward_model --rm-model {reward_model_folder}"
    small = plan_of(recipe, f"{flags} --gpu-memory-gib 0.000004")
    assert any(sentence.startswith("the reward model's weights take ") for sentence in sentences(small))
    few = plan_of(recipe, flags, around=PlanContext(Machine((), None), nodes=[8]))
    (sentence,) = sentences(few)
    assert "ask for 9 GPUs (8 for training, 8 for engines, the same ones, 1 for the reward model)" in sentence
    flags = f"{flags} --rm-num-gpus 2 --rm-num-gpus-per-engine 2"
    split = plan_of(recipe, flags, around=PlanContext(Machine((), None), nodes=[9, 9]))
    (sentence,) = sentences(split)
    assert sentence.startswith(
        "server 0 of the reward model would get the GPUs 8 to 9: 1 of the 9 on node 0, 1 of the 1"
    )


def test_teacher_is_shown_where_it_runs(recipe, tmp_path):
    make_checkpoint(recipe.dir / "teacher", "iter_0000007")
    ranks = f"--use-opd --opd-type megatron --opd-teacher-load {recipe.dir}/teacher --bf16"
    flat = re.sub(r"[ ]+", " ", render(plan_of(recipe, ranks)))
    assert f"teacher --opd-teacher-load {recipe.dir}/teacher/iter_0000007 (after rollout 7)" in flat
    # two copies of the weights of each of two models
    assert "in host memory, per GPU: 14.99 GiB (the reference model and the teacher)" in flat
    folder = tmp_path / "larger"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"architectures": ["Qwen3ForCausalLM"]}))
    shutil.copy(recipe.dir / "hf" / "tokenizer.json", folder)
    safetensors(folder / "model.safetensors", {"model.layers.0.mlp.up_proj.weight": [50, 40]})
    served = f"--rollout-temperature 1 --use-opd --opd-type sglang --rm-model {folder}"
    plan = plan_of(recipe, f"{served} --gpu-memory-gib 80")
    flat = re.sub(r"[ ]+", " ", render(plan))
    assert "teacher 1 1: 0" in flat and "teacher: 1 server more, at 1: 0" in flat
    assert f"with: --model-path {folder} --tp-size 1\n" in flat
    assert re.search(r"\n teacher: weights \S+ \S+ of each of its GPUs\n", flat)
    assert plan.reward_weights == (2000 * 2,)
    several = f"{served.replace('--rm-model ', '--opd-teacher-models default=')} code={folder}"
    several = plan_of(recipe, f"{several} --opd-teacher-num-gpus 2 1 --opd-teacher-num-gpus-per-engine 2 1")
    flat_of_several = re.sub(r"[ ]+", " ", render(several))
    assert "teacher default: 1 server more, at 1: 0-1" in flat_of_several
    assert "teacher code: 1 server more, at 1: 2" in flat_of_several
    assert several.reward_weights == (1000 * 2, 1000 * 2, 2000 * 2)
    (sentence,) = sentences(plan_of(recipe, served, around=PlanContext(Machine((), None), nodes=[8])))
    assert "1 for the teacher)" in sentence


def test_async_program_shows_that_generation_runs_ahead(recipe):
    assert "one rollout ahead" in render(plan_of(recipe, placement=SPLIT, entry="train_async.py"))


def test_fully_async_generation_shows_its_staleness_bound_and_requests_in_flight(recipe):
    more = "--max-weight-staleness 2 --no-update-weights-in-flight --update-weights-interval 2"
    text = render(plan_of(recipe, more, placement=SPLIT, entry="train_async.py"))
    assert "generates fully asynchronously" in text and "one rollout ahead" not in text
    assert "weights at most 2 rollouts older" in text
    # 3 rollouts of 32 prompts, 8 samples each; 6 GPUs are 3 servers of 2
    assert "at most 768 samples started and not yet trained: 2 + 1 rollouts of 32 prompts x 8" in text
    assert "fewer than 480 requests are in flight (3 x --sglang-server-concurrency 160)" in text
    assert "after every 2 rollouts and the last; requests are drained first" in text


def test_evaluation_only_plan_shows_nothing_about_training(recipe):
    make_checkpoint(recipe.dir / "ckpt", "iter_0000008")
    text = render(plan_of(recipe, "--num-rollout 0"))
    assert "one evaluation, no training (--num-rollout 0)" in text
    assert f"{recipe.dir}/ckpt" in text and "evaluation only; no optimizer state is read" in text
    for word in ("reference", "continues with rollout", "every 20 rollouts", "synchronous", "optimizer steps"):
        assert word not in text
    evaluating, training = (plan_of(recipe, more).memory.stages[0] for more in ("--num-rollout 0", ""))
    assert evaluating.weights == training.weights
    assert (evaluating.activations, evaluating.loss, evaluating.backward, evaluating.host) == (0, 0, 0, 0)
    assert evaluating.optimizer == 0 < training.optimizer  # float32 weights: no copy, and the moments are not there yet


def test_single_role_plan_shows_nothing_about_the_other(recipe):
    text = render(plan_of(recipe, "--rollout-num-gpus 4 --debug-rollout-only", placement="--actor-num-gpus-per-node 2"))
    assert "Parallel groups" not in text
    assert "gradients" not in text
    assert "KV cache" in text


def test_columns_are_padded_and_numbers_right_aligned():
    assert table([("a", 5, "x"), ("bbb", 10, "y")]) == ["a     5  x", "bbb  10  y"]


def test_recipe_that_fits_is_accepted(recipe):
    assert sentences(plan_of(recipe, "--bf16 --sglang-mem-fraction-static 0.4", around=H100S)) == []


def test_cluster_with_too_few_gpus_is_rejected(recipe):
    (sentence,) = sentences(plan_of(recipe, around=PlanContext(Machine((), None), nodes=[4])))
    assert "ask for 8 GPUs (8 for training, 8 for engines, the same ones) and the Ray cluster has 4" in sentence
    alone = PlanContext(Machine(gpus=(80 * GIB,) * 4, host=None))
    assert "outside a Ray cluster this machine has 4" in sentences(plan_of(recipe, around=alone))[0]


def test_engine_across_nodes_is_rejected(recipe):
    placement = "--actor-num-gpus-per-node 2 --rollout-num-gpus 8"
    (sentence,) = sentences(plan_of(recipe, "--rollout-num-gpus-per-engine 4", placement=placement))
    assert (
        "engine 1 would get the GPUs 6 to 9: 2 of the 8 on node 0, 2 of the 2 on node 1 (by --num-gpus-per-node 8)"
        in sentence
    )


def test_engine_may_fill_whole_nodes(recipe):
    around = PlanContext(Machine((), None), nodes=[4, 4, 4])
    placement = "--actor-num-gpus-per-node 4 --rollout-num-gpus 8"
    assert sentences(plan_of(recipe, "--rollout-num-gpus-per-engine 8", placement=placement, around=around)) == []


def test_layer_split_across_nodes_is_rejected(recipe):
    around = PlanContext(Machine((), None), nodes=[3, 3])
    placement = "--actor-num-nodes 2 --actor-num-gpus-per-node 2 --rollout-num-gpus 2"
    (sentence,) = sentences(plan_of(recipe, placement=placement, more="--rollout-num-gpus-per-engine 1", around=around))
    assert "training GPUs 2 to 3 share layers (--tensor-model-parallel-size 2) and are on nodes 0 and 1" in sentence


def test_insufficient_training_memory_is_rejected_with_the_sum(recipe):
    (sentence,) = sentences(plan_of(recipe, "--bf16 --gpu-memory-gib 18"))
    assert sentence.startswith("training needs ")
    assert "weights 3.75 GiB + gradients 7.49 GiB + optimizer 5.62 GiB" in sentence
    assert "raise --tensor-model-parallel-size to 4" in sentence


ONE_GPU = "--actor-num-nodes 1 --actor-num-gpus-per-node 1 --colocate"
ALONE = "--bf16 --tensor-model-parallel-size 1 --rollout-num-gpus-per-engine 1 --sglang-mem-fraction-static 0.5"


def advice(plan):
    return next(problem.sentence for problem in plan_errors(plan) if problem.sentence.startswith("training needs"))


def test_advice_about_activations_is_omitted_when_the_state_alone_is_too_large(recipe):
    # weights 7.5 GiB + gradients 15.0 + optimizer 45.0 on one GPU
    said = advice(plan_of(recipe, f"{ALONE} --gpu-memory-gib 40", placement=ONE_GPU))
    assert said.endswith(
        "; add --optimizer-cpu-offload and --use-precision-aware-optimizer or train on 4 GPUs (--actor-num-nodes 4)."
    )
    for useless in ("--recompute", "--max-tokens-per-gpu", "--tensor-model-parallel-size", "--keep-logits"):
        assert useless not in said


def test_state_that_no_flag_reduces_asks_for_more_gpus(recipe):
    more = f"{ALONE} --gpu-memory-gib 20"  # weights and gradients alone are 22.5 GiB
    said = advice(plan_of(recipe, more, placement=ONE_GPU))
    assert "no supported flag reduces it that far: use a smaller model, or GPUs with more memory" in said


@pytest.mark.parametrize("gibibytes", [12, 16, 18, 20, 30, 45, 60])
@pytest.mark.parametrize("placement", [ONE_GPU, COLOCATED], ids=["one GPU", "eight GPUs"])
def test_each_piece_of_advice_makes_the_plan_fit(recipe, gibibytes, placement):
    base = ALONE if placement == ONE_GPU else "--bf16"
    plan = plan_of(recipe, f"{base} --gpu-memory-gib {gibibytes}", placement=placement)
    found = [problem.sentence for problem in plan_errors(plan) if problem.sentence.startswith("training needs")]
    if not found or "no supported flag" in found[0]:
        return
    remedies = re.split(r", | or ", found[0].rpartition("; ")[2].removesuffix("."))
    assert remedies
    for remedy in remedies if "together" not in found[0] else []:
        flags = (
            " ".join(re.findall(r"--[a-z-]+(?: to \d+| [a-z0-9]+)?", remedy)).replace(" to ", " ").replace(" and", "")
        )
        if "--max-tokens-per-gpu" in flags:
            continue
        corrected = plan_of(recipe, f"{base} --gpu-memory-gib {gibibytes} {flags}", placement=placement)
        assert not [one for one in plan_errors(corrected) if one.sentence.startswith("training needs")], remedy


def test_advice_about_the_cache_fraction_is_omitted_when_no_fraction_suffices(recipe):
    more = f"{ALONE} --sglang-mem-fraction-static 0.9 --gpu-memory-gib 9"  # of which the weights take 7.5 GiB
    said = next(one for one in sentences(plan_of(recipe, more, placement=ONE_GPU)) if "an engine's GPU" in one)
    assert "--sglang-mem-fraction-static" not in said
    assert "raise --rollout-num-gpus-per-engine to 2 and --rollout-num-gpus to 2" in said


def test_two_roles_that_do_not_fit_together_are_rejected(recipe):
    assert sentences(plan_of(recipe, "--bf16 --sglang-mem-fraction-static 0.8", around=H100S)) == []  # offloaded
    plan = plan_of(recipe, "--bf16 --sglang-mem-fraction-static 0.8 --no-offload-rollout", around=H100S)
    (sentence,) = sentences(plan)
    rest = 80 - plan.memory.largest_stage.total / GIB
    assert f"give --sglang-mem-fraction-static {int(rest / 80 * 100) / 100:g} or less, offload" in sentence
    assert "offload both (leave --no-offload-rollout out)" in sentence


def test_plan_shows_which_role_is_offloaded_and_where(recipe):
    text = render(plan_of(recipe, "--bf16", around=H100S))
    assert "8 GPUs, both roles on the same ones, each side offloaded while the other works" in text
    # 3.75 GiB of weights and 5.62 GiB of optimizer state, as in the sum above
    assert "in host memory while engines generate, per GPU: 9.37 GiB (weights, optimizer state)" in text
    resident = "--no-offload-train --no-offload-rollout --sglang-mem-fraction-static 0.3"
    text = render(plan_of(recipe, f"--bf16 {resident}", around=H100S))
    assert "both roles on the same ones, nothing offloaded" in text and "while engines generate" not in text


def test_cache_too_small_for_one_sample_is_rejected(recipe):
    (sentence,) = sentences(plan_of(recipe, "--sglang-mem-fraction-static 0.05", placement=SPLIT, around=H100S))
    assert "0.05 x 80.00 GiB (nvidia-smi) = 4.00 GiB for weights of 3.75 GiB" in sentence
    assert "the longest sample has 8,192" in sentence


def test_logical_gpus_share_the_host_memory_on_a_cpu_machine(recipe):
    around = PlanContext(Machine(gpus=(), host=15 * GIB), nodes=[8])
    (sentence,) = sentences(plan_of(recipe, around=around))
    assert "this machine has no GPU and 15.00 GiB of memory; 8 training GPUs take" in sentence
    assert sentences(plan_of(recipe, "--gpu-memory-gib 141 --sglang-mem-fraction-static 0.5", around=around)) == []


def test_plan_may_describe_another_machine(recipe):
    plan = plan_of(recipe, around=PlanContext(Machine(gpus=(), host=15 * GIB)))
    assert sentences(plan) == []
    (warning,) = warnings(plan)
    assert "this machine has no GPU and 15.00 GiB of memory" in warning and "--gpu-memory-gib" in warning


def test_weight_files_of_another_model_are_rejected(recipe):
    safetensors(recipe.dir / "hf" / "model.safetensors", {"model.embed_tokens.weight": [100, 10]})
    (sentence,) = sentences(plan_of(recipe))
    assert "describe 4,022,468,096 weights" in sentence
    assert "hold 1,000, 4,022,467,096 less" in sentence


def test_incomplete_model_folder_is_rejected(recipe):
    safetensors(recipe.dir / "hf" / "model-1.safetensors", {"a": [3]})
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors", "c": "model-3.safetensors"}}
    (recipe.dir / "hf" / "model.safetensors.index.json").write_text(json.dumps(index))
    (sentence,) = sentences(plan_of(recipe))
    assert "its index names model-2.safetensors and 1 more files that are not there" in sentence


def run(recipe, program, *more, placement=COLOCATED):
    line = [sys.executable, str(ROOT / program), *recipe.line("--dry-run " + " ".join(more), placement=placement)]
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    return subprocess.run(line, capture_output=True, text=True, timeout=60, cwd=recipe.dir, env=environment)


@pytest.mark.parametrize(("program", "placement"), [("train.py", COLOCATED), ("train_async.py", SPLIT)])
def test_both_programs_print_the_plan_and_start_nothing(recipe, program, placement):
    done = run(recipe, program, "--gpu-memory-gib 141 --sglang-mem-fraction-static 0.5", placement=placement)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"Plan of {program}: nothing is started.")
    assert not (recipe.dir / "runs").exists()


def test_rejected_plan_exits_with_code_2_and_is_still_printed(recipe):
    done = run(recipe, "train.py", "--gpu-memory-gib 4")
    assert done.returncode == 2
    assert "Memory of one GPU" in done.stdout
    assert "2 problems with the command line; nothing was started." in done.stderr  # training, and the engine


def test_broken_weights_file_is_reported(recipe):
    (recipe.dir / "hf" / "model.safetensors").write_bytes(b"short")
    done = run(recipe, "train.py")
    assert done.returncode == 2
    assert "is truncated or not a safetensors file" in done.stderr


def test_no_heavy_package_is_imported(recipe):
    program = (
        "import sys; from slimrl.cluster.command_line import main;"
        "code = main('train.py', None, sys.argv[1:]);"
        "print(sorted({'torch', 'ray', 'megatron', 'sglang', 'transformers', 'numpy'} & set(sys.modules)), code)"
    )
    line = [sys.executable, "-c", program, *recipe.line("--dry-run --gpu-memory-gib 141")]
    line += ["--sglang-mem-fraction-static", "0.5"]
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    done = subprocess.run(line, capture_output=True, text=True, timeout=60, cwd=ROOT, env=environment)
    assert done.stdout.splitlines()[-1] == "[] 0", done.stderr


@pytest.mark.parametrize(
    ("more", "shown"),
    [
        ("", "(every 20 rollouts and after the last; all stay)"),
        (
            "--async-save --save-total-limit 3",
            "(every 20 rollouts and after the last, while training continues; the newest 3 stay)",
        ),
        (
            "--save-retain-interval 100",
            "(every 20 rollouts and after the last; the newest stays and those after every 100 rollouts)",
        ),
    ],
)
def test_plan_shows_which_checkpoints_are_kept(recipe, more, shown):
    assert f"{recipe.dir}/ckpt {shown}" in render(plan_of(recipe, f"--save-interval 20 {more}"))
