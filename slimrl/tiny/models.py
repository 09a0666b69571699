"""Tiny random models and their tokenizer: the Qwen3 of the tiny task, and one model per supported family.

Defines the sizes, the Hugging Face configurations, and MODEL_ARGS with the same shape. Models of other families use
transformers' classes at a size that a CPU trains in minutes, with config.json in the published format; each family's
file in `slimrl.models.families` has its `toys`. tools/make_tiny_model.py calls it (`--family`).

The tokenizer is lossless byte-level BPE with ChatML as chat template. It is built like Qwen's, at a hundredth of the
size: 256 bytes, one token per digit, and just enough merges that the words of the chat template and ``\\boxed{`` are
one token each. Its size is deliberately not a multiple of 128, so that tests cover a padded vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from slimrl.models import families
from slimrl.models.families.config_mapping import ToyConfig

END_OF_TEXT = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
VISION_START, VISION_END = "<|vision_start|>", "<|vision_end|>"
IMAGE_PAD, VIDEO_PAD = "<|image_pad|>", "<|video_pad|>"
# key of config.json -> the token whose id it has, in a vision-language model
VISION_IDS = {
    "vision_start_token_id": VISION_START,
    "vision_end_token_id": VISION_END,
    "image_token_id": IMAGE_PAD,
    "video_token_id": VIDEO_PAD,
}
WHOLE_WORDS = ("\\boxed{", "system", "user", "assistant")

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
)
# the same with images and videos among the parts of a message
VISION_TEMPLATE = CHAT_TEMPLATE.replace(
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}",
    "{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{%- if message['content'] is string -%}{{ message['content'] }}{%- else -%}"
    "{%- for part in message['content'] -%}"
    "{%- if part['type'] == 'image' -%}{{ '<|vision_start|><|image_pad|><|vision_end|>' }}"
    "{%- elif part['type'] == 'video' -%}{{ '<|vision_start|><|video_pad|><|vision_end|>' }}"
    "{%- else -%}{{ part['text'] }}{%- endif -%}"
    "{%- endfor -%}{%- endif -%}"
    "{{ '<|im_end|>\\n' }}",
)


def _merges(word: str) -> list[tuple[str, str]]:
    """The merges that build ``word`` from the left, one character at a time."""
    return [(word[:end], word[end]) for end in range(1, len(word))]


def build_tokenizer(*, max_length: int, vision: bool = False) -> PreTrainedTokenizerFast:
    """The tokenizer of every tiny model; ``max_length`` is the model's context in tokens.

    With ``vision`` it also has the tokens of images.
    """
    merges = [merge for word in WHOLE_WORDS for merge in _merges(word)]
    pieces = sorted(pre_tokenizers.ByteLevel.alphabet()) + [left + right for left, right in merges]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{N}|[^\p{N}]+"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        extra_special_tokens=[END_OF_TEXT, TURN_START, TURN_END, *(VISION_IDS.values() if vision else ())],
        chat_template=VISION_TEMPLATE if vision else CHAT_TEMPLATE,
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )


COMMON = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "max_position_embeddings": 2048,
    # The usual 0.02 is meant for widths in the thousands; at 64 it doubles the length of the warm start.
    "initializer_range": 0.1,
    "bos_token_id": None,
}
FAMILIES: dict[str, ToyConfig] = {name: toy for family in families.FAMILIES for name, toy in family.toys.items()}

# key of the Hugging Face config -> Megatron's flag
SIZE_FLAGS = {
    "num_hidden_layers": "--num-layers",
    "hidden_size": "--hidden-size",
    "intermediate_size": "--ffn-hidden-size",
    "num_attention_heads": "--num-attention-heads",
    "vocab_size": "--vocab-size",
    "max_position_embeddings": "--max-position-embeddings",
    "rms_norm_eps": "--norm-epsilon",
    "num_local_experts": "--num-experts",
    "n_routed_experts": "--num-experts",
    "num_experts_per_tok": "--moe-router-topk",
    "moe_intermediate_size": "--moe-ffn-hidden-size",
    "q_lora_rank": "--q-lora-rank",
    "kv_lora_rank": "--kv-lora-rank",
    "qk_nope_head_dim": "--qk-head-dim",
    "qk_rope_head_dim": "--qk-pos-emb-head-dim",
    "v_head_dim": "--v-head-dim",
    "routed_scaling_factor": "--moe-router-topk-scaling-factor",
}


def sees(name: str) -> bool:
    """Whether the family has a vision tower."""
    return "vision_config" in FAMILIES[name].config


def build_family_model(
    name: str, tokenizer: PreTrainedTokenizerFast, *, seed: int, untie: bool = False
) -> PreTrainedModel:
    """A randomly initialized float32 model of the family; the same seed gives the same weights.

    Does not change torch's random state.
    """
    family = FAMILIES[name]
    architecture = getattr(transformers, family.architecture)
    own = dict(family.config)
    tokens = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    decoder = COMMON | own.pop("text_config", own) | {"vocab_size": len(tokenizer), **tokens}
    arguments = decoder if "text_config" not in family.config else {**own, "text_config": decoder}
    if sees(name):
        arguments |= {key: tokenizer.convert_tokens_to_ids(token) for key, token in VISION_IDS.items()}
    config = architecture.config_class(**arguments, tie_word_embeddings=not untie, dtype="float32")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = architecture(config)
    model.generation_config = GenerationConfig(**tokens, do_sample=True, temperature=1.0)
    return model


def publish_config(name: str, folder: Path) -> None:
    """Rewrites ``folder/config.json`` with the keys of the family's published files."""
    family, path = FAMILIES[name], folder / "config.json"
    whole = json.loads(path.read_text())
    nested = "text_config" in family.config
    if not nested:  # transformers' own files have the decoder one level down
        whole = whole.pop("text_config", {}) | whole
    entries = whole["text_config"] if nested else whole
    whole.pop("dtype", None)
    for key in ("layer_types", "mlp_layer_types", "qk_head_dim", "dtype"):
        entries.pop(key, None)
    if "kv_lora_rank" in entries:
        entries.pop("head_dim", None)
    if "num_local_experts" in entries:
        entries["num_experts"] = entries.pop("num_local_experts")
    rope = entries.pop("rope_parameters")
    for key in ("rope_theta", "partial_rotary_factor"):
        if key in rope:
            entries[key] = rope.pop(key)
    entries["rope_scaling"] = rope if nested or rope.get("rope_type", "default") != "default" else None
    if "mrope_section" in rope and not nested:
        entries["rope_scaling"] = {"type": "mrope", "mrope_section": rope["mrope_section"]}
    whole |= {"torch_dtype": "float32", **family.published}
    if family.config_code is not None:
        file, class_name, base = family.config_code
        entries["auto_map"] = {"AutoConfig": f"{file}.{class_name}"}
        code = f"class {class_name}(transformers.{base}):\n    model_type = {entries['model_type']!r}\n"
        (folder / f"{file}.py").write_text(f"import transformers\n\n\n{code}")
    path.write_text(json.dumps(whole, indent=2, sort_keys=True) + "\n")


def publish_experts(folder: Path) -> None:
    """Transposes the stacked experts in the files of ``folder``; other files stay as they are.

    Published files of Qwen3-VL-MoE have the inputs before the outputs, transformers saves them the other way round.
    """
    for path in folder.glob("*.safetensors"):
        tensors = load_file(path)
        stacks = {name for name in tensors if name.endswith((".experts.gate_up_proj", ".experts.down_proj"))}
        if stacks:
            whole = {name: t.transpose(1, 2).contiguous() if name in stacks else t for name, t in tensors.items()}
            save_file(whole, path, metadata={"format": "pt"})


def save_image_processor(tower: Mapping[str, Any] | None, folder: Path) -> None:
    """Writes the settings of the processors of a model with this vision tower, as published; nothing without one.

    Images keep their size if both sides are multiples of a merged patch and they have at most 256 of these. So do the
    frames of a video with at most 64 of these (Qwen3-VL: all of them together, at most 256).
    """
    if tower is None:
        return
    patch, merge = tower["patch_size"], tower["spatial_merge_size"]
    merged = (patch * merge) ** 2
    entries = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": "Qwen3VLProcessor" if "deepstack_visual_indexes" in tower else "Qwen2_5_VLProcessor",
        "patch_size": patch,
        "temporal_patch_size": tower["temporal_patch_size"],
        "merge_size": merge,
        "min_pixels": 4 * merged,
        "max_pixels": 256 * merged,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(entries, indent=2) + "\n")
    deep = "deepstack_visual_indexes" in tower  # whose limits are for all frames of a video
    videos = {
        "video_processor_type": "Qwen3VLVideoProcessor" if deep else "Qwen2VLVideoProcessor",
        "size": {"shortest_edge": 4 * merged, "longest_edge": (256 if deep else 64) * merged},
        "fps": 2,
        "max_frames": 32,
    }
    kept = {name: value for name, value in entries.items() if name not in ("image_processor_type", *videos)}
    kept = {name: value for name, value in kept.items() if name not in ("min_pixels", "max_pixels")}
    (folder / "video_preprocessor_config.json").write_text(json.dumps(kept | videos, indent=2) + "\n")


def size_args_script(name: str, config: PretrainedConfig) -> str:
    """A bash script that appends the tiny model's sizes to MODEL_ARGS of a model of the same family."""
    entries = config.to_dict()
    entries = entries.pop("text_config", {}) | entries
    flags = {flag: entries[key] for key, flag in SIZE_FLAGS.items() if entries.get(key) is not None}
    rope = entries["rope_parameters"]
    flags["--rotary-base"] = int(rope["rope_theta"])
    if "mrope_section" in rope:
        flags["--mrope-section"] = " ".join(map(str, rope["mrope_section"]))
    if rope.get("rope_type") == "yarn":
        flags["--rotary-scaling-factor"] = rope["factor"]
    if not entries.get("kv_lora_rank"):
        flags["--num-query-groups"] = entries["num_key_value_heads"]
        flags["--kv-channels"] = entries.get("head_dim") or entries["hidden_size"] // entries["num_attention_heads"]
    if "--num-experts" in flags:
        layers, dense = entries["num_hidden_layers"], 1 if "n_routed_experts" in entries else 0
        flags["--moe-layer-freq"] = f'"[0]*{dense}+[1]*{layers - dense}"' if dense else f'"[1]*{layers}"'
    if entries.get("n_shared_experts"):
        flags["--moe-shared-expert-intermediate-size"] = entries["n_shared_experts"] * entries["moe_intermediate_size"]
    if entries.get("n_group", 1) > 1:
        flags["--moe-router-num-groups"], flags["--moe-router-group-topk"] = entries["n_group"], entries["topk_group"]
    body = "".join(f"   {flag} {value}\n" for flag, value in flags.items())
    header = f"# Toy sizes for the family {name}; to be sourced after the flags of a model of this family.\n"
    return f"{header}# shellcheck shell=bash disable=SC2034\nMODEL_ARGS+=(\n{body})\n"


@dataclass(frozen=True)
class TinySize:
    """The shape of a tiny Qwen3; every count divides by a tensor-parallel size of 2."""

    num_layers: int = 2
    hidden_size: int = 64
    ffn_hidden_size: int = 128
    num_attention_heads: int = 4
    num_query_groups: int = 2
    kv_channels: int = 16
    max_position_embeddings: int = 2048
    rotary_base: int = 10000
    norm_epsilon: float = 1e-6
    tied: bool = True

    def __post_init__(self) -> None:
        if self.num_attention_heads % self.num_query_groups:
            raise ValueError(
                f"--num-attention-heads {self.num_attention_heads} is not a multiple of "
                f"--num-query-groups {self.num_query_groups}: each group must serve the same number of heads"
            )


SIZES = {
    "tiny": TinySize(),
    "small": TinySize(
        num_layers=4, hidden_size=128, ffn_hidden_size=384, num_attention_heads=8, num_query_groups=4, kv_channels=16
    ),
}


def build_model(size: TinySize, tokenizer: PreTrainedTokenizerFast, *, seed: int) -> Qwen3ForCausalLM:
    """A randomly initialized float32 model; same seed, same weights. Does not change torch's random state."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=size.hidden_size,
        intermediate_size=size.ffn_hidden_size,
        num_hidden_layers=size.num_layers,
        num_attention_heads=size.num_attention_heads,
        num_key_value_heads=size.num_query_groups,
        head_dim=size.kv_channels,
        max_position_embeddings=size.max_position_embeddings,
        rms_norm_eps=size.norm_epsilon,
        rope_theta=size.rotary_base,
        tie_word_embeddings=size.tied,
        # The usual 0.02 is meant for widths in the thousands; at 64 it doubles the length of the warm start.
        initializer_range=0.1,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, do_sample=True, temperature=1.0
    )
    return model


def model_args_script(size: TinySize, *, vocab_size: int) -> str:
    """A bash script that sets MODEL_ARGS, in the format of ``scripts/models/*.sh``."""
    lines = [
        "--swiglu",
        f"--num-layers {size.num_layers}",
        f"--hidden-size {size.hidden_size}",
        f"--ffn-hidden-size {size.ffn_hidden_size}",
        f"--num-attention-heads {size.num_attention_heads}",
        "--group-query-attention",
        f"--num-query-groups {size.num_query_groups}",
        f"--kv-channels {size.kv_channels}",
        "--qk-layernorm",
        "--use-rotary-position-embeddings",
        f"--rotary-base {size.rotary_base}",
        "--disable-bias-linear",
        "--normalization RMSNorm",
        f"--norm-epsilon {size.norm_epsilon}",
        f"--vocab-size {vocab_size}",
        f"--max-position-embeddings {size.max_position_embeddings}",
    ]
    if not size.tied:
        lines.append("--untie-embeddings-and-output-weights")
    body = "".join(f"   {line}\n" for line in lines)
    header = "# Megatron flags of this model; to be sourced.\n# shellcheck shell=bash disable=SC2034\n"
    return f"{header}MODEL_ARGS=(\n{body})\n"
