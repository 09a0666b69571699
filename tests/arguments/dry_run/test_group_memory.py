"""The plan's memory of the groups of --sglang-config, against numbers worked out by hand from published sizes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from slimrl.arguments import read_args
from slimrl.arguments.dry_run import Machine, PlanContext, make_plan, node_resources, plan_errors, warnings
from slimrl.arguments.dry_run.render import render
from tests.arguments.conftest import SPLIT
from tests.arguments.test_rules_of_engine_groups import TABLES, actor, file

GIB = 1024**3
PUBLISHED = Path(__file__).parents[2] / "scripts" / "published_configs"
QWEN3_4B = 4_022_468_096  # parameters of the models on the Hugging Face hub
QWEN3_0_6B = 596_049_920
# keys and values in bf16: 2 x layers x 8 heads of 128 x 2 bytes
CACHE_4B, CACHE_0_6B = 2 * 36 * 8 * 128 * 2, 2 * 28 * 8 * 128 * 2


def group(gpus: int, size: int, more: str = "") -> str:
    return f"{{num_gpus: {gpus}, num_gpus_per_engine: {size}{more}}}"


def judge(gpus: int, size: int, more: str = "") -> str:
    return f"{{name: judge, model_path: DIR/judge, server_groups: [{group(gpus, size, more)}]}}"


def fraction(part: float) -> str:
    return f", overrides: {{mem_fraction_static: {part}}}"


@pytest.fixture
def planned(recipe):
    """`planned(text, flags, config)` is the plan for 2 training and 6 rollout GPUs; `config` is that of the judge."""

    def plan(text: str, flags: str = "--gpu-memory-gib 80", config: dict | None = None):
        folder = recipe.dir / "judge"
        folder.mkdir(exist_ok=True)
        told = json.loads((PUBLISHED / "qwen3-0.6B.json").read_text()) if config is None else config
        (folder / "config.json").write_text(json.dumps(told))
        path = recipe.dir / "groups.yaml"
        path.write_text(text.replace("DIR", str(recipe.dir)))
        placement = SPLIT if "--colocate" not in flags else ""
        line = recipe.line(
            f"--rollout-num-gpus-per-engine 1 --sglang-config {path} --dry-run {flags}", placement=placement
        )
        args, problems = read_args(line, passthrough=TABLES)
        assert problems == []
        return make_plan(args, "train.py", PlanContext(Machine(host=None, gpus=())))

    return plan


def test_each_group_has_its_own_weights_and_cache(planned):
    plan = planned(file(actor(group(2, 1), group(2, 2, fraction(0.5))), judge(2, 2, fraction(0.25))))
    one, two, frozen = (part.memory for part in plan.group_memory)
    assert (one.weights, one.cache_per_token) == (2 * QWEN3_4B, CACHE_4B)
    assert one.tokens == (int(80 * GIB * 0.88) - 2 * QWEN3_4B) // CACHE_4B
    assert (two.weights, two.cache_per_token) == (QWEN3_4B, CACHE_4B // 2)
    assert two.tokens == (40 * GIB - QWEN3_4B) // (CACHE_4B // 2)
    assert (frozen.weights, frozen.cache_per_token) == (QWEN3_0_6B, CACHE_0_6B // 2)
    assert frozen.tokens == (20 * GIB - QWEN3_0_6B) // (CACHE_0_6B // 2)
    shown = render(plan)
    assert f"model actor, group 0: weights 7.49 GiB, KV cache 144.0 KiB per token x {one.tokens:,} tokens" in shown
    assert "        mem_fraction_static 0.5 of the GPU = 40.00 GiB for both" in shown
    assert f"model judge, group 0: weights 568.4 MiB, KV cache 56.0 KiB per token x {frozen.tokens:,} tokens" in shown
    assert plan_errors(plan) == []


def test_frozen_model_of_another_family_has_the_weights_of_its_files(planned, recipe):
    (recipe.dir / "judge").mkdir()
    tensors = {"a": torch.zeros(3 * 1024**2, dtype=torch.bfloat16), "b": torch.zeros(1024, 1024)}
    save_file(tensors, recipe.dir / "judge" / "model.safetensors")
    plan = planned(file(actor(group(4, 1)), judge(2, 2)), config={"model_type": "another"})
    assert plan.group_memory[1].memory.weights == (3 * 2 + 4) * 1024**2 // 2
    assert "model judge, group 0: weights 5.0 MiB; the KV cache of its family is not known here" in render(plan)
    assert plan_errors(plan) == [] and warnings(plan) == []


def test_frozen_model_without_weights_is_a_warning_of_the_plan(planned):
    plan = planned(file(actor(group(4, 1)), judge(2, 2)), config={"model_type": "another"})
    assert "model judge, group 0: not known, its folder holds no safetensors files" in render(plan)
    (found,) = warnings(plan)
    assert "of model judge has no weights (no .safetensors file)" in found and found.endswith("plan can be made.")


@pytest.mark.parametrize(
    ("groups", "sentence"),
    [
        (  # 0.3 x 24 GiB for 7.5 GiB of weights; two GPUs have 3.7 GiB of them each, and 48,000 tokens
            (actor(group(2, 1, fraction(0.3)), group(2, 2)), judge(2, 2)),
            "model actor, group 0 has 0.3 x 24.00 GiB (--gpu-memory-gib) = 7.20 GiB of a GPU for each server, and"
            " weights of 7.49 GiB there: raise its num_gpus_per_engine to 2 or raise its mem_fraction_static.",
        ),
        (  # 0.34 x 24 GiB leaves 0.67 GiB for tokens of 144 KiB
            (actor(group(2, 1, fraction(0.34)), group(2, 2)), judge(2, 2)),
            "model actor, group 0 has 0.34 x 24.00 GiB (--gpu-memory-gib) = 8.16 GiB of a GPU for weights of 7.49 GiB"
            f" and a KV cache, which leaves room for {(int(24 * GIB * 0.34) - 2 * QWEN3_4B) // CACHE_4B:,} tokens; the"
            " longest sample has 8,192: raise its num_gpus_per_engine to 2 or raise its mem_fraction_static.",
        ),
        (  # 0.02 x 24 GiB for 568 MiB of weights
            (actor(group(4, 2)), judge(2, 2, fraction(0.02))),
            "model judge, group 0 has 0.02 x 24.00 GiB (--gpu-memory-gib) = 491.5 MiB of a GPU for each server, and"
            " weights of 568.4 MiB there: raise its num_gpus_per_engine to 4, with its num_gpus or raise its"
            " mem_fraction_static.",
        ),
    ],
)
def test_group_that_does_not_fit_is_named(planned, recipe, groups, sentence):
    found = [one.sentence for one in plan_errors(planned(file(*groups), "--gpu-memory-gib 24"))]
    prefix = f"--sglang-config {recipe.dir / 'groups.yaml'}: "
    assert [one.removeprefix(prefix) for one in found if one.startswith(prefix)] == [sentence]


def test_group_beside_training_that_stays_on_the_gpus_is_named(planned):
    flags = "--actor-num-nodes 1 --actor-num-gpus-per-node 8 --colocate --no-offload-train --gpu-memory-gib 80"
    groups = actor(group(2, 1, fraction(0.2)), group(4, 2, fraction(0.3))), judge(2, 2, fraction(0.95))
    found = [one.sentence for one in plan_errors(planned(file(*groups), flags))]
    assert len(found) == 1 and "model judge, group 0 has 0.95 x 80.00 GiB" in found[0]
    assert found[0].endswith("lower its mem_fraction_static, or offload both (leave --no-offload-train out).")


def test_node_holds_the_weights_of_frozen_models_while_training_has_the_gpus(planned):
    flags = "--actor-num-nodes 1 --actor-num-gpus-per-node 8 --colocate --gpu-memory-gib 80"
    groups = actor(group(2, 1), group(2, 2)), judge(4, 2)
    offloaded, kept = (
        node_resources(planned(file(*groups), f"{flags} {more}")) for more in ("", "--no-offload-rollout")
    )
    # two servers of two GPUs, each with half of 2 bytes per parameter
    assert offloaded.memory_bytes - kept.memory_bytes == 4 * QWEN3_0_6B


def test_group_on_the_gpus_of_a_colocated_reward_model_leaves_room_to_it(planned, recipe):
    folder = recipe.dir / "rm"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForSequenceClassification"]}))
    (folder / "tokenizer.json").write_text("{}")
    save_file({"score.weight": torch.zeros(1, 2 * 1024**2)}, folder / "model.safetensors")  # 8 MiB
    flags = "--actor-num-nodes 1 --actor-num-gpus-per-node 8 --colocate --gpu-memory-gib 80 --rm-type reward_model"
    flags += f" --rm-model {folder} --rm-num-gpus 1 --rm-colocate"
    full, some = (
        [one.sentence for one in plan_errors(planned(file(actor(group(2, 1, fraction(part)), group(6, 2))), flags))]
        for part in (0.99999, 0.9)
    )
    assert some == [] and len(full) == 1
    assert (
        "model actor, group 0 has 0.99999 x 80.00 GiB (--gpu-memory-gib) = 80.00 GiB of a GPU on which the" in full[0]
    )
    assert full[0].endswith("reward model of --rm-colocate has weights of 8.0 MiB: lower its mem_fraction_static.")
