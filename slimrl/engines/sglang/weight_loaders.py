"""SGLang's custom weight loaders: the server calls them by their path with the tensors that it got (`server_args`).

`load_changes` applies changed elements of weights (`weights.update.transport_delta`), out of memory shared with the
trainer or of a broadcast in the group of weight updates, in which it takes part. A tensor in Hugging Face's layout is
rebuilt with NaN in place of elements that were not sent, and goes through the model's own loader, which shards, fuses
and pads it. Every copy into a parameter then leaves the elements in which the source is NaN. So every family that
SGLang loads is updated, without knowledge of its layout. Loaders that copy in threads (DeepSeek's) copy in the calling
one meanwhile, because torch intercepts the operations of one thread. The answer is a byte in the shared memory, or an
error in the store of the group.

`pull_weights` loads a published folder, or brings the checkpoint of this rank's host to its version
(`weights.local_checkpoint`) and loads that. It answers in the published folder. SGLang's own call for files answers for
its first rank alone, and loads them into a draft model, too.

`receive_pieces` is for point-to-point weight updates (`weights.point_to_point`). The trainer calls it through the
server, once for each step: it describes the rank's parameters, joins the trainer's link, and then receives updates,
whose pieces it copies into the parameters. A link stays until the next `describe`. The copies convert the trainer's
dtype to the parameter's, as the model's loader does.

A failure is an answer, not an exception, which would end the server.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import logging
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor, nn
from torch.distributed import PrefixStore, TCPStore
from torch.distributed.distributed_c10d import ProcessGroup, Store, _world
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from slimrl.weights.delta_files import ANSWERS, APPLIED, REFUSED
from slimrl.weights.local_checkpoint import LocalCheckpoint, tensors_in, write_answer
from slimrl.weights.point_to_point.engine_side import Call, Piece, Pieces, deserialize_call, message_bytes
from slimrl.weights.point_to_point.links import (
    Buffers,
    Link,
    LinkError,
    MooncakeLink,
    ProcessGroupLink,
    failure_key,
    ready_key,
)

logger = logging.getLogger(__name__)

ATTRIBUTE = "slimrl_weight_receivers"  # of the model: its receivers by the name of their link
PACKED = "use_intel_amx_backend"  # of a layer whose weights SGLang has packed for the CPU's matrix unit
# of the method of a layer whose weights SGLang has permuted or exchanged for a kernel
PERMUTED = ("w13_swiglu_interleaved", "use_flashinfer_trtllm_moe", "use_flashinfer_cutlass", "use_triton_kernels")


class _CopySent(TorchDispatchMode):
    """Within it, `copy_` leaves the elements in which its source is NaN.

    `written` are the addresses of storages that other operations have written to.
    """

    def __init__(self) -> None:
        super().__init__()
        self.written: set[int] = set()

    def __torch_dispatch__(
        self, function: Any, types: Any, inputs: Sequence[Any] = (), options: Mapping[str, Any] | None = None
    ) -> Any:
        if function is torch.ops.aten.copy_.default and inputs[1].is_floating_point():
            into, source = inputs[0], inputs[1].to(inputs[0].device)
            for part, own in _in_parts(into, source.expand_as(into)):
                copy_sent(part, own)
            return into
        if function._schema.is_mutable:
            self.written.update(address(leaf) for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor))
        return function(*inputs, **(options or {}))


# the bits of infinity in these dtypes, above which are those of NaN
_INFINITY = {torch.bfloat16: 0x7F80, torch.float16: 0x7C00}


def copy_sent(into: Tensor, source: Tensor) -> None:
    """Copies the elements of `source` that are not NaN."""
    infinity = _INFINITY.get(source.dtype)
    if infinity is None or into.dtype != source.dtype:
        torch.where(source.isnan(), into, source.to(into.dtype), out=into)
        return
    # the same on the bits, without a boolean mask, which on a CPU takes three times as long
    old, new = into.view(torch.int16), source.view(torch.int16)
    sent = new.bitwise_and(0x7FFF).sub_(infinity + 1).bitwise_right_shift_(15)  # all bits, or none for NaN
    old.bitwise_xor_(old.bitwise_xor(new).bitwise_and_(sent))


_PART = 1 << 17  # elements of a part, which with its mask stays in a processor's cache


def _in_parts(into: Tensor, source: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """The rows of both tensors, on a CPU in runs: memory for the mask of a large tensor costs more than its use."""
    if into.dim() == 0 or into.device.type != "cpu" or into.numel() <= _PART:
        return iter([(into, source)])
    rows = max(1, _PART * len(into) // into.numel())
    return zip(into.split(rows), source.split(rows), strict=True)


def address(tensor: Tensor) -> int:
    """That of the tensor's storage."""
    return tensor.untyped_storage().data_ptr()


@contextlib.contextmanager
def _without_threads() -> Iterator[None]:
    """Within it, work that this thread gives to a pool is done at once, in this thread."""
    here, submit_to_pool = threading.get_ident(), ThreadPoolExecutor.submit

    def submit(pool: ThreadPoolExecutor, work: Callable[..., Any], /, *inputs: Any, **options: Any) -> Future[Any]:
        if threading.get_ident() != here:
            return submit_to_pool(pool, work, *inputs, **options)
        done: Future[Any] = Future()
        try:
            done.set_result(work(*inputs, **options))
        except Exception as error:
            done.set_exception(error)
        return done

    pools: Any = ThreadPoolExecutor
    pools.submit = submit
    try:
        yield
    finally:
        pools.submit = submit_to_pool


def load_changes(model: Any, named_tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Applies a bucket of changes to the parameters of `model`, and answers."""
    parts = dict(named_tensors)
    if "call" in parts:
        _receive_changes(model, json.loads(parts["call"].cpu().numpy().tobytes()))
        return
    try:
        apply_changes(model, parts)
        parts[ANSWERS].fill_(APPLIED)
        if parts[ANSWERS].is_cuda:
            torch.cuda.synchronize()
    except Exception:  # the trainer sees no answer
        logger.exception("applying changes of weights failed")


def _receive_changes(model: Any, call: Mapping[str, Any]) -> None:
    """Takes part in the broadcast of a bucket of changes in the group that `call` names.

    Raises ValueError, which the server answers, if it has no such group: another server's, or one that it has left.
    """
    group = next((one for one, name in _world.pg_names.items() if name == call["group"]), None)
    if group is None:
        raise ValueError(f"this server is not in the group {call['group']} of weight updates")
    try:
        sizes: dict[str, int] = call["parts"]
        flat = torch.empty(sum(sizes.values()), dtype=torch.uint8, device=next(model.parameters()).device)
        options = torch.distributed.BroadcastOptions()
        options.rootRank = 0
        group.broadcast([flat], options).wait()
        apply_changes(model, dict(zip(sizes, flat.split([*sizes.values()]), strict=True)))
    except Exception as error:
        logger.exception("applying changes of weights failed")
        _refuse_changes(group, f"{type(error).__name__}: {error}")


def _refuse_changes(group: ProcessGroup, error: str) -> None:
    try:
        _world.pg_map[group][1].set(REFUSED, json.dumps([group.rank(), error]))
    except RuntimeError:  # the trainer is gone, too
        logger.exception("the store of the weight update cannot be reached")


def apply_changes(model: Any, parts: Mapping[str, Tensor]) -> None:
    """Applies changes to the parameters of `model`; `parts` are those of `weights.update.transport_delta.described`.

    Raises ValueError if the bytes differ from those that were sent, or if the model's loader does not copy.
    """
    described = json.loads(parts["described"].cpu().numpy().tobytes())
    hashed = xxhash.xxh3_128()
    for name in ("gaps", "values"):
        hashed.update(parts[name].cpu().contiguous().numpy().data)
    if (checksum := hashed.hexdigest()) != described["checksum"]:
        raise ValueError(f"the changes of weights arrived with checksum {checksum} instead of {described['checksum']}")
    before = {address(parameter) for parameter in model.parameters()}
    with torch.no_grad(), _CopySent() as copying, _without_threads():
        model.load_weights(_rebuilt(described["tensors"], parts["gaps"], parts["values"]))
    untouched = before - copying.written
    for name, parameter in model.named_parameters():
        copied = address(parameter) in untouched
        if not copied and parameter.is_floating_point() and bool(parameter.isnan().any()):
            raise ValueError(f"{name} has NaN after the changes were loaded: the model does not support delta updates")


def _rebuilt(tensors: Sequence[Mapping[str, Any]], gaps: Tensor, values: Tensor) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor with NaN where nothing was sent) of each tensor."""
    for one in tensors:
        dtype, sent = getattr(torch, one["dtype"]), one["sent"]
        own_gaps, gaps = gaps[: 2 * sent], gaps[2 * sent :]
        own_values, values = values[: dtype.itemsize * sent], values[dtype.itemsize * sent :]
        tensor = torch.full(one["shape"], torch.nan, dtype=dtype, device=values.device)
        if sent:
            distances = (own_gaps.clone().view(torch.int16).to(torch.int64) & 0xFFFF) + 1
            tensor.view(-1)[distances.cumsum(0) - 1] = own_values.clone().view(dtype)
        yield one["name"], tensor


def pull_weights(model: Any, named_tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Loads the folder that the call names into `model`, with "local" through the checkpoint of this host there."""
    call = json.loads(named_tensors[0][1].cpu().numpy().tobytes())
    published, local, error = Path(call["published"]), call["local"], None
    try:
        with torch.no_grad():
            model.load_weights(tensors_in(published if local is None else LocalCheckpoint(Path(local)).pull(published)))
    except Exception as failure:
        logger.exception("loading the weights in %s%s failed", published, "" if local is None else f" through {local}")
        error = f"{socket.gethostname()}: {type(failure).__name__}: {failure}"
    try:
        write_answer(published, call["server"], torch.distributed.get_rank(), error)
    except OSError:  # the trainer misses the answer
        logger.exception("%s is not writable", published)


def receive_pieces(model: Any, named_tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Answers one call of the trainer; raises only if the trainer's store cannot be reached."""
    call, targets, pieces = deserialize_call(named_tensors)
    receivers: dict[str, Receiver] = model.__dict__.setdefault(ATTRIBUTE, {})
    if call.action == "leave":  # also after a failure, when the store may be gone
        if (receiver := receivers.pop(call.name, None)) is not None:
            receiver.close(failed=False)
        return
    if call.action == "describe":  # a trainer rank may have been lost without leaving
        for name in [name for name in receivers if name != call.name]:
            receivers.pop(name).close(failed=False)
    store = receivers[call.name].store if call.name in receivers else _store_of(call)
    answer: dict[str, Any] = {}
    try:
        if call.action == "describe":
            answer = describe(model)
        elif call.action == "join":
            receivers[call.name] = Receiver(model, call, targets, pieces, store)
        elif call.name not in receivers:
            raise LinkError("the server has restarted since it joined the update")
        else:
            receivers[call.name].receive(call.update)
    except Exception as error:
        logger.exception("point-to-point weight update: %s failed", call.action)
        if (failed := receivers.pop(call.name, None)) is not None:
            failed.close(failed=True)
        answer = {"error": f"{type(error).__name__}: {error}"}
    store.set(call.key, json.dumps(answer))
    if "error" in answer:
        store.set(failure_key(call.name), "")  # senders wait until this rank receives


def _store_of(call: Call) -> Store:
    host, port = call.store
    return TCPStore(host, port, is_master=False, timeout=datetime.timedelta(seconds=call.timeout_s))


def describe(model: nn.Module) -> dict[str, Any]:
    """The shape of each parameter, those that are not plain memory, and layers whose weights have another form."""
    tensors = dict(model.named_parameters())
    other = [
        name
        for name, module in model.named_modules()
        if getattr(module, PACKED, False) or not _is_plain(getattr(module, "quant_method", None))
    ]
    return {
        "shapes": {name: list(tensor.shape) for name, tensor in tensors.items()},
        "not_contiguous": [name for name, tensor in tensors.items() if not tensor.is_contiguous()],
        "other_form": other,
    }


def _is_plain(method: object) -> bool:
    """Whether a layer of this method has its weights as a checkpoint does."""
    permuted = any(getattr(method, name, False) for name in PERMUTED)
    return method is None or ("Unquantized" in type(method).__name__ and not permuted)


class Receiver:
    """A rank's end of a link, and where each piece of every message goes."""

    def __init__(self, model: Any, call: Call, targets: Sequence[str], pieces: Pieces, store: Store) -> None:
        """Joins the link; raises LinkError if it cannot."""
        self.store = store
        self._name, self._member = call.name, call.member
        self._model = model
        parameters: Mapping[str, Tensor] = dict(model.named_parameters())
        device = next(iter(parameters.values())).device
        self._messages = {sender: [_views(one, parameters) for one in own] for sender, own in pieces.items()}
        self._sizes = {sender: [message_bytes(one) for one in own] for sender, own in pieces.items()}
        self._rounds = max(map(len, pieces.values()), default=0)
        filled = dict.fromkeys(targets, 0)
        for own in pieces.values():
            for message in own:
                for piece in message:
                    filled[piece.target] += piece.rows * piece.columns
        self._padded = [parameters[name] for name, count in filled.items() if count < parameters[name].numel()]
        self._link = _link(call, {sender: max(sizes) for sender, sizes in self._sizes.items()}, store, device)

    def receive(self, update: int) -> None:
        """Receives all messages of update number `update` of this link into the parameters."""
        with torch.no_grad():
            for tensor in self._padded:
                tensor.zero_()
            self._start(0)
            self.store.set(ready_key(self._name, update, self._member), "")
            for number in range(self._rounds):
                self._start(number + 1)
                self._link.wait(number)
                for sender in self._in_round(number):
                    self._unpack(self._link.inbox(sender, number), self._messages[sender][number])
            if hasattr(self._model, "post_load_weights"):  # of latent attention: matrices made of its weights
                self._model.post_load_weights()

    def close(self, *, failed: bool) -> None:
        """Leaves the link."""
        self._link.close(failed=failed)

    def _in_round(self, number: int) -> list[int]:
        return [sender for sender, messages in self._messages.items() if number < len(messages)]

    def _start(self, number: int) -> None:
        receives = {sender: self._sizes[sender][number] for sender in self._in_round(number)}
        if receives:
            self._link.start(number, {}, receives)

    @staticmethod
    def _unpack(packed: Tensor, pieces: Sequence[tuple[Piece, Tensor]]) -> None:
        for piece, view in pieces:
            view.copy_(packed[piece.start : piece.start + piece.nbytes].view(piece.dtype).view(view.shape))


def _views(pieces: Sequence[Piece], parameters: Mapping[str, Tensor]) -> list[tuple[Piece, Tensor]]:
    """Each piece with the part of the parameter that it becomes."""
    return [
        (
            piece,
            parameters[piece.target]
            .data.view(-1, piece.width)
            .narrow(0, piece.row, piece.rows)
            .narrow(1, piece.column, piece.columns),
        )
        for piece in pieces
    ]


def _link(call: Call, receives: dict[int, int], store: Store, device: torch.device) -> Link:
    own = PrefixStore(call.name, store)
    if call.transport == "mooncake":
        buffers = Buffers({}, receives, torch.device("cpu"), pinned=device.type == "cuda")
        return MooncakeLink(own, call.member, call.host, buffers, call.timeout_s)
    buffers = Buffers({}, receives, device)
    return ProcessGroupLink(own, call.member, call.members, buffers, device, call.timeout_s)
