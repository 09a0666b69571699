"""The parameter count from flags equals that of the files which transformers writes, for every model family."""

from __future__ import annotations

import pytest
from safetensors import safe_open

from slimrl.arguments import read_args
from slimrl.models.hf_folder import read_hf_files
from slimrl.models.model_size import selection_biases, total_parameters
from slimrl.models.model_spec import ModelSpec
from tests.families.toys import TOYS


@pytest.mark.parametrize("name", TOYS)
def test_flags_and_files_give_the_same_number_of_weights(name, tmp_path):
    toy = TOYS[name]
    toy.save(tmp_path, shards=2, dtype="bf16", tokenizer=False)
    args, _ = read_args([*toy.flags, "--hf-checkpoint", str(tmp_path)], entry="tools/convert_hf_to_torch_dist.py")
    shape = ModelSpec.from_args(args)
    files = read_hf_files(tmp_path, layers=shape.num_layers, tied=shape.tied)
    assert files.files >= 2
    assert files.missing == ()
    assert files.elements == total_parameters(shape) + selection_biases(shape)


def test_headers_match_those_read_by_safetensors(tmp_path):
    folder = TOYS["qwen3"].save(tmp_path, shards=2, tokenizer=False)
    tensors = []
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            tensors += [file.get_tensor(name) for name in file.keys()]  # noqa: SIM118
    files = read_hf_files(folder, layers=2, tied=True)
    assert (files.tensors, files.bytes) == (len(tensors), sum(tensor.nbytes for tensor in tensors))
