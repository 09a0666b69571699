"""Rules about kernels of training on GPUs, for described machines: each violation is one error."""

from __future__ import annotations

import pytest

from slimrl.arguments import derive as derived
from slimrl.arguments.validation.numerics import fused
from tests.arguments.one_rule import sentences

MODEL = """--num-layers 8 --hidden-size 64 --num-attention-heads 16 --group-query-attention --num-query-groups 8
 --vocab-size 1000 --actor-num-gpus-per-node 8"""
CP2 = "--context-parallel-size 2"
EXPERTS = "--num-experts 16 --moe-router-topk 4"
EP8 = f"{EXPERTS} --expert-model-parallel-size 8"
FLEX = "--moe-token-dispatcher-type flex"
SHARED = "--moe-shared-expert-intermediate-size 64"
TE_ACTIVATION = "--use-te-activation-func excludes the kernel that adds the bias:"

# rule -> (lines that pass, lines that do not with their error), on a machine without Transformer Engine
CASES: dict[str, tuple[list[str], list[tuple[str, str]]]] = {
    "context_parallel_exchange_fits_the_attention": (
        [
            f"{CP2} --cp-comm-type a2a",
            f"{CP2} --cp-comm-type p2p --multi-latent-attention",
            f"{CP2} --tensor-model-parallel-size 4 --cp-comm-type a2a",
            "--cp-comm-type all_gather",  # without effect
        ],
        [
            (
                f"{CP2} --cp-comm-type a2a+p2p",
                "--cp-comm-type a2a+p2p needs two levels of context parallelism and only one is supported: use p2p or"
                " a2a.",
            ),
            (
                f"{CP2} --cp-comm-type all_gather",
                "--cp-comm-type all_gather does not support packed samples in Transformer Engine: use p2p or a2a.",
            ),
            (
                f"{CP2} --cp-comm-type a2a --multi-latent-attention",
                "--cp-comm-type a2a needs queries and values of one width, which --multi-latent-attention does not"
                " have: use p2p.",
            ),
            (
                "--context-parallel-size 4 --tensor-model-parallel-size 4 --cp-comm-type a2a",
                "--cp-comm-type a2a divides the heads of a GPU, and --num-query-groups 8 / --tensor-model-parallel-size"
                " 4 = 2 do not divide by --context-parallel-size 4: use p2p.",
            ),
        ],
    ),
    "attention_backend_is_available": (
        ["--attention-backend flash", "--attention-backend local", f"{CP2} --attention-backend unfused"],
        [],
    ),
    "activations_are_fused_once": (
        [
            "--swiglu",
            "--swiglu --use-te-activation-func --no-bias-swiglu-fusion",
            "--use-te-activation-func --no-bias-gelu-fusion",
        ],
        [
            (
                "--swiglu --use-te-activation-func",
                f"{TE_ACTIVATION} add --no-bias-swiglu-fusion, or leave --use-te-activation-func out.",
            ),
            (
                "--use-te-activation-func --no-bias-swiglu-fusion",
                f"{TE_ACTIVATION} add --no-bias-gelu-fusion, or leave --use-te-activation-func out.",
            ),
        ],
    ),
    "dispatcher_fits_the_experts": (
        [
            f"{EP8} {FLEX} --moe-enable-deepep",
            f"{EP8} {FLEX} --moe-flex-dispatcher-backend hybridep --moe-expert-capacity-factor 1"
            " --moe-pad-expert-input-to-capacity --moe-deepep-num-sms 3",
            f"{EP8} {SHARED} --moe-shared-expert-overlap",
            f"{EXPERTS} --tensor-model-parallel-size 2 {FLEX}",  # each expert is cut in two
            EXPERTS,
        ],
        [
            (
                f"{EP8} --moe-enable-deepep --moe-flex-dispatcher-backend hybridep",
                "--moe-enable-deepep and --moe-flex-dispatcher-backend hybridep exclude each other: give one.",
            ),
            (
                f"{EXPERTS} --moe-enable-deepep",
                f"{FLEX} dispatches tokens between GPUs, and each GPU has all experts: raise"
                " --expert-model-parallel-size, or use alltoall, without --moe-enable-deepep.",
            ),
            (
                f"{EP8} {SHARED} --moe-shared-expert-overlap --moe-enable-deepep",
                f"--moe-shared-expert-overlap does not support {FLEX}: leave it out, or use alltoall, without"
                " --moe-enable-deepep.",
            ),
            (
                f"{EP8} {FLEX} --moe-expert-capacity-factor 1 --moe-pad-expert-input-to-capacity",
                f"--moe-pad-expert-input-to-capacity does not support {FLEX} with DeepEP: leave it out, or use"
                " alltoall.",
            ),
            (
                f"{EP8} {FLEX} --moe-deepep-num-sms 21",
                "--moe-deepep-num-sms 21 is odd and DeepEP uses multiprocessors in pairs: give an even number.",
            ),
        ],
    ),
}


def broken(rule: str, line: str) -> list[str]:
    return sentences(rule, f"{MODEL} {line}")


@pytest.mark.parametrize(("rule", "line"), [(rule, line) for rule, (passing, _) in CASES.items() for line in passing])
def test_valid_flags_are_accepted(rule: str, line: str):
    assert broken(rule, line) == []


@pytest.mark.parametrize(
    ("rule", "line", "sentence"),
    [(rule, line, sentence) for rule, (_, failing) in CASES.items() for line, sentence in failing],
)
def test_each_violation_is_one_error(rule: str, line: str, sentence: str):
    assert broken(rule, line) == [sentence]


FLASH = "--attention-backend flash"
LATENT = f"{FLASH} --multi-latent-attention"
ABSENT = "needs a package that is not installed"
CUDNN = "or leave the flag out, which takes cuDNN's kernel."


@pytest.mark.parametrize(
    ("packages", "line", "sentences"),
    [
        ([], "", []),
        ([], f"{FLASH} --transformer-impl local", []),
        ([], f"{FLASH} --lora-rank 8", []),  # its layers are the local ones
        ([], "--attention-backend fused", []),
        ([], FLASH, [f"{FLASH} {ABSENT}: install flash-attn or flash-attn-3, {CUDNN}"]),
        (["flash-attn-4"], FLASH, [f"{FLASH} {ABSENT}: install flash-attn or flash-attn-3, {CUDNN}"]),
        (["flash-attn"], FLASH, []),
        (["flash-attn"], LATENT, [f"{FLASH} {ABSENT} for --multi-latent-attention: install flash-attn-3, {CUDNN}"]),
        (["flash-attn-3"], LATENT, []),
        (
            [],
            "--attention-backend local",
            [
                "--attention-backend local switches off every attention kernel of Transformer Engine: leave it out, or"
                " add --transformer-impl local."
            ],
        ),
        ([], "--attention-backend unfused", []),
        (
            [],
            f"{CP2} --attention-backend unfused",
            ["--attention-backend unfused does not support --context-parallel-size 2: leave it out."],
        ),
    ],
)
def test_attention_backend_is_one_of_the_installed_transformer_engine(
    monkeypatch: pytest.MonkeyPatch, packages: list[str], line: str, sentences: list[str]
):
    monkeypatch.setattr(fused, "transformer_engine_installed", lambda: True)
    monkeypatch.setattr(derived, "_is_installed", lambda name: name in packages)
    assert broken("attention_backend_is_available", line) == sentences


def test_packages_are_found_by_the_names_of_their_distributions():
    assert derived._is_installed("pytest-xdist")
    assert not derived._is_installed("flash-attn-of-nobody")
