"""Token Distillation: train new rows so that the model reads and predicts new tokens as it did their old subwords."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Int
from tokenizers import Encoding, Tokenizer
from torch import Tensor, nn

from embedlayer.core.documents import IGNORED
from embedlayer.core.errors import SizeError, VocabularyError
from embedlayer.models.causal import causal_outputs, check_causal, evaluating
from embedlayer.tokenization.tokenizer_calls import as_tokenizer, encode, pure_tokenizer
from embedlayer.training.loop import TrainingOptions
from embedlayer.vocab.row_training import merge_rows, train_only_rows


def find_snippets(
    texts: Iterable[str],
    tokenizer: object,
    token_ids: Iterable[int],
    *,
    per_token: int = 25,
    length: int = 64,
    seed: int = 0,
) -> list[str]:
    """Return `per_token` passages for each new token that occurs in the texts, for `distill_rows`.

    A passage has `length` tokens, or the whole text if that is shorter, with the new token at a random place. The
    occurrences are drawn at random; those of a rare token are used several times, each time with a new random place. So
    every token that occurs has the same number of passages; one that does not occur has none. The passages of one token
    follow each other.

    Args:
        texts: Texts to search. Use training text only, never text to measure on.
        tokenizer: The tokenizer after the edit.
        token_ids: IDs of the new tokens.
        per_token: Passages of a token.
        length: Tokens of a passage.
        seed: Seed of the drawn occurrences and places.

    Raises:
        TokenizerError: `tokenizer` is no tokenizer.

    Example:
        >>> tokenizer = train_tokenizer("the dog saw the cat", kind="word")
        >>> find_snippets(["the dog saw the cat"], tokenizer, [tokenizer.token_to_id("saw")], per_token=1, length=5)
        ['the dog saw the cat']
    """
    if per_token < 1 or length < 1:
        raise SizeError(f"per_token and length must be at least 1, not {per_token} and {length}.")
    tokens, generator = pure_tokenizer(as_tokenizer(tokenizer)), torch.Generator().manual_seed(seed)
    places: dict[int, list[tuple[int, int]]] = {token: [] for token in token_ids}
    contents, offsets = list(texts), []
    for number, text in enumerate(contents):
        encoded = encode(tokens, text)
        offsets.append(encoded.offsets)
        for place, token in enumerate(encoded.ids):
            if token in places:
                places[token].append((number, place))
    snippets = []
    for occurrences in filter(None, places.values()):
        order = torch.randperm(len(occurrences), generator=generator).tolist()
        for turn, before in enumerate(torch.randint(length, (per_token,), generator=generator).tolist()):
            number, place = occurrences[order[turn % len(order)]]
            first = max(0, min(place - before, len(offsets[number]) - length))
            last = min(first + length, len(offsets[number])) - 1
            snippets.append(contents[number][offsets[number][first][0] : offsets[number][last][1]])
    return snippets


@dataclass(frozen=True)
class DistillationLosses:
    """List the losses of the steps of `distill_rows`, and the tokens whose rows were trained.

    Attributes:
        hidden: Mean squared difference of hidden states, at each step; 0 at a step whose snippets have no pair of
            tokens to compare, and at all steps with `hidden_weight=0`.
        prediction: Cross entropy of the next token in nats, at each step.
        trained: IDs of the new tokens that occur in the snippets. The others got the shared change alone.
    """

    hidden: tuple[float, ...]
    prediction: tuple[float, ...]
    trained: tuple[int, ...]


def distill_rows(
    model: nn.Module,
    teacher: nn.Module,
    snippets: Sequence[str],
    options: TrainingOptions,
    *,
    tokenizer: object,
    teacher_tokenizer: object,
    token_ids: Iterable[int],
    hidden_weight: float = 1.0,
    prediction_weight: float = 1.0,
    start_weight: float = 0.003,
) -> DistillationLosses:
    """Train the rows of new tokens on snippets, in place; every other number of the model keeps every bit.

    Both models read the same snippet, each with its own tokenizer. Let `P` be the pairs of a student's and a teacher's
    token that end at the same character, from the first new token on, and D the width. The loss of a step is

    `hidden_weight * mean over P, D of (hidden - teacher hidden)^2 + prediction_weight * cross entropy
    + start_weight * sum over rows of own^2`, where `row = row at the start + shared + own`,

    with the hidden states that the head reads, and the cross entropy of the next token at all positions of the
    snippets, over the whole new vocabulary. The first term trains the input rows. The second also trains the output
    rows, in an untied head or through the tie: a higher logit where the new token follows, and a lower one elsewhere.
    With `prediction_weight=0` an untied head's rows are unchanged, as in the paper. The change `shared` is
    one row that all new tokens of a table or head share; it learns what they have in common, such as how often any of
    them follows. The change `own` of a rare token stays small by the third term: otherwise the steps without the token
    lower its logits everywhere. A new token that occurs in no snippet gets the shared change alone.

    `train_only_rows` and `merge_rows` are called here.

    Args:
        model: The model after the edit, with a dense table: a `DecoderLM`, or a causal language model of transformers
            after `patch`.
        teacher: The model before the edit, for example `copy.deepcopy(model)` made before it. It is not changed.
        snippets: Texts in which the new tokens occur: those of `find_snippets`, or texts that the teacher generated.
            Further texts in which no new token occurs hold back the new tokens elsewhere. Snippets of one token are
            left out.
        options: Steps, `batch_size` in snippets, `max_length` in tokens, learning rate with its schedule, betas,
            `max_grad_norm`, and the seed of the order. The other options are not used; `minutes` raises a `SizeError`.
        tokenizer: The tokenizer after the edit.
        teacher_tokenizer: The tokenizer before the edit.
        token_ids: IDs of the new tokens.
        hidden_weight: Weight of the difference of hidden states.
        prediction_weight: Weight of the cross entropy.
        start_weight: Weight of the squared changes `own`.

    Returns:
        The losses of each step, and the tokens whose rows were trained.

    Raises:
        SizeError: As in `train_only_rows`. Nothing was changed.
        VocabularyError: No new token occurs in the snippets, or `train_only_rows` raises it.
        CheckpointError: `model` or `teacher` is no causal language model. Nothing was changed.
        TokenizerError: `tokenizer` or `teacher_tokenizer` is no tokenizer.
        TokenIdError: A token is outside the table.

    Example:
        >>> from copy import deepcopy
        >>> old, before = tokenizer, deepcopy(model)
        >>> receipt = add_tokens(model, ["cat", "mat"], tokenizer=old)
        >>> new, ids, text = receipt.tokenizer, list(receipt.added), ["the cat sat on the mat. " * 9]
        >>> snippets, options = find_snippets(text, new, ids), TrainingOptions(steps=2)
        >>> losses = distill_rows(
        ...     model, before, snippets, options, tokenizer=new, teacher_tokenizer=old, token_ids=ids
        ... )
        >>> losses.trained == tuple(ids), len(losses.hidden)
        (True, 2)

    Reference: Dobler et al., Token Distillation: Attention-aware Input Embeddings For New Tokens, 2026 (arXiv
    2505.20133), which trains input rows by the first term, on the last hidden states. The other
    terms are ours.
    """
    if options.steps is None:
        raise SizeError("distill_rows takes a number of steps: pass TrainingOptions(steps=...), without minutes.")
    new_ids = set(token_ids)
    own, theirs = (pure_tokenizer(as_tokenizer(one)) for one in (tokenizer, teacher_tokenizer))
    pairs = [_pair(own, theirs, snippet, new_ids, options.max_length) for snippet in snippets]
    pairs = [pair for pair in pairs if len(pair.ids) > 1]
    occurring = tuple(sorted(new_ids.intersection(*[[token for pair in pairs for token in pair.ids]])))
    if not occurring:
        raise VocabularyError(f"None of the {len(new_ids)} new tokens occurs in the {len(snippets)} snippets.")
    check_causal(model, torch.tensor(pairs[0].ids))
    check_causal(teacher, torch.tensor(pairs[0].teacher_ids))
    train_only_rows(model, new_ids)
    occurs = torch.tensor([token in occurring for token in sorted(new_ids)])
    try:
        with evaluating(model, teacher):
            hidden, prediction = _train(
                model, teacher, pairs, options, occurs, (hidden_weight, prediction_weight, start_weight)
            )
    finally:
        merge_rows(model)
    return DistillationLosses(tuple(hidden), tuple(prediction), occurring)


@dataclass(frozen=True)
class _Pair:
    """Store the token IDs of one snippet in both tokenizers, and the places whose hidden states are compared."""

    ids: list[int]
    teacher_ids: list[int]
    places: list[tuple[int, int]]


def _pair(own: Tokenizer, theirs: Tokenizer, text: str, new_ids: set[int], length: int) -> _Pair:
    """Encode a snippet with both tokenizers, and find the tokens that end at the same character."""
    student, teacher = (encode(one, text) for one in (own, theirs))
    ids = student.ids[:length]
    first = next((place for place, token in enumerate(ids) if token in new_ids), len(ids))
    stop = student.offsets[len(ids) - 1][1] if ids else 0
    teacher_ids = [token for token, (_, end) in zip(teacher.ids, teacher.offsets, strict=True) if end <= stop]
    ends, teacher_ends = _ends(student, len(ids)), _ends(teacher, len(teacher_ids))
    places = [(place, teacher_ends[end]) for end, place in ends.items() if place >= first and end in teacher_ends]
    return _Pair(ids, teacher_ids, places)


def _ends(encoded: Encoding, number: int) -> dict[int, int]:
    """Return from each character at which one of the first `number` tokens ends to the last such token's place."""
    return {end: place for place, (_, end) in enumerate(encoded.offsets[:number])}


class _RowChanges:
    """Write the trained rows of one table or head as `start + shared + own`, and split their gradient."""

    def __init__(self, rows: nn.Parameter, occurs: Bool[Tensor, " k"]) -> None:
        self._rows, self._start = rows, rows.detach().clone().float()
        self._occurs = occurs.to(rows.device).unsqueeze(1)
        self.shared = nn.Parameter(torch.zeros_like(self._start[0]))
        self.own = nn.Parameter(torch.zeros_like(self._start))

    def read_gradient(self, start_weight: float) -> None:
        """Set the gradients of `shared` and `own` from that of the rows, with the penalty on `own`."""
        if self._rows.grad is not None:
            gradient = self._rows.grad.float() * self._occurs
            self.shared.grad = gradient.sum(0)
            self.own.grad = gradient + 2 * start_weight * self.own.detach()

    @torch.no_grad()
    def write(self) -> None:
        """Set the rows to the sum of their start and both changes."""
        self._rows.copy_(self._start + self.shared + self.own)


def _train(
    model: nn.Module,
    teacher: nn.Module,
    pairs: Sequence[_Pair],
    options: TrainingOptions,
    occurs: Bool[Tensor, " k"],
    weights: tuple[float, float, float],
) -> tuple[list[float], list[float]]:
    """Train the rows of new tokens, and return both losses of each step, those of `DistillationLosses`."""
    steps = options.steps or 0
    rows = [parameter for parameter in model.parameters() if parameter.requires_grad]
    changes = [_RowChanges(row, occurs) for row in rows]
    hidden_weight, prediction_weight, start_weight = weights
    trained = [tensor for change in changes for tensor in (change.shared, change.own)]
    optimizer = torch.optim.AdamW(trained, betas=(options.beta1, options.beta2), weight_decay=0.0)
    device = rows[0].device
    losses: tuple[list[float], list[float]] = ([], [])
    for step, batch in zip(range(1, steps + 1), _batches(pairs, options), strict=False):
        ids, mask = _padded([pair.ids for pair in batch], device)
        hidden, loss_of = causal_outputs(model, ids, mask)
        targets = F.pad(ids.masked_fill(mask == 0, IGNORED)[:, 1:], (0, 1), value=IGNORED)
        prediction = loss_of(targets, ignore_index=IGNORED)
        difference = hidden.new_zeros(())
        places = [(row, *place) for row, pair in enumerate(batch) for place in pair.places]
        if places and hidden_weight:
            row, place, teacher_place = torch.tensor(places, device=device).unbind(1)
            with torch.no_grad():
                teacher_ids, teacher_mask = _padded([pair.teacher_ids for pair in batch], device)
                wanted = causal_outputs(teacher, teacher_ids, teacher_mask)[0][row, teacher_place]
            difference = F.mse_loss(hidden[row, place], wanted.to(hidden.dtype))
        for group in optimizer.param_groups:
            group["lr"] = options.learning_rate_at(step, steps)
        model.zero_grad()
        (hidden_weight * difference + prediction_weight * prediction).backward()
        torch.nn.utils.clip_grad_norm_(rows, options.max_grad_norm)
        for change in changes:
            change.read_gradient(start_weight)
        optimizer.step()
        for change in changes:
            change.write()
        losses[0].append(float(difference.detach()))
        losses[1].append(float(prediction.detach()))
    return losses


def _batches(pairs: Sequence[_Pair], options: TrainingOptions) -> Iterator[list[_Pair]]:
    """Yield batches of snippets without end; each pass over them has another order."""
    generator = torch.Generator().manual_seed(options.seed)
    waiting: list[int] = []
    while True:
        while len(waiting) < options.batch_size:
            waiting += torch.randperm(len(pairs), generator=generator).tolist()
        yield [pairs[place] for place in waiting[: options.batch_size]]
        waiting = waiting[options.batch_size :]


def _padded(sequences: Sequence[Sequence[int]], device: torch.device) -> tuple[Int[Tensor, "B T"], Int[Tensor, "B T"]]:
    """Return token IDs padded with 0 at the right, and the mask, 1 for tokens and 0 for padding."""
    rows = [torch.tensor(sequence) for sequence in sequences]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    return ids.to(device), mask.to(device)
