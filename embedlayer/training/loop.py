"""The training loop: every step is a function of its number where possible, so a resumed run is bit for bit the same.

The step number determines the windows of a step, its learning rate and whether it validates. `Trainer.state()` holds
all else: weights, moments, random generators, and the loss since the last line of metrics. This module prints nothing:
`Trainer.run()` yields one dictionary per logged step.

The speed of a machine changes, so a number of steps that is fixed at the start does not keep a time budget. The clock
is read at each line of metrics. Between two readings the schedule depends on the step number alone.
"""

import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from embedlayer.core.documents import IGNORED
from embedlayer.core.errors import CheckpointError, EmbedLayerWarning, SizeError
from embedlayer.core.partitioned import local_shard
from embedlayer.data.corpus import TokenCorpus
from embedlayer.data.mixture import MixedSampler, TokenMixture, corpora_of
from embedlayer.data.windows import Batch, TokenWindows, WindowSampler
from embedlayer.distributed.sharded import ShardedTable, trained_parameters
from embedlayer.io.files import JsonObject
from embedlayer.models.causal import PatchedDecoder
from embedlayer.models.decoder import DecoderLM
from embedlayer.optim.clip import clip_grad_norm_
from embedlayer.optim.groups import check_role_rates, param_groups
from embedlayer.optim.row_adamw import RowAdamW
from embedlayer.row_sparse.hooks import without_applying_updates
from embedlayer.tables.stored.mapped import MappedEmbedding
from embedlayer.training.monitor import EmbeddingMonitor
from embedlayer.training.parallel import ParallelContext, mean_loss

Precision = Literal["auto", "float32", "bfloat16"]

FAR_FROM_LN_V = 1.0  # nats; fresh rows of a sensible size start within 0.3
COST_OF_AN_UPDATE = 3.0  # forward passes: a first guess, replaced by a measurement at the first line


@dataclass(frozen=True)
class TrainingOptions:
    """Options of a training run.

    Attributes:
        steps: Number of updates; `None` to fill `minutes`.
        minutes: Wall-clock time to fill, in minutes, or `None`. The number of steps is estimated again at each line of
            metrics, and the schedule follows the fraction of the time that is used.
        min_steps: Smallest number of updates with `minutes`, also if they take longer.
        batch_size: Windows per forward pass.
        accumulate: Forward passes per update.
        max_length: Tokens per window, T.
        learning_rate: Peak learning rate, reached after `warmup_fraction` of the steps; a cosine decay follows.
        warmup_fraction: Fraction of the steps with linear warm-up.
        final_fraction: Learning rate of the last step as a fraction of the peak.
        rates: Peak learning rate of each role of parameters that has one of its own, such as `{"tables": 0.02}`; they
            follow the same schedule. `None` for none. See `param_groups`.
        weight_decay: Decoupled weight decay of matrices and untied heads; tables, positions and norms have none.
        beta1: AdamW's decay rate of the first moment.
        beta2: AdamW's decay rate of the second moment.
        max_grad_norm: Gradients are clipped to this norm.
        log_every: Steps between two lines of metrics.
        validate_every: Lines of metrics between two validations; the first and the last line always validate.
        validation_tokens: Maximum number of validation tokens per validation, in equal parts of each corpus, which has
            one window at least.
        documents: Whether each document is trained on by itself, also in validation: a token neither attends to another
            document nor is predicted from it, and positions count from the start of the document in its window.
        seed: Seed of the windows and, with several processes, of dropout. The command `train` also seeds torch's
            generator with it, which draws the weights and, in a single process, dropout.
        precision: `"float32"`, `"bfloat16"` (autocast), or `"auto"`: bfloat16 on a GPU that supports it.
        monitor_every: Steps between two lines of metrics with the numbers of an `EmbeddingMonitor`, a multiple of
            `log_every`; `None` for no monitor.
    """

    steps: int | None = None
    minutes: float | None = None
    min_steps: int = 1
    batch_size: int = 8
    accumulate: int = 1
    max_length: int = 128
    learning_rate: float = 3e-3
    warmup_fraction: float = 0.1
    final_fraction: float = 0.05
    rates: dict[str, float] | None = None
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    max_grad_norm: float = 1.0
    log_every: int = 10
    validate_every: int = 5
    validation_tokens: int = 32768
    documents: bool = False
    seed: int = 0
    precision: Precision = "auto"
    monitor_every: int | None = None

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.minutes is None):
            raise SizeError(f"Set either steps or minutes, not {self.steps} and {self.minutes}.")
        counts = ("min_steps", "batch_size", "accumulate", "max_length", "log_every", "validate_every")
        for name in (*counts, "validation_tokens"):
            if getattr(self, name) < 1:
                raise SizeError(f"{name} must be at least 1, not {getattr(self, name)}.")
        for name in ("steps", "minutes", "learning_rate", "max_grad_norm"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise SizeError(f"{name} must be positive, not {value}.")
        for name in ("warmup_fraction", "final_fraction", "beta1", "beta2"):
            if not 0 <= getattr(self, name) <= 1:
                raise SizeError(f"{name} must be from 0 to 1, not {getattr(self, name)}.")
        check_role_rates(self.rates or {})
        if self.monitor_every is not None and (self.monitor_every < 1 or self.monitor_every % self.log_every):
            raise SizeError(
                f"monitor_every must be a multiple of log_every {self.log_every}, not {self.monitor_every}."
            )
        if not 0 <= self.weight_decay < math.inf:
            raise SizeError(f"weight_decay must be 0 or positive, not {self.weight_decay}.")
        if self.precision not in get_args(Precision):
            raise SizeError(f"precision must be one of {', '.join(get_args(Precision))}, not {self.precision!r}.")

    def learning_rate_at(self, step: int | float, steps: int) -> float:
        """Return the learning rate of an update: linear warm-up, then cosine decay.

        Args:
            step: Number of the update, from 1 to `steps`; a fraction is interpolated.
            steps: Number of updates in the whole run.
        """
        warmup = max(1, round(self.warmup_fraction * steps))
        if step <= warmup:
            return self.learning_rate * step / warmup
        progress = (step - warmup) / max(1, steps - warmup)
        cosine = (1 + math.cos(math.pi * progress)) / 2
        return self.learning_rate * (self.final_fraction + (1 - self.final_fraction) * cosine)


class Trainer:
    """Train a `DecoderLM`, and with it its embedding layer, on a corpus of token IDs.

    With several processes, the model is sharded in place, and `run`, `validate`, `state` and `load_state` must be
    called on all ranks.

    Args:
        model: The model, on its device; a `PatchedDecoder` in one process only.
        training: Token IDs for training: a corpus, or a `TokenMixture` of several with a weight each.
        validation: Token IDs for validation; of a mixture, the corpora of the training part with the same weights.
        options: See `TrainingOptions`.
        parallel: The processes that train the model together, each with an equal `Trainer`; `None` for one process.
            Each process takes its share of every batch. The result equals that of one process, except for dropout.

    Raises:
        TextError: A corpus of `training` or `validation` is shorter than one window and its target.
        CheckpointError: With several processes: the model could not be loaded again.

    Example:
        >>> trainer = Trainer(model, *corpus.split(0.1), TrainingOptions(steps=2, max_length=8, batch_size=2))
        >>> [line["step"] for line in trainer.run()]
        [0, 2]
    """

    def __init__(
        self,
        model: DecoderLM | PatchedDecoder,
        training: TokenCorpus | TokenMixture,
        validation: TokenCorpus | TokenMixture,
        options: TrainingOptions,
        parallel: ParallelContext | None = None,
    ) -> None:
        self.model = model
        self.options = options
        self.parallel = ParallelContext() if parallel is None else parallel
        if options.documents and isinstance(model, PatchedDecoder):
            raise SizeError(
                "documents=True needs a DecoderLM; for transformers, use its Trainer with DataCollatorWithFlattening."
            )
        self.parallel.shard(model)
        self.device = next(model.parameters()).device
        self._loss = self.parallel.loss_function(model)
        parts = training, validation
        weights, others = ([*part.weights] if isinstance(part, TokenMixture) else [] for part in parts)
        if weights != others:
            raise SizeError(f"Training weights {weights}, validation weights {others}: split one mixture.")
        self.training, self.validation, self._weights = training, validation, weights
        self._has_windows = len(self.parallel.share(options.batch_size)) > 0  # of each batch, on this rank
        length, corpora = options.max_length, corpora_of(validation)
        sizes: Any = {"max_length": length, "batch_size": options.batch_size, "seed": options.seed}
        sizes["documents"] = options.documents
        self.sampler: WindowSampler | MixedSampler
        if isinstance(training, TokenMixture):
            self.sampler = MixedSampler(zip(training.corpora, training.weights, strict=True), **sizes)
        else:
            self.sampler = WindowSampler(training, **sizes)
        all_windows = [TokenWindows(corpus, length, length, documents=options.documents) for corpus in corpora]
        most = max(1, options.validation_tokens // length // len(corpora))
        # of each validation corpus all windows, and how many of them, from the first, one validation reads
        self._validation_windows = [(windows, min(len(windows), most)) for windows in all_windows]
        self.optimizer = RowAdamW(
            param_groups(model, weight_decay=options.weight_decay, rates=options.rates),
            lr=options.learning_rate,
            betas=(options.beta1, options.beta2),
        )
        every = options.monitor_every
        self.monitor = None if every is None else EmbeddingMonitor(model, self.optimizer, every=every)
        self.steps = options.steps
        self.step = 0
        self.budget = None if options.minutes is None else TimeBudget(60 * options.minutes, options.min_steps)
        self._running_since: float | None = None
        self._stopping = False
        # Sum and count since the last line; in float64, where a sum over ranks does not depend on their order.
        self._losses = torch.zeros(2, dtype=torch.float64, device=self.device)

    @property
    def decoder(self) -> DecoderLM:
        """Return the model of a run, which is a `DecoderLM`.

        Raises:
            CheckpointError: The model is one of transformers, which is trained and saved without a run.
        """
        if isinstance(self.model, DecoderLM):
            return self.model
        raise CheckpointError("A run stores a DecoderLM: save a model of transformers with its own save_pretrained.")

    def stop(self) -> None:
        """Make the running `run()` end after the current step, also on the other ranks. A later `run()` continues."""
        self._stopping = True

    def run(self, on_step: Callable[[int], None] | None = None) -> Iterator[dict[str, Any]]:
        """Train to the last step, and yield a line of metrics every `log_every` updates.

        A line is a dictionary with `step`, `loss` (nats per token, mean since the last line), `lr`,
        `tokens_per_second` and `rows_touched` (number of distinct rows that the update looked up; 0 on ranks other
        than 0). Some lines, the last included, also have `validation_loss` (nats per token) and
        `validation_bits_per_byte`; with a mixture also `validation_losses`. See `validate`. Those of every
        `monitor_every`-th step have `monitor`, the fields of a `MonitorReport`. The last line comes after the last
        update. A run from step 0 begins with a line before any update, which has the loss of the first batch,
        a validation, and 0 for the rest.

        Args:
            on_step: Function that is called with the number of each finished step, or `None`.

        Raises:
            TokenIdError: A text has an ID outside the table.
            PeerError: Another process hangs or has ended.

        Warns:
            EmbedLayerWarning: The first loss is far from `ln V`, that of a uniform distribution over the vocabulary.
        """
        self._stopping = False
        self._running_since = time.perf_counter()
        try:
            if self.step == 0:
                line = self._first_line()
                self._measure_speed()
                yield line
            assert self.steps is not None
            clock, tokens = time.perf_counter(), 0
            while self.step < self.steps and not self.parallel.collectives.any(self._stopping):
                progress: int | float = self.step + 1
                if self.budget is not None:  # the schedule follows the fraction of the time that is used
                    progress = self.steps * self.budget.progress(self.step + 1, last_step=self.steps)
                learning_rate = self.options.learning_rate_at(progress, self.steps)
                self._losses += self._update(self.optimizer, self.step, learning_rate)
                self.step += 1
                if on_step is not None:
                    on_step(self.step)
                tokens += self.options.accumulate * self.options.batch_size * self.options.max_length
                if self.step % self.options.log_every and self.step < self.steps:
                    continue
                self.model.check()
                total, count = self.parallel.sum(self._losses).tolist()
                self._losses.zero_()
                seconds = time.perf_counter() - clock
                self._measure_speed()
                line = {
                    "step": self.step,
                    "loss": total / count,
                    "lr": learning_rate,
                    "tokens_per_second": round(tokens / seconds),
                    "rows_touched": self._rows_touched() if self.parallel.is_first else 0,
                }
                if self.monitor is not None and (read := self.monitor.fields()) is not None:
                    line["monitor"] = read
                if self.step % (self.options.log_every * self.options.validate_every) == 0 or self.step == self.steps:
                    line |= self.validate()
                yield line
                clock, tokens = time.perf_counter(), 0
        finally:
            if self.budget is not None:
                self.budget.used = self._seconds_used()
            self._running_since = None

    def validate(self) -> dict[str, Any]:
        """Measure the loss on up to `validation_tokens` tokens of the validation part, without dropout.

        The model is in training mode afterwards.

        Returns:
            `validation_loss`, in nats per token, and `validation_bits_per_byte`, which is comparable between models
            with different tokenizers. Of a mixture there are also `validation_losses`, a list with the loss of each
            corpus. Their mean, weighted as the training is, is `validation_loss`; the bytes per token are averaged
            alike. Of a corpus with token weights, the loss is that of the tokens with the weight 1, and the bits per
            byte are those of all tokens. With `documents` the first token of each document is not among these, since
            nothing predicts it.
        """
        started = time.perf_counter()
        self.model.eval()
        with torch.no_grad(), self._autocast():
            totals = [self._validation_total(windows, count) for windows, count in self._validation_windows]
        self.model.train()
        sums = self.parallel.sum(torch.tensor(totals, dtype=torch.float64)).tolist()
        losses = [weighted / max(total_weight, 1) for weighted, total_weight, *_ in sums]
        weights, corpora = self._weights or [1.0], corpora_of(self.validation)
        nats = _weighted_mean(losses, weights)
        of_all = [all_targets / max(count, 1) for *_, all_targets, count in sums]
        bytes_per_token = _weighted_mean([corpus.num_bytes / len(corpus) for corpus in corpora], weights)
        if self.budget is not None:
            self.budget.reserve = time.perf_counter() - started
        line: dict[str, Any] = {
            "validation_loss": nats,
            "validation_bits_per_byte": _weighted_mean(of_all, weights) / math.log(2) / bytes_per_token,
        }
        return line | ({"validation_losses": losses} if isinstance(self.validation, TokenMixture) else {})

    def _validation_total(self, windows: TokenWindows, count: int) -> list[float]:
        """Return this rank's part of four sums over the targets of the first `count` windows.

        The sums are: losses times weights in nats, weights, losses, and the number of targets.
        """
        totals, batch_size = torch.zeros(4, dtype=torch.float64), self.options.batch_size
        for start in range(0, count, batch_size):
            share = self.parallel.share(min(batch_size, count - start))
            here = share or range(1)  # a rank without a window must take part in the look-ups too
            batch = self._named(windows.batch(range(start + here.start, start + here.stop)))
            weights, mask = batch.get("token_weights"), batch.get("documents")
            ids, targets = batch["ids"].to(self.device), batch["targets"].to(self.device)
            options: dict[str, Any] = {} if mask is None else {"attention_mask": mask.to(self.device)}
            options["reduction"] = "sum" if weights is None else "none"
            losses = self.model.loss(ids, targets, **options).double().cpu()
            if share:
                weighted = losses if weights is None else losses * weights
                sums = float(weighted.sum()), total_weight(batch), float(losses.sum()), num_targets(batch)
                totals += torch.tensor(sums, dtype=torch.float64)
        return [float(total) for total in totals]

    @contextmanager
    def checkpoint(self) -> Iterator[tuple[dict[str, Tensor], JsonObject]]:
        """Context manager: yield `state()`, to be saved in the block, and make a checkpoint of mapped tables with it.

        The numbers of these checkpoints are in the state. If the process is killed in the block, the mapped tables can
        be resumed at the checkpoint that was saved, whichever it is. See `MappedEmbedding.checkpoint`.

        Raises:
            FileError: A mapped table cannot be written, for example on a full disk.
        """
        with ExitStack() as stack:
            tables = trained_files(self.model).values()
            generations = [stack.enter_context(table.checkpoint()) for table in tables]
            tensors, rest = self.state()
            yield tensors, {**rest, "generations": generations}

    def state(self) -> tuple[dict[str, Tensor], JsonObject]:
        """Return everything that the rest of the run depends on, for `load_state`.

        Trained mapped tables are left out, with their moments and pending updates: these are in their files.

        Returns:
            Tensors by name (weights, moments, pending updates, random generators), and the other values as JSON.
            Tensors with sharded rows are DTensors. Weights and moments are not copied: further training changes them.
        """
        in_files = weights_in_files(self.model)
        with without_applying_updates(self.model):
            state = self.model.state_dict()
        tensors = {f"model.{name}": tensor for name, tensor in state.items() if name not in in_files}
        all_pending: JsonObject = {}
        for name, parameter, table in trained_parameters(self.model):
            if name in in_files:
                continue
            moments = self.optimizer.state.get(parameter, {})
            tensors |= {f"optimizer.{name}.{key}": value for key, value in _as_saved(moments, table).items()}
            if pending := getattr(parameter, "pending_updates", None):
                pending_rows, all_pending[name] = pending.state()
                tensors |= {
                    f"pending_updates.{name}.{key}": value for key, value in _as_saved(pending_rows, table).items()
                }
        tensors["losses"] = self.parallel.sum(self._losses)
        if self.monitor is not None:
            tensors["monitor.counts"] = self.monitor.counts()
        tensors["generator.cpu"] = torch.get_rng_state()
        if self.device.type == "cuda":
            tensors["generator.cuda"] = torch.cuda.get_rng_state(self.device)
        return tensors, {
            "step": self.step,
            "steps": self.steps,
            "options": asdict(self.options),
            "pending_updates": all_pending,
            **({"weights": self._weights} if self._weights else {}),
            **({} if self.budget is None else {"time": asdict(self.budget) | {"used": self._seconds_used()}}),
        }

    def load_state(self, tensors: dict[str, Tensor], rest: JsonObject) -> None:
        """Restore a result of `state()` into this trainer and its model, in place.

        Args:
            tensors: The tensors by name.
            rest: The other values.

        Raises:
            CheckpointError: A tensor or value is missing, or the state belongs to another model or mixture.
        """
        in_files = weights_in_files(self.model)
        try:
            if rest.get("weights", []) != self._weights:
                raise KeyError(f"it trained with the weights {rest.get('weights', [])} of corpora")
            missing, unexpected = self.model.load_state_dict(_select(tensors, "model."), strict=False)
            if unexpected or set(missing) - in_files:
                wrong = sorted([*unexpected, *(set(missing) - in_files)])
                raise KeyError(f"missing or unexpected: {', '.join(wrong[:8])}")
            local = {name: local_shard(tensor) for name, tensor in tensors.items()}
            for name, parameter, _ in trained_parameters(self.model):
                if moments := _select(local, f"optimizer.{name}."):
                    self.optimizer.load_moments(parameter, moments)
                if pending := rest.get("pending_updates", {}).get(name):
                    self.optimizer.load_pending_updates(parameter, _select(local, f"pending_updates.{name}."), pending)
            self.step, self.steps = rest["step"], rest["steps"]
            if self.budget is not None and "time" in rest:
                self.budget = TimeBudget(**rest["time"])
            elif self.budget is not None:  # a state with fixed steps: estimate the time that they took
                self.budget.used = self.budget.seconds * self.step / self.steps
            self._losses.copy_(tensors["losses"] if self.parallel.is_first else torch.zeros(2))
            if self.monitor is not None:
                self.monitor.load_counts(tensors["monitor.counts"], self.step)
            torch.set_rng_state(tensors["generator.cpu"].cpu())
            if self.device.type == "cuda" and "generator.cuda" in tensors:
                torch.cuda.set_rng_state(tensors["generator.cuda"].cpu(), self.device)
        except (KeyError, RuntimeError) as error:
            raise CheckpointError(f"The checkpoint does not fit this run: {error}") from error

    def _first_line(self) -> dict[str, Any]:
        """Measure the losses before any update, on the validation part and on the first batch."""
        measured = self.validate()
        batch, count = self._batch(0)
        self.model.eval()
        with torch.no_grad(), self._autocast():
            part = mean_loss(self.model, **batch) * (count / self._total_weight(range(1)))
            loss = float(self.parallel.sum(part))
        self.model.train()
        uniform = math.log(self.model.table.vocab_size)
        if self.parallel.is_first and not abs(loss - uniform) <= FAR_FROM_LN_V:
            warnings.warn(
                f"The first loss is {loss:.1f}, and a uniform distribution has ln V = {uniform:.2f} nats. The rows "
                f"start too large for the head (a tied table needs init_std=0.02 and scale='sqrt_dim', not N(0, 1)), "
                f"or belong to another tokenizer; training may not recover.",
                EmbedLayerWarning,
                stacklevel=3,
            )
        return {"step": 0, "loss": loss, "lr": 0.0, "tokens_per_second": 0, "rows_touched": 0, **measured}

    def _update(self, optimizer: torch.optim.Optimizer, step: int, learning_rate: float) -> Tensor:
        """Run `accumulate` forward and backward passes, on one batch each, and update the weights.

        All ranks must call it. Return `[loss, count]` on the device, without waiting for it: this rank's term of the
        mean loss, and 1 on rank 0 or 0 elsewhere. Summed over all ranks they are the mean loss and 1.
        """
        self.parallel.seed(self.options.seed, step)
        rates, peak = self.options.rates or {}, self.options.learning_rate
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * (rates.get(group.get("name", ""), peak) / peak)
        result = torch.tensor([0.0, float(self.parallel.is_first)], device=self.device)
        last = self.options.accumulate - 1
        parts = range(step * self.options.accumulate, (step + 1) * self.options.accumulate)
        total = self._total_weight(parts)
        with nullcontext() if self.monitor is None else self.monitor.step():
            for part, index in enumerate(parts):
                batch, count = self._batch(index)
                if self.monitor is not None and self._has_windows:
                    self.monitor.count(batch["ids"])
                sync = nullcontext() if part == last else self.parallel.no_sync()
                with self.parallel.collectives.peer_errors(), sync:
                    with self._autocast():
                        loss = self._loss(**batch) * (count / total)
                    (loss * self.parallel.size).backward()  # gradients are means over the ranks: those of all are sums
                result[0] += loss.detach()
            if self.monitor is not None and not self._has_windows:  # the windows of this rank belong to another one
                self.monitor.discard_losses()
            self.parallel.average_replicas(self.model)
            with self.parallel.collectives.peer_errors():
                clip_grad_norm_(self.model.parameters(), self.options.max_grad_norm)
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return result

    def _rows_touched(self) -> int:
        """Count the distinct token IDs in the inputs of the last update, on all ranks."""
        parts = range((self.step - 1) * self.options.accumulate, self.step * self.options.accumulate)
        return len(torch.cat([self.sampler.batch(part)[0].flatten() for part in parts]).unique())

    def _total_weight(self, parts: range) -> float:
        """Return the sum of the weights of all targets of some batches, on all ranks: their number without weights."""
        has_weights = any(corpus.token_weights is not None for corpus in corpora_of(self.training))
        if not self.options.documents and not has_weights:
            return len(parts) * self.options.batch_size * self.options.max_length
        return max(sum(total_weight(self._named(self.sampler.batch(part))) for part in parts), 1.0)

    def _batch(self, index: int) -> tuple[dict[str, Tensor], int]:
        """Return this rank's windows of a batch.

        The arguments of `mean_loss` on the device, `(windows, T)` each, and the number of targets. A rank without
        windows gets one window and the number 0, so that it can take part in collective operations.
        """
        size = self.options.batch_size
        rank, ranks = (self.parallel.rank, self.parallel.size) if self._has_windows else (0, size)
        batch = self._named(self.sampler.batch(index, rank=rank, ranks=ranks))
        count = num_targets(batch) if self._has_windows else 0
        return {name: tensor.to(self.device) for name, tensor in batch.items()}, count

    def _named(self, batch: Batch) -> dict[str, Tensor]:
        """Return the tensors of a batch by the names of the arguments of `mean_loss`."""
        names = "ids", "targets", *(["documents"] if self.options.documents else []), "token_weights"
        return dict(zip(names, batch, strict=False))

    def _autocast(self) -> AbstractContextManager[Any]:
        """Return a context manager: bfloat16 autocast if `precision` asks for it, else one that does nothing."""
        precision = self.options.precision
        if precision == "auto":
            precision = "bfloat16" if self.device.type == "cuda" and torch.cuda.is_bf16_supported() else "float32"
        return torch.autocast(self.device.type, torch.bfloat16) if precision == "bfloat16" else nullcontext()

    def _measure_speed(self) -> None:
        """Estimate how many steps fit into `minutes` at the measured speed, and set `steps` to it on all ranks.

        With a fixed number of steps nothing happens. All ranks must call it.
        """
        if self.budget is None:
            return
        used = self.parallel.collectives.broadcast_object(round(self._seconds_used(), 3))
        batches = sum(count for _, count in self._validation_windows) / self.options.batch_size
        last = self.budget.last_step(
            self.step, used=used, guess=COST_OF_AN_UPDATE * self.options.accumulate * self.budget.reserve / batches
        )
        self.steps = self.parallel.collectives.broadcast_object(last)

    def _seconds_used(self) -> float:
        """Return the seconds that the run has taken so far, in the current `run()` and before it."""
        before = 0.0 if self.budget is None else self.budget.used
        return before + (0.0 if self._running_since is None else time.perf_counter() - self._running_since)


def num_targets(batch: Mapping[str, Tensor]) -> int:
    """Return the number of targets of a batch that are not ignored."""
    return int((batch["targets"] != IGNORED).sum())


def total_weight(batch: Mapping[str, Tensor]) -> float:
    """Return the sum of the weights of the targets of a batch that are not ignored; without weights their number."""
    weights = batch.get("token_weights")
    return num_targets(batch) if weights is None else float(weights[batch["targets"] != IGNORED].sum())


def _weighted_mean(values: Sequence[float], weights: Sequence[float]) -> float:
    """Return `sum(weight * value) / sum(weight)`."""
    return sum(weight * value for weight, value in zip(weights, values, strict=True)) / sum(weights)


def trained_files(model: nn.Module) -> dict[str, MappedEmbedding]:
    """Return the trained mapped tables of a model, whose rows and optimizer state are in files, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, MappedEmbedding) and module.weight is not None
    }


def weights_in_files(model: nn.Module) -> set[str]:
    """Return the names of the parameters of a model whose rows and optimizer state are in files."""
    return {f"{name}.weight" for name in trained_files(model)}


def _select(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Return the entries with names that start with `prefix`, and remove the prefix from these names."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _as_saved(tensors: Mapping[str, Tensor], table: ShardedTable | None) -> dict[str, Tensor]:
    """Wrap this rank's rows of each tensor as a DTensor of the rows of all ranks, as a checkpoint stores them.

    `step` and `history` have no rows and are unchanged; so are all tensors if `table` is `None`.
    """
    return {
        name: tensor if table is None or name in ("step", "history") else table.as_dtensor(tensor)
        for name, tensor in tensors.items()
    }


READINGS = 6


@dataclass
class TimeBudget:
    """Estimate of how many training steps fit into a wall-clock time, from measurements during the run."""

    seconds: float
    min_steps: int = 1
    used: float = 0.0  # until the run was last interrupted
    reserve: float = 0.0  # for the validation after the last step
    readings: list[list[int | float]] = field(default_factory=list)  # the last (finished steps, seconds used)

    def last_step(self, step: int, *, used: float, guess: float = 1.0) -> int:
        """Add a measurement to `readings`, and return the number of the step at which the time will be used up.

        So far `step` steps took `used` seconds. `guess` is the seconds of a step to assume as long as there is only one
        measurement. The result is at least `step` and at least `min_steps`.
        """
        self.readings = [*self.readings, [step, used]][-READINGS:]
        fitting = int((self.seconds - self.reserve - used) / max(self._seconds_per_step(guess), 1e-9))
        return max(self.min_steps, step + max(0, fitting))

    def progress(self, step: int, *, last_step: int) -> float:
        """Estimate which fraction of `expected_seconds` will be used when step `step` ends, from 0 to 1."""
        read, used = self.readings[-1] if self.readings else (0, 0.0)
        share = used / self.expected_seconds
        return share + (1 - share) * (step - read) / max(1, last_step - read)

    @property
    def expected_seconds(self) -> float:
        """Return `seconds`, or the time that the run will have taken after `min_steps` steps if that is longer."""
        read, used = self.readings[-1] if self.readings else (0, 0.0)
        return max(self.seconds, used + self._seconds_per_step(0.0) * max(0, self.min_steps - read))

    def _seconds_per_step(self, guess: float) -> float:
        """Return the seconds of a step by the readings, or `guess` as long as they do not show it."""
        if not self.readings or self.readings[0][0] == self.readings[-1][0]:
            return guess
        (first, since), (last, now) = self.readings[0], self.readings[-1]
        return (now - since) / (last - first)
