"""Rules about vision-language models. Qwen2.5-VL-3B's own flags pass, each violation is one error."""

from __future__ import annotations

import importlib.util
import json
import subprocess
from pathlib import Path

import pytest

from slimrl.arguments import read_args
from tests.arguments.conftest import Recipe, without

ROOT = Path(__file__).resolve().parents[2]
CONFIG = json.loads((ROOT / "tests/scripts/published_configs/qwen2.5-VL-3B.json").read_text())
KEYS = '--multimodal-keys {{"image":"images"}}'
TEXT = "a vision-language model (--hf-checkpoint) {1} {0}: leave {0} out, or give a text model."
OUT = "{0} {1}: leave it or --multimodal-keys out."

# rule -> (flags that pass when appended to the line, flags that do not with their error)
CASES: dict[str, tuple[list[str], list[tuple[str, str]]]] = {
    "multimodal_positions_are_complete": (
        [""],
        [
            (
                "--mrope-section 16 24",
                "--mrope-section 16 24 has 40 pairs of channels and --kv-channels 128 64: give the mrope_section of"
                " config.json.",
            ),
        ],
    ),
    "vision_model_can_be_trained": (
        [
            "--freeze-params-name-list vision_model",
            "--pipeline-model-parallel-size 2 --use-distributed-optimizer",
            "--context-parallel-size 2",
            "--lora-rank 8 --transformer-impl local",
            "--advantage-estimator ppo",
            "--use-megatron-fsdp --data-parallel-sharding-strategy optim",
        ],
        [
            (
                "--spec tests.megatron.engine_layers layers",
                TEXT.format("--spec", "has its own layers instead of"),
            ),
        ],
    ),
    "vision_model_can_be_served": (
        ["--rollout-engine sglang", "--check-weight-update-equal --rollout-num-gpus-per-engine 1"],
        [
            (
                "--check-weight-update-equal",
                "--check-weight-update-equal compares a vision tower (--hf-checkpoint) on engines of one GPU, and"
                " --rollout-num-gpus-per-engine is 2: leave it out, or give 1.",
            ),
            (
                "--update-weight-transfer-mode p2p --rollout-num-gpus 6",
                "--update-weight-transfer-mode p2p sends a vision tower (--hf-checkpoint) to engines of one GPU, and"
                " --rollout-num-gpus-per-engine is 2: leave it out, or give 1.",
            ),
            (
                "--update-weight-mode delta --rollout-num-gpus 6",
                "--update-weight-mode delta does not load a vision tower (--hf-checkpoint): leave it out.",
            ),
        ],
    ),
    "images_have_a_model": (
        [KEYS, '--multimodal-keys {{"image":"images","video":"videos"}}'],
        [
            (
                '--multimodal-keys {{"audio":"clips"}}',
                "--multimodal-keys has 'audio', and images and videos are supported: leave it out.",
            ),
            ('--multimodal-keys {{"video":""}}', "--multimodal-keys has '' for video: give the name of a column."),
            ('--multimodal-keys {{"image":3}}', "--multimodal-keys has 3 for image: give the name of a column."),
            (
                "--multimodal-keys {{}}",
                '--multimodal-keys is empty: give the column of images, {"image": "images"}, or leave it out.',
            ),
        ],
    ),
    "images_fit_the_run": (
        [
            f"{KEYS} --rollout-max-prompt-len 1024",
            f"{KEYS} --custom-generate-function-path examples.look_again.generate",
        ],
        [
            (
                f"{KEYS} --rollout-truncate-prompt left --rollout-max-prompt-len 1024",
                OUT.format("--rollout-truncate-prompt", "may cut an image"),
            ),
            (
                f"{KEYS} --custom-convert-samples-to-train-data-path tests.rollout.test_user_functions.columns",
                OUT.format("--custom-convert-samples-to-train-data-path", "makes rows without images"),
            ),
        ],
    ),
}


@pytest.fixture
def seeing(recipe: Recipe) -> Recipe:
    """The recipe with the published config.json and processor of Qwen2.5-VL-3B, and a row with an image."""
    (recipe.dir / "hf" / "config.json").write_text(json.dumps(CONFIG))
    (recipe.dir / "hf" / "preprocessor_config.json").write_text("{}")
    row = {
        "prompt": [{"role": "user", "content": "<image>1+1"}],
        "label": "2",
        "images": ["data:image/png;base64,AA=="],
    }
    for name in ("train", "aime-2024"):
        (recipe.dir / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    return recipe


def line(recipe: Recipe, more: str, model: str = "qwen2.5-VL-3B") -> list[str]:
    """The recipe's line with the flags of a model."""
    command = f"source {ROOT}/scripts/models/{model}.sh; printf '%s\\n' \"${{MODEL_ARGS[@]}}\""
    words = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True).stdout.splitlines()
    base = without(recipe.line(), "--qk-layernorm", "--use-rotary")
    return [*base, *words, *more.format(dir=recipe.dir).split()]


def sentences(words: list[str]) -> list[str]:
    _, problems = read_args(words)
    return [problem.sentence for problem in problems]


@pytest.mark.parametrize(("rule", "more"), [(rule, more) for rule, (good, _) in CASES.items() for more in good])
def test_allowed_line_has_no_error(rule, more, seeing):
    assert sentences(line(seeing, more)) == []


@pytest.mark.parametrize(
    ("rule", "more", "sentence"), [(rule, *case) for rule, (_, bad) in CASES.items() for case in bad]
)
def test_violation_is_an_error(rule, more, sentence, seeing):
    assert sentence in sentences(line(seeing, more))


def test_positions_without_their_section_and_the_other_way_round(seeing):
    words = line(seeing, "")
    start = words.index("--mrope-section")
    assert any("mrope needs --mrope-section" in one for one in sentences([*words[:start], *words[start + 4 :]]))
    words[words.index("mrope")] = "rope"
    assert "--mrope-section belongs to --position-embedding-type mrope: add it, or leave --mrope-section out." in (
        sentences(words)
    )


def test_section_of_another_model_is_named(seeing):
    assert sentences(line(seeing, "--mrope-section 24 20 20")) == [
        "--mrope-section is 24 20 20 and config.json says rope mrope_section 16 24 24: give --mrope-section 16 24 24."
    ]


def test_images_need_a_model_that_sees(recipe):
    (found,) = sentences(recipe.line('--multimodal-keys {{"image":"images"}}'))
    assert found.startswith("--multimodal-keys needs a vision-language model, and config.json of --hf-checkpoint")


def test_multimodal_positions_need_a_tower(recipe):
    found = sentences(recipe.line("--position-embedding-type mrope --mrope-section 16 24 24"))
    assert any(one.startswith("--position-embedding-type mrope is for models with a vision tower") for one in found)


def test_images_need_a_processor(seeing):
    (seeing.dir / "hf" / "preprocessor_config.json").unlink()
    (found,) = sentences(line(seeing, KEYS))
    assert found == (
        f"--multimodal-keys needs an image processor, and --hf-checkpoint {seeing.dir}/hf has no"
        " preprocessor_config.json: copy it there from the model."
    )


TESTED_APART = ("levels_are_on_the_first_stage",)
SELECTIVE = "--recompute-granularity selective"


@pytest.mark.parametrize(
    ("more", "found"),
    [
        (SELECTIVE, []),
        (f"{SELECTIVE} --pipeline-model-parallel-size 4", []),
        (
            "",
            [
                "--recompute-granularity full repeats layers without the features that the vision tower adds to the"
                " first 3 (--hf-checkpoint): give selective, or leave it out."
            ],
        ),
        (
            f"{SELECTIVE} --pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 2",
            [
                "--pipeline-model-parallel-size 2 leaves 2 layers on the first stage, and the vision tower"
                " (--hf-checkpoint) adds features to 3: use fewer stages, or give --decoder-first-pipeline-num-layers"
                " 3."
            ],
        ),
    ],
)
def test_levels_of_qwen3_vl_are_on_the_first_stage(more, found, seeing):
    config = json.loads((ROOT / "tests/scripts/published_configs/qwen3-VL-4B.json").read_text())
    (seeing.dir / "hf" / "config.json").write_text(json.dumps(config))
    words = without(line(seeing, more, model="qwen3-VL-4B"), "--recompute-method", "--recompute-num-layers")
    problems = [one for one in sentences(words) if "--recompute-method" not in one]
    assert problems == found


CONVERSATIONS = (
    "--rollout-function-path slimrl.rollout.sft_rollout.generate_rollout --loss-type sft_loss --debug-train-only"
    " --disable-compute-advantages-and-returns"
)


def conversations(seeing: Recipe, messages: list[dict[str, str]]) -> list[str]:
    """The problems of supervised training on these messages, that name images."""
    row = {"prompt": messages, "label": "2", "images": ["data:image/png;base64,AA=="]}
    (seeing.dir / "train.jsonl").write_text(json.dumps(row) + "\n")
    words = [word for word in line(seeing, f"{KEYS} {CONVERSATIONS}") if word != "--apply-chat-template"]
    return [one for one in sentences(words) if "image" in one]


def test_conversations_may_have_images_in_messages_of_others_than_the_assistant(seeing):
    question, answer = {"role": "user", "content": "<image>?"}, {"role": "assistant", "content": "2"}
    assert conversations(seeing, [question, answer]) == []
    assert conversations(seeing, [answer, question]) == []
    (found,) = conversations(seeing, [{**question, "content": "?"}, {**answer, "content": "<image>2"}])
    assert f"{seeing.dir}/train.jsonl:1: message 1 is the assistant's and has an image, whose tokens cannot be" in found
    (found,) = conversations(seeing, [question, question, answer])
    assert "the messages have 2 places for images (<image>) and column 'images' (--multimodal-keys) has 1" in found


def test_videos_need_the_package_that_decodes_them(seeing, monkeypatch):
    keys = '--multimodal-keys {{"image":"images","video":"videos"}}'
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == "av" else find(name, *more))
    assert sentences(line(seeing, keys)) == [
        "--multimodal-keys has videos, and the package av is not installed: pip install av."
    ]


def test_images_need_a_chat_template(seeing):
    words = [word for word in line(seeing, KEYS) if word != "--apply-chat-template"]
    assert "--multimodal-keys puts images where the chat template has them: add --apply-chat-template." in (
        sentences(words)
    )


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        ({"images": []}, "have 1 places for images (<image>) and column 'images' (--multimodal-keys) has 0 images"),
        ({"images": ["nowhere.png"]}, "images[0] (--multimodal-keys) is 'nowhere.png', which is no existing file"),
        ({"images": [3]}, "images[0] (--multimodal-keys) is of type int"),
        ({"images": [{"size": 3}]}, 'images[0] (--multimodal-keys) is an object without "bytes" and "path"'),
        ({"images": ["data:image/png;base64,@@"]}, "images[0] (--multimodal-keys) is a data URI without base64 bytes"),
    ],
)
def test_bad_images_are_named_with_their_row(row, fault, seeing):
    content = {"prompt": [{"role": "user", "content": "<image>1+1"}], "label": "2"}
    (seeing.dir / "train.jsonl").write_text(json.dumps(content | row) + "\n")
    (found,) = sentences(line(seeing, KEYS))
    assert f"{seeing.dir}/train.jsonl:1: " in found and fault in found
