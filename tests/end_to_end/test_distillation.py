"""On-policy distillation of the toy: it learns to carry from a teacher alone, without any reward."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from slimrl.observability import rollout_dump
from slimrl.tiny.tasks import encode_answers, encode_prompts, greedy_accuracy, split_additions
from tests.end_to_end import harness

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def teacher(tiny, tmp_path_factory) -> Path:
    """The toy after 60 supervised steps: it carries with a probability of about 0.9, the student with 0.3."""
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(tiny.model)
    model = AutoModelForCausalLM.from_pretrained(tiny.model, dtype=torch.float32)
    train, held_out = split_additions(seed=0, train_size=1600, eval_size=128)
    prompts = encode_prompts(tokenizer, train)
    right = encode_answers(tokenizer, [one.answer for one in train])
    noisy = encode_answers(tokenizer, [one.noisy_answer for one in train])
    adam = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.0)
    for _ in range(60):
        rows = torch.randint(len(train), (64,))
        given = torch.where(torch.rand(64, 1) < 0.5, noisy[rows], right[rows])
        log_probs = model(torch.cat([prompts[rows], given], 1)[:, :-1], logits_to_keep=right.shape[1]).logits
        log_probs = log_probs.log_softmax(-1)
        of_right, of_noisy = (log_probs.gather(-1, one[rows, :, None]) for one in (right, noisy))
        loss = -(0.9 * of_right + 0.1 * of_noisy).mean()
        adam.zero_grad()
        loss.backward()
        adam.step()
    assert greedy_accuracy(model.eval(), tokenizer, held_out) > 0.8
    folder = tmp_path_factory.mktemp("teacher") / "toy"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def with_idle_layer(teacher: Path, folder: Path) -> Path:
    """The same function by a larger model: a third layer that adds nothing to its input."""
    model = AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float32)
    config = model.config.__class__(**{**model.config.to_dict(), "num_hidden_layers": 3, "layer_types": None})
    larger = AutoModelForCausalLM.from_config(config)
    weights = larger.state_dict() | model.state_dict()
    for name in weights:
        if name.startswith("model.layers.2.") and name.endswith(("o_proj.weight", "down_proj.weight")):
            weights[name] = torch.zeros_like(weights[name])
    larger.load_state_dict(weights)
    larger.save_pretrained(folder)
    AutoTokenizer.from_pretrained(teacher).save_pretrained(folder)
    return folder


def flags(tiny, folder: Path, **changes: object) -> list[str]:
    return tiny.flags(
        rm_type="zero",
        label_key=None,
        use_kl_loss=None,
        kl_loss_coef=None,
        kl_loss_type=None,
        actor_num_gpus_per_node=1,
        rollout_num_gpus=1,
        colocate=True,
        rollout_batch_size=64,
        lr=2e-3,
        adam_beta2=0.95,
        save_debug_rollout_data=str(folder / "dump" / "{rollout_id}.jsonl"),
        use_opd=True,
        **changes,
    )


def reverse_kls(done: harness.Finished) -> list[float]:
    assert done.code == 0, done.output[-6000:]
    assert done.left == []
    return done.steps("rollout/opd_reverse_kl")


def test_student_learns_from_a_teacher_in_the_training_ranks(tiny, teacher, tmp_path):
    line = flags(tiny, tmp_path, num_rollout=6, opd_type="megatron", opd_teacher_load=teacher)
    done = harness.start("train.py", line, tmp_path, "distilled", tiny.home).finish(200)
    found = reverse_kls(done)
    assert found[0] > 0.1 and found[-1] < found[0] / 5
    assert set(done.steps("reward")) == {0.0}


def test_student_learns_from_the_distributions_of_a_teacher(tiny, teacher, tmp_path):
    own = {"opd_type": "megatron", "opd_teacher_load": teacher, "opd_divergence": "jsd", "opd_jsd_beta": 0.5}
    done = harness.start("train.py", flags(tiny, tmp_path, num_rollout=6, **own), tmp_path, "jsd", tiny.home).finish(
        200
    )
    found, divergences = reverse_kls(done), done.steps("opd_divergence")
    assert found[0] > 0.1 and found[-1] < found[0] / 2
    assert divergences[-1] < divergences[0] / 2
    assert set(done.steps("reward")) == {0.0} and done.steps("pg_loss") == [0.0] * 6


def test_student_learns_from_a_larger_teacher_on_a_server(tiny, teacher, tmp_path):
    larger = with_idle_layer(teacher, tmp_path / "larger")
    line = flags(tiny, tmp_path, num_rollout=4, opd_type="sglang", rm_model=larger)
    done = harness.start("train.py", line, tmp_path, "served", tiny.home).finish(200)
    found = reverse_kls(done)
    assert found[0] > 0.1 and found[-1] < found[0] / 2
    assert {"sglang0.log", "sglang_teacher0.log"} <= {path.name for path in (done.run_dir / "logs").iterdir()}
    model = AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float32).eval()
    samples = rollout_dump.load_rollout(str(tmp_path / "dump" / "{rollout_id}.jsonl"), 0).samples
    for sample in samples[::7]:
        with torch.no_grad():
            logits = model(torch.tensor([sample.tokens])).logits[0, sample.prompt_length - 1 : -1]
        expected = logits.log_softmax(-1).gather(1, torch.tensor(sample.tokens)[sample.prompt_length :, None])[:, 0]
        assert sample.teacher_log_probs == pytest.approx(expected.tolist(), abs=1e-4)


def test_student_learns_from_the_top_tokens_of_a_teacher_on_a_server(tiny, teacher, tmp_path):
    own = {"opd_type": "sglang", "rm_model": teacher, "opd_divergence": "forward_kl", "opd_top_k": 5}
    done = harness.start("train.py", flags(tiny, tmp_path, num_rollout=4, **own), tmp_path, "top", tiny.home).finish(
        200
    )
    found, divergences = reverse_kls(done), done.steps("opd_divergence")
    assert found[-1] < found[0] / 2 and divergences[-1] < divergences[0] / 2
    model = AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float32).eval()
    samples = rollout_dump.load_rollout(str(tmp_path / "dump" / "{rollout_id}.jsonl"), 0).samples
    for sample in samples[::7]:
        with torch.no_grad():
            logits = model(torch.tensor([sample.tokens])).logits[0, sample.prompt_length - 1 : -1]
        ids, values = torch.tensor(sample.teacher_top_ids).view(-1, 5), torch.tensor(sample.teacher_top_log_probs)
        expected = logits.log_softmax(-1)
        torch.testing.assert_close(values.view(-1, 5), expected.gather(1, ids).to(values), rtol=0, atol=1e-4)
        assert torch.allclose(expected.gather(1, ids).sort(dim=1, descending=True).values, expected.topk(5).values)


GROUPS = """sglang:
  - {name: actor, server_groups: [{worker_type: regular, num_gpus: 1}]}
  - {name: sums, model_path: TEACHER, server_groups: [{worker_type: regular, num_gpus: 2}]}
  - {name: same, update_weights: false, server_groups: [{worker_type: regular, num_gpus: 1}]}
"""


def test_frozen_models_of_the_groups_teach_the_prompts_of_their_files(tiny, teacher, tmp_path):
    """As below; the teachers are servers of --sglang-config, the first one two of them behind its router."""
    rows = (tiny.folder / "train.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "sums.jsonl").write_text("".join(rows[:400]))
    (tmp_path / "same.jsonl").write_text("".join(rows[400:800]))
    (tmp_path / "groups.yaml").write_text(GROUPS.replace("TEACHER", str(teacher)))
    own = {
        "opd_type": "sglang",
        "opd_teacher_models": ["sums", "same"],
        "sglang_config": tmp_path / "groups.yaml",
        "prompt_data": [f"{tmp_path}/sums.jsonl=0.5", f"{tmp_path}/same.jsonl=0.5"],
    }
    line = flags(tiny, tmp_path, num_rollout=2, **own)
    line[line.index("--rollout-num-gpus") + 1] = "4"
    line.remove("--colocate")
    done = harness.start("train.py", line, tmp_path, "groups", tiny.home).finish(200)
    assert reverse_kls(done)[0] > 0.03
    assert done.steps("rollout/teacher/sums/opd_reverse_kl")[0] > 0.05
    assert abs(done.steps("rollout/teacher/same/opd_reverse_kl")[0]) < 1e-4
    assert "2 servers of the frozen model sums, 1 server of the frozen model same, which get no weight" in done.output
    logs = {path.name for path in (done.run_dir / "logs").iterdir()}
    assert {"sglang_sums-1.log", "sglang_same-0.log", "router_sums.log"} <= logs
    asked = [(done.run_dir / "logs" / f"sglang_sums-{n}.log").read_text().count("POST /generate") for n in range(2)]
    assert min(asked) > 16


def test_prompts_of_two_files_are_taught_by_two_teachers_that_the_run_starts(tiny, teacher, tmp_path):
    """The student itself teaches the rows of one file, which gives a divergence near 0."""
    rows = (tiny.folder / "train.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "sums.jsonl").write_text("".join(rows[:400]))
    (tmp_path / "same.jsonl").write_text("".join(rows[400:800]))
    own = {
        "opd_type": "sglang",
        "opd_teacher_models": [f"sums={teacher}", f"same={tiny.model}"],
        "opd_teacher_num_gpus": [1, 1],
        "prompt_data": [f"{tmp_path}/sums.jsonl=0.5", f"{tmp_path}/same.jsonl=0.5"],
    }
    done = harness.start("train.py", flags(tiny, tmp_path, num_rollout=2, **own), tmp_path, "two", tiny.home).finish(
        200
    )
    assert reverse_kls(done)[0] > 0.03
    counts = [sum(done.steps(f"rollout/teacher/{name}/samples")) for name in ("sums", "same")]
    assert sum(counts) == 2 * 256 and min(counts) > 64
    assert done.steps("rollout/teacher/sums/opd_reverse_kl")[0] > 0.05
    assert abs(done.steps("rollout/teacher/same/opd_reverse_kl")[0]) < 1e-4
    logs = {path.name for path in (done.run_dir / "logs").iterdir()}
    assert {"sglang_teacher0.log", "sglang_teacher1.log"} <= logs
    samples = rollout_dump.load_rollout(str(tmp_path / "dump" / "{rollout_id}.jsonl"), 0).samples
    assert {sample.metadata["teacher"] for sample in samples} == {"sums", "same"}
