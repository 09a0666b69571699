"""Groups of engines of different sizes serve one run, and frozen models beside them (--sglang-config)."""

import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from slimrl.observability.rollout_dump import read_dump
from tests.end_to_end import faults, harness
from tests.sglang.draft_chains import ASKED_FOR, count_drafts

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
STEPS = 16

TWO_SIZES = """sglang:
  - name: actor
    server_groups:
      - {worker_type: regular, num_gpus: 1, num_gpus_per_engine: 1}
      - {worker_type: regular, num_gpus: 2, num_gpus_per_engine: 2, overrides: {max_running_requests: 16}}
"""


def finish(tiny, folder, text, entry="train.py", **changes):
    (folder / "groups.yaml").write_text(text)
    values = {"sglang_config": folder / "groups.yaml", "check_weight_update_equal": True, **changes}
    done = harness.start(entry, tiny.flags(**values), folder, "groups", tiny.home).finish(250)
    assert done.code == 0, done.output[-6000:]
    assert done.left == []
    return done


def assert_on_policy(done, rollouts):
    assert done.steps("weight_version") == [str(version) for version in range(rollouts)]
    for step in done.summary["steps"]:
        assert step["train_rollout_logprob_abs_diff_mean"] < 1e-5
        assert step["train_rollout_logprob_abs_diff_max"] < 1e-3


def server_arguments(done, name):
    """What SGLang wrote about its own arguments at its start."""
    text = (done.run_dir / "logs" / name).read_text()
    return next(line for line in text.splitlines() if "server_args=" in line)


def test_groups_of_two_sizes_get_every_update_and_the_policy_learns(tiny, tmp_path):
    done = finish(tiny, tmp_path, TWO_SIZES, actor_num_gpus_per_node=1, rollout_num_gpus=3, num_rollout=8)
    assert_on_policy(done, 8)
    first, second = (server_arguments(done, f"sglang{index}.log") for index in range(2))
    assert "'tp_size': 1," in first and "'max_running_requests': 16" not in first
    assert "'tp_size': 2," in second and "'max_running_requests': 16" in second
    rewards = done.steps("reward")
    assert sum(rewards[-2:]) > sum(rewards[:2]), rewards


def another_model(model, folder):
    """A copy of the model that prefers the tokens which the model finds least likely."""
    shutil.copytree(model, folder)
    (path,) = folder.glob("*.safetensors")
    tensors = load_file(path)
    tensors["model.norm.weight"] = -tensors["model.norm.weight"]
    save_file(tensors, path, metadata={"format": "pt"})
    return folder


def greedy(model, tokens, count):
    with torch.no_grad():
        found = model.generate(torch.tensor([tokens]), max_new_tokens=count, do_sample=False)
    return found[0, len(tokens) :].tolist()


def with_judge(text, folder):
    """The file with a frozen model of one server."""
    return f"{text}  - {{name: judge, model_path: {folder}, server_groups: [{{worker_type: regular, num_gpus: 1}}]}}\n"


# flags of each way of a weight update that groups of one and of two ranks take, and the largest difference of
# log-probabilities: bf16 engines of two ranks add in another order
WAYS = {
    "broadcast": ({}, 1e-4),
    "files": ({"update_weight_transport": "disk", "update_weight_disk_dir": "updates"}, 1e-4),
    "changes": ({"bf16": True, "sglang_dtype": "bfloat16", "update_weight_mode": "delta"}, 0.3),
    "changed files": (
        {"bf16": True, "sglang_dtype": "bfloat16", "update_weight_mode": "delta", "update_weight_transport": "disk"}
        | {"update_weight_disk_dir": "updates", "update_weight_local_checkpoint_dir": "engine"},
        0.3,
    ),
    "point to point": (
        {"update_weight_transfer_mode": "p2p", "actor_num_gpus_per_node": 2, "tensor_model_parallel_size": 2},
        1e-4,
    ),
    "adapters": ({"lora_rank": 4, "lora_alpha": 8, "lr": 1e-2}, 1e-4),
    "shared memory": ({"colocate": True, "actor_num_gpus_per_node": 4}, 1e-4),
    "changes in shared memory": (
        {"colocate": True, "actor_num_gpus_per_node": 4, "no_offload_rollout": True}
        | {"bf16": True, "sglang_dtype": "bfloat16", "update_weight_mode": "delta"},
        0.3,
    ),
    "while the next rollout is generated": ({"entry": "train_async.py"}, 1e-4),
}


@pytest.mark.parametrize("way", WAYS)
def test_every_server_of_every_group_has_every_update_and_the_frozen_model_none(tiny, tmp_path, way):
    """Each server is asked at each version: those of the policy agree with training, the judge with transformers."""
    judge = another_model(tiny.model, tmp_path / "judge")
    changes, limit = WAYS[way]
    gpus = {} if "colocate" in changes else {"actor_num_gpus_per_node": 1, "rollout_num_gpus": 4}
    reward = {"rm_type": None, "custom_rm_path": "tests.end_to_end.judge.reward_and_scores"}
    dump = {"save_debug_rollout_data": tmp_path / "dump" / "{rollout_id}.jsonl"}
    done = finish(tiny, tmp_path, with_judge(TWO_SIZES, judge), **{**gpus, **reward, **dump, **changes})
    versions = ["0", "0", "1"] if "entry" in changes else ["0", "1", "2"]
    assert done.steps("weight_version") == versions
    assert "1 server of the frozen model judge, which gets no weight updates" in done.output
    logs = {path.name for path in (done.run_dir / "logs").iterdir()}
    assert {"sglang0.log", "sglang1.log", "sglang_judge-0.log", "router.log", "router_judge.log"} <= logs
    model, policy = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) for folder in (judge, tiny.model)
    )
    seen = []
    for rollout, expected in enumerate(versions):
        samples = read_dump(tmp_path / "dump" / f"{rollout}.jsonl").samples
        scored = [sample for sample in samples if "scores" in sample.metadata]
        assert len(scored) == 4
        for sample in scored:
            scores = sample.metadata["scores"]
            assert [version for version, _ in scores.values()] == [expected] * 2  # a server of each group
            for _, log_probs in scores.values():
                assert log_probs == pytest.approx(sample.rollout_log_probs, abs=limit)
            assert sample.metadata["judge_version"] == "default"
            if "bf16" not in changes:  # which decides near ties otherwise
                assert sample.metadata["judge"] == greedy(model, sample.tokens[:4], len(sample.metadata["judge"]))
        seen.append(scored[0].metadata["scores"])
    assert len(set(map(str, seen))) == 3
    answers = [greedy(model, sample.tokens[:4], 4) == greedy(policy, sample.tokens[:4], 4) for sample in samples]
    assert not all(answers), "the judge answers as the policy does: the test cannot tell them apart"


# the second group has the policy's first weights as draft model, and two ranks
ONE_DRAFTS = """sglang:
  - name: actor
    server_groups:
      - {worker_type: regular, num_gpus: 1, num_gpus_per_engine: 1}
      - worker_type: regular
        num_gpus: 2
        num_gpus_per_engine: 2
        overrides: {speculative_algorithm: STANDALONE, speculative_draft_model_path: DRAFT}
"""


def test_group_with_a_draft_model_samples_the_tokens_of_groups_without_over_weight_updates(tiny, tmp_path):
    """Each server is asked for its most likely tokens too: as many drafts are right as those of the first weights.

    Of the run's own requests it depends on the moment which ones the drafting server gets, and so does their share.
    """
    dump = {"save_debug_rollout_data": tmp_path / "{rollout_id}.jsonl", "actor_num_gpus_per_node": 1}
    dump |= {"rm_type": None, "custom_rm_path": "tests.end_to_end.judge.reward_and_drafts"}
    sampled, rates, answers = [], [], []
    draft = AutoModelForCausalLM.from_pretrained(tiny.model, dtype=torch.float32)
    drafting = ONE_DRAFTS.replace("DRAFT", str(tiny.model))
    for text, way in ((TWO_SIZES, "broadcast"), (drafting, "broadcast"), (drafting, "files")):
        changes, _ = WAYS[way]
        done = finish(tiny, tmp_path, text, rollout_num_gpus=3, num_rollout=4, **dump, **changes)
        assert_on_policy(done, 4)
        rollouts = [read_dump(tmp_path / f"{rollout}.jsonl").samples for rollout in range(4)]
        sampled.append([sample.tokens for samples in rollouts for sample in samples])
        answers.append([sample for samples in rollouts for sample in samples if "answers" in sample.metadata])
        rates += done.steps("rollout/spec_accept_rate") if text is drafting else []
    assert sampled[0] == sampled[1] == sampled[2]
    assert "a draft model in 1 server of the policy, which gets no weight updates" in done.output
    assert rates and all(0 <= rate <= 1 for rate in rates)
    counts = []
    for without, *with_drafts in zip(*answers, strict=True):
        (tokens, *none), other = without.metadata["answers"]
        assert none == other[1:] == [0, 0]
        asked = [one for drafted in with_drafts for one in drafted.metadata["answers"]]
        assert [one[0] for one in (other, *asked)] == [tokens] * 5
        found, again = (one[1:] for one in asked if one[2])
        prompt = without.tokens[: -without.response_length]
        assert tuple(found) == tuple(again) == count_drafts(draft, prompt, tokens, ASKED_FOR)
        counts.append(found)
    assert len(counts) == 16
    assert len({tuple(one) for one in counts}) > 1


def test_death_of_a_frozen_model_ends_the_run_with_its_name(tiny, tmp_path):
    judge = shutil.copytree(tiny.model, tmp_path / "judge")
    text = with_judge(TWO_SIZES.replace("2, num_gpus_per_engine: 2, overrides: {max_running_requests: 16}", "1"), judge)
    (tmp_path / "groups.yaml").write_text(text)
    changes = {"actor_num_gpus_per_node": 1, "rollout_num_gpus": 3, "num_rollout": 200}
    flags = tiny.flags(sglang_config=tmp_path / "groups.yaml", **changes)
    run = harness.start("train.py", flags, tmp_path, "groups", tiny.home)
    run.wait_for_line("step 0 |", 200)
    servers = [one for one in run.processes(str(judge)) if not any("subreaper" in word for word in one.cmdline())]
    servers[0].kill()
    done = run.finish(60)
    assert done.code != 0 and done.left == []
    assert "a process of the frozen model judge has ended: SGLang server _judge-0" in done.output


@pytest.mark.parametrize("placement", ["split", "colocated"])
def test_lost_servers_of_a_group_and_of_a_frozen_model_are_replaced_in_their_places(tiny, tmp_path, placement):
    """Evaluations, which ask the judge too, run before and after."""
    judge = another_model(tiny.model, tmp_path / "judge")
    (tmp_path / "groups.yaml").write_text(with_judge(TWO_SIZES, judge))
    flags = tiny.flags(
        sglang_config=tmp_path / "groups.yaml",
        actor_num_gpus_per_node=4 if placement == "colocated" else 1,
        rollout_num_gpus=None if placement == "colocated" else 4,
        colocate=placement == "colocated",
        num_rollout=STEPS,
        eval_interval=STEPS,
        eval_prompt_data=["addition", f"{tiny.folder / 'eval.jsonl'}@[0:4]"],
        rm_type=None,
        custom_rm_path="tests.end_to_end.judge.reward_and_scores",
        save_debug_rollout_data=tmp_path / "dump" / "{rollout_id}.jsonl",
        use_fault_tolerance=True,
        rollout_health_check_interval=0.5,
        rollout_health_check_timeout=10,  # a healthy server is slow when all processes share two cores
    )
    run = harness.start("train.py", flags, tmp_path, "groups", tiny.home)
    run.wait_for_line("step 1 |", 200)
    servers = faults.victims(run, "server")
    lost = [one for one in servers if {"--tp-size=2", f"--model-path={judge}"} & set(one.cmdline())]
    assert len(servers) == 3 and len(lost) == 2
    log = str(run.run_dir / "logs" / "router_judge.log")
    (router,) = (one for one in faults.victims(run, "router") if log in [file.path for file in one.open_files()])
    for process in [*lost, router]:
        process.kill()
    done = run.finish(300)
    print("\n".join(faults.fault_lines(done.output)))
    assert done.code == 0, done.output[-6000:]
    assert done.left == []
    assert done.steps("weight_version") == [str(version) for version in range(STEPS)]
    assert max(done.steps("train_rollout_logprob_abs_diff_max")) < 1e-3
    assert re.search(r"SGLang server 1\.1 .* has weights [0-9]+ and serves", done.output)
    assert re.search(r"SGLang server _judge-0\.1 .* started and serves", done.output)
    first, again = (server_arguments(done, name) for name in ("sglang1.log", "sglang1.1.log"))
    assert all("'tp_size': 2," in one and "'max_running_requests': 16" in one for one in (first, again))
    assert str(judge) in server_arguments(done, "sglang_judge-0.1.log")
    assert (done.run_dir / "logs" / "router_judge.1.log").is_file()
    assert sum(done.steps("rollout/faults/servers_lost")) >= 2
    assert sum(done.steps("rollout/faults/router_restarts")) >= 1
    model = AutoModelForCausalLM.from_pretrained(judge, dtype=torch.float32)
    evaluated = [read_dump(tmp_path / "dump" / f"eval_{step}.jsonl").samples for step in (0, STEPS)]
    samples = read_dump(tmp_path / "dump" / f"{STEPS - 1}.jsonl").samples
    for sample in (one for some in (samples, *evaluated) for one in some):
        assert sample.metadata["judge"] == greedy(model, sample.tokens[:4], len(sample.metadata["judge"]))
    assert [len(some) for some in evaluated] == [4, 4]
    for sample in (sample for sample in samples if "scores" in sample.metadata):
        scores = sample.metadata["scores"]
        assert [version for version, _ in scores.values()] == [str(STEPS - 1)] * 2
        for _, log_probs in scores.values():
            assert log_probs == pytest.approx(sample.rollout_log_probs, abs=1e-4)
