"""--sglang-config: the file as the run reads it, and one error for every violation."""

from __future__ import annotations

import json
import types

import pytest

from slimrl.arguments import PassthroughFlag, read_args
from slimrl.arguments.dry_run.plan import PlanContext, make_plan
from slimrl.arguments.dry_run.render import render
from slimrl.arguments.engine_groups import ServerGroup, engine_places, group_flags, policy_groups
from slimrl.arguments.hf_config import served_models
from slimrl.cluster.engines.frozen_models import FrozenModels
from slimrl.cluster.placement import plan_gpus
from slimrl.engines.sglang.server_args import server_flags
from slimrl.processes.process_info import Machine
from tests.arguments.conftest import COLOCATED, SPLIT

OPTIONS = {
    "api-key": PassthroughFlag("api_key", type=str),
    "context-length": PassthroughFlag("context_length", type=str),
    "disaggregation-mode": PassthroughFlag(
        "disaggregation_mode", type=str, managed_by="--prefill-num-servers, or worker_type of --sglang-config"
    ),
    "disaggregation-transfer-backend": PassthroughFlag("disaggregation_transfer_backend", type=str),
    "dp-size": PassthroughFlag("dp_size", type=int),
    "enable-deterministic-inference": PassthroughFlag("enable_deterministic_inference", action="store_true"),
    "enable-dp-attention": PassthroughFlag("enable_dp_attention", action="store_true"),
    "load-format": PassthroughFlag("load_format", type=str),
    "lora-paths": PassthroughFlag("lora_paths", type=str),
    "max-running-requests": PassthroughFlag("max_running_requests", type=int),
    "mem-fraction-static": PassthroughFlag("mem_fraction_static", type=float),
    "pp-size": PassthroughFlag("pp_size", type=int),
    "quantization": PassthroughFlag("quantization", type=str),
    "random-seed": PassthroughFlag("random_seed", type=int, managed_by="--rollout-seed plus the index of the server"),
}
TABLES = {"sglang": lambda: OPTIONS}
ONE = "{worker_type: regular, num_gpus: 2, num_gpus_per_engine: 1}"
TWO = "{worker_type: regular, num_gpus: 4, num_gpus_per_engine: 2}"
PREFILL = ONE.replace("regular", "prefill")
DECODE = TWO.replace("regular", "decode")
DUMMY = "overrides: {load_format: dummy}"
JUDGE = "{name: judge, model_path: DIR/hf2, server_groups: [{num_gpus: 4}]}"


def actor(*groups: str, more: str = "") -> str:
    return f"{{name: actor, {more}server_groups: [{', '.join(groups)}]}}"


def of_group(group: str, deterministic: str) -> str:
    return group.removesuffix("}") + f", overrides: {{enable_deterministic_inference: {deterministic}}}}}"


def file(*models: str) -> str:
    return "sglang: [" + ", ".join(models) + "]"


# rule -> (file and flags that pass, file and flags that do not with the error after the file's name); 6 rollout GPUs
CASES: dict[str, tuple[list[tuple[str, str]], list[tuple[str, str, str]]]] = {
    "groups_have_engines_of_the_run": (
        [(file(actor(ONE, TWO)), "")],
        [
            (
                file(actor(ONE, TWO)),
                "--use-fault-tolerance --rollout-max-num-gpus 8",
                "--rollout-max-num-gpus adds servers that are all alike, and --sglang-config describes those of the"
                " run: leave one of the two out.",
            ),
            (
                file(actor(ONE, TWO)),
                "--rollout-engine vllm --vllm-python /bin/sh",
                "--rollout-engine vllm has no groups of servers, and --sglang-config describes those of the run: leave"
                " one of the two out.",
            ),
        ],
    ),
    "prefill_leaves_gpus_to_decode": (
        [("", "--prefill-num-servers 5"), (file(actor(PREFILL, DECODE)), "")],
        [
            (
                "",
                "--prefill-num-servers 3 --rollout-num-gpus-per-engine 2",
                "--prefill-num-servers 3 leaves no engine to decode: --rollout-num-gpus 6 are 3 engines of 2; give"
                " fewer.",
            ),
            (
                file(actor(PREFILL, DECODE)),
                "--prefill-num-servers 1",
                "--prefill-num-servers splits the policy's engines, and --sglang-config lists the groups: give one of"
                " the two.",
            ),
            (
                "",
                "--prefill-num-servers 1 --rollout-engine vllm --vllm-python /bin/sh",
                "--rollout-engine vllm has no groups of servers, and --prefill-num-servers describes those of the run:"
                " leave one of the two out.",
            ),
            (
                "",
                "--prefill-num-servers 1 --use-fault-tolerance --rollout-max-num-gpus 8",
                "--rollout-max-num-gpus adds servers that are all alike, and --prefill-num-servers describes those of"
                " the run: leave one of the two out.",
            ),
        ],
    ),
    "caches_are_sent_by_one_backend": (
        [("", "--prefill-num-servers 1 --sglang-disaggregation-transfer-backend nixl")],
        [
            (
                file(actor(PREFILL, DECODE.replace("2}", "2, overrides: {disaggregation_transfer_backend: nixl}}"))),
                "",
                "its groups have the disaggregation_transfer_backend mooncake and nixl: give all of them one.",
            ),
            (
                "",
                "--prefill-num-servers 1 --sglang-router-ip 10.0.0.1 --sglang-router-port 30000",
                "--prefill-num-servers 1: the policy has prefill and decode servers, and only a router that the run"
                " starts sends requests to both: leave out --sglang-router-ip 10.0.0.1.",
            ),
        ],
    ),
    "groups_fill_the_rollout_gpus": (
        [(file(actor(ONE, "{worker_type: placeholder, num_gpus: 4}")), "")],
        [
            (
                file(actor(ONE)),
                "",
                "its groups have 2 GPUs and --rollout-num-gpus is 6: make them equal; a group of worker_type"
                " placeholder leaves GPUs free.",
            ),
            (
                file(actor(ONE, TWO)),
                COLOCATED,
                "its groups have 6 GPUs and --rollout-num-gpus is 8 (the training GPUs, by --colocate): make them"
                " equal; a group of worker_type placeholder leaves GPUs free.",
            ),
        ],
    ),
    "deterministic_groups_get_seeds": (
        [
            (file(actor(ONE, TWO)), "--sglang-enable-deterministic-inference"),
            (file(actor(of_group(ONE, "true"), of_group(TWO, "false"))), "--sglang-enable-deterministic-inference"),
            (file(actor(of_group(ONE, "false"), TWO)), ""),
            (file(actor(of_group(ONE, "true").replace("regular", "placeholder"), TWO)), ""),
            (file(actor(ONE), JUDGE.replace("4}", "4, overrides: {enable_deterministic_inference: true}}")), ""),
        ],
        [
            (
                file(actor(of_group(ONE, "true"), TWO)),
                "",
                "model actor, group 0 has enable_deterministic_inference, and requests have the seeds that its servers"
                " need only with --sglang-enable-deterministic-inference: give that, and"
                " enable_deterministic_inference: false to groups without it.",
            ),
        ],
    ),
    "one_model_is_the_policy": (
        [(file(actor(ONE), JUDGE), ""), (file(actor(ONE, more="model_path: DIR/hf, "), JUDGE), "")],
        [
            (
                file(actor(TWO), actor(ONE).replace("actor", "second")),
                "",
                "models actor and second get the weight updates, and a run trains one: give all but one false.",
            ),
            (
                file(actor(ONE).replace("actor", "a").replace("{name", "{update_weights: false, name"), JUDGE),
                "",
                "no model (a, judge) gets the weight updates: give the policy update_weights: true, or no model_path.",
            ),
            (
                file(actor(ONE).replace("actor", "policy"), JUDGE.replace("judge", "actor")),
                "",
                "model actor is frozen (update_weights: false, or another model_path), and custom code asks for the"
                " policy by the name actor: rename it, or give it update_weights: true.",
            ),
            (
                file(actor(ONE), JUDGE.replace("judge", "policy")),
                "",
                "model policy is frozen, and the policy is the model that is trained: rename it.",
            ),
            (
                file(actor(ONE, TWO, more="model_path: DIR/hf2, update_weights: true, ")),
                "",
                "model actor has model_path DIR/hf2 and gets the weight updates, and the policy's servers start from"
                " --hf-checkpoint DIR/hf: leave model_path out.",
            ),
            (
                file(actor(ONE, TWO.replace("regular", "placeholder")).replace("regular", "placeholder")),
                "",
                "model actor has no servers: give it another group than placeholders.",
            ),
        ],
    ),
    "frozen_models_have_folders": (
        [
            (file(actor(ONE), JUDGE), ""),
            (file(actor(ONE), JUDGE.replace("hf2", "bare")), "--dry-run"),
            (file(actor(ONE), JUDGE.replace("hf2", "bare").replace("4}", f"4, {DUMMY}}}")), ""),
        ],
        [
            (
                file(actor(ONE), JUDGE.replace("hf2", "none")),
                "",
                "model_path DIR/none of model judge does not exist (only DIR of it does): check the path.",
            ),
            (
                file(actor(ONE), JUDGE.replace("hf2", "ref")),
                "",
                "model_path DIR/ref of model judge has no config.json: give a Hugging Face folder.",
            ),
            (
                file(actor(ONE), JUDGE.replace("hf2", "bare")),
                "",
                "model_path DIR/bare of model judge has no weights (no .safetensors file), which the engines load: copy"
                " them there too.",
            ),
        ],
    ),
    "groups_keep_the_rules_of_engines": (
        [
            (file(actor(ONE, TWO.replace("2}", "2, overrides: {enable_dp_attention: true, dp_size: 2}}"))), ""),
            (file(actor(ONE), JUDGE.replace("4}", "4, overrides: {lora_paths: /adapters}}")), ""),
        ],
        [
            (
                file(actor(ONE, TWO.replace("2}", f"2, {DUMMY}}}"))),
                "--lora-rank 8 --lora-alpha 16",
                "model actor, group 1: --lora-rank sends the engines adapters, and the engines need the base's weights:"
                " leave --sglang-load-format dummy out, or add --lora-merge.",
            ),
            (
                file(actor(ONE, TWO.replace("2}", "2, overrides: {lora_paths: /adapters}}"))),
                "",
                "model actor, group 1: --sglang-lora-paths is for LoRA adapters, which --lora-rank without --lora-merge"
                " sets up: leave it out.",
            ),
            (
                file(actor(ONE, TWO.replace("2}", "2, overrides: {enable_dp_attention: true, dp_size: 4}}"))),
                "",
                "model actor, group 1: --sglang-dp-size 4 does not divide the tensor parallel size of an engine"
                " (--rollout-num-gpus-per-engine 2): choose a divisor.",
            ),
            (
                file(actor(ONE, TWO.replace("2}", "2, overrides: {pp_size: 2}}"))),
                "",
                "model actor, group 1: --sglang-pp-size 2 does not support weight updates by a broadcast: SGLang's"
                " pipeline stages take weights only from trainers on their own GPUs; give --colocate without"
                " --update-weight-transport disk, or use tensor and expert parallelism only.",
            ),
            (
                file(actor(ONE, TWO.replace("2}", "2, overrides: {quantization: fp8}}"))),
                "",
                "model actor, group 1: --sglang-quantization fp8 quantises the engines' weights, and weight updates"
                " send unquantised tensors: leave it out.",
            ),
            (
                file(actor(ONE, TWO.replace("2}", "2, overrides: {context_length: 4096}}"))),
                "--eval-max-response-len 64",
                "model actor, group 1: --sglang-context-length 4096 is less than the longest sample, at least one token"
                " of prompt + --rollout-max-response-len 8192 = 8193: give at least 8193.",
            ),
        ],
    ),
    "groups_end_where_the_policy_ends": ([(file(actor(ONE, TWO)), "")], []),
}
TESTED_APART = ("caches_are_of_the_current_weights",)  # of train_async.py
PROBLEMS = [
    ("[1]", "the file must hold the key sglang with a list of models"),
    ("models: []", "the file must hold the key sglang with a list of models"),
    (file(actor(ONE, TWO)) + "\nrouter: 1", "the file has an unknown key 'router': known: sglang"),
    ("sglang: [3]", "model 0 must be a mapping with name and server_groups"),
    (file(actor(ONE, TWO, more="update_weight: true, ")), "model actor has an unknown key 'update_weight': did you"),
    (file(actor(ONE, TWO, more="update_weights: maybe, ")), "model actor has update_weights 'maybe': give true or"),
    (file(actor(ONE, TWO, more="model_path: 3, ")), "model actor has model_path 3: give a folder"),
    (file(actor(ONE, TWO).replace("actor", "a/b")), "model a/b: name logs with letters, digits"),
    (file("{name: actor}"), "model actor has no server_groups: list at least one, with worker_type and num_gpus"),
    (file("{name: actor, server_groups: [], engine_groups: []}"), "has server_groups and their old name engine_groups"),
    (file(actor(ONE), actor(TWO)), "model actor is given twice: join its server_groups, or rename one"),
    (file(actor(ONE, "4")), "model actor, group 1 must be a mapping with worker_type and num_gpus"),
    (file(actor(ONE, TWO.replace("worker_type", "type"))), "model actor, group 1 has an unknown key 'type'"),
    (file(actor(ONE, TWO.replace("regular", "regulr"))), "worker_type 'regulr', which is not one of regular,"),
    (file(actor(ONE, TWO.replace("regular", "encoder"))), "group 1 has worker_type encoder, which is unsupported"),
    (file(actor(ONE, "{worker_type: regular}")), "model actor, group 1 has no num_gpus: give the number of its GPUs"),
    (file(actor(ONE, TWO.replace("4", "none"))), "model actor, group 1 has num_gpus 'none': give a count of at least"),
    (file(actor(ONE, TWO.replace("4", "0"))), "model actor, group 1 has num_gpus 0: give a count of at least 1"),
    (file(actor(ONE, TWO.replace("4", "3"))), "has num_gpus 3, no multiple of num_gpus_per_engine 2: choose one"),
    (
        file(actor(ONE, TWO.replace("regular", "prefill"))),
        "model actor has regular groups beside prefill groups, and its router sends every request to a prefill and a"
        " decode server: make all of them prefill or decode",
    ),
    (file(actor(TWO.replace("regular", "prefill"))), "model actor has prefill groups and no decode group: add one"),
    (file(actor(TWO.replace("regular", "decode"))), "model actor has decode groups and no prefill group: add one"),
    (
        file(actor(PREFILL, DECODE.replace("2}", "2, overrides: {disaggregation_mode: prefill}}"))),
        "overrides: --sglang-disaggregation-mode is set by slimrl itself (--prefill-num-servers, or worker_type of",
    ),
    (file(actor(ONE, TWO.replace("2}", "2, overrides: [1]}"))), "has overrides [1]: give a mapping of SGLang's"),
    (
        file(actor(ONE, TWO.replace("2}", "2, overrides: {max_runing_requests: 4}}"))),
        "model actor, group 1, overrides: unknown flag --sglang-max-runing-requests: did you mean"
        " --sglang-max-running-requests?",
    ),
    (
        file(actor(ONE, TWO.replace("2}", "2, overrides: {max_running_requests: few}}"))),
        "model actor, group 1, overrides: --sglang-max-running-requests few is not a value that the engine accepts",
    ),
    (
        file(actor(ONE, TWO.replace("2}", "2, overrides: {random_seed: 1}}"))),
        "overrides: --sglang-random-seed is set by slimrl itself (--rollout-seed plus the index of the server)",
    ),
    (
        file(actor(ONE, TWO.replace("2}", "2, overrides: {api_key: mine}}"))),
        "group 1: api_key in its overrides is another key than that of the other servers, and the run has one: leave",
    ),
    (
        file(actor(ONE, TWO.replace("2}", "2, overrides: {tp_size: 4}}"))),
        "has tp_size 4 x pp_size 1 in its overrides and num_gpus_per_engine 2: leave tp_size out",
    ),
    (
        file(actor(ONE, TWO.replace("2}", "2, overrides: {mem_fraction_static: null}}"))),
        "model actor, group 1: mem_fraction_static in its overrides is null: give a value, or leave it out",
    ),
]


def line(recipe, text: str, more: str = "") -> list[str]:
    """The recipe with 2 training and 6 rollout GPUs and the file, whose DIR is the recipe's folder."""
    (recipe.dir / "hf2").mkdir(exist_ok=True)
    (recipe.dir / "hf2" / "config.json").write_text((recipe.dir / "hf" / "config.json").read_text())
    (recipe.dir / "hf2" / "pytorch_model.bin").write_bytes(b"weights")
    (recipe.dir / "bare").mkdir(exist_ok=True)
    (recipe.dir / "bare" / "config.json").write_text((recipe.dir / "hf" / "config.json").read_text())
    path = recipe.dir / "groups.yaml"
    path.write_text(text.replace("DIR", str(recipe.dir)))
    one = "--rollout-num-gpus-per-engine 1 --seq-length 512"
    groups = f"--sglang-config {path}" if text else ""
    return recipe.line(f"{one} {groups} {more}", placement=SPLIT)


def sentences(recipe, text, more):
    args, problems = read_args(line(recipe, text, more), passthrough=TABLES)
    path = f"--sglang-config {recipe.dir / 'groups.yaml'}: "
    return args, [one.sentence.removeprefix(path).replace(str(recipe.dir), "DIR") for one in problems]


def test_weights_are_not_updated_while_caches_are_on_their_way(recipe):
    flags = line(recipe, "", "--prefill-num-servers 1 --max-weight-staleness 1")
    asynchronous = {"passthrough": TABLES, "entry": "train_async.py"}
    _, problems = read_args(flags, **asynchronous)
    assert (
        "--prefill-num-servers 1: prefill servers send KV caches to others, and a cache on its way during a weight"
        " update would be of the old weights: add --no-update-weights-in-flight."
    ) in [one.sentence for one in problems]
    assert read_args([*flags, "--no-update-weights-in-flight"], **asynchronous)[1] == []


@pytest.mark.parametrize(("rule", "case"), [(rule, case) for rule, (good, _) in CASES.items() for case in good])
def test_valid_groups_pass(recipe, rule, case):
    assert sentences(recipe, *case)[1] == []


@pytest.mark.parametrize(
    ("rule", "text", "more", "sentence"), [(rule, *case) for rule, (_, bad) in CASES.items() for case in bad]
)
def test_violation_is_one_error(recipe, rule, text, more, sentence):
    assert sentences(recipe, text, more)[1] == [sentence]


@pytest.mark.parametrize(("text", "beginning"), PROBLEMS)
def test_every_fault_of_the_file_is_named(recipe, text, beginning):
    found = sentences(recipe, text, "")[1]
    assert any(beginning in sentence for sentence in found), found
    assert all(sentence.endswith((".", "?")) for sentence in found)


def test_all_faults_of_a_file_are_reported_at_once(recipe):
    text = file(actor("{worker_type: gpu, num_gpus: 0}", "{num_gpus: 3, num_gpus_per_engine: 2, x: 1}"), "{name: 5}")
    assert len(sentences(recipe, text, "")[1]) == 5


def test_engine_on_gpus_of_policy_and_critic_is_rejected(recipe):
    critic = "--advantage-estimator ppo --critic-num-nodes 1 --critic-num-gpus-per-node 1 --critic-load DIR/ref"
    flags = f"--actor-num-nodes 1 --actor-num-gpus-per-node 5 --colocate {critic.replace('DIR', str(recipe.dir))}"
    found = sentences(recipe, file(actor(TWO, TWO.replace("4", "2"))), flags)[1]
    assert (
        "model actor, group 1 has an engine on GPUs 4 to 5, of which the first 1 train the policy and the others the"
        " critic: let an engine end where the policy's GPUs end." in found
    )


def test_pipeline_stages_on_the_critics_gpus_are_rejected(recipe):
    critic = "--advantage-estimator ppo --critic-num-nodes 1 --critic-num-gpus-per-node 4 --critic-load DIR/ref"
    flags = f"--actor-num-nodes 1 --actor-num-gpus-per-node 4 --colocate {critic.replace('DIR', str(recipe.dir))}"
    stages = TWO.replace("2}", "2, overrides: {pp_size: 2}}")
    sentence = (
        "model actor, group 1 has pp_size 2 and an engine on GPUs {} to {}, which train the critic: pipeline stages"
        " take weights only from trainers of the policy on their own GPUs; give the group the policy's GPUs, or no"
        " stages."
    )
    found = sentences(recipe, file(actor(TWO, stages)), flags)[1]
    assert {sentence.format(4, 5), sentence.format(6, 7)} <= set(found)
    assert not [one for one in sentences(recipe, file(actor(stages, TWO)), flags)[1] if "pp_size 2" in one]


def test_groups_take_the_rollout_gpus_in_the_order_of_the_file(recipe):
    text = file(
        actor("{num_gpus: 2, overrides: {max-running-requests: 4, enable_dp_attention: false}}"),
        "{name: judge, model_path: DIR/hf2, num_gpus_per_engine: 2, engine_groups: [{worker_type: placeholder,"
        " num_gpus: 2}, {num_gpus: 2}]}",
    )
    args, found = sentences(recipe, text, "--sglang-max-running-requests 8 --sglang-context-length 20000")
    assert found == []
    plan = plan_gpus(args)
    assert (plan.total, plan.policy_servers, plan.frozen_servers) == (8, (range(2, 3), range(3, 4)), (range(6, 8),))
    first, judge = engine_places(args, 2)[0], engine_places(args, 2)[2]
    flags = group_flags(args, first.model, first.group)
    assert flags.hf_checkpoint == args.hf_checkpoint and flags.rollout_num_gpus_per_engine == 1
    expected = {"max_running_requests": 4, "enable_dp_attention": False, "context_length": "20000"}
    assert flags.sglang_options == expected
    flags = group_flags(args, judge.model, judge.group)
    assert (flags.hf_checkpoint, flags.rollout_num_gpus_per_engine) == (str(recipe.dir / "hf2"), 2)
    assert not judge.model.update_weights and first.model.update_weights


TAUGHT = "--use-opd --opd-type sglang --rm-type zero --rollout-temperature 1 --opd-teacher-models"


def test_teacher_may_be_a_frozen_model_of_the_file(recipe):
    (recipe.dir / "train.jsonl").write_text(
        json.dumps({"prompt": "1+1", "label": "2", "metadata": {"teacher": "judge"}})
    )
    args, found = sentences(recipe, file(actor(ONE), JUDGE), f"{TAUGHT} judge --metadata-key metadata")
    assert found == []
    assert args.opd_teacher_folders == {"judge": str(recipe.dir / "hf2")} and args.opd_teacher_names == ("judge",)
    assert served_models(args) == ()  # its servers are those of the group
    plan = plan_gpus(args)
    assert (plan.total, plan.reward_servers, plan.frozen_names) == (8, (), ("judge",) * 4)
    routers = FrozenModels({"judge": types.SimpleNamespace(router_url="http://h:7")}).reachable(args)
    assert routers.opd_teachers == {"judge": "http://h:7"} and routers.sglang_model_routers["judge"] == ("h", 7)


def test_teacher_that_no_frozen_model_is_called_is_an_error(recipe):
    _, found = sentences(recipe, file(actor(ONE), JUDGE), f"{TAUGHT} actor")
    assert (
        "--opd-teacher-models actor is not a name and a folder: write name=folder, or name a frozen model of"
        " --sglang-config." in found
    )


def test_prefill_servers_come_before_those_that_decode(recipe):
    args, found = sentences(recipe, "", "--prefill-num-servers 1 --rollout-num-gpus-per-engine 2")
    assert found == []
    assert policy_groups(args) == [ServerGroup("prefill", 2, 2), ServerGroup("decode", 4, 2)]
    shown = render(make_plan(args, "train.py", PlanContext(Machine(host=None, gpus=()))))
    for words in (
        "group 0 (prefill, 2 GPUs): server 0, gets the weight updates, with: --model-path {} --tp-size 2"
        " --disaggregation-mode prefill",
        "group 1 (decode, 4 GPUs): servers 1 to 2, gets the weight updates, with: --model-path {} --tp-size 2"
        " --disaggregation-mode decode",
    ):
        assert words.format(args.hf_checkpoint) in shown, shown


def test_least_context_of_the_policys_groups_limits_samples(recipe):
    texts = [TWO.replace("2}", f"2, overrides: {{context_length: {n}}}}}") for n in (30000, 20000)]
    args, found = sentences(recipe, file(actor(ONE, texts[0])), "")
    assert (found, args.engine_context_len) == ([], 30000 - 6)
    judge = JUDGE.replace("4}", "4, overrides: {context_length: 100}}")
    assert sentences(recipe, file(actor(ONE), judge), "")[0].engine_context_len == 40960 - 6


def test_overrides_are_checked_against_the_installed_sglang(recipe):
    text = file(actor(ONE, TWO.replace("2}", "2, overrides: {chunked_prefill_size: 256, no_such_option: 1}}")))
    problems = read_args(line(recipe, text), passthrough={"sglang": server_flags})[1]
    assert [one.sentence.partition("overrides: ")[2] for one in problems] == [
        "unknown flag --sglang-no-such-option: see docs/flags.md for all flags."
    ]


def test_overrides_may_have_the_names_of_the_servers_fields(recipe):
    fields = "fp8_gemm_runner_backend: triton, lora_strict_loading: false, ple_offload_embedding: true"
    text = file(actor(ONE), JUDGE.replace("4}", f"4, overrides: {{{fields}}}}}"))
    args, problems = read_args(line(recipe, text), passthrough={"sglang": server_flags})
    assert problems == []
    expected = {"fp8_gemm_runner_backend": "triton", "lora_strict_loading": False, "ple_offload_embedding": True}
    assert args.server_models[1].groups[0].overrides == expected


def test_every_field_of_the_servers_arguments_is_known_in_overrides(recipe):
    """Given by the name of its field as in slime's files, each is accepted or refused for its value or by a rule."""
    fields = sorted({flag.dest for flag in server_flags().values()})
    assert len(fields) > 450
    text = file(actor(ONE), JUDGE.replace("4}", f"4, overrides: {{{', '.join(f'{one}: 1' for one in fields)}}}}}"))
    problems = read_args(line(recipe, text), passthrough={"sglang": server_flags})[1]
    assert problems and not [one.sentence for one in problems if "unknown flag" in one.sentence]


def test_file_may_be_json(recipe):
    (recipe.dir / "groups.json").write_text(
        json.dumps({"sglang": [{"name": "actor", "server_groups": [{"num_gpus": 6}]}]})
    )
    args, problems = read_args(
        recipe.line(f"--rollout-num-gpus-per-engine 3 --sglang-config {recipe.dir}/groups.json", placement=SPLIT)
    )
    assert problems == [] and policy_groups(args) == [ServerGroup("regular", 6, 3)]


def test_plan_shows_the_servers_and_flags_of_each_group(recipe):
    overrides = TWO.replace("4, num_gpus_per_engine: 2}", "2, num_gpus_per_engine: 2, overrides: {dp_size: 1}}")
    text = file(actor(ONE, overrides), JUDGE.replace("4}", "2}"))
    args, found = sentences(recipe, text, "")
    assert found == []
    plan = make_plan(args, "train.py", PlanContext(Machine(host=None, gpus=())))
    shown = render(plan).replace(str(recipe.dir), "DIR")
    assert [list(own) for own in (*plan.placement.engines, *plan.placement.frozen)] == [[2], [3], [4, 5], [6], [7]]
    for line_of_plan in (
        "model actor, group 0 (regular, 2 GPUs): servers 0 to 1, gets the weight updates, with: --model-path DIR/hf"
        " --tp-size 1",
        "model actor, group 1 (regular, 2 GPUs): server 2, gets the weight updates, with: --model-path DIR/hf --tp-size"
        " 2 --dp-size 1",
        "model judge, group 0 (regular, 2 GPUs): servers judge-0 to judge-1, frozen, with a router of its own, with:"
        " --model-path DIR/hf2 --tp-size 1",
    ):
        assert f"  {line_of_plan}\n" in shown, shown
