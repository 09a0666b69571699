"""A Qwen2.5-VL of two layers for tests: its folder, its flags, and a rollout about images."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch

from slimrl.data.images.batch import BatchImages
from slimrl.data.train_batch import RolloutBatch
from slimrl.models.families import family_for
from slimrl.models.families.vision import kept_elements, tower_weights
from tests.megatron import tiny

IMAGE, VIDEO, START, END = range(110, 114)
MERGE = 2
PATCH_VALUES = 3 * 2 * 14 * 14
DEEP_PATCH_VALUES = 3 * 2 * 16 * 16
TOWER = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "in_chans": 3,
    "out_hidden_size": 64,
    "patch_size": 14,
    "spatial_merge_size": MERGE,
    "temporal_patch_size": 2,
    "window_size": 56,  # two by two merged patches, so that larger images have several windows
    "fullatt_block_indexes": [1],
}


def save_qwen2_5_vl(folder: Path, *, seed: int, tied: bool = False) -> Path:
    """A model with random weights, norms and biases as a Hugging Face folder."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    text = {name: value for name, value in tiny._SHAPE.items() if name != "head_dim"}
    config = Qwen2_5_VLConfig(
        text_config=text
        | {
            "num_hidden_layers": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]},
            "bos_token_id": None,
            "eos_token_id": None,
        },
        vision_config=TOWER,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=START,
        vision_end_token_id=END,
        tie_word_embeddings=tied,
    )
    return _save(Qwen2_5_VLForConditionalGeneration, config, folder, seed)


DEEP_LAYERS = 4
DEEP_TOWER = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "in_channels": 3,
    "out_hidden_size": 64,
    "patch_size": 16,
    "spatial_merge_size": MERGE,
    "temporal_patch_size": 2,
    "num_position_embeddings": 64,
    "deepstack_visual_indexes": [0, 1],
}


def save_qwen3_vl(folder: Path, *, seed: int) -> Path:
    """The same of Qwen3-VL, with four layers, to the first two of which the tower adds."""
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2], "mrope_interleaved": True}
    text = {"num_hidden_layers": DEEP_LAYERS, "rope_parameters": rope, "bos_token_id": None, "eos_token_id": None}
    config = Qwen3VLConfig(
        text_config=tiny._SHAPE | text,
        vision_config=DEEP_TOWER,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=START,
        vision_end_token_id=END,
        tie_word_embeddings=False,
    )
    return _save(Qwen3VLForConditionalGeneration, config, folder, seed)


EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}  # gate_up_proj is not square


def save_qwen3_vl_moe(folder: Path, *, seed: int) -> Path:
    """The same with experts in each layer, stacked as in published files."""
    from transformers import Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration

    from slimrl.tiny.models import publish_experts

    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2], "mrope_interleaved": True}
    text = {"num_hidden_layers": DEEP_LAYERS, "rope_parameters": rope, "bos_token_id": None, "eos_token_id": None}
    config = Qwen3VLMoeConfig(
        text_config=tiny._SHAPE | EXPERTS | text,
        vision_config=DEEP_TOWER,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=START,
        vision_end_token_id=END,
        tie_word_embeddings=False,
    )
    publish_experts(_save(Qwen3VLMoeForConditionalGeneration, config, folder, seed))
    return folder


def _save(architecture: Any, config: Any, folder: Path, seed: int) -> Path:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = architecture(config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.dim() == 1:  # norms of 1 and biases of 0 would hide that they are not applied
                    parameter.add_(0.2 * torch.randn_like(parameter))
                elif "visual" in name:  # features as large as embeddings
                    parameter.mul_(4)
    model.save_pretrained(folder)
    return folder


def flags_of(folder: Path) -> dict[str, Any]:
    """The flags of the model, in addition to those of `tiny_args`."""
    config = json.loads((folder / "config.json").read_text())
    deep, family = config["model_type"].startswith("qwen3_vl"), family_for(config)
    experts = {"moe_layer_freq": [1] * DEEP_LAYERS, "moe_ffn_hidden_size": EXPERTS["moe_intermediate_size"]}
    return {
        **(tiny.MOE_FLAGS | experts if family.stacked_experts else {}),
        "num_layers": DEEP_LAYERS if deep else 2,
        "qk_layernorm": deep,
        "add_qkv_bias": not deep,
        "untie_embeddings_and_output_weights": not config["tie_word_embeddings"],
        "position_embedding_type": "mrope",
        "mrope_section": config["text_config"]["rope_parameters"]["mrope_section"],
        "vision_weights": tower_weights(family.tower_rows),
        "vision_activations": kept_elements(family.tower, config),
        "vision_folder": str(folder),
        "vision_levels": len(config["vision_config"].get("deepstack_visual_indexes", ())),
        "hf_checkpoint": str(folder),
    }


def inputs(grids: list[tuple[int, int, int]], seed: int, values: int = PATCH_VALUES) -> dict[str, torch.Tensor]:
    """Random images of these sizes in patches, as transformers' processor gives them."""
    generator = torch.Generator().manual_seed(seed)
    patches = sum(time * height * width for time, height, width in grids)
    return {
        "pixel_values": torch.randn(patches, values, generator=generator),
        "image_grid_thw": torch.tensor(grids),
    }


def prompt(grids: list[tuple[int, int, int]], generator: torch.Generator) -> list[int]:
    """Words, then each image and more words."""
    ids = torch.randint(0, 100, (4,), generator=generator).tolist()
    for time, height, width in grids:
        ids += [START, *[IMAGE] * (time * height * width // MERGE**2), END]
        ids += torch.randint(0, 100, (3,), generator=generator).tolist()
    return ids


def rollout(seed: int, values: int = PATCH_VALUES) -> RolloutBatch:
    """Eight samples: two groups about one image each, one about two images, one about none; without a schedule.

    One response has an image token that the model sampled.
    """
    generator = torch.Generator().manual_seed(seed)
    sizes: list[list[tuple[int, int, int]]] = [[(1, 4, 6)], [(1, 8, 4)], [(1, 2, 2), (1, 6, 10)], []]
    images = [inputs(grids, seed + number, values) if grids else None for number, grids in enumerate(sizes)]
    tokens, totals, responses, seen = [], [], [], []
    for sample in range(8):
        own = prompt(sizes[sample // 2], torch.Generator().manual_seed(sample // 2))
        answer = torch.randint(0, 100, (int(torch.randint(3, 12, (1,), generator=generator)),), generator=generator)
        if sample == 1:
            answer[1] = IMAGE
        tokens += [*own, *answer.tolist()]
        totals.append(len(own) + len(answer))
        responses.append(len(answer))
        seen.append(images[sample // 2])
    rewards = torch.randn(8, generator=generator)
    total = sum(responses)
    return RolloutBatch(
        tokens=torch.tensor(tokens),
        total_lengths=torch.tensor(totals),
        response_lengths=torch.tensor(responses),
        loss_mask=torch.ones(total),
        rollout_log_probs=-3 - torch.rand(total, generator=generator),
        raw_rewards=rewards,
        rewards=rewards.clone(),
        group_ids=torch.arange(8) // 2,
        sample_ids=torch.arange(8),
        truncated=torch.zeros(8, dtype=torch.bool),
        images=BatchImages.of_samples(seen),
    )


def video_inputs(
    grids: list[tuple[int, int, int]], seed: int, seconds: list[float] | None, values: int = PATCH_VALUES
) -> dict[str, Any]:
    """Random videos of these sizes in patches; without `seconds` between these, timestamps stand between them."""
    found = inputs(grids, seed, values)
    times = {} if seconds is None else {"second_per_grid_ts": torch.tensor(seconds)}
    return {"pixel_values_videos": found["pixel_values"], "video_grid_thw": found["image_grid_thw"], **times}


def video_prompt(grids: list[tuple[int, int, int]], generator: torch.Generator, *, dated: bool) -> list[int]:
    """As `prompt`; `dated`: words stand before each frame."""
    ids = torch.randint(0, 100, (2,), generator=generator).tolist()
    for time, height, width in grids:
        for frames in [1] * time if dated else [time]:
            ids += torch.randint(0, 100, (2,), generator=generator).tolist()
            ids += [START, *[VIDEO] * (frames * height * width // MERGE**2), END]
    return [*ids, *torch.randint(0, 100, (3,), generator=generator).tolist()]


def rollout_with_videos(seed: int, *, dated: bool, values: int = PATCH_VALUES) -> RolloutBatch:
    """Eight samples like those of `rollout`: of an image, of a video, of two videos and an image between, of text."""
    one, two = [(3, 4, 6)], [(2, 8, 4), (4, 2, 2)]
    images = [
        inputs([(1, 4, 6)], seed, values),
        video_inputs(one, seed + 1, None if dated else [1.5], values),
        inputs([(1, 6, 10)], seed + 2, values) | video_inputs(two, seed + 3, None if dated else [1.0, 2.2], values),
        None,
    ]
    words = [torch.Generator().manual_seed(number) for number in range(4)]
    prompts = [
        prompt([(1, 4, 6)], words[0]),
        video_prompt(one, words[1], dated=dated),
        [
            *video_prompt(two[:1], words[2], dated=dated),
            *prompt([(1, 6, 10)], words[2]),
            *video_prompt(two[1:], words[2], dated=dated),
        ],
        prompt([], words[3]),
    ]
    base = without_sampled_image(rollout(seed))
    answers = [
        own[int(total - response) :].tolist()
        for own, total, response in zip(
            base.tokens.split(base.total_lengths.tolist()), base.total_lengths, base.response_lengths, strict=True
        )
    ]
    answers = [torch.where(torch.tensor(own) < 100, torch.tensor(own), 5).tolist() for own in answers]
    tokens = [[*prompts[number // 2], *own] for number, own in enumerate(answers)]
    return dataclasses.replace(
        base,
        tokens=torch.tensor([token for own in tokens for token in own]),
        total_lengths=torch.tensor([len(own) for own in tokens]),
        images=BatchImages.of_samples([images[number // 2] for number in range(8)]),
    )


def without_sampled_image(batch: RolloutBatch) -> RolloutBatch:
    """The same with another token where the model sampled an image token, which transformers takes for an image."""
    tokens = batch.tokens.clone()
    start = int(batch.token_offsets[1] + batch.total_lengths[1] - batch.response_lengths[1])
    assert tokens[start + 1] == IMAGE
    tokens[start + 1] = 7
    return dataclasses.replace(batch, tokens=tokens)
