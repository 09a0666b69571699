"""Import paths of earlier versions resolve to the current modules, with one warning that names the new path."""

import importlib
import subprocess
import sys
import warnings
from importlib import util
from pathlib import Path

import pytest

from slimrl.renamed_modules import ALIASES, RENAMED, current_path

HEAVY = {
    "slimrl.megatron.forward",
    "slimrl.megatron.loss",
    "slimrl.megatron.model.layer_spec",
    "slimrl.megatron.own_loss",
    "slimrl.sglang.cpu",
}


@pytest.mark.parametrize("old", sorted(set(RENAMED) - HEAVY))
def test_old_path_is_the_current_module_and_warns_once(old, monkeypatch):
    monkeypatch.delitem(sys.modules, old, raising=False)
    with pytest.warns(DeprecationWarning, match=f"{old} is now {current_path(old)}: import it from there"):
        module = importlib.import_module(old)
    assert module is importlib.import_module(current_path(old))
    assert module.__name__ == module.__spec__.name == current_path(old)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert importlib.import_module(old) is module


@pytest.mark.parametrize("old", sorted(ALIASES))
def test_slime_path_is_not_an_old_path(old, monkeypatch):
    monkeypatch.delitem(sys.modules, old, raising=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert importlib.import_module(old) is importlib.import_module(current_path(old))


@pytest.mark.parametrize("old", sorted(RENAMED.keys() | ALIASES.keys()))
def test_no_module_remains_at_an_old_path(old):
    assert util.find_spec(current_path(old)) is not None
    assert not (Path(__file__).parents[1] / (old.replace(".", "/") + ".py")).exists()


def test_functions_at_old_paths_are_loaded_like_from_a_script():
    program = (
        "from slimrl.rollout.turns import converse; from slimrl.rollout.engine import EngineClient;"
        "from slimrl.rollout.sglang_rollout import generate_rollout; import slimrl.rollout.turns;"
        "assert slimrl.rollout.turns.converse is converse; print(converse.__module__, generate_rollout.__module__)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["slimrl.rollout.generation.multi_turn", "slimrl.rollout.rollout_function"]


def test_unknown_path_is_still_an_import_error():
    with pytest.raises(ModuleNotFoundError, match="slimrl.rollout.nowhere"):
        importlib.import_module("slimrl.rollout.nowhere")
