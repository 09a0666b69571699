"""Flags of other frameworks are answered with slimrl's flag, once."""

from __future__ import annotations

import pytest

from slimrl.arguments import read_args
from slimrl.arguments.foreign_flags import _PREFIXES, OTHER_WORDS
from slimrl.arguments.namespace import all_flag_specs
from slimrl.arguments.parser import RETIRED_FLAGS, own_spellings, parse_line

OWN = own_spellings(all_flag_specs())


def sentences(line: str) -> list[str]:
    return [str(problem) for problem in parse_line(line.split(), all_flag_specs(), {}).problems]


@pytest.mark.parametrize(("word", "row"), OTHER_WORDS.items(), ids=list(OTHER_WORDS))
def test_each_foreign_flag_maps_to_an_existing_flag(word, row):
    from slimrl.engines.sglang.server_args import RESERVED, server_flags

    assert word == word.lower().strip("-").replace("_", "-")
    assert f"--{word}" not in OWN
    assert f"--{word}" not in RETIRED_FLAGS
    if row.flag is None:
        assert row.clause
    elif row.flag.startswith("--sglang-"):
        passed = server_flags()[row.flag.removeprefix("--sglang-")]
        assert passed.dest not in RESERVED
    else:
        assert row.flag in OWN


@pytest.mark.parametrize("row", [*OTHER_WORDS.values(), *_PREFIXES.values()])
def test_each_flag_in_a_hint_exists(row):
    named = [word.strip(",;.()") for word in row.clause.split() if word.startswith("--") and "sglang-" not in word]
    assert [word for word in named if word not in OWN and word != "--flag"] == []


def test_common_flags_of_four_frameworks_are_covered():
    assert len(OTHER_WORDS) >= 60
    for owner in ("verl's", "OpenRLHF's", "TRL's", "ms-swift's"):
        assert sum(row.owner == owner for row in OTHER_WORDS.values()) >= 6


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        (
            "actor_rollout_ref.rollout.n=8",
            "actor_rollout_ref.rollout.n is verl's name: use --n-samples-per-prompt.",
        ),
        (
            "--colocate +trainer.total_epochs=15",
            "trainer.total_epochs is verl's name: use --num-epoch.",
        ),
        (
            "--colocate trainer.balance_batch=True",
            "trainer.balance_batch is verl's name and has no counterpart: flags are written --flag value, and"
            " docs/flags.md lists all of them.",
        ),
        ("--tis-upper-bound 2.0", "--tis-upper-bound is slime's name: use --tis-clip."),
        (
            "algorithm.rollout_correction.rollout_rs=sequence",
            "algorithm.rollout_correction.rollout_rs is verl's name: use --rs-level, with --use-rs.",
        ),
        ("--pretrain Qwen/Qwen3-4B", "--pretrain is OpenRLHF's name: use --hf-checkpoint."),
        (
            "--per_device_train_batch_size 4",
            "--per_device_train_batch_size is transformers' name: use --micro-batch-size, and"
            " --global-batch-size for a step.",
        ),
        (
            "--tp 2",
            "--tp is a short form: use --tensor-model-parallel-size, and --rollout-num-gpus-per-engine for the"
            " engines.",
        ),
        ("--pp=2", "--pp is a short form: use --pipeline-model-parallel-size."),
        ("--lr_scheduler cosine", "--lr_scheduler is transformers' name: use --lr-decay-style."),
        (
            "--lora-rank 16",
            "--lora-rank is TRL's name and has no counterpart: all weights are trained, adapters are unsupported;"
            " leave it out.",
        ),
        (
            "--use-lora",
            "--use-lora is TRL's name and has no counterpart: all weights are trained, adapters are unsupported; leave"
            " it out.",
        ),
        (
            "--critic-num-gpus 8",
            "--critic-num-gpus is a critic flag and has no counterpart: leave it out; docs/flags.md lists the flags of"
            " a critic, for example --critic-lr.",
        ),
        ("--critic_learning_rate 9e-6", "--critic_learning_rate is OpenRLHF's name: use --critic-lr."),
        ("critic.optim.lr=1e-5", "critic.optim.lr is verl's name: use --critic-lr."),
        ("--vllm_mode colocate", None),
        ("--learning-rate 1e-6", "--learning-rate is transformers' name: use --lr."),
    ],
)
def test_flag_of_another_framework_is_answered_with_ours(line, sentence):
    found = sentences(line)
    assert len(found) == 1
    assert sentence is None or found == [sentence]


@pytest.mark.parametrize("line", ["--prompt-data data.jsonl=0.5 more.jsonl=0.5", "--rollout-stop a.b=c trainer.x"])
def test_values_that_look_like_settings_stay_values(line):
    parsed = parse_line(line.split(), all_flag_specs(), {})
    assert parsed.problems == []
    assert [parsed.values] == [{line.split()[0].strip("-").replace("-", "_"): line.split()[1:]}]


@pytest.mark.parametrize(
    "line",
    [
        "--lora-rank 16",
        "--use-lora",
        "--critic-num-gpus 8",
        "--z-lora-rank 16",
        "--rollout-batch-sise 33",
        "--tp 3",
        "--pp 5",
        "--max-length 16",
        "--per_device_train_batch_size 3",
        "actor_rollout_ref.rollout.temperature=-1",
    ],
)
def test_guess_causes_no_second_error(recipe, line):
    assert len(read_args(recipe.line(line))[1]) == 1


@pytest.mark.parametrize(
    ("without", "instead"),
    [
        ("--hf-checkpoint", "--pretrain {dir}/hf"),
        ("--rollout-batch-size", "data.train_batch_size=32"),
        ("--rollout-max-response-len", "--generate_max_len 8192"),
        ("--num-rollout", "--num-rollot 3000"),
        ("--colocate", "--colocat"),
        ("--tensor-model-parallel-size", "--tp 2"),
        ("--max-tokens-per-gpu", "--max-token-per-gpu 9216"),
        ("--vocab-size", "--vocab_size 151936"),
    ],
)
def test_value_lost_to_a_misread_word_causes_no_second_error(recipe, without, instead):
    line = recipe.line(without=without) + instead.format(dir=recipe.dir).split()
    problems = read_args(line)[1]
    assert len(problems) == 1, problems
    assert instead.split()[0].partition("=")[0] in str(problems[0])


def test_errors_independent_of_a_misread_word_are_reported_together(recipe):
    problems = read_args(recipe.line("--rollout-batch-sise 32 --kl-coef 0.1 --kl-loss-coef 0.1"))[1]
    assert len(problems) == 2
    assert "count the KL twice" in str(problems[1])
