"""Watch both ends of a model in training: rows of the input table by token frequency, and the logits of the head.

`EmbeddingMonitor` reads what a step computes anyway: the rows that the batch looked up, their gradients before the
optimizer's step and their values after it, and what the cross entropy computed of each token. Only every `every`-th
step is read, and only there the host waits for the device; in the others token IDs are counted on the device.

Deciles are those of the counts so far: of the tokens that occurred in inputs, token v is in the decile

    1 + floor(10 * #{u : 0 < count[u] < count[v]} / #{u : count[u] > 0}),

so that tokens of one count have one decile, and decile 10 has the most frequent ones.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Int
from torch import Tensor, nn

from embedlayer.core.collectives import SINGLE_PROCESS, Collectives, RowPartition
from embedlayer.core.errors import CheckpointError, ShapeError, SizeError, TokenIdError
from embedlayer.core.formatting import a_or_an
from embedlayer.core.held_parameters import parameters_of
from embedlayer.core.partitioned import is_sharded, local_shard, refuse_partitioned
from embedlayer.core.shapes import Ids
from embedlayer.distributed.sharded import ROW_TENSORS, ShardedTable
from embedlayer.integrations.deepspeed import refuse_engine
from embedlayer.integrations.dtensor import shard_of_rows
from embedlayer.io.files import JsonObject
from embedlayer.losses.recording import TokenRecord, record_losses
from embedlayer.row_sparse.gradient import rows_and_values
from embedlayer.row_sparse.hooks import without_applying_updates
from embedlayer.tables.conversions import as_lookup_table
from embedlayer.tables.delta import DeltaEmbedding
from embedlayer.tables.dense_table import DenseTable
from embedlayer.tables.lookup import LookupTable
from embedlayer.tokenization.bytes import token_text
from embedlayer.tokenization.tokenizer_calls import as_tokenizer

DECILES = 10
LISTED = 8
"""Most tokens that a report lists by ID."""

ROWS_AT_ONCE = 8192
"""Rows that are read at once where all rows of a table are searched for numbers that are not finite."""


@dataclass(frozen=True)
class MonitorReport:
    """Hold what `EmbeddingMonitor` read at one step.

    Lists by decile have ten entries, the least frequent tokens first; one without tokens in the batch is `None`. A
    number of rows is the mean over the distinct rows that the batch looked up, without the padding row; one of targets
    is the mean over all targets that count.

    Attributes:
        step: Number of the step, from 1.
        never_seen: Fraction of the V tokens that no input had so far.
        norms: Mean of `‖w‖` by decile, before the update.
        update_ratios: Mean of `‖w' - w‖ / ‖w‖` by decile, of the rows w before and w' after the update; rows of norm 0
            are left out.
        losses: Mean of the cross entropy in nats by decile of the target.
        loss_never_seen: That of targets that no input had so far.
        new_norm: Mean of `‖w‖` over new tokens in the batch; so are the next two of their rows and targets.
        new_update_ratio: See `update_ratios`.
        new_loss: See `losses`.
        rows_not_finite: Number of rows with a NaN or infinite number before the update: of the rows of the batch, or,
            if one of these or a logit is not finite, of all rows.
        tokens_not_finite: The first `LISTED` of their tokens.
        gradients_not_finite: Number of rows of the batch whose gradient has a NaN or infinite number, as the optimizer
            sees it. `None` for a table without gradients, or with none that have a row for each token: so it is in a
            step that the optimizer did not take, if `zero_grad` is called inside the block.
        tokens_of_gradients: The first `LISTED` of their tokens.
        logit_std: Root mean square over up to 16 tokens of the standard deviation of the logits over the vocabulary.
        log_z: Mean of `log Z = log sum of exp(z)`.
        largest_logit: Largest logit of all targets' positions.
    """

    step: int
    never_seen: float
    norms: list[float | None]
    update_ratios: list[float | None]
    losses: list[float | None]
    loss_never_seen: float | None
    new_norm: float | None
    new_update_ratio: float | None
    new_loss: float | None
    rows_not_finite: int
    tokens_not_finite: list[int]
    gradients_not_finite: int | None
    tokens_of_gradients: list[int]
    logit_std: float | None
    log_z: float | None
    largest_logit: float | None

    def fields(self, text: Callable[[int], str] = str) -> JsonObject:
        """Return the entries that are not `None`, except `step`, as a run's `metrics.jsonl` has them.

        Args:
            text: Function from a token ID to its name, which stands for the ID.
        """
        present = {name: value for name, value in vars(self).items() if value is not None and name != "step"}
        tokens = {name: list(map(text, present[name])) for name in ("tokens_not_finite", "tokens_of_gradients")}
        return present | tokens

    def scalars(self, text: Callable[[int], str] = str) -> dict[str, float | str]:
        """Return the numbers by name, such as `embedding/loss/decile_1`, for the `log` of a trainer.

        The tokens of rows that are not finite are one text each, if there are any.

        Args:
            text: Function from a token ID to its name.

        Example:
            >>> table = TokenEmbedding(100, 8)
            >>> monitor = EmbeddingMonitor(table, torch.optim.SGD(table.parameters(), lr=0.1), every=1)
            >>> with monitor.step(torch.tensor([1, 2, 2])):
            ...     table.loss(torch.randn(3, 8), torch.tensor([2, 2, 7])).backward()
            >>> sorted(monitor.report.scalars())[:3]
            ['embedding/gradients_not_finite', 'embedding/largest_logit', 'embedding/log_z']
        """
        by_decile = {"norm": self.norms, "update_ratio": self.update_ratios, "loss": self.losses}
        numbers: dict[str, float | None] = {
            "never_seen": self.never_seen,
            **{
                f"{name}/decile_{place}": value
                for name, values in by_decile.items()
                for place, value in enumerate(values, 1)
            },
            "loss/never_seen": self.loss_never_seen,
            "norm/new": self.new_norm,
            "update_ratio/new": self.new_update_ratio,
            "loss/new": self.new_loss,
            "rows_not_finite": self.rows_not_finite,
            "gradients_not_finite": self.gradients_not_finite,
            "logit_std": self.logit_std,
            "log_z": self.log_z,
            "largest_logit": self.largest_logit,
        }
        tokens = {
            "rows_not_finite/tokens": self.tokens_not_finite,
            "gradients_not_finite/tokens": self.tokens_of_gradients,
        }
        texts = {name: ", ".join(map(text, ids)) for name, ids in tokens.items() if ids}
        return {f"embedding/{name}": x for name, x in {**numbers, **texts}.items() if x is not None}


class EmbeddingMonitor:
    """Report every `every` steps what a training step did to the input table, and what the head computed.

    Each step runs in the block of `step`. Inputs are counted in all steps; the other numbers are read in every
    `every`-th, between the backward pass and the optimizer's step, and after it. Parameters, gradients and optimizer
    state are the same bits as without the monitor.

    Losses are those that this package computes, of a `DecoderLM`, a head, a table or a patched model of transformers.
    With several processes that torch.distributed joins, the numbers are those of the batches of all ranks, which all
    must run the same steps; each has the whole table, or some rows of a `ShardedTable` or of a weight that
    `fully_shard` sharded by rows.

    Args:
        model: A model with `get_input_embeddings`, or with a table as its attribute `table`; or a table.
        optimizer: The optimizer of the table.
        every: Steps from one report to the next.
        new_tokens: IDs of the tokens that an edit added, which are reported as a group too.
        tokenizer: A tokenizer, by which `text` names tokens; `None` for their IDs.

    Attributes:
        report: The `MonitorReport` of the last step; `None` if it was not read.
        steps: Steps so far.
        records: In the block of a step that is read, what its losses recorded so far; otherwise `None`.

    Raises:
        SizeError: The optimizer is DeepSpeed's, ZeRO-3 has partitioned a parameter, or the table is not sharded by
            rows.
        TokenIdError: A new token is outside the table.

    Example:
        >>> model = DecoderLM(TokenEmbedding(100, 32), "rotary", num_layers=1, num_heads=2)
        >>> optimizer = RowAdamW(model.parameters(), lr=1e-3)
        >>> monitor = EmbeddingMonitor(model, optimizer, every=2)
        >>> for _ in range(2):
        ...     ids = torch.randint(0, 100, (4, 9))
        ...     with monitor.step(ids[:, :-1]):
        ...         model.loss(ids[:, :-1], ids[:, 1:]).backward()
        ...         optimizer.step()
        ...     optimizer.zero_grad()
        >>> monitor.report.step, monitor.report.never_seen < 1
        (2, True)
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        every: int = 10,
        new_tokens: Iterable[int] = (),
        tokenizer: Any = None,
    ) -> None:
        if every < 1:
            raise SizeError(f"every must be at least 1, not {every}.")
        refuse_partitioned(model.named_parameters(), "is monitored", gathered=False)
        self.model, self.every, self.steps = model, every, 0
        refuse_engine(optimizer)
        has_hooks = hasattr(optimizer, "_optimizer_step_pre_hooks")  # else it is the wrapper of accelerate
        self.optimizer: torch.optim.Optimizer = optimizer if has_hooks else getattr(optimizer, "optimizer", optimizer)
        self.tokenizer = None if tokenizer is None else as_tokenizer(tokenizer)
        self.collectives = SINGLE_PROCESS
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            on_cpu = "gloo" in dist.get_backend()
            self.collectives = Collectives(
                device="cpu" if on_cpu else torch.device("cuda", torch.cuda.current_device())
            )
        table = input_table(model)
        device = table.device
        trained = {id(parameter) for parameter in table.parameters() if parameter.requires_grad}
        held = {id(parameter) for parameter in parameters_of(self.optimizer)}
        if trained and not trained & held:
            raise SizeError("The optimizer has no parameter of the input table: pass the optimizer that steps it.")
        _RowsOfRank(table, torch.empty(0, dtype=torch.int64, device=device), self.collectives)  # refuses other shards
        self.new_tokens = torch.tensor(sorted(set(new_tokens)), dtype=torch.int64, device=device)
        outside = [int(token) for token in self.new_tokens if not 0 <= token < table.vocab_size]
        if outside:
            raise TokenIdError(f"The new token {outside[0]} is outside this table of {table.vocab_size} rows.")
        self.report: MonitorReport | None = None
        self._counts = torch.zeros(table.vocab_size, dtype=torch.int64, device=device)
        self._since = torch.zeros_like(self._counts)  # of this rank, since the counts of all were summed
        self._batches: list[Tensor] | None = None
        self.records: list[TokenRecord] | None = None

    def counts(self) -> Int[Tensor, " V"]:
        """Return how often each token occurred in the inputs of all ranks so far, `(V,)`. All ranks must call it."""
        self._counts += self.collectives.all_reduce(self._since)
        self._since = torch.zeros_like(self._counts)
        return self._counts

    def load_counts(self, counts: Int[Tensor, " V"], steps: int) -> None:
        """Continue with the counts and the number of steps of an earlier monitor of the same table, on all ranks.

        Raises:
            CheckpointError: The counts are those of another number of tokens.
        """
        if counts.shape != self._counts.shape or counts.dtype != torch.int64:
            raise CheckpointError(
                f"The checkpoint counts {tuple(counts.shape)} {counts.dtype}, the table has {len(self._counts)} rows."
            )
        self._counts.copy_(counts)
        self._since.zero_()
        self.steps = steps

    def count(self, ids: Ids) -> None:
        """Count the token IDs of a batch, in the block of `step`. The host does not wait for the device.

        Args:
            ids: Token IDs that the table looks up in this step, of any shape. Those outside the table do not count.
        """
        if ids.is_floating_point():
            raise ShapeError(f"The monitor counts token IDs, a tensor of integers; found {ids.dtype}.")
        ids = ids.detach().to(self._since.device).flatten().long()
        inside = (ids >= 0) & (ids < len(self._since))
        self._since.index_add_(0, ids.where(inside, 0), inside.long())
        if self._batches is not None:
            self._batches.append(ids.clamp(0, len(self._since) - 1))

    def discard_losses(self) -> None:
        """Leave the losses of this step so far out of its report, on this rank."""
        if self.records is not None:
            self.records.clear()

    def text(self, token: int) -> str:
        """Return the text of a token, or its ID without a tokenizer or where this one has no such token."""
        if self.tokenizer is None or self.tokenizer.id_to_token(token) is None:
            return str(token)
        return repr(token_text(self.tokenizer, token))

    def move_counts(self, new_ids: Int[Tensor, " V"]) -> None:
        """Count on after an edit of the vocabulary: token v is token `new_ids[v]` now, or removed if that is negative.

        The model has the edited table already; `new_ids` is that of the edit's `Receipt`. Tokens that the edit added
        have the count 0. The tokens that were passed as `new_tokens` are reported by their new IDs.
        """
        counts, table = self.counts(), input_table(self.model)
        new_ids = new_ids.to(counts.device)
        is_kept = new_ids >= 0
        self._counts = counts.new_zeros(table.vocab_size).index_add_(0, new_ids[is_kept], counts[is_kept])
        self._since = torch.zeros_like(self._counts)
        moved = new_ids[self.new_tokens]
        self.new_tokens = moved[moved >= 0]

    def fields(self) -> JsonObject | None:
        """Return `MonitorReport.fields` of the last step, with the texts of tokens; `None` if it was not read."""
        return None if self.report is None else self.report.fields(self.text)

    def scalars(self) -> dict[str, float | str]:
        """Return `MonitorReport.scalars` of the last step, with the texts of tokens; empty if it was not read."""
        return {} if self.report is None else self.report.scalars(self.text)

    @contextmanager
    def step(self, ids: Ids | None = None) -> Iterator[None]:
        """Context manager: a training step, from its first forward pass to the optimizer's step.

        Args:
            ids: Token IDs of its batch; `None` if `count` is called in the block, as with accumulated batches.
        """
        self.report = self.records = None
        self.steps += 1
        is_read = self.steps % self.every == 0
        self._batches = [] if is_read else None
        if ids is not None:
            self.count(ids)
        if not is_read:
            yield
            return
        reading: list[_RowsOfRank] = []

        def before(*_: Any) -> None:
            if not reading:
                reading.append(self._read_rows())

        with ExitStack() as stack:
            stack.callback(self.optimizer.register_step_pre_hook(before).remove)
            stack.callback(self.optimizer.register_step_post_hook(lambda *_: reading[0].read_again()).remove)
            self.records = stack.enter_context(record_losses())
            yield
        before()  # of a step that the optimizer did not take, such as one that a GradScaler skipped
        self.report = self._reported(reading[0])
        self.records = self._batches = None

    @torch.no_grad()
    def _read_rows(self) -> "_RowsOfRank":
        """Read the rows of the batch and their gradients, before the optimizer's step."""
        table, ranks = input_table(self.model), self.collectives
        if table.vocab_size != len(self._counts):
            raise SizeError(
                f"The table has {table.vocab_size} rows, not {len(self._counts)}: call move_counts(receipt.new_ids)."
            )
        looked_up = torch.zeros_like(self._counts, dtype=torch.int32)
        for ids in self._batches or ():
            looked_up[ids] = 1
        looked_up = ranks.all_reduce(looked_up, "max")
        if table.padding_idx is not None:
            looked_up[table.padding_idx] = 0
        read = _RowsOfRank(table, looked_up.nonzero()[:, 0], ranks)
        read.read()
        is_finite = all(bool(record.logsumexp.isfinite().all()) for record in self.records or ())
        if ranks.any(not is_finite or bool(read.not_finite.numel())):
            read.not_finite = read.all_not_finite()
        return read

    @torch.no_grad()
    def _reported(self, read: "_RowsOfRank") -> MonitorReport:
        """Return the report of the step from its rows and losses. All ranks must call it."""
        ranks, counts, ids, records = self.collectives, self.counts(), read.ids, self.records or []
        has_norm = read.norms > 0
        norms = self._means(ids, read.norms)
        ratios = self._means(ids[has_norm], read.changes[has_norm] / read.norms[has_norm])
        losses = self._means(_counted(records, "targets").long(), -_counted(records, "log_probs"))
        log_z, largest = _counted(records, "logsumexp"), _counted(records, "largest")
        variances = _joined([record.variances for record in records])
        sums = [log_z.sum(), log_z.new_tensor(log_z.numel()), variances.sum(), variances.new_tensor(variances.numel())]
        total_z, tokens, variance, samples = ranks.all_reduce(torch.stack(sums).to(counts.device)).tolist()
        top = ranks.all_reduce(_joined([largest, largest.new_full((1,), -torch.inf)]).amax().to(counts.device), "max")
        found = ranks.all_gather_object([read.not_finite.tolist(), read.gradients_not_finite])
        rows = sorted({token for each, _ in found for token in each})
        lists = [each for _, each in found if each is not None]
        gradients = sorted({token for each in lists for token in each}) if lists else None
        return MonitorReport(
            step=self.steps,
            never_seen=float((counts == 0).double().mean()),
            norms=norms[1:-1],
            update_ratios=ratios[1:-1],
            losses=losses[1:-1],
            loss_never_seen=losses[0],
            new_norm=norms[-1],
            new_update_ratio=ratios[-1],
            new_loss=losses[-1],
            rows_not_finite=len(rows),
            tokens_not_finite=rows[:LISTED],
            gradients_not_finite=None if gradients is None else len(gradients),
            tokens_of_gradients=(gradients or [])[:LISTED],
            logit_std=(variance / samples) ** 0.5 if samples else None,
            log_z=total_z / tokens if tokens else None,
            largest_logit=float(top) if tokens else None,
        )

    def _means(self, ids: Tensor, values: Tensor) -> list[float | None]:
        """Return the means over all ranks of the values of tokens `(N,)`, by group; `None` for an empty one.

        The groups are the tokens that never occurred, the deciles, and the new tokens, which are in a decile too.
        """
        device = self._counts.device
        ids, values = ids.to(device), values.double().to(device)
        both = torch.stack([values, torch.ones_like(values)])
        sums = both.new_zeros(2, DECILES + 2).index_add_(1, _deciles(self._counts, ids), both)
        sums[:, -1] = both[:, torch.isin(ids, self.new_tokens)].sum(1)
        totals, numbers = self.collectives.all_reduce(sums).tolist()
        return [total / number if number else None for total, number in zip(totals, numbers, strict=True)]


def _deciles(counts: Int[Tensor, " V"], ids: Int[Tensor, " N"]) -> Int[Tensor, " N"]:
    """Return the decile of the count of each token, from 1 to 10, or 0 for a count of 0.

    The decile of v is `1 + floor(10 * #{u : 0 < counts[u] < counts[v]} / #{u : counts[u] > 0})`.
    """
    seen, of_ids = counts[counts > 0].sort().values, counts[ids]
    smaller = torch.searchsorted(seen, of_ids)
    return torch.where(of_ids > 0, smaller * DECILES // max(len(seen), 1) + 1, 0)


def input_table(model: nn.Module) -> LookupTable:
    """Return the input table of a model: `get_input_embeddings()`, `model.table`, or the model if it is a table."""
    for candidate in (model, getattr(model, "table", None)):
        if isinstance(candidate, LookupTable):
            return candidate
    getter = getattr(model, "get_input_embeddings", None)
    embedding: Any = model if getter is None else getter()
    return as_lookup_table(embedding)


class _RowsOfRank:
    """The rows of some tokens that this rank reads: its shard of them, or every N-th of them if it has all rows."""

    def __init__(self, table: LookupTable, ids: Tensor, ranks: Collectives) -> None:
        # the table with the rows of this rank, the first token of which is `first`; or a shard of a DTensor
        self.first, self.stored = 0, table
        self._shard: Tensor | None = None
        if isinstance(table, ShardedTable):
            self.first, self.stored, stop = table.partition.start, table.local, table.partition.stop
        elif any(is_sharded(parameter) for parameter in table.parameters()):
            if not isinstance(table, DenseTable):
                raise SizeError(f"The rows of {a_or_an(table)} on several ranks cannot be monitored.")
            self.first, self._shard = shard_of_rows(table.weight)
            stop = self.first + len(self._shard)
        if self.stored is table and self._shard is None:
            partition = RowPartition(table.vocab_size, ranks.rank, ranks.size)  # each rank searches a part of all rows
            self.ids, self.searched = ids[ranks.rank :: ranks.size], (partition.start, partition.stop)
        else:
            self.ids = ids[(ids >= self.first) & (ids < stop)]
            self.searched = 0, min(stop, table.vocab_size) - self.first

    def read(self) -> None:
        """Read the rows and their gradients before the update."""
        self._before = self._vectors()
        self.norms = self._before.norm(dim=-1)
        self.changes = torch.zeros_like(self.norms)
        self.not_finite = self.ids[~self._before.isfinite().all(-1)]
        self.gradients_not_finite = self._gradients_not_finite()

    @torch.no_grad()
    def read_again(self) -> None:
        """Read the rows after the update."""
        self.changes = (self._vectors() - self._before).norm(dim=-1)

    def _vectors(self) -> Tensor:
        """Return the rows `(N, D)` without scale, in float64."""
        places = self.ids - self.first
        rows = self.stored.look_up(places) if self._shard is None else self._shard[places]
        return rows.double()

    def _gradients_not_finite(self) -> list[int] | None:
        """Return the tokens whose gradient is not finite; `None` if none with a row for each token has a gradient."""
        table, parameters, rows = self.stored, dict(self.stored.named_parameters()), self.ids - self.first
        names = ["delta"] if isinstance(table, DeltaEmbedding) else ROW_TENSORS.get(type(table), ())
        grads = [parameters[name].grad for name in names if name in parameters]
        tokens: set[int] = set()
        for grad in (local_shard(grad) for grad in grads if grad is not None):
            if grad.layout is torch.sparse_coo:
                of_rows, values = rows_and_values(grad)
            elif isinstance(table, DeltaEmbedding):
                of_rows, values = table.token_tensor, grad
            else:
                of_rows, values = rows, grad[rows]
            bad = of_rows[~values.isfinite().flatten(1).all(-1)]
            tokens.update((self.first + bad[torch.isin(bad, rows)]).tolist())
        return None if all(grad is None for grad in grads) else sorted(tokens)

    def all_not_finite(self) -> Tensor:
        """Return the tokens of all rows of this rank that have a number that is not finite, `(M,)`."""
        found, (start, stop) = [self.ids[:0]], self.searched
        with without_applying_updates(self.stored):
            for block in range(start, stop, ROWS_AT_ONCE):
                last = min(block + ROWS_AT_ONCE, stop)
                rows = self.stored.rows(block, last) if self._shard is None else self._shard[block:last]
                found.append((~rows.isfinite().all(-1)).nonzero()[:, 0] + (block + self.first))
        return torch.cat(found)


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    """Return tensors `(N,)` as one in float64, which is empty if there are none."""
    return torch.cat([x.double() for x in tensors]) if tensors else torch.empty(0, dtype=torch.float64)


def _counted(records: Sequence[TokenRecord], name: str) -> Tensor:
    """Return one field of the tokens that count, of all records, `(N,)`, in float64."""
    fields = [(getattr(record, name), record.counted) for record in records]
    return _joined([x if counted is None else x[counted] for x, counted in fields])
