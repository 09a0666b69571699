"""Command-line words become values, and every unrecognized word is reported."""

from __future__ import annotations

import re

import pytest

from slimrl.arguments import PassthroughFlag
from slimrl.arguments.flag import FlagSpec
from slimrl.arguments.namespace import all_flag_specs
from slimrl.arguments.parser import RETIRED_FLAGS, ParsedLine, own_spellings, parse_line


def server_flags() -> dict[str, PassthroughFlag]:
    return {
        "mem-fraction-static": PassthroughFlag("mem_fraction_static", type=float),
        "cuda-graph-bs": PassthroughFlag("cuda_graph_bs", nargs="+", type=int),
        "log-level": PassthroughFlag("log_level", choices=("info", "error")),
        "disable-radix-cache": PassthroughFlag("disable_radix_cache", action="store_true"),
        "enable-mixed-chunk": PassthroughFlag("mixed", nargs="?", type=int),
        "pair": PassthroughFlag("pair", nargs=2),
        "port": PassthroughFlag("port", type=int, managed_by="a free port"),
    }


def parse(line: str) -> ParsedLine:
    return parse_line(line.split(), all_flag_specs(), {"sglang": server_flags, "router": dict})


def sentences(line: str) -> list[str]:
    return [str(problem) for problem in parse(line).problems]


@pytest.mark.parametrize(
    ("line", "dest", "value"),
    [
        ("--rollout-batch-size 32", "rollout_batch_size", 32),
        ("--rollout-batch-size=32", "rollout_batch_size", 32),
        ("--rollout-batch-size 16 --rollout-batch-size 32", "rollout_batch_size", 32),
        ("--rollout-top-k -1", "rollout_top_k", -1),
        ("--lr 1e-6", "lr", 1e-6),
        ("--norm-epsilon 1e-6", "norm_epsilon", 1e-6),
        ("--layernorm-epsilon 1e-6", "norm_epsilon", 1e-6),
        ("--colocate", "colocate", True),
        ("--no-offload-train", "offload_train", False),
        ("--offload-train --no-offload-train", "offload_train", False),
        ("--disable-bias-linear", "add_bias_linear", False),
        ("--rollout-stop-token-ids 1 2 3", "rollout_stop_token_ids", [1, 2, 3]),
        ("--rollout-stop a --rollout-stop b c", "rollout_stop", ["b", "c"]),
        ('--train-env-vars {"A":"1"}', "train_env_vars", {"A": "1"}),
        ("--prompt-data a=b.jsonl", "prompt_data", ["a=b.jsonl"]),
        ("--prompt-data=a=b.jsonl", "prompt_data", ["a=b.jsonl"]),
    ],
)
def test_words_are_parsed_into_values(line, dest, value):
    parsed = parse(line)
    assert parsed.problems == []
    assert parsed.values == {dest: value}


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("--rollout-batch-sise 32", "unknown flag --rollout-batch-sise: did you mean --rollout-batch-size?"),
        ("--num-layer 3", "unknown flag --num-layer: did you mean --num-layers?"),
        ("--zzzzzz 3", "unknown flag --zzzzzz: see docs/flags.md for all flags."),
        (
            "--http-proxy x",
            "--http-proxy has no effect in slimrl: slime never read it; leave it out, downloads follow the variable"
            " http_proxy.",
        ),
        ("--num-layers 3.5", "--num-layers 3.5 is not a whole number."),
        ("--lr fast", "--lr fast is not a number."),
        ("--lr nan", "--lr nan is not a finite number."),
        ("--save=", "--save '' is empty, perhaps because of an unset variable: give a value, or leave it out."),
        ("--lr=", "--lr '' is empty, perhaps because of an unset variable: give a value, or leave it out."),
        ("--rollout-top-k 0", "--rollout-top-k 0 is not allowed: give another number, or leave it out."),
        (
            "--log-probs-chunk-size 0",
            "--log-probs-chunk-size 0 is not allowed: give another number, or leave it out.",
        ),
        ("--rollout-seed -5", "--rollout-seed -5 is too small: it must be at least 0."),
        ("--kl-coef -0.1", "--kl-coef -0.1 is too small: it must be at least 0."),
        ("--kl-loss-coef -0.1", "--kl-loss-coef -0.1 is too small: it must be at least 0."),
        ("--rollout-temperature 0", "--rollout-temperature 0 is too small: it must be above 0."),
        ("--rollout-top-p 1.5", "--rollout-top-p 1.5 is too large: it must be at most 1."),
        ("--kl-loss-type k4", "--kl-loss-type k4 is not k1, k2, k3 or low_var_kl."),
        ("--kl-loss-type low_var", "--kl-loss-type low_var is not k1, k2, k3 or low_var_kl: perhaps low_var_kl."),
        (
            "--loss-type sum",
            "--loss-type sum is not policy_loss, sft_loss, preference_loss, reward_model_loss or custom_loss.",
        ),
        ("--lr", "--lr needs a value and none is given: write --lr <value>."),
        (
            "--colocate yes",
            "--colocate is a switch that takes no value, so 'yes' after it belongs to no flag: remove it or name its"
            " flag.",
        ),
        (
            "--lr 1 2",
            "--lr is a flag that takes one value, so '2' after it belongs to no flag: remove it or name its flag.",
        ),
        ("= --colocate", "'=' is before the first flag: write every value after its --flag."),
        ("--train-env-vars [1]", "--train-env-vars [1] is not a JSON object such as '{\"enable_thinking\": false}'."),
    ],
)
def test_unrecognized_words_are_one_error(line, sentence):
    assert sentences(line) == [sentence]


def test_every_unsupported_flag_reports_an_alternative():
    refusals = {spec.name: spec.not_served for spec in all_flag_specs() if spec.not_served is not None}
    deed = re.compile(
        r"\b(use|give|leave|lower|divide|call|choose|convert|compare|dump|read|profile)\b|belongs to --|FSDP"
    )
    assert [name for name, reason in {**refusals, **RETIRED_FLAGS}.items() if not deed.search(reason)] == []


def test_all_errors_are_reported_not_only_the_first():
    assert len(sentences("--num-layer 3 --lr fast --kl-loss-type k4 --colocate 1")) == 4


def test_guess_is_not_applied_but_noted():
    parsed = parse("--rollout-batch-sise 32")
    assert parsed.values == {}
    assert parsed.as_guessed().values == {"rollout_batch_size": 32}


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("--rollout-batchsize", "--rollout-batch-size"),
        ("--rollout_batch_size", "--rollout-batch-size"),
        ("--num-rollot", "--num-rollout"),
        ("--eval-tempreature", "--eval-temperature"),
        ("--no-offload-trian", "--no-offload-train"),
        ("--advantage-estimater", "--advantage-estimator"),
        ("--hf-checkpiont", "--hf-checkpoint"),
    ],
)
def test_misspelled_flag_gets_a_suggestion(typed, meant):
    assert sentences(typed) == [f"unknown flag {typed}: did you mean {meant}?"]


@pytest.mark.parametrize("typed", ["--reward-num-gpus", "--use-adapter", "--z-adapter-rank", "--verbose"])
def test_different_word_gets_no_misspelling_suggestion(typed):
    assert sentences(typed) == [f"unknown flag {typed}: see docs/flags.md for all flags."]


def test_abbreviations_are_rejected():
    assert sentences("--rollout-batch 32") == ["unknown flag --rollout-batch: did you mean --rollout-batch-size?"]


@pytest.mark.parametrize(
    ("line", "options"),
    [
        ("--sglang-mem-fraction-static 0.7", {"mem_fraction_static": 0.7}),
        ("--sglang-cuda-graph-bs 1 2 4", {"cuda_graph_bs": [1, 2, 4]}),
        ("--sglang-disable-radix-cache", {"disable_radix_cache": True}),
        ("--sglang-enable-mixed-chunk", {"mixed": None}),
        ("--sglang-pair a b", {"pair": ["a", "b"]}),
    ],
)
def test_engine_flags_keep_their_engine_names(line, options):
    parsed = parse(line)
    assert parsed.problems == []
    assert parsed.options == {"sglang": options, "router": {}}


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        (
            "--sglang-mem-fraction-statik 1",
            "unknown flag --sglang-mem-fraction-statik: did you mean --sglang-mem-fraction-static?",
        ),
        ("--sglang-log-level INFO", "--sglang-log-level INFO is not one of info, error."),
        (
            "--sglang-mem-fraction-static x",
            "--sglang-mem-fraction-static x is not a value that the engine accepts (could not convert string to"
            " float: 'x').",
        ),
        ("--sglang-port 3", "--sglang-port is set by slimrl itself (a free port): leave it out."),
        ("--sglang-pair a", "--sglang-pair needs 2 values and only 1 is given: write --sglang-pair <value>."),
    ],
)
def test_engine_flags_are_validated(line, sentence):
    assert sentences(line) == [sentence]


def test_engine_flags_are_listed_only_when_one_is_used():
    def fail() -> dict[str, PassthroughFlag]:
        raise AssertionError("listed")

    tables = {"sglang": fail, "router": fail}
    parsed = parse_line(["--colocate", "--sglang-server-concurrency", "160"], all_flag_specs(), tables)
    assert parsed.problems == []


def test_missing_engine_package_is_an_error_not_a_crash():
    def missing() -> dict[str, PassthroughFlag]:
        raise ImportError("No module named 'sglang'")

    parsed = parse_line(["--sglang-x", "1"], all_flag_specs(), {"sglang": missing})
    assert "cannot be checked" in str(parsed.problems[0])


def test_each_spelling_belongs_to_one_flag():
    spellings = [name for spec in all_flag_specs() for name in spec.on + spec.off]
    assert len(spellings) == len(set(spellings)) == len(own_spellings(all_flag_specs()))
    assert not set(RETIRED_FLAGS) & set(spellings)


@pytest.mark.parametrize("spec", all_flag_specs(), ids=lambda spec: spec.dest)
def test_each_flag_has_a_help_text_and_a_valid_default(spec: FlagSpec):
    assert len(spec.help) > 8
    if not spec.is_switch and spec.default is not None and not isinstance(spec.default, list | dict):
        spec.check(spec.default)
        assert spec.convert(str(spec.default)) == spec.default
