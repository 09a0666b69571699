"""Rules about routing replay: a model with experts passes, what has other routers or servers is one error."""

from __future__ import annotations

import pytest

from slimrl.arguments import read_args
from slimrl.engines.sglang.server_args import server_flags

PASS, ENGINES = "--use-routing-replay", "--use-rollout-routing-replay"
EXPERTS = "--num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 768"
STAGES = "--pipeline-model-parallel-size 2"
SELECTIVE = "--recompute-granularity selective --recompute-modules"
LAYERS = (
    "with pipeline stages a layer is recomputed after other micro-batches: recompute whole layers"
    " (--recompute-granularity full); leave one out."
)
# rule -> (flags that pass when appended to the recipe, flags that do not with their error)
CASES: dict[str, tuple[list[str], list[tuple[str, str]]]] = {
    "replayed_routers_are_plain": (
        [
            f"{EXPERTS} {PASS}",
            f"{EXPERTS} {PASS} {ENGINES}",
            f"{EXPERTS} {ENGINES} {SELECTIVE} moe",
            f"{EXPERTS} {ENGINES} {STAGES} {SELECTIVE} core_attn",
        ],
        [
            (
                f"{EXPERTS} {PASS} --moe-router-fusion",
                f"{PASS} and --moe-router-fusion exclude each other: the fused kernel chooses experts itself; leave one"
                " out.",
            ),
            (
                f"{EXPERTS} {ENGINES} --moe-router-load-balancing-type sinkhorn",
                f"{ENGINES} and --moe-router-load-balancing-type sinkhorn exclude each other: its experts are not the"
                " top-k of the scores; leave one out.",
            ),
            (
                f"{EXPERTS} {ENGINES} {STAGES} {SELECTIVE} moe",
                f"{ENGINES} and --recompute-modules moe exclude each other: {LAYERS}",
            ),
            (
                f"{EXPERTS} {PASS} {STAGES} --moe-layer-recompute",
                f"{PASS} and --moe-layer-recompute exclude each other: {LAYERS}",
            ),
        ],
    ),
    "engines_return_their_routing": (
        [f"{EXPERTS} {ENGINES}", f"{EXPERTS} {PASS} --rollout-external-engine-addrs 10.0.0.1:30000"],
        [
            (
                f"{EXPERTS} {ENGINES} --rollout-external-engine-addrs 10.0.0.1:30000",
                f"{ENGINES} and --rollout-external-engine-addrs exclude each other: whether they return their routing"
                " is not known before they answer; leave one out.",
            ),
            (
                f"{EXPERTS} {ENGINES} --sglang-enable-eplb",
                f"{ENGINES} and redundant experts (--sglang-enable-eplb, --sglang-ep-num-redundant-experts) exclude"
                " each other: a copy of an expert has another number; leave one out.",
            ),
        ],
    ),
}


@pytest.mark.parametrize("line", sorted({line for good, _ in CASES.values() for line in good}))
def test_valid_variant_passes(line, recipe):
    _, problems = read_args(recipe.line(line), passthrough={"sglang": server_flags})
    assert [problem.sentence for problem in problems if "routing-replay" in problem.sentence] == []


@pytest.mark.parametrize(
    ("rule", "line", "sentence"), [(rule, *case) for rule, (_, bad) in CASES.items() for case in bad]
)
def test_violation_is_one_error(rule, line, sentence, recipe):
    _, problems = read_args(recipe.line(line), passthrough={"sglang": server_flags})
    assert [problem.sentence for problem in problems if "routing-replay" in problem.sentence] == [sentence]


def test_supervised_training_and_vllm_have_nothing_to_replay(recipe):
    for more, end in (
        ("--loss-type sft_loss --disable-compute-advantages-and-returns", "it trains on no sampled tokens"),
        ("--rollout-engine vllm", "only SGLang's answers are read"),
    ):
        _, problems = read_args(recipe.line(f"{EXPERTS} {ENGINES} {more}"))
        (sentence,) = [problem.sentence for problem in problems if "routing-replay" in problem.sentence]
        assert f"exclude each other: {end}; leave one out." in sentence
