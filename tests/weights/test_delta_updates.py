"""Weight updates that send only changed elements, into a model's loader and into real SGLang servers."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import torch

from slimrl.engines.sglang import weight_loaders
from slimrl.engines.sglang.control import ServerControl
from slimrl.engines.sglang.server import ServerProcess
from slimrl.engines.sglang.server_args import delta_options
from slimrl.weights.delta_files import FARTHEST, TensorDelta, changed_elements
from slimrl.weights.update.engine_fanout import WeightSyncError
from slimrl.weights.update.topology import EngineEndpoint
from slimrl.weights.update.transport_changed_files import ChangedFiles
from slimrl.weights.update.transport_delta import described
from slimrl.weights.update.transport_disk import EveryRankLoads
from tests.megatron.launch import RankPool
from tests.megatron.tiny import save_qwen3, tiny_args
from tests.weights import ranks
from tests.weights.ranks import Step
from tests.weights.real_servers import running


class Model(torch.nn.Module):
    """Loads one tensor of the second half of `weight`, transposed, as fused and sharded layers do."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight.clone())

    def load_weights(self, named_tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in named_tensors:
            assert name == "part"
            self.weight.data[len(self.weight) // 2 :].copy_(tensor.t().to(self.weight.dtype))


def sent(*deltas: TensorDelta) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(part.copy()) for name, part in described(deltas).items()}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "places", [[], [0], [7], [0, 1, 2, 799_999], [FARTHEST, 2 * FARTHEST + 1, 799_998], [FARTHEST - 1, 400_000]]
)
def test_model_has_the_senders_bits_where_elements_changed_and_its_own_elsewhere(dtype, places):
    generator = torch.Generator().manual_seed(len(places))
    whole = torch.randn(1600, 1000, generator=generator).to(dtype)
    old = whole[800:].t().contiguous().flatten()
    new = old.clone()
    new[places] += 1
    model = Model(whole)
    model.load_weights(iter([("part", torch.full((1000, 800), torch.nan, dtype=dtype))]))
    assert model.weight[800:].isnan().all()  # what the loader does without the changes' own way of copying
    model = Model(whole)
    weight_loaders.apply_changes(model, sent(changed_elements("part", (1000, 800), old, new)))
    assert torch.equal(model.weight[800:], new.view(1000, 800).t()) and torch.equal(model.weight[:800], whole[:800])


def test_sent_elements_are_the_changed_ones_and_as_few_between_as_the_gaps_need():
    old = torch.zeros(10 * FARTHEST)
    new = old.clone()
    new[[3, 5 * FARTHEST]] = 1
    delta = changed_elements("x", (10 * FARTHEST,), old, new)
    assert delta.gaps.tolist() == [3, 65535, 65535, 65535, 65535, FARTHEST - 4]
    assert delta.values.view("float32").tolist() == [1, 0, 0, 0, 0, 1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("into", [torch.bfloat16, torch.float16, torch.float32])
def test_all_values_but_nan_are_copied(dtype, into):
    source = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(dtype).view(256, 256).t()
    old = torch.arange(1 << 16).view(256, 256).to(into)
    expected = torch.where(source.isnan(), old, source.to(into))
    weight_loaders.copy_sent(old, source)
    assert torch.equal(old, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("elements", [0, 1, 3, 4, 1001])
def test_changed_elements_are_those_with_other_bits(dtype, elements):
    generator = torch.Generator().manual_seed(elements)
    buffer = torch.randn(elements + 1, generator=generator).to(dtype)
    old = buffer[1:]  # not at a multiple of 8 bytes
    new = torch.where(torch.rand(elements, generator=generator) < 0.3, -old, old)
    places = torch.from_numpy(changed_elements("x", (elements,), old, new).gaps.astype("int64") + 1).cumsum(0) - 1
    assert places.tolist() == (old != new).nonzero().flatten().tolist()


def test_damaged_changes_are_refused_before_any_weight_changes():
    old, new = torch.zeros(8), torch.ones(8)
    parts = sent(changed_elements("part", (4, 2), old, new))
    parts["values"][0] += 1
    model = Model(torch.zeros(4, 4))
    with pytest.raises(ValueError, match="arrived with checksum"):
        weight_loaders.apply_changes(model, parts)
    assert model.weight.count_nonzero() == 0


def test_changes_for_a_group_that_the_server_is_not_in_are_refused_by_its_name():
    call = torch.tensor(list(json.dumps({"group": "weights 7", "parts": {}}).encode()), dtype=torch.uint8)
    with pytest.raises(ValueError, match="^this server is not in the group weights 7 of weight updates$"):
        weight_loaders.load_changes(Model(torch.zeros(4, 4)), [("call", call)])


def test_loader_that_copies_in_threads_leaves_elements_that_were_not_sent():
    class Threaded(Model):
        def load_weights(self, named_tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
            with ThreadPoolExecutor() as pool:
                loads = [pool.submit(super(Threaded, self).load_weights, iter([one])) for one in named_tensors]
            for load in loads:
                load.result()

    old = torch.randn(8, generator=torch.Generator().manual_seed(0))
    new = old.clone()
    new[3] += 1
    model = Threaded(torch.cat([torch.zeros(2, 4), old.view(4, 2).t()]))
    submit = ThreadPoolExecutor.submit
    weight_loaders.apply_changes(model, sent(changed_elements("part", (4, 2), old, new)))
    assert torch.equal(model.weight[2:], new.view(4, 2).t()) and ThreadPoolExecutor.submit is submit


def assign(model: Model, tensor: torch.Tensor) -> None:
    model.weight.data = tensor


def replace(model: Model, tensor: torch.Tensor) -> None:
    model.weight = torch.nn.Parameter(tensor)


def write_by_index(model: Model, tensor: torch.Tensor) -> None:
    model.weight.data[torch.arange(len(tensor))] = tensor


def write_rows(model: Model, tensor: torch.Tensor) -> None:
    torch._foreach_copy_([*model.weight.data], [*tensor])


@pytest.mark.parametrize("write", [assign, replace, write_by_index, write_rows])
def test_model_whose_loader_does_not_copy_is_named(write):
    class Assigns(Model):
        def load_weights(self, named_tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
            write(self, next(iter(named_tensors))[1])

    with pytest.raises(ValueError, match="weight has NaN after the changes were loaded"):
        old = torch.zeros(8)
        weight_loaders.apply_changes(
            Assigns(old), sent(changed_elements("part", (8,), old, old + old.new_tensor([1, *[0] * 7])))
        )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_qwen3(tmp_path_factory.mktemp("model") / "base", seed=0)


@pytest.fixture(scope="module")
def servers(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """One of one rank, and one of two, in bf16."""
    options = {"skip_tokenizer_init": True, "max_total_tokens": 2048, "max_running_requests": 4, "dtype": "bfloat16"}
    logs = tmp_path_factory.mktemp("logs")
    started = [
        ServerProcess(
            folder, log_path=logs / f"{size}.log", tensor_parallel_size=size, options=options | delta_options({})
        )
        for size in (1, 2)
    ]
    with running(started) as urls:
        yield urls


PLACES = {
    "split": ([[2], [3, 4]], [None, None]),
    "divided": ([[2], [3, 4]], [None, None]),  # the changes of the second are announced by rank 1
    "colocated": ([[0], [0, 1]], [["a"], ["a", "b"]]),  # the ranks of the second read the memory of one trainer each
}


@pytest.mark.slow
@pytest.mark.parametrize("way", PLACES)
def test_servers_have_the_trainers_bits_after_full_updates_and_changes(way, servers, folder):
    """Each update compares every tensor of every server with the trainer's, by checksums."""
    engines = [EngineEndpoint(url, gpus, nodes) for url, gpus, nodes in zip(servers, *PLACES[way], strict=True)]
    args = tiny_args(tensor_model_parallel_size=2, bf16=True)
    parts = [Step(), Step(0.01), Step(), Step(0.9), Step(0.01), Step(forget=True), Step(0.02), Step(0.02, damage=True)]
    with RankPool(2) as pool:
        reports, _ = pool.run(
            ranks.delta_updates, args, folder, engines, [*parts, Step(0.01)], None, None, 0.2, way, timeout_s=180
        )
    whole = reports[0].bytes
    sent = [report.bytes / whole for report in reports]
    assert sent[0] == sent[3] == sent[5] == sent[7] == 1  # the first, most elements, after a failure
    # names and shapes of the few elements of a bucket are most of it
    assert all(0.03 < part < 0.5 for part in (sent[1], sent[4], sent[6], sent[8])) and sent[2] == 0
    assert [report.attempts for report in reports] == [1] * 7 + [2, 1]
    assert [ServerControl(url).weight_version() for url in servers] == ["9", "9"]


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
def test_servers_have_the_trainers_bits_after_changes_in_files(servers, folder, tmp_path, encoding):
    """Two servers on a host with one checkpoint, which is lost once; once the files are damaged."""
    engines = [EngineEndpoint(url, gpus) for url, gpus in zip(servers, ([2], [3, 4]), strict=True)]
    args = tiny_args(tensor_model_parallel_size=2, bf16=True)
    local, shared = tmp_path / "local", tmp_path / "shared"
    steps = [Step(), Step(0.01), Step(), Step(0.9), Step(0.01), Step(0.01, lose=local), Step(0.01)]
    steps += [Step(0.3, damage=True), Step(0.01)]
    changes = ChangedFiles(local, folder, encoding)
    with RankPool(2) as pool:
        reports, _ = pool.run(ranks.delta_updates, args, folder, engines, steps, changes, shared, timeout_s=180)
    whole = reports[0].bytes
    sent = [report.bytes / whole for report in reports]
    assert [round(part, 1) for part in sent] == [1, 0, 0, 1, 0, 1, 0, 1, 0] and sent[2] == 0
    assert [report.attempts for report in reports] == [1, 1, 1, 1, 1, 2, 1, 2, 1]
    assert [ServerControl(url).weight_version() for url in servers] == ["9", "9"]
    assert list(shared.iterdir()) == []
    (checkpoint,) = (path for path in local.iterdir() if path.is_dir())
    assert checkpoint.name.startswith("weight_v000009-")


@pytest.mark.slow
def test_every_rank_answers_for_the_files_of_a_full_update(servers, folder, tmp_path):
    """The second rank of a server cannot open another file for a while."""
    of_two_ranks = ServerControl(servers[1])
    load = EveryRankLoads.of([of_two_ranks], [2])
    published = tmp_path / "published"
    shutil.copytree(folder, published)
    load([of_two_ranks], str(published))  # from then on a load opens no other files than the weights
    (second,) = (one for one in psutil.Process().children(recursive=True) if "scheduler_TP1" in "".join(one.cmdline()))
    limits = second.rlimit(psutil.RLIMIT_NOFILE)
    second.rlimit(psutil.RLIMIT_NOFILE, (3, limits[1]))
    with pytest.raises(WeightSyncError, match=rf"failed on {servers[1]}: no answer of rank 1 within 1 s in "):
        dataclasses.replace(load, timeout_s=1)([of_two_ranks], str(published))
    second.rlimit(psutil.RLIMIT_NOFILE, limits)
    load([of_two_ranks], str(published))
    engines = [EngineEndpoint(url, gpus) for url, gpus in zip(servers, ([2], [3, 4]), strict=True)]
    args = tiny_args(tensor_model_parallel_size=2, bf16=True)
    with RankPool(2) as pool:
        (results, _) = pool.run(ranks.weight_updates, args, folder, engines, "files", ["1"], tmp_path / "shared")
    assert not isinstance(results[0], str), results
    assert [ServerControl(url).weight_version() for url in servers] == ["1", "1"]
    assert list((tmp_path / "shared").iterdir()) == []
