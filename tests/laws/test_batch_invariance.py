"""With `batch_invariant` no result of a token, nor the gradient of its hidden state, depends on the others of a call.

All bits are compared, at sizes with which those of the last tokens of a batch differ without the option: several chunks
of tokens, several blocks of rows, which are made small, and a last block of 3 rows.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, get_args

import kinds
import pytest
import torch
import torch.utils.checkpoint
from covering import cases, some
from kinds import TABLES, TIED_HEADS, UNTIED_HEADS
from small_blocks import small_blocks
from torch import Tensor, nn

import embedlayer as el
from embedlayer.core.errors import SizeError
from embedlayer.heads.draft import DraftHead
from embedlayer.heads.prediction import PredictionHead
from embedlayer.kernels import kernels_disabled
from embedlayer.losses import (
    ForwardKL,
    JensenShannon,
    LinearLogits,
    NextByte,
    NextBytes,
    ReverseKL,
    TopKTargets,
    check_batch_invariance,
    divergence,
)
from embedlayer.losses.statistics import Statistic
from embedlayer.tables.gguf_rows import GGUFEmbedding

BLOCK, WHOLE_BLOCK = 256, 2048
V, D, TOKENS, DRAFTED = 2 * BLOCK + 3, 128, 150, 300
STATISTICS = get_args(Statistic)
ON = {"batch_invariant": True}
Results = dict[str, Tensor]
Divergences = Sequence[Any]


class Overridden(el.OutputHead):
    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden).tanh() * 3


def with_transform() -> nn.Module:
    dense = nn.Linear(D, D)
    return PredictionHead(el.OutputHead(TABLES["dense"](), **ON), dense=dense, activation="gelu", norm=nn.LayerNorm(D))


def adapted(kind: str, **options: object) -> nn.Module:
    table = el.TokenEmbedding(kinds.VOCAB_SIZE, D, padding_idx=0)
    module = nn.Module()
    module.table, module.head = table, el.OutputHead(table, **ON).follow(module)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what PEFT holds of models that are not transformers'
        peft = pytest.importorskip("peft")
        peft.inject_adapter_in_model(getattr(peft, kind)(target_modules=["table"], **options), module)
    for name, parameter in module.named_parameters():
        parameter.data.div_(9 if "lora" in name else 1)  # so that logits are of the size of those of other heads
    head: Any = module.head
    head.followed = [module]  # in a list: it is no part of the head
    return head


def of_a_file() -> nn.Module:
    from gguf_models import blocks

    table = GGUFEmbedding(kinds.VOCAB_SIZE, 256, "Q4_K")
    table.packed.copy_(torch.from_numpy(blocks("Q4_K", kinds.VOCAB_SIZE, 256)))
    return el.OutputHead(table, **ON)


HEADS: dict[str, Callable[[], nn.Module]] = {
    **{name: lambda table=table: el.OutputHead(TABLES[table](), **ON) for name, table in TIED_HEADS.items()},
    **{name: lambda name=name: invariant(UNTIED_HEADS[name]()) for name in UNTIED_HEADS},
    "with a transform": with_transform,
    "overridden": lambda: Overridden(D, kinds.VOCAB_SIZE, **ON),
    "adapted": lambda: adapted("LoraConfig", r=4, init_lora_weights=False),
    "trained tokens": lambda: adapted("TrainableTokensConfig", token_indices=[3, kinds.VOCAB_SIZE - 1, 5]),
    "of a file": of_a_file,
    "draft": lambda: DraftHead(el.OutputHead(TABLES["dense"](), bias=True, **ON), range(5, DRAFTED)),
    "draft of a transform": lambda: DraftHead(with_transform(), range(5, DRAFTED)),
    "draft of a low rank": lambda: DraftHead(el.OutputHead(TABLES["factorised"](), **ON), range(5, DRAFTED)),
}
PATHS: dict[str, tuple[int, Callable[[], AbstractContextManager[None]]]] = {
    "kernels, one thread": (1, nullcontext),
    "kernels, two threads": (2, nullcontext),
    "torch, one thread": (1, kernels_disabled),
    "torch, two threads": (2, kernels_disabled),
    "torch, three threads": (3, kernels_disabled),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "temperature, small chunks": {"temperature": 0.7, "chunk_bytes": 100_000},
    "soft cap, scale": {"softcap": 5.0, "logit_scale": 0.3},
    "float32": {"head_dtype": torch.float32},
    "masked": {"padding_idx": 7, "mask_padding": True, "drop_ignored": False},
}
DIVERGENCES = (ForwardKL(), ReverseKL(), JensenShannon(0.3), NextByte)


def invariant(head: el.OutputHead) -> el.OutputHead:
    head.batch_invariant = True
    return head


@pytest.fixture(autouse=True)
def several_blocks_and_chunks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(kinds, "VOCAB_SIZE", V)
    monkeypatch.setattr(kinds, "EMBED_DIM", D)
    threads = torch.get_num_threads()
    with small_blocks(rows=BLOCK):
        yield
    torch.set_num_threads(threads)


@pytest.fixture
def whole_blocks(several_blocks_and_chunks, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Blocks of as many rows as there are without these tests."""
    monkeypatch.setattr(kinds, "VOCAB_SIZE", WHOLE_BLOCK + 3)
    with small_blocks(rows=WHOLE_BLOCK):
        yield


class Batch:
    """Hidden states with targets, the hidden states of a teacher, and its most likely tokens."""

    def __init__(self, dtype: torch.dtype, vocab_size: int, width: int = D) -> None:
        self.hidden = (torch.randn(TOKENS, width) / 2).to(dtype)
        self.ids = torch.randint(5, DRAFTED, (TOKENS,)).masked_fill(torch.rand(TOKENS) < 0.1, -100)
        self.of_teacher = torch.randn(TOKENS, 24)
        self.teacher = torch.randn(vocab_size, 24)
        known = torch.randn(TOKENS, vocab_size).log_softmax(-1).topk(5)
        self.known = TopKTargets(known.indices, known.values)


def results(head: Any, batch: Batch, part: Tensor, options: dict[str, Any], divergences: Divergences) -> Results:
    """Every result of some tokens, and gradients of their hidden states, with the tokens along the first dimension."""
    hidden, ids = batch.hidden[part].requires_grad_(), batch.ids[part]
    scores = {"chunk_bytes": options.get("chunk_bytes"), "drop_ignored": options.get("drop_ignored")}
    statistics = head.token_statistics(hidden, ids, statistics=STATISTICS, top_k=4, **options)
    found = {name: value for name, value in statistics._asdict().items() if value is not None}
    smoothing = {} if options.get("mask_padding") else {"label_smoothing": 0.1}
    weights = torch.cos(ids)
    losses = {"z_loss": 1e-3, "token_weights": weights, **smoothing, **options}
    found["losses"] = head.loss(hidden, ids, reduction="none", **losses)
    student = head.uncomputed_logits(hidden, **{name: x for name, x in options.items() if name not in scores})
    teacher = LinearLogits(batch.of_teacher[part], batch.teacher, temperature=1.5)
    events = NextBytes(torch.arange(student.vocab_size) % 5, 5)
    for each in divergences:
        kind = each(events, events) if isinstance(each, type) else each
        found[str(kind)] = divergence(student, teacher, kind, labels=ids, reduction="none", **scores)
    known = TopKTargets(*(each[part] for each in batch.known))
    found["of known tokens"] = divergence(student, known, JensenShannon(0.3), reduction="none", **scores)
    found["logits"] = student.logits()
    if not options.get("mask_padding"):  # its token has another ID in a draft vocabulary
        kept = ids != -100
        assert torch.equal(found["top_logits"][kept], found["logits"][kept].topk(4).values)
    if not options:
        found["head(hidden)"] = head(hidden)
        assert torch.equal(head(hidden[None])[0], found["head(hidden)"])
        assert hidden.dtype != torch.float32 or torch.equal(found["head(hidden)"], found["logits"])
        depths = head.multi_token_loss if hasattr(head, "multi_token_loss") else None
        if depths is not None:
            states = hidden.unsqueeze(1).expand(-1, 4, -1)
            labels = (ids.clamp(min=5).unsqueeze(1) + torch.arange(4)) % (DRAFTED - 5) + 5
            found["depths"] = depths([states, states], labels, [1.0, 0.3], reduction="none").loss
    totals = {name: value.nan_to_num(neginf=0.0).sin().sum() for name, value in found.items() if value.requires_grad}
    totals["statistics"] = torch.stack([totals.pop(name) for name in statistics._fields if name in totals]).sum()
    totals["a sum of losses"] = head.loss(hidden, ids, reduction="sum", **losses)
    for name, value in totals.items():
        found[f"gradient of {name}"] = torch.autograd.grad(value, hidden, retain_graph=True)[0]
    return found


def assert_independent(head: Any, dtype: torch.dtype, options: dict[str, Any], divergences: Divergences) -> None:
    """Compare all tokens at once with three parts in random order: without, with some and with much padding."""
    draft = getattr(head, "draft_vocab_size", None)
    batch = Batch(dtype, V if draft is None else draft, 256 if "Q4_K" in repr(getattr(head, "table", "")) else D)
    if draft is not None:
        batch.ids = batch.ids.where(batch.ids != 7, 8)
    whole = results(head, batch, torch.arange(TOKENS), options, divergences)
    differing = set()
    for part in torch.randperm(TOKENS).split([64, TOKENS - 65, 1]):
        found = results(head, batch, part, options, divergences)
        assert found.keys() == whole.keys()
        for name, value in found.items():
            if not torch.equal(value.nan_to_num(), whole[name][part].nan_to_num()):
                differing.add(name)
    assert not differing, sorted(differing)


@pytest.fixture
def divergences(request: pytest.FixtureRequest, path: str, choice: str) -> Divergences:
    """All kinds with `--all`, else one, so that each is computed on each path and with each choice of options."""
    number = [*PATHS].index(path) + [*OPTIONS].index(choice)
    return DIVERGENCES if request.config.getoption("--all") else [DIVERGENCES[number % len(DIVERGENCES)]]


BY_INPUTS = ("untied", "tied to dense", "tied to factorised", "tied to delta", "tied to int8", "with a transform",
             "overridden", "adapted", "of a file", "draft of a transform")  # fmt: skip
"""Heads that say in different ways which hidden states they take, or how their rows are computed."""
OF_SEVERAL_THREADS = ("kernels, two threads", "torch, three threads")

several_heads = some(BY_INPUTS, HEADS)


@cases("name, path, choice", several_heads, some(OF_SEVERAL_THREADS, PATHS), OPTIONS, pairs=["path, choice"])
def test_no_result_of_a_token_depends_on_the_others(unchecked: None, divergences, name, path, choice) -> None:
    threads, context = PATHS[path]
    head, options = HEADS[name](), OPTIONS[choice]
    if name == "overridden" and "head_dtype" in options:  # which an overridden head takes for all calls alone
        head.head_dtype, options = torch.float32, {}  # type: ignore[assignment]
    torch.set_num_threads(threads)
    with context():
        assert_independent(head, torch.float32, options, divergences)


DTYPES = (torch.bfloat16, torch.float16)  # and float32, above
OF_BLOCKS = ("tied to dense", "tied to factorised", "tied to int8", "tied to int4, q4_0", "tied to delta over int8")
NARROW = ("untied", "untied, bias, softcap", "tied to dense", "tied to factorised", "tied to delta", "with a transform")


@cases("name, dtype, path, choice", NARROW, DTYPES, PATHS, ("plain", "float32"), pairs=["dtype, choice"])
def test_so_it_is_in_every_dtype(unchecked: None, divergences, name, dtype, path, choice) -> None:
    threads, context = PATHS[path]
    head = HEADS[name]()
    tied = getattr(getattr(head, "output", head), "table", None)
    for each in (head, *([] if tied is None else [tied])):
        each.to(dtype)
    torch.set_num_threads(threads)
    with context():
        assert_independent(head, dtype, OPTIONS[choice], divergences)


@cases("name, vocab_size, width", some(OF_BLOCKS, TIED_HEADS), (2305, 50, 3, 4160), (100, 24))
def test_so_it_is_for_other_sizes(unchecked: None, whole_blocks, monkeypatch, name, vocab_size, width) -> None:
    monkeypatch.setattr(kinds, "VOCAB_SIZE", vocab_size)
    monkeypatch.setattr(kinds, "EMBED_DIM", width)
    head = HEADS[name]()
    hidden, ids = torch.randn(TOKENS, width), torch.randint(vocab_size, (TOKENS,))
    whole = head.token_log_probs(hidden, ids), head(hidden)
    for part in torch.randperm(TOKENS).split([1, 66, TOKENS - 67]):
        assert torch.equal(head.token_log_probs(hidden[part], ids[part]), whole[0][part])
        assert torch.equal(head(hidden[part]), whole[1][part])


@pytest.mark.parametrize("name", several_heads)
def test_logits_are_those_of_the_head_without_the_option(unchecked: None, name) -> None:
    head = HEADS[name]()
    hidden = torch.randn(3, 7, 256 if name == "of a file" else D).requires_grad_()
    ours = head(hidden)
    factors = torch.randn(ours.shape)
    grads = torch.autograd.grad(ours, hidden, factors)
    for each in head.modules() if not isinstance(head, DraftHead) else [head.head, getattr(head.head, "output", None)]:
        if isinstance(each, el.OutputHead):
            each.batch_invariant = False
    plain = head(hidden)
    torch.testing.assert_close(ours, plain, rtol=1e-5, atol=5e-5)  # float32 sums of 256 products in another order
    torch.testing.assert_close(grads, torch.autograd.grad(plain, hidden, factors))
    assert ours.dtype == plain.dtype


class OfTheBatch(el.OutputHead):
    """Its logits depend on the other tokens of a call."""

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden - hidden.flatten(0, -2).mean(0))


def test_the_self_test_chooses_a_multiple_with_which_nothing_differs_or_refuses_the_head(unchecked: None) -> None:
    head = el.OutputHead(D, V, **ON)
    report = check_batch_invariance(head)
    assert report.multiple in (32, 64)
    assert report.differing[report.multiple] == ()
    assert head.uncomputed_logits(torch.randn(3, D)).token_multiple == report.multiple
    assert check_batch_invariance(OfTheBatch(D, V)).multiple is None
    with pytest.raises(SizeError, match="batch_invariant=True is not possible here"):
        OfTheBatch(D, V, **ON).token_log_probs(torch.randn(3, D), torch.tensor([1, 2, 3]))


@pytest.mark.parametrize("name", some(("tied to int8", "draft of a transform"), HEADS))
def test_every_head_can_be_checked(unchecked: None, name) -> None:
    with small_blocks(rows=V):  # one block
        report = check_batch_invariance(HEADS[name]())
    assert report.multiple is not None
    assert report.differing.keys() == {1, 32, 64}


def test_the_self_test_leaves_no_trace(unchecked: None) -> None:
    width = D + 3  # of no other test, so that it is tested here
    head, hidden = el.OutputHead(width, V, **ON), torch.randn(3, width, requires_grad=True)
    state = torch.get_rng_state()
    loss = torch.utils.checkpoint.checkpoint(lambda x: head(x).sin().sum(), hidden, use_reentrant=False)
    loss.backward()
    assert torch.equal(torch.get_rng_state(), state)


def refused(head: el.OutputHead, hidden: Tensor) -> dict[str, tuple[Callable[[], object], str]]:
    ids = torch.zeros(hidden.shape[:-1], dtype=torch.long)

    def in_dual() -> object:
        with torch.autograd.forward_ad.dual_level():
            return head.loss(torch.autograd.forward_ad.make_dual(hidden, hidden), ids)

    return {
        "plain": (lambda: head.loss(hidden, ids, impl="plain"), "impl='plain'"),
        "meta": (lambda: head.to("meta")(hidden.to("meta")), "on meta"),
        "a transform": (lambda: torch.func.vmap(head)(hidden), "torch.func"),
        "a tangent": (in_dual, "torch.func"),
        "a graph": (lambda: torch.compile(head, backend="eager", fullgraph=True)(hidden), "torch.compile"),
        "an export": (lambda: torch.export.export(head, (hidden,)), "xport"),
    }


@pytest.mark.parametrize("what", ["plain", "meta", "a transform", "a tangent", "a graph", "an export"])
def test_where_it_is_not_possible_it_is_refused_by_name(unchecked: None, what) -> None:
    call, reason = refused(el.OutputHead(D, 70, **ON), torch.randn(5, D))[what]
    with pytest.raises(Exception, match="batch_invariant") as error:
        call()
    assert reason in str(error.value)
