"""Which role is offloaded: as in slime, and rejected when it contradicts the run."""

from __future__ import annotations

import pytest

from slimrl.arguments import read_args

COLOCATED = "--actor-num-nodes 1 --actor-num-gpus-per-node 8 --colocate"
SPLIT = "--actor-num-nodes 1 --actor-num-gpus-per-node 2 --rollout-num-gpus 6"


def read(recipe, more, placement=COLOCATED, entry="train.py"):
    args, problems = read_args(recipe.line(more, placement=placement), entry=entry)
    return (args.offload_train, args.offload_rollout), [str(problem) for problem in problems]


@pytest.mark.parametrize(
    ("more", "placement", "offloaded"),
    [
        ("", COLOCATED, (True, True)),
        ("--no-offload-train", COLOCATED, (False, True)),
        ("--no-offload-rollout", COLOCATED, (True, False)),
        ("--no-offload-train --no-offload-rollout", COLOCATED, (False, False)),
        ("--no-offload-train --offload-train", COLOCATED, (True, True)),
        ("", SPLIT, (False, False)),
        ("--offload", SPLIT, (True, True)),
        ("--offload-rollout", SPLIT, (False, True)),
        ("--offload-train", SPLIT, (True, False)),
    ],
)
def test_colocation_offloads_both_roles_by_default(recipe, more, placement, offloaded):
    assert read(recipe, more, placement) == (offloaded, [])


def test_absent_role_is_not_offloaded(recipe):
    (recipe.dir / "dump_0.jsonl").touch()
    replay = "--load-debug-rollout-data {dir}/dump_{{rollout_id}}.jsonl"
    assert read(recipe, replay) == ((False, False), [])  # no process needs the memory
    assert read(recipe, f"{replay} --offload-train") == ((True, False), [])
    assert read(recipe, "--debug-rollout-only") == ((False, False), [])
    args, problems = read_args(recipe.line(f"{replay} --offload"))
    assert problems == [] and (args.offload_train, args.offload_rollout) == (True, False)
    assert "--offload-rollout is off with --debug-train-only: no engine is started." in args.notes
    args, problems = read_args(recipe.line("--debug-rollout-only --offload-train"))
    assert problems == [] and "--offload-train is off with --debug-rollout-only: no trainer is started." in args.notes
    for asked in ("--offload", "--offload-rollout"):  # no weight update would ever bring released engines back
        args, problems = read_args(recipe.line(f"--debug-rollout-only {asked}"))
        assert problems == [] and (args.offload_train, args.offload_rollout) == (False, False)
        assert "--offload-rollout is off with --debug-rollout-only: no trainer is started." in args.notes


def test_shards_of_megatron_fsdp_are_offloaded_like_whole_weights(recipe):
    sharded = "--use-megatron-fsdp --data-parallel-sharding-strategy optim"
    assert read(recipe, sharded) == read(recipe, f"{sharded} --offload-train") == ((True, True), [])
    assert read(recipe, f"{sharded} --no-offload-train") == ((False, True), [])


@pytest.mark.parametrize("flag", ["--offload-train", "--offload-rollout"])
def test_roles_that_run_concurrently_cannot_be_offloaded(recipe, flag):
    _, problems = read(recipe, flag, SPLIT, "train_async.py")
    assert problems == [
        f"{flag} offloads a side while the other works, and with train_async.py both work concurrently: leave it out,"
        f" or start train.py."
    ]
    assert read(recipe, flag.replace("--", "--no-"), SPLIT, "train_async.py") == ((False, False), [])


def test_offload_sets_both_roles(recipe):
    _, problems = read(recipe, "--offload --no-offload-train", SPLIT)
    assert problems == [
        "--offload offloads both sides and --no-offload-train leaves one out: give one of the two flags."
    ]
    assert read(recipe, "--offload --offload-train", SPLIT) == ((True, True), [])
