"""Ranks compare what they are about to do: a difference raises an error on every rank instead of hanging.

Everything here costs the same on 2 ranks and on 2,000: digests are numbers, and one all-reduce tells whether all ranks
hold the same ones. All ranks of the default process group take part.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.distributed as dist

from autopar import errors
from autopar.errors import AutoparError, PlanMismatchError
from autopar.runtime.ranks.failures import collective_error
from autopar.runtime.ranks.standing import is_fake
from autopar.user_warnings import users_line

WARNING_SECONDS = 20.0  # after so long, a rank that waits for others warns
_ITEMS = 16  # digests that one call can compare, as the vector has a fixed length
_MESSAGE_BYTES = 2048  # to which the text of an error is cut
BATCH = 'the batch (with inputs="global" every rank passes the same one)'
_MENDED_BY = {
    "the shapes and dtypes of the examples": "; those of the whole batch, also where each rank passes a part of it",
    # tracing fixes the order of sets made in forward, but not of those made in a constructor
    "graph": "; a model whose constructor goes over a set needs one PYTHONHASHSEED in the environment of all ranks",
    "the plan": "; where each rank makes one, let autoparallelize plan, or make it once and load its file on all ranks",
    BATCH: "; shuffle by a seed of the data's own (DataLoader(generator=...)), which other draws of a rank do not move",
}


def agree(device: torch.device, digests: Mapping[str, str], error: BaseException | None = None) -> None:
    """Raise PlanMismatchError on every rank unless all of them hold the same `digests`.

    `digests` maps what is compared, in words, to a text that must be equal on all ranks; its order is the same
    everywhere. A rank that has failed before passes its `error` and raises it again here; every other rank raises
    PlanMismatchError with the error's text, so that no rank waits for one that has left. `device`: one that the process
    group's backend supports.
    """
    assert len(digests) <= _ITEMS
    failed = dist.get_rank() + 1 if error is not None else 0
    numbers = [] if error is not None else [_number(f"{name}={text}") for name, text in digests.items()]
    numbers += [0] * (_ITEMS - len(numbers))
    largest = _largest(device, [failed, *numbers, *(-n for n in numbers)])
    if largest[0]:
        text = _text_of(device, largest[0] - 1, str(error) if error is not None else "")
        if error is not None:
            raise error
        raise PlanMismatchError(f"rank {largest[0] - 1} failed, so this rank stops too: {text}")
    differ = [name for i, name in enumerate(digests) if largest[1 + i] != -largest[1 + _ITEMS + i]]
    if differ:
        raise PlanMismatchError(
            f"the ranks disagree about {' and '.join(differ)} (seen on rank {dist.get_rank()}): all need the same"
            + next((_MENDED_BY[name] for name in differ if name in _MENDED_BY), "")
        )


@contextmanager
def waiting_told(call: str) -> Iterator[None]:
    """Warn if the block takes longer than `WARNING_SECONDS`: it never ends if a rank does not make `call`."""
    text = (
        f"rank {dist.get_rank()} has waited {WARNING_SECONDS:g} s in {call} for other ranks: every rank must call it "
        "alike, so take it out of `if rank == 0:` and the like; a rank that is only slow is waited for"
    )
    timer = threading.Timer(WARNING_SECONDS, users_line().warn, [text])  # the timer's thread has no user frame
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def from_rank_zero(make: Callable[[], str], device: torch.device) -> str:
    """Return on every rank the text that `make()` returns on rank 0; an error on rank 0 is raised on every rank.

    An AutoparError keeps its class and fields on the other ranks; any other error reaches them as text.
    """
    text, failure = "", None
    if dist.get_rank() == 0 or is_fake():
        try:
            text = json.dumps({"text": make()})
        except Exception as error:  # raised below, once every rank knows
            failure = error
            text = json.dumps({"error": type(error).__name__, "fields": _fields(error)})
    answer = json.loads(_broadcast(text, device))
    if failure is not None:
        raise failure
    if "error" in answer:
        raise _revived(answer["error"], answer["fields"])
    return str(answer["text"])


def content_digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """A digest of names, shapes, dtypes and values.

    >>> a, b = torch.zeros(2), torch.zeros(2)
    >>> content_digest({"x": a}) == content_digest({"x": b}), content_digest({"x": a}) == content_digest({"x": b + 1})
    (True, False)
    """
    digest = hashlib.sha256()
    for name, tensor in tensors.items():
        digest.update(f"{name}:{tuple(tensor.shape)}:{tensor.dtype};".encode())
        tensor = tensor if tensor.layout == torch.strided else tensor.to_dense()
        if tensor.numel():
            plain = tensor.detach().cpu().resolve_conj().resolve_neg()  # the bytes must be those of the values
            digest.update(plain.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _number(text: str) -> int:
    """61 bits of a hash, so that the number and its negative both fit into int64."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 3


def _largest(device: torch.device, values: list[int]) -> list[int]:
    """The elementwise maximum over all ranks."""
    vector = torch.tensor(values, dtype=torch.int64, device=device)
    try:
        dist.all_reduce(vector, op=dist.ReduceOp.MAX)
    except RuntimeError as error:
        raise collective_error("the ranks' agreement on model, plan and inputs", error) from error
    return [int(v) for v in vector.tolist()]


def _text_of(device: torch.device, rank: int, text: str) -> str:
    """The text of one rank, cut to `_MESSAGE_BYTES`, on every rank."""
    mine = text.encode()[:_MESSAGE_BYTES] if dist.get_rank() == rank else b""
    letters = _largest(device, list(mine.ljust(_MESSAGE_BYTES, b"\0")))
    return bytes(letters).rstrip(b"\0").decode(errors="replace")


def _broadcast(text: str, device: torch.device) -> str:
    if is_fake():
        return text
    content = text.encode()
    length = torch.tensor([len(content)], dtype=torch.int64, device=device)
    dist.broadcast(length, src=0)
    letters = torch.zeros(int(length.item()), dtype=torch.uint8, device=device)
    if dist.get_rank() == 0:
        letters.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
    dist.broadcast(letters, src=0)
    return letters.cpu().numpy().tobytes().decode()


def _fields(error: Exception) -> dict[str, object]:
    if not isinstance(error, AutoparError):
        return {"message": f"rank 0 failed: {type(error).__name__}: {error}"}
    return {name: value for name, value in vars(error).items() if isinstance(value, (str, int, float, type(None)))}


def _revived(kind: str, fields: dict[str, object]) -> AutoparError:
    error = getattr(errors, kind, PlanMismatchError)(str(fields["message"]))
    assert isinstance(error, AutoparError)
    vars(error).update(fields)
    return error
