"""Several processes that train one model: a decoder with the same parameters on each, and rows that are divided.

Each rank takes its share of every batch. The gradients of what all have are made means by `DistributedDataParallel`,
those of divided rows by `ShardedTable`; a rank's mean loss is weighed by its share of the batch, so that the step is
that of one process, also where the shares differ.
"""

import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from embedlayer.data.windows import derive_seed
from embedlayer.distributed.agreement import require_agreement
from embedlayer.distributed.copies import ROWS, mean_over_copies, mesh_of_copies
from embedlayer.distributed.gathered import Rows, load_parts, save_gathered
from embedlayer.distributed.ranks import Loss, Ranks, Whole
from embedlayer.distributed.sharded import ROW_TENSORS, ShardedTable, keep_rows_apart, shard_table
from embedlayer.distributed.state import MOMENTS, parameters_of, sharded_tables
from embedlayer.errors import PeerError, SizeError
from embedlayer.io.files import JsonObject
from embedlayer.layers.output import OutputHead
from embedlayer.pretrained import build, describe
from embedlayer.tables.dense import TokenEmbedding
from embedlayer.tables.table import TokenTable

if TYPE_CHECKING:
    from embedlayer.models.decoder import DecoderLM

HEARTBEAT = "embedlayer/heartbeat"
STEPS_OF_ROWS = ("value_steps", "moment_steps")
HEAD_OPTIONS = ("softcap", "logit_scale", "mask_padding")


@contextmanager
def started_together(device: str, timeout_seconds: float, table_ranks: int | None = None) -> Iterator["Together"]:
    """Meet the processes that `torchrun`'s environment names, for as long as the block lasts."""
    place, timeout = place_of(torch.device(device).type), timedelta(seconds=timeout_seconds)
    on_gpu = place.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(place)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    try:
        with peers_named(rank, size, timeout_seconds):
            store, rank, size = next(iter(rendezvous("env://", timeout=timeout)))
            store.set_timeout(timeout)
            store = room_of_this_attempt(store, rank, size, timeout)
            backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"  # notes and files go by the CPU
            dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
            with heartbeat(store) if rank == 0 else nullcontext():
                yield Together(store, place, table_ranks=table_ranks, launch=launched_by(store, rank, size))
    except BaseException:
        if not on_gpu and dist.is_initialized():  # gloo's threads must not outlive it; NCCL would wait for the others
            dist.destroy_process_group()
        raise
    dist.destroy_process_group()


def place_of(kind: str) -> torch.device:
    """The device of this process: of several GPUs the one of its number on its machine.

    Raises:
        SizeError: There are fewer GPUs than processes.
    """
    if kind != "cuda":
        return torch.device(kind)
    number, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if number >= count:
        raise SizeError(
            f"Process {number} of this machine, counted from 0, has no GPU of its own: there are {count}. "
            f"Start at most {count} (torchrun --nproc-per-node {count}), or use --device cpu."
        )
    return torch.device(kind, number)


def room_of_this_attempt(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """The part of a store that only the processes of one attempt know, whatever earlier ones left in it.

    torchrun lends restarted processes the store of the dead, and counts the attempts on each machine for itself. So
    rank 0 opens a room with a new name, and another enters when a note of its own is answered there: in the room of
    one that is dead nobody answers.

    Raises:
        PeerError: Nobody answers in time.
    """
    me, until = uuid4().hex, time.monotonic() + timeout.total_seconds()
    if rank == 0:
        store.set("embedlayer/room", me)
        for other in range(1, size):
            guest = store.get(f"{me}/knocks/{other}").decode()
            store.set(f"{me}/enters/{guest}", "")
        return PrefixStore(me, store)
    while time.monotonic() < until:
        room = store.get("embedlayer/room").decode()
        store.set(f"{room}/knocks/{rank}", me)
        if store.check([f"{room}/enters/{me}"]):
            return PrefixStore(room, store)
        time.sleep(0.05)
    raise PeerError(
        f"Rank {rank} of {size} gave up: rank 0 did not come within {timeout.total_seconds():g} seconds. It has ended, "
        f"is slow (--timeout-seconds), or, where a machine joins those that have begun, meets elsewhere: set "
        f"TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun on all machines."
    )


@contextmanager
def heartbeat(store: Any) -> Iterator[None]:
    """Give signs of life in a store, several within its time-out, by a thread of its own, while the block lasts."""
    ended, every = threading.Event(), min(1.0, store.timeout.total_seconds() / 4)

    def beat() -> None:
        with suppress(RuntimeError):  # the store is gone, and with it who would hear
            while not ended.wait(every):
                store.add(HEARTBEAT, 1)

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@contextmanager
def peers_named(rank: int, size: int, timeout_seconds: float) -> Iterator[None]:
    """What goes wrong between processes inside, as one error of ours."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, PeerError) or not _is_of_network(error):
            raise
        raise PeerError(
            f"Rank {rank} of {size} gave up: another process has ended, or hangs for more than {timeout_seconds:g} "
            f"seconds. The first error of another rank says why. A run goes on from its last checkpoint with --resume, "
            f"or by itself where torchrun has --max-restarts left. (torch.distributed: {error})"
        ) from error


class Together(Ranks):
    """The ranks of torch's default process group, which must take CPU tensors: gloo, or `"cpu:gloo,cuda:nccl"`.

    Args:
        store: Where they see that rank 0 lives, and how far it is.
        device: Where this one computes.
        table_ranks: Among how many of them a table is divided; there are as many copies as that goes into all.
        launch: What started them, as `launched_by` says.

    Raises:
        SizeError: It does not go into all.
    """

    def __init__(
        self, store: Any, device: torch.device | str = "cpu", *, table_ranks: int | None = None, launch: str = ""
    ) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.device = torch.device(device)
        self._store = store
        self._waits = 0
        self._description: JsonObject = {}
        self._divided: dict[str, Rows] = {}
        self._parallel: DistributedDataParallel | None = None
        self._mesh = mesh_of_copies(self.device.type, self.size, table_ranks)
        self.launch = launch

    def any(self, flag: bool) -> bool:
        """Whether it is so on any rank."""
        return bool(self.sum(torch.tensor(int(flag))))

    def sum(self, numbers: Tensor) -> Tensor:
        """The sum over the ranks."""
        total = numbers.clone()
        dist.all_reduce(total)
        return total

    def first_says(self, number: int) -> int:
        """The number of rank 0."""
        return int(self.sum(torch.tensor(number if self.first else 0)))

    def agree(self, facts: Mapping[str, Any]) -> None:
        """Refuse to go on unless all ranks come with the same facts."""
        require_agreement(facts, None, "cpu")

    def after_first(self) -> None:
        """Wait until rank 0 comes here, however long it takes."""
        self._waits += 1
        key = f"embedlayer/{self._waits}/first"
        if self.first:
            self._store.set(key, "here")
        beat, heard, patience = -1, time.monotonic(), self._store.timeout.total_seconds()
        while not self._store.check([key]):
            last, beat = beat, self._store.add(HEARTBEAT, 0)
            if beat != last:
                heard = time.monotonic()
            elif time.monotonic() - heard > patience:
                raise PeerError(
                    f"Rank {self.rank} of {self.size} gave up: rank 0, which prepares the run, has given no sign of "
                    f"life for {patience:g} seconds. It was stopped, or its machine hangs."
                )
            time.sleep(0.2)

    def seed(self, seed: int, step: int) -> None:
        """Let what is drawn in this step be this rank's own, and follow from the step."""
        torch.manual_seed(derive_seed(seed, step, self.rank))

    def build(self, description: JsonObject, device: torch.device | str) -> "DecoderLM":
        """Of the table, and of an untied head, each rank draws its own rows: no process has them all."""
        from embedlayer.models.decoder import DecoderLM

        config = {name: value for name, value in description.items() if name != "kind"}
        model = DecoderLM.from_config(config, make_table=self._drawn_table, make_head=self._drawn_head)
        self._description = description
        return model.to(self.device)

    def divide(self, model: "DecoderLM") -> None:
        """Divide the rows of the model's table, and of an untied head, among the ranks; move the model to the device."""
        if not isinstance(model.table, ShardedTable):
            self._description = describe(model)
            head, options = model.head, _options_of(model.head)
            model.table = table = self._divided_table(model.table)
            if head.tied:
                model.head = OutputHead(table, **options)
            else:
                model.head = self._divided_head(head, head.weight.detach(), options)
            model.head.bias = head.bias
        stored = self._description["table"].get("pad_to_multiple_of") or 1
        for prefix, divided in sharded_tables(model):
            spare = -divided.vocab_size % stored if divided is model.table else 0
            for name in ROW_TENSORS[type(divided.local)]:
                self._divided[f"{prefix}.{name}"] = Rows(divided, divided.vocab_size + spare)
        model.to(self.device)

    def _drawn_table(self, description: JsonObject) -> ShardedTable:
        with torch.device("meta"):
            table = build(description)
        return self._divided_table(table)

    def _drawn_head(self, table: TokenTable | None, **config: Any) -> OutputHead:
        if table is not None:
            return OutputHead(table, **config)
        with torch.device("meta"):
            head = OutputHead(**config)
        return self._divided_head(head, head.weight, _options_of(head))

    def _divided_table(self, table: TokenTable) -> ShardedTable:
        return shard_table(table, self._mesh[ROWS])

    def _divided_head(self, head: OutputHead, weight: Tensor, options: JsonObject) -> OutputHead:
        """An untied head whose rows are divided, and its own."""
        rows = TokenEmbedding(head.out_features, head.in_features, init_std=head.init_std, device="meta")
        rows.weight = nn.Parameter(weight, requires_grad=head.weight.requires_grad)
        table = self._divided_table(rows)
        table.padding_idx = head.padding_idx  # a token without a logit, whose row is like any other
        divided = OutputHead(table, **options)
        divided.add_module("rows", table)  # a head that is not tied owns its rows
        divided.register_state_dict_post_hook(_without_rows)  # type: ignore[no-untyped-call]
        divided.register_load_state_dict_pre_hook(_with_rows)  # type: ignore[no-untyped-call]
        return divided

    def describe(self, model: "DecoderLM") -> JsonObject:
        """`describe(model)`, of the model before it was divided."""
        return self._description

    def loss_of(self, model: "DecoderLM") -> Loss:
        """The model's loss, whose gradients are means over the ranks after `backward()`."""
        module = keep_rows_apart(_Loss(model))
        self._parallel = DistributedDataParallel(module, broadcast_buffers=False)  # they follow from arguments
        return self._parallel

    def local_gradients(self) -> AbstractContextManager[Any]:
        """Gradients that arrive meanwhile are summed on each rank, and become means with the next that arrive."""
        assert self._parallel is not None
        return self._parallel.no_sync()

    def join_gradients(self, model: nn.Module) -> None:
        """`DistributedDataParallel` has joined those of what all have; left are the copies of divided rows."""
        for _, parameter, table in parameters_of(model):
            if table is not None:
                mean_over_copies(parameter, self._mesh)

    def parameters(self, model: nn.Module) -> Iterator[tuple[str, nn.Parameter, Whole]]:
        """Each parameter, its name in an undivided model, and what makes its rows' numbers a part of all rows'."""
        for name, parameter, table in parameters_of(model):
            yield name, parameter, (lambda tensor: tensor) if table is None else table.whole

    def local(self, tensor: Tensor) -> Tensor:
        """What this rank has of it."""
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor

    def save(self, path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
        """`save_tensors`, by rank 0, of whole tensors; what is divided arrives a piece at a time."""
        save_gathered(path, tensors, self._rows_of(tensors), metadata)

    def load(self, path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
        """`load_tensors`, of divided tensors this rank's rows alone."""
        return load_parts(path, self._rows_of)

    def _rows_of(self, names: Any) -> dict[str, Rows]:
        """Those of the names that are divided: rows, their moments, and what their ledger says of each."""
        places: dict[str, Rows] = {}
        for name, rows in self._divided.items():
            places |= {name: rows, f"model.{name}": rows}
            places |= {f"optimizer.{name}.{key}": rows for key in MOMENTS}
            places |= {f"pending_updates.{name}.{key}": rows for key in STEPS_OF_ROWS}
        return {name: places[name] for name in names if name in places}


class _Loss(nn.Module):
    """A model whose `forward` is its loss: what `DistributedDataParallel` can hold."""

    def __init__(self, model: "DecoderLM") -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        """The mean over the tokens."""
        return self.model.loss(ids, targets)


def _options_of(head: OutputHead) -> JsonObject:
    return {"bias": head.bias is not None, **{name: head.config[name] for name in HEAD_OPTIONS}}


def launcher() -> str:
    """Which process started this one and starts it again: host, number and time of torchrun's, where there is one."""
    host = socket.gethostname()
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return f"{host}:{uuid4().hex}"  # nobody does
    parent = os.getppid()
    try:
        started = Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:  # not Linux
        started = ""
    return f"{host}:{parent}:{os.environ['TORCHELASTIC_RUN_ID']}:{started}"


def launched_by(store: Any, rank: int, size: int) -> str:
    """The launchers of all ranks, on rank 0; on another its own."""
    store.set(f"embedlayer/launcher/{rank}", launcher())
    ranks = range(size) if rank == 0 else [rank]
    return " ".join(sorted({store.get(f"embedlayer/launcher/{each}").decode() for each in ranks}))


def _is_of_network(error: RuntimeError) -> bool:
    words = ("gloo", "nccl", "connection", "timed out", "timeout", "tcpstore")
    return isinstance(error, dist.DistError) or any(word in str(error).lower() for word in words)


def _without_rows(head: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    for key in [key for key in state if key.startswith(f"{prefix}rows.")]:
        state[prefix + key.removeprefix(f"{prefix}rows.")] = state.pop(key)


def _with_rows(head: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    if f"{prefix}weight" in state:
        state[f"{prefix}rows.weight"] = state.pop(f"{prefix}weight")
