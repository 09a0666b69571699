"""tools/make_tiny_model.py as a user runs it: files, shapes, errors, and (slow) the initial accuracy."""

import json
import shlex
import subprocess
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.tools import converting

ROOT = Path(__file__).resolve().parents[2]


def run_tool(*arguments: object, new_process: bool = False) -> subprocess.CompletedProcess[str]:
    run = converting.run_tool_subprocess if new_process else converting.run_tool
    return run("make_tiny_model.py", *arguments)


def model_args(folder: Path) -> list[str]:
    script = f'source {shlex.quote(str(folder / "model_args.sh"))} && printf "%s\\n" "${{MODEL_ARGS[@]}}"'
    return subprocess.run(["bash", "-euc", script], capture_output=True, text=True, check=True).stdout.split()


@pytest.fixture(scope="module")
def untrained(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tiny") / "made"
    done = run_tool(
        "--output-dir", folder, "--seed", 5, "--warm-start-steps", 0, "--untie", "--num-layers", 3, new_process=True
    )
    assert done.returncode == 0, done.stderr
    return folder


def test_checkpoint_loads_in_transformers_with_the_requested_shape(untrained):
    model = AutoModelForCausalLM.from_pretrained(untrained / "model")
    assert model.config.model_type == "qwen3"
    assert model.dtype == torch.float32
    assert (model.config.num_hidden_layers, model.config.hidden_size, model.config.vocab_size) == (3, 64, 281)
    assert not torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)


def test_saved_tokenizer_is_the_built_one(untrained):
    tokenizer = AutoTokenizer.from_pretrained(untrained / "model")
    assert tokenizer.tokenize("12+3=") == ["1", "2", "+", "3", "="]
    assert tokenizer.eos_token == "<|im_end|>"
    generation = json.loads((untrained / "model" / "generation_config.json").read_text())
    assert generation["eos_token_id"] == tokenizer.eos_token_id


def test_data_has_messages_and_correct_labels(untrained):
    rows = [json.loads(line) for name in ("train", "eval") for line in (untrained / f"{name}.jsonl").open()]
    assert len(rows) == 1600 + 128
    for row in rows:
        left, right = row["prompt"][0]["content"].rstrip("=").split("+")
        assert int(left) + int(right) == int(row["label"])


def test_model_args_describe_the_saved_config(untrained):
    flags = model_args(untrained)
    config = json.loads((untrained / "model" / "config.json").read_text())
    value = dict(zip(flags, flags[1:], strict=False))
    assert int(value["--num-layers"]) == config["num_hidden_layers"]
    assert int(value["--ffn-hidden-size"]) == config["intermediate_size"]
    assert int(value["--num-query-groups"]) == config["num_key_value_heads"]
    assert int(value["--kv-channels"]) == config["head_dim"]
    assert int(value["--vocab-size"]) == config["vocab_size"]
    assert float(value["--norm-epsilon"]) == config["rms_norm_eps"]
    assert float(value["--rotary-base"]) == config["rope_parameters"]["rope_theta"]
    assert "--untie-embeddings-and-output-weights" in flags


@pytest.mark.slow
def test_existing_folder_is_rejected_before_any_work(untrained):
    before = (untrained / "model" / "model.safetensors").read_bytes()
    done = run_tool("--output-dir", untrained)
    assert done.returncode == 2
    assert f"--output-dir {untrained} exists" in done.stderr and "--force" in done.stderr
    assert (untrained / "model" / "model.safetensors").read_bytes() == before


def test_force_replaces_no_folder_with_other_contents(tmp_path):
    (tmp_path / "thesis.txt").write_text("precious")
    done = run_tool("--output-dir", tmp_path, "--force")
    assert done.returncode == 2 and "also has thesis.txt" in done.stderr
    assert (tmp_path / "thesis.txt").read_text() == "precious"
    done = run_tool("--output-dir", tmp_path / "thesis.txt", "--force")
    assert done.returncode == 2 and "is a file" in done.stderr


def test_heads_that_do_not_divide_into_groups_are_rejected(tmp_path):
    done = run_tool("--output-dir", tmp_path / "made", "--num-attention-heads", 6, "--num-query-groups", 4)
    assert done.returncode == 2
    assert "--num-attention-heads 6 is not a multiple of --num-query-groups 4" in done.stderr
    assert not (tmp_path / "made").exists()


@pytest.mark.slow
def test_warmed_up_model_solves_exactly_the_additions_without_a_carry(additions):
    model = AutoModelForCausalLM.from_pretrained(additions / "model")
    tokenizer = AutoTokenizer.from_pretrained(additions / "model")
    rows = [json.loads(line) for line in (additions / "eval.jsonl").open()]
    chats = [row["prompt"] for row in rows]
    prompts = tokenizer.apply_chat_template(chats, add_generation_prompt=True, return_tensors="pt")
    answers = model.generate(**prompts, do_sample=False, temperature=None, max_new_tokens=16)
    texts = tokenizer.batch_decode(answers[:, prompts["input_ids"].shape[1] :], skip_special_tokens=True)
    right = [text == f"\\boxed{{{row['label']}}}" for text, row in zip(texts, rows, strict=True)]
    assert 0.3 <= sum(right) / len(right) <= 0.5
    sampled = model.generate(**prompts, do_sample=True, num_return_sequences=8, max_new_tokens=16)
    texts = tokenizer.batch_decode(sampled[:, prompts["input_ids"].shape[1] :], skip_special_tokens=True)
    found = [
        any(text == f"\\boxed{{{row['label']}}}" for text in texts[8 * i : 8 * i + 8]) for i, row in enumerate(rows)
    ]
    assert sum(found) / len(found) > 0.8


def test_family_toy_comes_with_sizes_for_the_flags_of_a_published_model(tmp_path):
    made = run_tool("--output-dir", tmp_path / "toy", "--family", "moonlight", "--warm-start-steps", "0", "--untie")
    assert made.returncode == 0, made.stderr
    assert sorted(path.name for path in (tmp_path / "toy").iterdir()) == [
        "eval.jsonl",
        "model",
        "size_args.sh",
        "train.jsonl",
    ]
    config = json.loads((tmp_path / "toy/model/config.json").read_text())
    assert (config["model_type"], config["n_routed_experts"], config["q_lora_rank"]) == ("deepseek_v3", 8, None)
    sizes = f"source scripts/models/moonlight.sh; source {tmp_path}/toy/size_args.sh; echo ${{MODEL_ARGS[@]}}"
    words = subprocess.run(["bash", "-euc", sizes], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    last = {flag: value for flag, value in zip(words, words[1:], strict=False) if flag.startswith("--")}
    assert (last["--hidden-size"], last["--num-experts"], last["--moe-layer-freq"]) == ("64", "8", "[0]*1+[1]*1")


@pytest.mark.parametrize(
    ("arguments", "flag"), [(["--num-layers", "3"], "--num-layers"), (["--size", "small"], "--size")]
)
def test_family_toy_has_a_fixed_shape(arguments, flag, tmp_path):
    refused = run_tool("--output-dir", tmp_path / "toy", "--family", "qwen3_moe", *arguments)
    assert refused.returncode == 2
    assert refused.stderr == f"{flag} has no effect on the fixed shape of --family qwen3_moe; give one of them\n"
