"""What a plan needs of each node, for job files."""

from __future__ import annotations

import json

from slimrl.arguments.dry_run import Machine, PlanContext, node_resources, print_plan
from slimrl.arguments.memory import training_memory
from tests.arguments.conftest import COLOCATED, SPLIT
from tests.arguments.dry_run.test_dry_run import H100S, plan_of

GIB = 2**30


def test_colocated_node_holds_parked_training_state_and_both_processes_of_each_gpu(recipe):
    plan = plan_of(recipe, "--bf16 --gpu-memory-gib 80", around=H100S)
    needs = node_resources(plan)
    [stage] = training_memory(plan.args)
    parked = stage.weights + stage.optimizer
    assert (needs.nodes, needs.gpus_per_node) == (1, 8)
    assert needs.shared_memory_bytes == (16 + 8 * 2) * GIB
    assert needs.memory_bytes == needs.shared_memory_bytes + 24 * GIB + 8 * (8 * GIB + stage.host + parked + 8 * GIB)


def test_saving_in_the_background_holds_one_more_copy(recipe):
    less, more = (
        node_resources(plan_of(recipe, f"--bf16 --gpu-memory-gib 80 {flag}", placement=SPLIT))
        for flag in ("", "--async-save")
    )
    [stage] = training_memory(plan_of(recipe, "--bf16", placement=SPLIT).args)
    ranks = len(plan_of(recipe, placement=SPLIT).placement.train)
    assert more.memory_bytes - less.memory_bytes == ranks * (stage.weights + stage.optimizer)


def test_fullest_of_several_nodes_counts(recipe):
    plan = plan_of(recipe, "--gpu-memory-gib 80 --num-gpus-per-node 8 --rollout-num-gpus 14", placement=SPLIT)
    needs = node_resources(plan)
    assert needs.nodes == -(-plan.placement.total // 8)
    assert needs.gpus_per_node == 8


def test_resources_are_written_beside_the_printed_plan(recipe, tmp_path, capsys):
    file = tmp_path / "needs.json"
    plan = plan_of(recipe, f"--bf16 --gpu-memory-gib 80 --dry-run-resources {file}")
    assert print_plan(plan.args, "train.py", PlanContext(Machine(gpus=(), host=None))) == 0
    needs = json.loads(file.read_text())
    assert needs == {"nodes": 1, "gpus_per_node": 8, **{k: needs[k] for k in ("memory_bytes", "shared_memory_bytes")}}
    assert f"8 GPUs, about {needs['memory_bytes'] / GIB:.2f} GiB of host memory" in capsys.readouterr().out


def test_unwritable_file_of_resources_is_an_error(recipe, tmp_path, capsys):
    plan = plan_of(recipe, f"--bf16 --gpu-memory-gib 80 --dry-run-resources {tmp_path / 'no' / 'needs.json'}")
    assert print_plan(plan.args, "train.py", PlanContext(Machine(gpus=(), host=None))) == 2
    assert "--dry-run-resources cannot be written" in capsys.readouterr().err


def test_run_on_logical_gpus_of_one_machine_has_no_line_of_resources(recipe, capsys):
    plan = plan_of(recipe, placement=COLOCATED, around=PlanContext(Machine(gpus=(), host=1024 * GIB)))
    print_plan(plan.args, "train.py", plan.surroundings)
    assert "of host memory," not in capsys.readouterr().out


def test_ranks_of_a_critic_count(recipe):
    more = "--bf16 --gpu-memory-gib 80 --advantage-estimator ppo --async-save"
    less, more = (
        node_resources(plan_of(recipe, f"{more} {own} --num-gpus-per-node 16", placement=SPLIT))
        for own in ("", "--critic-num-gpus-per-node 2")
    )
    assert (less.gpus_per_node, more.gpus_per_node) == (8, 10)
    # two ranks more, and what NCCL needs; the copy that is written behind only changes its ranks
    assert more.memory_bytes - less.memory_bytes == 2 * (8 * GIB + 2 * GIB)
