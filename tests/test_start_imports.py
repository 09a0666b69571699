"""What the processes of a run must not import at their start: each of these packages takes seconds or most of one."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from slimrl.engines.sglang.server_args import unused_model_modules
from slimrl.processes.child_process import uncollected

ROOT = Path(__file__).resolve().parents[1]
HEAVY = (
    *("torch", "transformers", "sglang", "megatron.core"),
    *("wandb", "torch._dynamo", "torch._inductor", "ray", "numba"),
)


def loaded_by(program: str) -> set[str]:
    """The packages of `HEAVY` that a new process has loaded after `program`, without a GPU."""
    shows = f"{program}\nimport sys, json\nprint(json.dumps([name for name in {HEAVY!r} if sys.modules.get(name)]))"
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-c", shows]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize(
    "module",
    ["placement", "training.train_group", "engines.engine", "rollout_manager", "run"],
)
def test_driver_and_actors_start_without_torch(module: str):
    assert loaded_by(f"import slimrl.cluster.{module}") == {"ray"}


def test_driver_knows_the_errors_of_a_run_without_torch():
    assert loaded_by("from slimrl.cluster.command_line import exit_codes\nassert exit_codes()") == {"ray"}


def test_tokenizers_are_loaded_without_the_compiler_which_masks_import_when_they_are_made(additions: Path):
    program = f"""
from slimrl.rollout.dataset.tokenizer import load_tokenizer
load_tokenizer({str(additions / "model")!r}, trust_code=False)
"""
    assert loaded_by(program) == {"torch", "transformers"}
    program += """
import torch
from transformers import AutoModelForCausalLM, masking_utils
from transformers.masking_utils import create_causal_mask
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
assert isinstance(masking_utils.TransformGetItemToIndex(), TransformGetItemToIndex)
model = AutoModelForCausalLM.from_pretrained(MODEL)
model(input_ids=torch.tensor([[1, 2, 3], [4, 5, 6]]), attention_mask=torch.tensor([[0, 1, 1], [1, 1, 1]]))
""".replace("MODEL", repr(str(additions / "model")))
    assert "torch._dynamo" in loaded_by(program)


def test_launch_decisions_without_a_gpu_need_no_torch():
    assert loaded_by("from slimrl.platform.launch_env import this_machine\nassert not this_machine().cuda") == set()


def test_process_of_a_rank_needs_no_ray():
    assert loaded_by("import slimrl.cluster.training.train_process") == set()


def test_router_needs_neither_torch_nor_sglang():
    hidden = "from slimrl.engines.sglang import entry\nentry.hide_python_router()\n"
    assert loaded_by(hidden + "import sglang_router.launch_router") == set()


def test_training_imports_neither_wandb_nor_the_compiler_and_both_can_be_imported_later():
    assert loaded_by("import slimrl.megatron.training.trainer") == {"torch", "megatron.core"}
    program = "import slimrl.megatron.training.trainer, wandb, torch\ntorch.compile(lambda: None)\nwandb.init"
    assert "wandb" in loaded_by(program)


def test_compiler_is_replaced_by_decorators_that_change_nothing():
    program = """
import slimrl.megatron.training.trainer
from megatron.core.jit import jit_fuser, noop_decorator, enable_jit_fuser, disable_jit_fuser
from megatron.core.fusions import fused_bias_swiglu
assert jit_fuser(len) is noop_decorator(len) is len
assert enable_jit_fuser() is None and disable_jit_fuser() is None
assert not hasattr(fused_bias_swiglu.swiglu, "_torchdynamo_orig_callable")
"""
    assert "torch._dynamo" not in loaded_by(program)


def test_collector_is_off_within_the_block_only_and_after_an_error():
    with uncollected():
        assert not gc.isenabled()
        with uncollected():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ValueError, match="inside"), uncollected():
        raise ValueError("inside")
    assert gc.isenabled()


def words_for(folder: Path, architectures: list[str]) -> list[str]:
    (folder / "config.json").write_text(json.dumps({"architectures": architectures}))
    return ["--model-path", str(folder)]


def test_only_the_module_that_defines_the_architecture_is_used(tmp_path: Path):
    unused = unused_model_modules(words_for(tmp_path, ["Qwen3ForCausalLM"]))
    assert "qwen3" not in unused
    assert {"llama", "qwen2", "qwen3_moe", "deepseek_v2"} <= set(unused)


def test_all_modules_are_used_where_another_architecture_may_be_needed(tmp_path: Path):
    words = words_for(tmp_path, ["Qwen3ForCausalLM"])
    for more in ("--speculative-algorithm=EAGLE", "--json-model-override-args={}", "--model-impl"):
        assert unused_model_modules([*words, more]) == []
    assert "qwen2_rm" not in unused_model_modules(words_for(tmp_path, ["Qwen2ForProcessRewardModel"]))
    assert unused_model_modules(words_for(tmp_path, ["NoSuchModel"])) == []
    assert unused_model_modules(words_for(tmp_path, [])) == []
    assert unused_model_modules(["--model-path", str(tmp_path / "none")]) == []


def test_collections_do_not_scan_what_an_import_left():
    with uncollected():
        kept = [[]]
    assert gc.is_tracked(kept) and all(kept is not scanned for scanned in gc.get_objects())
