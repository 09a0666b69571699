"""Rules about weight updates from trainer shards straight to engine ranks: each violation is one error."""

from __future__ import annotations

import importlib.util

import pytest

from slimrl.arguments import read_args
from slimrl.engines.sglang.server_args import server_flags
from tests.arguments.conftest import COLOCATED, SPLIT

P2P = "--update-weight-transfer-mode p2p"
MOONCAKE = "--update-weight-transport mooncake"
OTHERS = "sends each trainer shard to the ranks of SGLang servers on other GPUs: leave one of them out."
UNKNOWN = f"which {P2P} does not know: leave one of them out."
GROUPS = """sglang:
  - name: actor
    server_groups:
      - {worker_type: regular, num_gpus: 2}
      - {worker_type: regular, num_gpus: 4, num_gpus_per_engine: 4, overrides: {ep_size: 2}}
"""

DELTA = "--bf16 --update-weight-mode delta"
DELTA_FILES = f"{DELTA} --update-weight-transport disk --update-weight-disk-dir shared"
LOCAL, CHECKSUM = "--update-weight-local-checkpoint-dir", "--update-weight-delta-checksum"
FILES_ONLY = (
    "is used by --update-weight-mode delta with --update-weight-transport disk only: add both, or leave it out."
)

CASES: dict[str, tuple[list[str], list[tuple[str, str]]]] = {
    "delta_files_have_a_checkpoint": (
        [
            f"{DELTA_FILES} {LOCAL} local",
            f"{DELTA_FILES} {LOCAL} local --update-weight-delta-encoding overwrite {CHECKSUM} adler32",
            f"{DELTA} --update-weight-delta-encoding overwrite {CHECKSUM} xxh3-128",
        ],
        [
            (
                DELTA_FILES,
                "--update-weight-mode delta with --update-weight-transport disk changes a checkpoint on each engine's"
                f" host: give its folder, {LOCAL}, on a disk with room for the model.",
            ),
            (
                f"{DELTA_FILES} {LOCAL} shared/local",
                f"{LOCAL} shared/local and --update-weight-disk-dir shared contain one another: the one is on each"
                " engine's host, the other shared; choose another folder.",
            ),
            (f"{DELTA} {LOCAL} local", f"{LOCAL} local {FILES_ONLY}"),
            (f"{DELTA} --update-weight-delta-encoding xor", f"--update-weight-delta-encoding xor {FILES_ONLY}"),
            (f"{DELTA} {CHECKSUM} adler32", f"{CHECKSUM} adler32 {FILES_ONLY}"),
            (
                f"--update-weight-transport disk --update-weight-disk-dir shared {LOCAL} local",
                f"{LOCAL} local {FILES_ONLY}",
            ),
        ],
    ),
    "p2p_updates_fit_the_run": (
        [
            P2P,
            f"{P2P} {MOONCAKE} --check-weight-update-equal",
            f"{P2P} --use-fault-tolerance",
            f"{P2P} --debug-rollout-only",
            "--update-weight-transfer-mode broadcast",
        ],
        [
            (
                MOONCAKE,
                f"{MOONCAKE} moves weights between pairs of ranks, which {P2P} does: add it, or leave mooncake out.",
            ),
            (
                f"{P2P} --update-weight-transport disk --update-weight-disk-dir x",
                f"--update-weight-transport disk writes files, and {P2P} {OTHERS}",
            ),
            (
                f"{P2P} --lora-rank 8",
                f"--lora-rank without --lora-merge sends nothing but the adapters, and {P2P} {OTHERS}",
            ),
            (
                f"{P2P} --rollout-engine vllm --vllm-python /bin/sh",
                f"--rollout-engine vllm has servers that take whole weights, and {P2P} {OTHERS}",
            ),
        ],
    ),
    "p2p_knows_the_layout_of_engines": (
        [f"{P2P} --sglang-moe-runner-backend triton --sglang-ep-size 1", "--sglang-ep-size 2"],
        [
            (
                f"{P2P} --sglang-ep-size 2",
                f"--sglang-ep-size divides an engine in other ways than tensors, {UNKNOWN}",
            ),
            (
                f"{P2P} --sglang-speculative-algorithm EAGLE",
                f"--sglang-speculative-algorithm adds a draft model, {UNKNOWN}",
            ),
            (
                f"{P2P} --sglang-moe-runner-backend flashinfer_trtllm",
                "--sglang-moe-runner-backend flashinfer_trtllm stores experts in a layout of its own, " + UNKNOWN,
            ),
            (
                f"{P2P} --sglang-moe-a2a-backend deepep",
                f"--sglang-moe-a2a-backend moves experts between ranks, {UNKNOWN}",
            ),
        ],
    ),
    "experts_keep_the_layout_of_updates": (
        [
            "--sglang-moe-runner-backend triton",
            "--sglang-moe-runner-backend deep_gemm",
            "--sglang-moe-runner-backend flashinfer_trtllm --debug-rollout-only",
        ],
        [
            (
                f"--sglang-moe-runner-backend {runner}",
                f"--sglang-moe-runner-backend {runner} permutes the weights of experts when they are loaded, and the"
                " first weight update fails: use triton, or leave it out.",
            )
            for runner in ("flashinfer_trtllm", "flashinfer_trtllm_routed")
        ],
    ),
}


def sentences(recipe, more: str, placement: str = SPLIT) -> list[str]:
    _, problems = read_args(recipe.line(more, placement=placement), passthrough={"sglang": server_flags})
    return [str(problem) for problem in problems]


@pytest.mark.parametrize(("rule", "more"), [(rule, more) for rule, (good, _) in CASES.items() for more in good])
def test_valid_flags_are_accepted(recipe, rule, more):
    assert sentences(recipe, more) == []


@pytest.mark.parametrize(
    ("rule", "more", "sentence"), [(rule, *case) for rule, (_, bad) in CASES.items() for case in bad]
)
def test_each_violation_is_one_error(recipe, rule, more, sentence):
    assert sentences(recipe, more) == [sentence]


def test_shards_are_not_sent_to_engines_on_the_trainers_gpus(recipe):
    assert sentences(recipe, P2P, COLOCATED) == [
        f"--colocate has engines that read the weights in the trainer's memory, and {P2P} {OTHERS}"
    ]


def test_changes_and_shards_exclude_each_other(recipe):
    assert sentences(recipe, f"{P2P} --bf16 --update-weight-mode delta") == [
        f"{P2P} compares nothing with the last update, and --update-weight-mode delta sends changes: leave one of them"
        " out."
    ]


def test_checksum_whose_package_is_absent_is_named(recipe, monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "blake3" else real(name))
    assert sentences(recipe, f"{DELTA_FILES} {LOCAL} local {CHECKSUM} blake3") == [
        f"{CHECKSUM} blake3 needs the package blake3, which this environment does not have: install it here and for the"
        " engines, or use xxh3-128."
    ]


def test_changes_in_files_are_for_engines_on_their_own_gpus(recipe):
    assert sentences(recipe, f"{DELTA_FILES} {LOCAL} local", COLOCATED) == [
        "--colocate with --update-weight-transport disk needs no files of changes, because the engines reach the"
        " trainer's memory, and --update-weight-mode delta sends changes: leave one of them out."
    ]


def test_changes_are_not_sent_to_servers_of_vllm(recipe):
    assert sentences(recipe, "--bf16 --update-weight-mode delta --rollout-engine vllm --vllm-python /bin/sh") == [
        "--rollout-engine vllm excludes --update-weight-mode delta, because vLLM servers load all weights: leave"
        " --update-weight-mode delta out."
    ]


def test_external_servers_have_no_loader_for_shards(recipe):
    found = sentences(recipe, f"{P2P} --rollout-external-engine-addrs h:1")
    assert f"--rollout-external-engine-addrs has servers without slimrl's loader, and {P2P} {OTHERS}" in found


def test_weights_divided_by_rank_are_not_sent(recipe):
    found = sentences(recipe, f"{P2P} --use-megatron-fsdp")
    assert f"--use-megatron-fsdp divides tensors anywhere in their rows, and {P2P} {OTHERS}" in found


def test_group_of_engines_with_experts_on_several_ranks_is_named(recipe):
    (recipe.dir / "groups.yaml").write_text(GROUPS)
    (sentence,) = sentences(recipe, f"{P2P} --sglang-config {{dir}}/groups.yaml --rollout-num-gpus-per-engine 1")
    assert "model actor, group 1: --sglang-ep-size divides an engine in other ways than tensors" in sentence


def test_changes_through_shared_memory_are_for_engines_that_keep_their_weights(recipe):
    assert sentences(recipe, f"{DELTA} --no-offload-rollout", COLOCATED) == []
    assert sentences(recipe, f"{DELTA} --no-offload-rollout --sglang-pp-size 2", COLOCATED) == [
        "--sglang-pp-size has stages that answer before they have the changes, and --update-weight-mode delta sends"
        " changes: leave one of them out."
    ]
