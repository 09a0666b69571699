"""GRPO of LoRA adapters with real engines, which load the adapters beside their base; a killed run resumes.

Those of latent attention are merged for the engines; supervised training exports them, and GRPO starts from the export.
"""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from slimrl.models.adapters import CONFIG_NAME, TARGETS, WEIGHTS_NAME, AdapterConfig, peft_config
from tests.end_to_end import harness, test_supervised
from tests.end_to_end.conftest import make_family
from tests.families.toys import TOYS
from tests.megatron import lora_truth
from tests.megatron.layouts import relative_error

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def random_adapters(model, folder):
    """A PEFT folder for the projections of the model in the folder `model`, of rank 4; returns its tensors."""
    generator, tensors = torch.Generator().manual_seed(1), {}
    for name, weight in load_file(model / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            module = f"base_model.model.{name.removesuffix('.weight')}"
            tensors[f"{module}.lora_A.weight"] = 0.1 * torch.randn(4, weight.shape[1], generator=generator)
            tensors[f"{module}.lora_B.weight"] = 0.1 * torch.randn(weight.shape[0], 4, generator=generator)
    folder.mkdir()
    save_file(tensors, folder / WEIGHTS_NAME)
    (folder / CONFIG_NAME).write_text(json.dumps(peft_config(AdapterConfig(4, 8.0, TARGETS))))
    return tensors


def test_adapters_are_loaded_trained_sent_saved_and_exported(tiny, tmp_path):
    first = random_adapters(tiny.model, tmp_path / "first")
    flags = tiny.flags(
        actor_num_gpus_per_node=2,
        tensor_model_parallel_size=2,
        colocate=True,
        lora_rank=4,
        lora_alpha=8,
        lora_load=tmp_path / "first",
        lr=1e-3,
        num_rollout=4,
        save=tmp_path / "checkpoints",
        load=tmp_path / "checkpoints",
        save_interval=1,
        save_hf=tmp_path / "exported_{rollout_id}",
    )
    killed = harness.start("train.py", flags, tmp_path, "killed", tiny.home)
    killed.wait_for_line("iter_0000001", 150)
    killed.kill_everything()
    done = harness.start("train.py", flags, tmp_path, "killed", tiny.home).finish(150)
    assert done.code == 0, done.output[-6000:]
    assert done.left == []

    assert f"resuming from {tmp_path}/checkpoints/iter_000000" in done.output
    assert done.steps("step") == list(range(4))
    # of every weight version: the engines have what the trainer computes with
    assert max(done.steps("train_rollout_logprob_abs_diff_max")) < 1e-4
    assert all(step["grad_norm"] > 0 for step in done.summary["steps"])
    assert done.steps("kl_loss")[0] > 1e-5  # from the base, which the reference model is

    last = load_file(tmp_path / "exported_3" / WEIGHTS_NAME)
    assert {name: tensor.shape for name, tensor in last.items()} == {name: one.shape for name, one in first.items()}
    for name, tensor in last.items():  # four steps of Adam at 1e-3
        assert 0 < (tensor - first[name]).abs().max() < 5e-3
    config = json.loads((tmp_path / "exported_3" / CONFIG_NAME).read_text())
    assert config == peft_config(AdapterConfig(4, 8.0, TARGETS), str(tiny.model))


@pytest.mark.parametrize("name", ["deepseek-v3", "moonlight"])
def test_adapters_of_latent_attention_go_from_supervised_training_to_engines_that_get_them_merged(name, tiny, tmp_path):
    made = make_family(TOYS[name], tiny, tmp_path / name)
    messages = [{"role": "user", "content": "3+4="}, {"role": "assistant", "content": "7"}]
    (tmp_path / "chats.jsonl").write_text((json.dumps({"messages": messages}) + "\n") * 8)
    layout = {"tensor_model_parallel_size": 2, "sequence_parallel": True, "expert_tensor_parallel_size": 1}
    adapters = {"lora_rank": 4, "lora_alpha": 8, "lr": 1e-2, **layout}
    first = test_supervised.FLAGS | adapters | {"num_rollout": 6, "save_hf": tmp_path / "peft_{rollout_id}"}
    flags = made.flags(prompt_data=tmp_path / "chats.jsonl", **first, save=tmp_path / "supervised")
    supervised = harness.start("train.py", flags, tmp_path, "supervised", tiny.home).finish(150)
    assert supervised.code == 0, supervised.output[-6000:]
    losses = supervised.steps("loss")
    assert losses[-1] < losses[0] / 2

    stored = load_file(tmp_path / "peft_5" / WEIGHTS_NAME)
    queries = {"q_proj"} if name == "moonlight" else {"q_a_proj", "q_b_proj"}
    latents = {"kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert {key.split(".")[-3] for key in stored} == queries | latents
    second = adapters | {"lora_load": tmp_path / "peft_5", "lora_merge": True, "lr": 1e-3, "num_rollout": 3}
    second |= {"actor_num_gpus_per_node": 2, "colocate": True, "check_weight_update_equal": True}
    second |= {"save": tmp_path / "checkpoints", "save_hf": tmp_path / "merged_{rollout_id}"}
    done = harness.start("train.py", made.flags(**second), tmp_path, "merged", tiny.home).finish(150)
    assert done.code == 0, done.output[-6000:]
    assert done.left == supervised.left == []
    # of every weight version, in servers of the family
    assert max(done.steps("train_rollout_logprob_abs_diff_max")) < 1e-4
    assert all(step["grad_norm"] > 0 for step in done.summary["steps"])
    assert done.steps("kl_loss")[0] > 1e-3  # from the base

    trained = load_file(tmp_path / "merged_2-adapters" / WEIGHTS_NAME)
    assert trained.keys() == stored.keys() and any(not torch.equal(trained[key], stored[key]) for key in stored)
    assert json.loads((tmp_path / "merged_2-adapters" / CONFIG_NAME).read_text())["r"] == 4
    base, merged = lora_truth.published_weights(made.model), lora_truth.published_weights(tmp_path / "merged_2")
    added = {key: tensor * 2 * lora_truth.RANK / lora_truth.ALPHA for key, tensor in lora_truth.changes(stored).items()}
    changed = {key for key in base if not torch.equal(base[key], merged[key])}
    whole = {key for key in added if ".experts." not in key}
    assert whole <= changed <= added.keys()  # an expert that no token chose has a B of zero
    own = {key: merged[key] - base[key] for key in added}
    last = {key: one * 2 * lora_truth.RANK / lora_truth.ALPHA for key, one in lora_truth.changes(trained).items()}
    assert relative_error(own, last) < 1e-5
    assert relative_error(own, added) < 0.2  # three steps of Adam at 1e-3 from the adapters that were loaded
