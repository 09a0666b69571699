"""Rules about draft models beside the model of a server, for all servers and for groups; their part of the plan."""

from __future__ import annotations

import json

import pytest

from slimrl.arguments import read_args
from slimrl.arguments.dry_run.plan import PlanContext, make_plan
from slimrl.arguments.dry_run.render import render
from slimrl.arguments.engine_groups import draft_folder
from slimrl.cluster.placement import plan_gpus
from slimrl.engines.sglang.server_args import server_flags
from slimrl.processes.process_info import Machine
from tests.arguments.conftest import QWEN3_4B_CONFIG, SPLIT
from tests.arguments.test_rules_of_engine_groups import DECODE, ONE, PREFILL, TWO, actor, file

TABLES = {"sglang": server_flags}
ALGORITHM, FOLDER = "--sglang-speculative-algorithm", "--sglang-speculative-draft-model-path"
DRAFT = f"{ALGORITHM} STANDALONE {FOLDER} {{dir}}/draft"
DISK = "--update-weight-transport disk --update-weight-disk-dir {dir}"
QWEN3_0_6B = 596_049_920  # parameters on the Hugging Face hub


def options(folder: str = "DIR/draft", algorithm: str = "STANDALONE", more: str = "") -> str:
    return f"overrides: {{speculative_algorithm: {algorithm}, speculative_draft_model_path: {folder}{more}}}"


def drafting(group: str, *args: str, **named: str) -> str:
    return group.replace("}", f", {options(*args, **named)}}}")


# rule -> (file and flags that pass, file and flags that do not with the error); 6 rollout GPUs
CASES: dict[str, tuple[list[tuple[str, str]], list[tuple[str, str, str]]]] = {
    "draft_models_can_be_served": (
        [
            ("", DRAFT),
            ("", f"{ALGORITHM} NGRAM"),
            ("", f"{ALGORITHM} EAGLE"),  # the MTP layers of the model's own folder
            (file(actor(ONE, drafting(TWO))), ""),
            (
                file(
                    actor(ONE),
                    "{name: j, model_path: DIR/hf, update_weights: false, server_groups: [" + drafting(TWO) + "]}",
                ),
                "",
            ),
        ],
        [
            (
                "",
                f"{FOLDER} {{dir}}/draft",
                f"{FOLDER} DIR/draft has no effect without {ALGORITHM}: add it (STANDALONE for a whole language model),"
                " or leave the folder out.",
            ),
            ("", f"{ALGORITHM} standalone", f"{ALGORITHM} STANDALONE needs a draft model: give its folder, {FOLDER}."),
            (
                "",
                f"{ALGORITHM} NGRAM {FOLDER} {{dir}}/draft",
                f"{ALGORITHM} NGRAM has no draft model: leave {FOLDER} DIR/draft out.",
            ),
            (
                file(actor(ONE, drafting(TWO, "DIR/none"))),
                "",
                f"FILE: model actor, group 1: {FOLDER} DIR/none does not exist (only DIR of it does): give the Hugging"
                " Face folder of the draft model.",
            ),
            (
                file(actor(ONE, drafting(TWO, "DIR"))),
                "",
                f"FILE: model actor, group 1: {FOLDER} DIR has no config.json: give a Hugging Face folder.",
            ),
            (
                file(actor(ONE, drafting(TWO, "DIR/bare"))),
                "",
                f"FILE: model actor, group 1: {FOLDER} DIR/bare has no weights (no .safetensors file), which the"
                " engines load: copy them there too.",
            ),
            (
                file(actor(ONE, drafting(TWO, "DIR/other"))),
                "",
                f"FILE: model actor, group 1: {FOLDER} DIR/other has a vocabulary of 32000 tokens and the model DIR/hf"
                " one of 151936: give a draft model of the same family.",
            ),
        ],
    ),
    "drafts_are_accepted_by_their_probability": (
        [("", f"{DRAFT} --sglang-speculative-accept-threshold-acc 1.0")],
        [
            (
                file(actor(ONE, drafting(TWO, more=", speculative_accept_threshold_single: 0.5"))),
                "",
                "FILE: model actor, group 1: --sglang-speculative-accept-threshold-single 0.5 accepts drafts more often"
                " than the policy samples them, and training takes them for the policy's: leave it out.",
            ),
        ],
    ),
    "roles_have_one_draft_model": (
        [(file(actor(drafting(PREFILL), drafting(DECODE))), "")],
        [
            (
                file(actor(PREFILL, drafting(DECODE))),
                "",
                "FILE: model actor has prefill and decode groups with the draft models DIR/draft and none, and the"
                " cache of a draft model moves with that of the model: give all of them one.",
            ),
        ],
    ),
}


def read(recipe, text: str, more: str):
    """The recipe with 2 training and 6 rollout GPUs, the file, and a draft model; DIR is the recipe's folder."""
    for name, size in (("draft", 151936), ("bare", 151936), ("other", 32000)):
        (recipe.dir / name).mkdir(exist_ok=True)
        small = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16}
        (recipe.dir / name / "config.json").write_text(json.dumps({**QWEN3_4B_CONFIG, **small, "vocab_size": size}))
        if name != "bare":
            (recipe.dir / name / "pytorch_model.bin").write_bytes(b"weights")
    path = recipe.dir / "groups.yaml"
    path.write_text(text.replace("DIR", str(recipe.dir)))
    groups = f"--sglang-config {path}" if text else ""
    line = recipe.line(f"--rollout-num-gpus-per-engine 1 --seq-length 512 {groups} {more}", placement=SPLIT)
    args, problems = read_args(line, passthrough=TABLES)
    named = (one.sentence.replace(f"--sglang-config {path}", "FILE") for one in problems)
    return args, [sentence.replace(str(recipe.dir), "DIR") for sentence in named]


@pytest.mark.parametrize(("rule", "case"), [(rule, case) for rule, (good, _) in CASES.items() for case in good])
def test_valid_draft_models_pass(recipe, rule, case):
    assert read(recipe, *case)[1] == []


@pytest.mark.parametrize(
    ("rule", "text", "more", "sentence"), [(rule, *case) for rule, (_, bad) in CASES.items() for case in bad]
)
def test_violation_is_one_error(recipe, rule, text, more, sentence):
    assert read(recipe, text, more)[1] == [sentence]


def test_draft_model_does_not_know_pipeline_stages(recipe):
    _, found = read(recipe, "", f"{DRAFT} --rollout-num-gpus-per-engine 2 --sglang-pp-size 2")
    assert f"{ALGORITHM} STANDALONE excludes --sglang-pp-size 2: leave one of them out." in found


def test_shards_are_not_sent_to_a_group_with_a_draft_model(recipe):
    _, (sentence,) = read(recipe, file(actor(ONE, drafting(TWO))), "--update-weight-transfer-mode p2p")
    assert "model actor, group 1: --sglang-speculative-algorithm adds a draft model" in sentence


def test_draft_model_as_servers_of_its_own_is_explained(recipe):
    _, (sentence,) = read(recipe, file(actor(ONE, TWO.replace("regular", "draft"))), "")
    assert "group 1 has worker_type draft, which is unsupported: a draft model is in the policy's servers" in sentence


def test_plan_has_the_weights_and_the_cache_of_draft_models(recipe):
    args, found = read(recipe, file(actor(ONE, drafting(TWO))), "--gpu-memory-gib 80 --dry-run")
    assert found == []
    plan = make_plan(args, "train.py", PlanContext(Machine(host=None, gpus=())))
    without, beside = (one.memory for one in plan.group_memory)
    assert (without.draft, beside.draft) == (0, QWEN3_0_6B)  # half of two bytes per weight on each of two GPUs
    assert beside.weights == without.weights // 2 + QWEN3_0_6B
    # keys and values of 36 and 28 layers, 8 heads of 128, two bytes, over two GPUs
    assert beside.cache_per_token == 2 * (36 + 28) * 8 * 128 * 2 // 2
    shown = render(plan)
    assert "group 0 (regular, 2 GPUs): servers 0 to 1, gets the weight updates, with: " in shown
    assert (
        "group 1 (regular, 4 GPUs): servers 2 to 3, gets the weight updates, with a frozen draft model, with:" in shown
    )
    assert "GiB (568.4 MiB of a draft model), KV cache" in shown
    assert plan_gpus(args).sentence == (
        "2 train workers and 6 rollout GPUs; a draft model in 2 servers of the policy, which gets no weight updates"
    )


def test_plan_of_alike_servers_says_that_the_draft_model_is_frozen(recipe):
    args, _ = read(recipe, "", f"{DRAFT} --gpu-memory-gib 80 --dry-run")
    plan = make_plan(args, "train.py", PlanContext(Machine(host=None, gpus=())))
    assert plan.memory.engine.draft == 2 * QWEN3_0_6B
    assert f"in each a draft model, {recipe.dir}/draft, which is frozen: weight updates do not reach it" in render(plan)


def test_folder_without_an_algorithm_is_no_draft_model():
    assert draft_folder({"speculative_draft_model_path": "x"}) is None
