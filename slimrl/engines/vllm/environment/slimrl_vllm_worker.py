"""vLLM's worker extension (`--worker-extension-cls`): loads weight updates; one instance per rank of every replica.

Runs in vLLM's environment, so it imports only torch and vllm. An update is `slimrl_begin`, any number of loads, and
`slimrl_end`. vLLM's layerwise reload keeps the tensors of a layer until it is complete: tensors in memory that the
trainer reuses are copied first.
"""

from __future__ import annotations

import base64
import datetime
import io
import os
import pickle
import select
import signal
import threading
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

GROUP_TIMEOUT_S = 300
# what a reference to shared memory consists of; a pickle may name nothing else
_ALLOWED = {
    ("torch.multiprocessing.reductions", "rebuild_cuda_tensor"),
    ("torch", "Tensor"),
    ("torch", "Size"),
    ("torch._utils", "_rebuild_tensor_v2"),
    ("torch.storage", "TypedStorage"),  # of a tensor on a GPU
    ("torch.storage", "UntypedStorage"),
    ("torch", "float32"),
    ("torch", "float16"),
    ("torch", "bfloat16"),
    ("torch", "float64"),
    ("torch", "uint8"),
    ("torch", "as_strided"),
    ("torch", "from_file"),
    ("torch._C", "_VariableFunctionsClass"),
    ("functools", "partial"),
    ("types", "SimpleNamespace"),
}
_DEVICE_ARGUMENT = 6  # of rebuild_cuda_tensor: the GPU, which the sender names by its UUID


class WorkerExtension:
    """Methods for `collective_rpc`; mixed into vLLM's worker, whose `model_runner` and `rank` it uses."""

    model_runner: Any
    vllm_config: Any
    rank: int
    device: torch.device

    def slimrl_end_with(self, server: int) -> None:
        """Ends this process, and that of vLLM's engine, with the process `server`; vLLM's engine would outlive it."""
        threading.Thread(target=_end_with, args=(server, os.getppid()), daemon=True).start()

    def slimrl_begin(self) -> None:
        """Starts an update: every layer waits for all of its tensors."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import layerwise

        with set_current_vllm_config(self.vllm_config):
            layerwise.initialize_layerwise_reload(self.model_runner.get_model())

    def slimrl_end(self) -> None:
        """Ends an update, also a failed one: the next update then starts from complete layers."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import layerwise

        model = self.model_runner.get_model()
        with set_current_vllm_config(self.vllm_config), torch.no_grad():
            layerwise.finalize_layerwise_reload(model, self.vllm_config.model_config)
            _repack_tied_head(model)

    def slimrl_load_shared(self, payloads: list[str], load_format: str | None) -> None:
        """Loads tensors from memory shared with the trainer; `payloads` has one entry per rank of the server."""
        payload = payloads[_rank_in_server(self)] if len(payloads) > 1 else payloads[0]
        opened = _Unpickler(io.BytesIO(base64.b64decode(payload))).load()
        named = opened if load_format is None else _unflattened(opened["flattened_tensor"], opened["metadata"])
        self._slimrl_load((name, tensor.clone()) for name, tensor in named)
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # the trainer reuses the memory once this returns
            torch.cuda.ipc_collect()

    def slimrl_load_broadcast(self, names: list[str], dtypes: list[str], shapes: list[list[int]], group: str) -> None:
        """Receives one bucket, broadcast as bytes by rank 0 of the group, and loads it."""
        kinds = [getattr(torch, dtype) for dtype in dtypes]
        sizes = [torch.Size(shape).numel() * kind.itemsize for shape, kind in zip(shapes, kinds, strict=True)]
        flat = torch.empty(sum(sizes), dtype=torch.uint8, device=self.device)
        options = dist.BroadcastOptions()
        options.rootRank = 0
        _groups(self)[group].broadcast([flat], options).wait()
        parts = zip(names, kinds, shapes, flat.split(sizes), strict=True)
        self._slimrl_load((name, part.view(kind).view(shape)) for name, kind, shape, part in parts)

    def slimrl_load_folder(self, folder: str) -> None:
        """Loads the safetensors files of a Hugging Face folder."""
        from pathlib import Path

        from safetensors import safe_open

        files = sorted(Path(folder).glob("*.safetensors"))
        if not files:
            raise FileNotFoundError(f"{folder} has no safetensors files")
        for path in files:
            with safe_open(path, framework="pt", device="cpu") as opened:
                self._slimrl_load((name, opened.get_tensor(name)) for name in opened.keys())  # noqa: SIM118

    def slimrl_join(self, address: str, port: int, first_rank: int, world_size: int, name: str, backend: str) -> None:
        """Joins the process group `name` as `first_rank` + own rank, with the trainer's store keys."""
        from torch.distributed import distributed_c10d as c10d

        timeout = datetime.timedelta(seconds=GROUP_TIMEOUT_S)
        store = dist.TCPStore(address, port, world_size, is_master=False, timeout=timeout, wait_for_workers=False)
        rank = first_rank + _rank_in_server(self)
        group, _ = c10d._new_process_group_helper(
            world_size,
            rank,
            [],
            dist.Backend(backend),
            dist.PrefixStore(name, store),
            group_name=c10d.GroupName(name),
            timeout=timeout,
        )
        c10d._world.pg_group_ranks[group] = {member: member for member in range(world_size)}
        _groups(self)[name] = group

    def slimrl_leave(self, name: str) -> None:
        """Leaves the group `name`, if this rank has joined it."""
        group = _groups(self).pop(name, None)
        if group is not None:
            dist.destroy_process_group(group)

    def _slimrl_load(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        from vllm.config import set_current_vllm_config

        with set_current_vllm_config(self.vllm_config), torch.no_grad():
            self.model_runner.get_model().load_weights(named)


def _rank_in_server(worker: Any) -> int:
    """Counted through the replicas (`--data-parallel-size`), of which each counts its ranks from 0."""
    parallel = worker.vllm_config.parallel_config
    return int(parallel.data_parallel_index * parallel.world_size + worker.rank)


def _end_with(server: int, parent: int) -> None:
    """`parent` is the engine's process of a worker that has a process of its own, else the server."""
    poller = select.poll()
    try:
        poller.register(os.pidfd_open(server), select.POLLIN)
        poller.poll()
    except ProcessLookupError:
        pass
    if parent not in (server, 1):
        os.kill(parent, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


class _Unpickler(pickle.Unpickler):
    """Opens references to shared memory, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch.multiprocessing.reductions", "rebuild_cuda_tensor"):
            return _opened_on_gpu
        if (module, name) == ("builtins", "getattr"):
            return _attribute
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"a weight update may not name {module}.{name}")
        return super().find_class(module, name)


def _attribute(owner: Any, name: str) -> Any:
    """The two functions of torch that references name; the builtin would let a pickle access anything."""
    known = {"from_file": torch.from_file, "as_strided": torch.as_strided}
    extension: Any = torch._C
    functions = extension._VariableFunctionsClass
    if owner is not functions or name not in known:
        raise pickle.UnpicklingError(f"a weight update may not access {name} of {owner!r}")
    return known[name]


def _opened_on_gpu(*arguments: Any) -> torch.Tensor:
    """The tensor of another process on the GPU with the sender's UUID, whatever its number is here."""
    from torch.multiprocessing import reductions

    rebuild: Any = reductions.rebuild_cuda_tensor
    uuid = arguments[_DEVICE_ARGUMENT]
    uuids = [str(torch.cuda.get_device_properties(index).uuid) for index in range(torch.cuda.device_count())]
    return rebuild(*arguments[:_DEVICE_ARGUMENT], uuids.index(uuid), *arguments[_DEVICE_ARGUMENT + 1 :])


def _unflattened(flat: torch.Tensor, metadata: list[Any]) -> Iterable[tuple[str, torch.Tensor]]:
    for entry in metadata:
        yield entry.name, flat[entry.start_idx : entry.end_idx].view(entry.dtype).view(entry.shape)


def _repack_tied_head(model: Any) -> None:
    """Packs an output layer with tied embeddings again: on the CPU it has a packed copy, which no reload replaces."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for layer in model.modules():
        if isinstance(layer, ParallelLMHead) and layer.quant_method is not None:
            layer.quant_method.process_weights_after_loading(layer)


def _groups(worker: Any) -> dict[str, dist.ProcessGroup]:
    return worker.__dict__.setdefault("slimrl_groups", {})
