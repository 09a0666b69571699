"""Rules about LoRA adapters. The recipe with adapters passes, each violation is one error."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from slimrl.arguments import read_args
from slimrl.engines.sglang.server_args import server_flags
from tests.families.toys import TOYS

LORA = "--lora-rank 8 --lora-merge"
BOTH = "leave {0} out, or --lora-rank."
# rule -> (flags that pass when appended to the recipe, flags that do not with their error)
CASES: dict[str, tuple[list[str], list[tuple[str, str]]]] = {
    "lora_flags_have_a_rank": (
        [f"{LORA} --lora-alpha 16 --lora-target-modules q_proj v_proj"],
        [
            ("--lora-alpha 16", "--lora-alpha belongs to --lora-rank: add it, or leave --lora-alpha out."),
            ("--lora-name a", "--lora-name belongs to --lora-rank: add it, or leave --lora-name out."),
            ("--lora-merge", "--lora-merge belongs to --lora-rank: add it, or leave --lora-merge out."),
        ],
    ),
    "lora_fits_the_run": (
        [
            f"{LORA} --use-distributed-optimizer",
            f"{LORA} --advantage-estimator ppo",
            f"{LORA} --advantage-estimator ppo --critic-lora-rank 4 --critic-lora-alpha 8",
        ],
        [
            (
                "--advantage-estimator ppo --critic-lora-rank 4 --optimizer muon",
                "--critic-lora-rank has no matrices of Muon's kind: leave --optimizer muon out, or --critic-lora-rank.",
            ),
            (
                f"{LORA} --only-train-params-name-list mlp",
                "--lora-rank trains the adapters and nothing else: " + BOTH.format("--only-train-params-name-list"),
            ),
            (
                f"{LORA} --freeze-params-name-list mlp",
                "--lora-rank trains the adapters and nothing else: " + BOTH.format("--freeze-params-name-list"),
            ),
            (
                f"{LORA} --custom-model-provider-path tests.megatron.custom_functions.half_frozen",
                "--lora-rank adapts slimrl's own layers: " + BOTH.format("--custom-model-provider-path"),
            ),
            (
                f"{LORA} --optimizer muon",
                "--lora-rank has no matrices of Muon's kind: " + BOTH.format("--optimizer muon"),
            ),
            (
                f"{LORA} --use-megatron-fsdp --use-distributed-optimizer --data-parallel-sharding-strategy optim",
                "--lora-rank has not been tried with sharded weights: " + BOTH.format("--use-megatron-fsdp"),
            ),
            (
                f"{LORA} --transformer-impl transformer_engine",
                "--lora-rank adapts megatron-core's local layers: give --transformer-impl local.",
            ),
        ],
    ),
    "engines_can_load_adapters": (
        ["--lora-rank 8 --save-hf {dir}/out_{{rollout_id}}", "--lora-rank 8 --sglang-lora-backend triton"],
        [
            (
                "--lora-rank 8 --update-weight-transport disk --update-weight-disk-dir {dir}",
                "--lora-rank sends the engines adapters, and they are sent in HTTP calls: leave"
                " --update-weight-transport disk out, or add --lora-merge.",
            ),
            (
                "--lora-rank 8 --sglang-load-format dummy",
                "--lora-rank sends the engines adapters, and the engines need the base's weights: leave"
                " --sglang-load-format dummy out, or add --lora-merge.",
            ),
            (
                "--lora-rank 8 --sglang-speculative-algorithm NGRAM",
                "--lora-rank sends the engines adapters, and draft models do not know them: leave"
                " --sglang-speculative-algorithm out, or add --lora-merge.",
            ),
        ],
    ),
    "lora_name_is_of_an_adapter": (
        ["--lora-rank 8 --lora-name run_7-a"],
        [
            (
                "--lora-rank 8 --lora-name a@1",
                "--lora-name 'a@1' is not a name: use letters, digits, - and _.",
            ),
            (
                f"{LORA} --lora-name other",
                "--lora-name other names an adapter in the engines, and --lora-merge sends none: leave one of the two"
                " out.",
            ),
        ],
    ),
    "engine_lora_options_follow_the_adapters": (
        [],
        [
            (
                "--sglang-enable-lora",
                "--sglang-enable-lora is for LoRA adapters, which --lora-rank without --lora-merge sets up:"
                " leave it out.",
            ),
            (
                "--sglang-max-lora-rank 16 --debug-rollout-only",
                "--sglang-max-lora-rank is for LoRA adapters, which --lora-rank without --lora-merge sets up:"
                " leave it out.",
            ),
        ],
    ),
}
TESTED_APART = ("lora_has_a_base", "lora_targets_are_in_the_model", "lora_load_is_of_this_model")


@pytest.mark.parametrize(("rule", "line"), [(rule, line) for rule, (good, _) in CASES.items() for line in good])
def test_valid_variant_passes(rule, line, recipe):
    args, problems = read_args(recipe.line(line), passthrough={"sglang": server_flags})
    assert problems == []
    assert (args.lora_rank, args.freeze_params_name_list) == (8, None)


@pytest.mark.parametrize(
    ("rule", "line", "sentence"), [(rule, *case) for rule, (_, bad) in CASES.items() for case in bad]
)
def test_violation_is_one_error(rule, line, sentence, recipe):
    _, problems = read_args(recipe.line(line), passthrough={"sglang": server_flags})
    about_adapters = [problem.sentence for problem in problems if "lora" in problem.sentence]
    assert about_adapters == [sentence.format(dir=recipe.dir)]


@pytest.mark.parametrize(
    ("line", "layers"), [(LORA, "local"), ("--true-on-policy-mode --no-bf16", "local"), ("--lr 1e-6", None)]
)
def test_adapters_and_equal_log_probs_take_the_local_layers_where_transformer_engine_is_installed(line, layers, recipe):
    args, _ = read_args(recipe.line(line), passthrough={"sglang": server_flags})
    assert args.transformer_impl == layers


EXTERNAL = "--rollout-external-engine-addrs 127.0.0.1:1 127.0.0.1:2"


def test_external_servers_take_the_adapters_of_a_run_by_its_name(recipe):
    trainers = "--actor-num-nodes 1 --actor-num-gpus-per-node 8"
    line = recipe.line(f"--lora-rank 8 --lora-name a {EXTERNAL}", placement=trainers)
    args, problems = read_args(line, passthrough={"sglang": server_flags})
    assert [problem.sentence for problem in problems] == []
    assert args.shared_adapter.at("3") == "a.@3"  # without the owner, which is known when the run starts
    own, _ = read_args(recipe.line("--lora-rank 8 --lora-name a"))
    assert own.shared_adapter is None and own.adapter_of_requests == "a"


def test_base_of_the_adapters_is_needed(recipe):
    _, problems = read_args(recipe.line(LORA, without="--ref-load"))
    assert "--lora-rank adapts the model of --ref-load, which is missing: give its checkpoint." in [
        problem.sentence for problem in problems
    ]


def test_load_has_adapters_and_no_model(recipe):
    save_file({"x": torch.zeros(1)}, recipe.dir / "hf" / "model.safetensors")
    _, problems = read_args(recipe.line(f"{LORA} --load {recipe.dir}/hf"))
    assert (
        f"--load {recipe.dir}/hf is a Hugging Face model, and with --lora-rank --load has the adapters of a run: give"
        " it as --ref-load, and PEFT adapters as --lora-load."
    ) in [problem.sentence for problem in problems]


def write_adapter(folder, **changes):
    """A PEFT folder of q_proj of both layers, rank 8, without tensors."""
    folder.mkdir()
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 8, "target_modules": ["q_proj"], "bias": "none"} | changes
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file({"x": torch.zeros(1)}, folder / "adapter_model.safetensors")


def test_adapter_of_another_model_is_refused_by_its_first_tensor(recipe, tmp_path):
    write_adapter(tmp_path / "adapter")
    line = f"{LORA} --lora-target-modules q_proj --lora-load {tmp_path}/adapter"
    _, problems = read_args(recipe.line(line))
    (sentence,) = [problem.sentence for problem in problems]
    assert sentence == (
        f"--lora-load {tmp_path}/adapter lacks base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight: give the"
        " adapter of this model."
    )


def test_adapter_of_another_rank_is_refused(recipe, tmp_path):
    write_adapter(tmp_path / "adapter", r=4)
    line = f"{LORA} --lora-target-modules q_proj --lora-load {tmp_path}/adapter"
    _, problems = read_args(recipe.line(line))
    (sentence,) = [problem.sentence for problem in problems]
    assert sentence.startswith(f"--lora-load {tmp_path}/adapter ") and "4" in sentence and "8" in sentence


def about_adapters(recipe, toy, more):
    """The sentences about adapters of a run of a toy model of another family."""
    folder = TOYS[toy].save(recipe.dir / toy, tokenizer=False)
    line = [*recipe.line(), *TOYS[toy].flags, "--hf-checkpoint", str(folder), *more.split()]
    _, problems = read_args(line, passthrough={"sglang": server_flags})
    return [problem.sentence for problem in problems if "lora-" in problem.sentence]


def test_targets_that_the_model_has_not_are_refused_also_where_they_are_the_default(recipe):
    names = "q_proj, k_proj, v_proj, o_proj, gate_up_proj, down_proj"
    assert about_adapters(recipe, "glm4", "--lora-rank 8") == [
        "--lora-rank adapts q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj by default, and a glm4 model"
        f" has {names}: give --lora-target-modules {names.replace(',', '')}."
    ]
    assert about_adapters(recipe, "glm4", f"--lora-rank 8 --lora-target-modules {names.replace(',', '')}") == []
    assert about_adapters(recipe, "moonlight", f"{LORA} --lora-target-modules q_a_proj o_proj") == [
        "--lora-target-modules has q_a_proj, and a deepseek_v3 model has q_proj, kv_a_proj_with_mqa, kv_b_proj, o_proj,"
        " gate_proj, up_proj, down_proj: leave q_a_proj out."
    ]


@pytest.mark.parametrize("toy", ["deepseek-v3", "kimi-k2", "moonlight", "glm4-moe-lite"])
def test_adapters_of_latent_attention_are_merged_for_the_engines(recipe, toy):
    whole = "--expert-tensor-parallel-size 1"
    assert about_adapters(recipe, toy, f"{whole} --lora-rank 8") == [
        "--lora-rank sends the engines adapters, and those of latent attention are not served beside a base: add"
        " --lora-merge."
    ]
    assert about_adapters(recipe, toy, f"{whole} {LORA}") == []


def test_unknown_target_is_refused(recipe):
    _, problems = read_args(recipe.line(f"{LORA} --lora-target-modules wq"))
    (sentence,) = [problem.sentence for problem in problems]
    assert sentence.startswith("--lora-target-modules wq") and "q_proj" in sentence
