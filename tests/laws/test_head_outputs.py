"""Every output of every head equals the plain formulation on all logits, with its gradients, and stores none of them.

The oracle is `log_softmax` of `head(hidden)` in float64. Chunks and blocks are made small, so that each batch has
several of both. A head that is built over another one has the selected logits of that one, as it is at each call.
"""

import warnings
from collections.abc import Callable, Iterator
from typing import Any, get_args

import pytest
import torch
import torch.nn.functional as F
from cases import CODE_PATHS, UsesHead
from covering import looped, some
from kinds import EMBED_DIM, TABLES, TIED_HEADS, UNTIED_HEADS, VOCAB_SIZE
from memory import Shapes
from small_blocks import small_blocks
from torch import Tensor, nn

import embedlayer as el
from embedlayer.core.documents import shifted_targets
from embedlayer.heads import DraftHead, DraftMap, StreamHead
from embedlayer.heads.prediction import PredictionHead
from embedlayer.losses import (
    ForwardKL,
    JensenShannon,
    LinearLogits,
    NextByte,
    NextBytes,
    ReverseKL,
    TopKTargets,
    divergence,
)
from embedlayer.losses.statistics import Statistic

STATISTICS = get_args(Statistic)
KINDS = {"forward": ForwardKL(), "reverse": ReverseKL(), "Jensen-Shannon": JensenShannon(0.3)}


def tied(name: str) -> UsesHead:
    table = TABLES[name]()
    return UsesHead(el.OutputHead(table, bias=name == "int8", softcap=3.0 if name == "delta" else None), table)


def with_transform() -> UsesHead:
    table = TABLES["dense"]()
    dense = nn.Linear(EMBED_DIM, EMBED_DIM)
    return UsesHead(PredictionHead(el.OutputHead(table), dense=dense, activation="gelu"), table)


class Overridden(el.OutputHead):
    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden).sin() * 3


HEADS: dict[str, Callable[[], UsesHead]] = {
    **{name: lambda table=table: tied(table) for name, table in TIED_HEADS.items()},
    **{name: lambda make=make: UsesHead(make()) for name, make in UNTIED_HEADS.items()},
    "with a transform": with_transform,
    "overridden": lambda: UsesHead(Overridden(EMBED_DIM, VOCAB_SIZE)),
}
OTHERS = {f"head: {name}" for name in (*UNTIED_HEADS, *TIED_HEADS)} - {*CODE_PATHS}
EACH_CODE_PATH = some([name for name in HEADS if f"head: {name}" not in OTHERS], HEADS)
each_code_path = looped("name", EACH_CODE_PATH)
"""For laws about what is computed at all, whatever its numbers are."""


@pytest.fixture(autouse=True)
def several_blocks() -> Iterator[None]:
    with small_blocks(tokens=6, rows=20, table_rows=20):
        yield


def batch(tokens: int = 11) -> tuple[Tensor, Tensor]:
    hidden = torch.randn(tokens, EMBED_DIM, dtype=torch.float64, requires_grad=True)
    ids = torch.randint(1, VOCAB_SIZE, (tokens,))
    ids[2] = -100
    return hidden, ids


def assert_same(ours: Tensor, plain: Tensor, leaves: list[Tensor]) -> None:
    torch.testing.assert_close(ours, plain, rtol=1e-10, atol=1e-10)
    grad_output = torch.randn_like(plain)
    found = torch.autograd.grad(ours, leaves, grad_output, retain_graph=True, allow_unused=True)
    expected = torch.autograd.grad(plain, leaves, grad_output, retain_graph=True, allow_unused=True)
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


def leaves_of(module: nn.Module, *others: Tensor) -> list[Tensor]:
    return [*others, *(parameter for parameter in module.parameters() if parameter.requires_grad)]


@looped("name, temperature", EACH_CODE_PATH, (1.0, 0.7))
def test_statistics_are_those_of_log_softmax(name, temperature) -> None:
    module = HEADS[name]().double()
    hidden, tokens = batch()
    found = module.head.token_statistics(
        hidden, tokens, statistics=STATISTICS, top_k=5, temperature=temperature, impl="chunked"
    )
    logits = module.head(hidden) / temperature
    kept, log_p = tokens != -100, F.log_softmax(logits, dim=-1)
    top, top_ids = logits.sort(dim=-1, descending=True, stable=True)
    expected = {
        "log_probs": log_p.gather(-1, tokens.clamp(min=0).unsqueeze(-1)).squeeze(-1) * kept,
        "entropy": -(log_p.exp() * log_p).sum(-1) * kept,
        "logsumexp": logits.logsumexp(-1) * kept,
        "sum_squared_probs": log_p.exp().square().sum(-1) * kept,
        "mean_logits": logits.mean(-1) * kept,
        "top_logits": top[:, :5] * kept.unsqueeze(-1),
    }
    assert {*STATISTICS} <= {*expected, "is_argmax"}
    for field, plain in expected.items():
        assert_same(getattr(found, field), plain, leaves_of(module, hidden))
    assert torch.equal(found.top_ids, top_ids[:, :5].where(kept.unsqueeze(-1), -1))
    assert torch.equal(found.is_argmax, (logits.argmax(-1) == tokens) & kept)


@looped("name, kind, reduction", EACH_CODE_PATH, KINDS, ("mean", "none"), pairs=["kind, reduction"])
def test_divergences_are_those_of_two_log_softmaxes(name, kind, reduction) -> None:
    module = HEADS[name]().double()
    hidden, labels = batch()
    teacher = nn.Linear(7, VOCAB_SIZE, dtype=torch.float64)
    teacher_hidden = torch.randn(len(hidden), 7, dtype=torch.float64)
    student = module.head.uncomputed_logits(hidden, temperature=0.8, impl="chunked")
    other = LinearLogits(teacher_hidden, teacher.weight, bias=teacher.bias, temperature=1.5)
    ours = divergence(student, other, KINDS[kind], labels=labels, reduction=reduction)
    log_q = F.log_softmax(module.head(hidden) / 0.8, dim=-1)
    log_p = F.log_softmax(teacher(teacher_hidden) / 1.5, dim=-1).detach()
    q, p = log_q.exp(), log_p.exp()
    if kind == "Jensen-Shannon":
        log_m = (0.3 * p + 0.7 * q).log()
        each = (0.3 * p * (log_p - log_m) + 0.7 * q * (log_q - log_m)).sum(-1)
    else:
        each = (p * (log_p - log_q) if kind == "forward" else q * (log_q - log_p)).sum(-1)
    each = each * (labels != -100)
    assert_same(ours, each.sum() / (labels != -100).sum() if reduction == "mean" else each, leaves_of(module, hidden))


@looped("name, kind", EACH_CODE_PATH, KINDS)
def test_a_head_of_any_format_can_be_the_teacher(name, kind) -> None:
    module = HEADS[name]().double()
    hidden, teacher_hidden = (batch()[0] for _ in range(2))
    weight = torch.randn(VOCAB_SIZE, EMBED_DIM, dtype=torch.float64, requires_grad=True)
    teacher = module.head.uncomputed_logits(teacher_hidden, temperature=1.5)
    ours = divergence(LinearLogits(hidden, weight, impl="chunked"), teacher, KINDS[kind])
    log_p = F.log_softmax(module.head(teacher_hidden) / 1.5, dim=-1).detach()
    plain = KINDS[kind].of_log_probs(F.log_softmax(hidden @ weight.T, dim=-1), log_p).mean()
    assert_same(ours, plain, [hidden, weight])
    wanted = leaves_of(module, teacher_hidden)
    assert all(grad is None for grad in torch.autograd.grad(ours, wanted, allow_unused=True))


@looped(
    "name, kind, reduction, few", EACH_CODE_PATH, KINDS, ("mean", "none"), (0, 2**16), pairs=["kind, reduction, few"]
)
def test_two_vocabularies_are_compared_by_their_shared_tokens(name, kind, reduction, few) -> None:
    """With one event for all others; the head is that of the student and, built again, of its teacher."""
    modules = [HEADS[name]().double() for _ in range(2)]
    states = [batch()[0] for _ in modules]
    ids = [torch.randperm(VOCAB_SIZE)[:20] for _ in modules]
    shared = DraftMap(ids[0], ids[1], VOCAB_SIZE, VOCAB_SIZE, "", "")
    pairs = [(each, module.head) for each, module in zip(states, modules, strict=True)]
    with small_blocks(few_logits=few):
        ours = shared.divergence(*pairs, KINDS[kind], reduction=reduction)
    of_events = []
    for module, hidden, own in zip(modules, states, ids, strict=True):
        log_probs = F.log_softmax(module.head(hidden), dim=-1)
        others = log_probs.index_fill(-1, own, -torch.inf).logsumexp(-1, keepdim=True)
        of_events.append(torch.cat([log_probs[:, own], others], dim=-1))
    plain = KINDS[kind].of_log_probs(of_events[0], of_events[1].detach())
    assert_same(ours, plain.mean() if reduction == "mean" else plain, leaves_of(modules[0], states[0]))
    wanted = leaves_of(modules[1], states[1])
    assert all(grad is None for grad in torch.autograd.grad(ours.sum(), wanted, allow_unused=True))


@looped("name, kind", EACH_CODE_PATH, KINDS)
def test_two_vocabularies_are_compared_by_the_next_byte(name, kind) -> None:
    modules = [HEADS[name]().double() for _ in range(2)]
    (hidden, labels), (other, _) = batch(), batch()
    events = [torch.cat([torch.arange(9), torch.randint(0, 9, (VOCAB_SIZE - 9,))]) for _ in modules]
    next_byte = NextByte(NextBytes(events[0], 9), NextBytes(events[1], 9), KINDS[kind])
    pairs = [(each, module.head) for each, module in zip((hidden, other), modules, strict=True)]
    ours = divergence(*pairs, next_byte, labels=labels)
    own, of_teacher = (
        torch.stack([F.log_softmax(head(x), dim=-1)[:, each == event].logsumexp(-1) for event in range(9)], dim=-1)
        for (x, head), each in zip(pairs, events, strict=True)
    )
    plain = KINDS[kind].of_log_probs(own, of_teacher.detach())[labels != -100].mean()
    assert_same(ours, plain, leaves_of(modules[0], hidden))


@looped("name, kind", EACH_CODE_PATH, KINDS)
def test_a_teacher_of_k_tokens_counts_these_alone(name, kind) -> None:
    module = HEADS[name]().double()
    hidden, labels = batch()
    ids = torch.stack([torch.randperm(VOCAB_SIZE)[:4] for _ in hidden])
    log_probs = F.log_softmax(torch.randn(len(hidden), 5, dtype=torch.float64), dim=-1)[:, :4]
    student = module.head.uncomputed_logits(hidden, impl="chunked")
    ours = divergence(student, TopKTargets(ids, log_probs), KINDS[kind], labels=labels)
    own = F.log_softmax(module.head(hidden), dim=-1).gather(-1, ids)
    each = KINDS[kind].of_log_probs(own, log_probs) * (labels != -100)
    assert_same(ours, each.sum() / (labels != -100).sum(), leaves_of(module, hidden))


@looped(
    "name, reduction, impl", EACH_CODE_PATH, ("mean", "sum", "none"), ("plain", "chunked"), pairs=["reduction, impl"]
)
def test_weights_of_tokens_are_factors_of_their_losses(name, reduction, impl) -> None:
    module = HEADS[name]().double()
    hidden, targets = batch()
    weights = torch.randn(len(targets)).bfloat16().masked_fill(targets == -100, torch.inf)
    ours = module.head.loss(
        hidden, targets, token_weights=weights, reduction=reduction, z_loss=0.1, temperature=0.7, impl=impl
    )
    logits, kept = module.head(hidden) / 0.7, targets != -100
    each = F.cross_entropy(logits, targets, reduction="none") + 0.1 * logits.logsumexp(-1).square()
    each = each.where(kept, 0) * weights.double().where(kept, 0)
    plain = each if reduction == "none" else each.sum() / (kept.sum() if reduction == "mean" else 1)
    assert_same(ours, plain, leaves_of(module, hidden))


@looped("name, weighted", EACH_CODE_PATH, (False, True))
def test_several_depths_are_the_weighted_sum_of_their_losses(name, weighted) -> None:
    module = HEADS[name]().double()
    hidden = [torch.randn(2, 6, EMBED_DIM, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    labels = torch.randint(1, VOCAB_SIZE, (2, 6))
    labels[0, 4] = -100
    of_labels = torch.randn(2, 6).masked_fill(labels == -100, torch.nan) if weighted else None
    ours = module.head.multi_token_loss(
        hidden, labels, weights=[1.0, 0.3, 0.2], impl="chunked", token_weights=of_labels
    )
    each = []
    for depth, states in enumerate(hidden):
        targets = labels[:, 1 + depth :].flatten()
        losses = F.cross_entropy(module.head(states[:, : 5 - depth]).flatten(0, 1), targets, reduction="none")
        if of_labels is not None:
            losses = losses * of_labels[:, 1 + depth :].flatten().nan_to_num(0.0)
        each.append(losses.sum() / (targets != -100).sum())
    torch.testing.assert_close(ours.losses, torch.stack(each).detach(), rtol=1e-10, atol=1e-10)
    assert_same(ours.loss, each[0] + 0.3 * each[1] + 0.2 * each[2], leaves_of(module, *hidden))


@looped(
    "name, output, impl, value",
    EACH_CODE_PATH,
    ("loss", "depths"),
    ("auto", "plain", "chunked"),
    (torch.nan, torch.inf),
    pairs=["output, impl", "impl, value"],
)
def test_hidden_states_that_do_not_count_have_no_effect(name, output, impl, value) -> None:
    module = HEADS[name]().double()
    states, ids = batch(12)
    states, ids = states.detach().view(2, 6, -1), ids.view(2, 6)
    documents = torch.tensor([[1, 1, 1, 1, 1, 2], [1, 1, 2, 2, 0, 0]])
    ids = ids.masked_fill(documents == 0, -100)
    targets = [ids, *(F.pad(shifted_targets(ids, documents, depth=k), (0, 1 + k), value=-100) for k in range(2))]
    finite = [states] * 3
    dirty = [states.masked_fill((each == -100).unsqueeze(-1), value) for each in targets]

    def results(*inputs: Tensor) -> list[Tensor]:
        hidden, *depths = leaves = [each.clone().requires_grad_() for each in inputs]
        if output == "depths":
            found = module.head.multi_token_loss(depths, ids, documents=documents, impl=impl).loss
        else:
            found = module.head.loss(hidden, ids, impl=impl)
        leaves = leaves_of(module, *leaves)
        grads = torch.autograd.grad(found, leaves, allow_unused=True) if found.requires_grad else []
        return [found, *(grad for grad in grads if grad is not None)]

    torch.testing.assert_close(results(*dirty), results(*finite), rtol=1e-10, atol=1e-10)


@each_code_path
def test_no_output_stores_numbers_for_each_token_and_each_row(name) -> None:
    module = HEADS[name]()
    tokens = 96
    hidden = torch.randn(tokens, EMBED_DIM, requires_grad=True)
    ids = torch.randint(1, VOCAB_SIZE, (tokens,))
    teacher = LinearLogits(torch.randn(tokens, 4), torch.randn(VOCAB_SIZE, 4))
    with small_blocks(tokens=48), Shapes() as shapes:
        statistics = module.head.token_statistics(hidden, ids, statistics=STATISTICS, top_k=2, impl="chunked")
        sum(value.sum() for value in statistics if value is not None and value.requires_grad).backward()
        module.head.loss(hidden, ids, impl="chunked").backward()
        for kind in KINDS.values():
            divergence(module.head.uncomputed_logits(hidden, impl="chunked"), teacher, kind).backward()
    assert not shapes.largest(tokens * VOCAB_SIZE)


@each_code_path
def test_when_nothing_counts_all_is_zero(name) -> None:
    module = HEADS[name]()
    for tokens in (0, 3):
        hidden = torch.randn(tokens, EMBED_DIM, requires_grad=True)
        labels = torch.full((tokens,), -100)
        teacher = LinearLogits(torch.randn(tokens, 4), torch.randn(VOCAB_SIZE, 4))
        found = module.head.token_statistics(hidden, labels, statistics=STATISTICS, top_k=3, impl="chunked")
        student = module.head.uncomputed_logits(hidden, impl="chunked")
        losses = [divergence(student, teacher, kind, labels=labels) for kind in KINDS.values()]
        losses += [module.head.loss(hidden, labels, impl="chunked")]
        total = sum(losses) + sum(value.sum() for value in found if value is not None and value.requires_grad)
        assert all(loss == 0 for loss in losses)
        assert all(value.eq(0).all() for value in found[:4] if value is not None)
        assert total == 0
        total.backward()
        assert hidden.grad is None or hidden.grad.eq(0).all()
        assert all(p.grad is None or p.grad.eq(0).all() for p in module.parameters())


UNSORTED, SIZES = [48, 3, 0, 49, 20, 7], [20, 7, 23]
PEFT_CHOICES: dict[str, dict[str, Any]] = {
    "LoRA": {"target_modules": ["tokens"]},
    "trainable tokens": {"target_modules": ["query"], "trainable_token_indices": {"tokens": [3, 20, 1]}},
    "a trained copy": {"target_modules": ["query"], "modules_to_save": ["tokens"]},
}


class OtherLogits(el.TokenEmbedding):
    def logits(self, hidden: Tensor, **options: Any) -> Tensor:
        return 2 * super().logits(hidden, **options)


def adapted(choice: str) -> UsesHead:
    peft = pytest.importorskip("peft", reason="the dev extra is not installed")
    model = nn.ModuleDict({"tokens": TABLES["dense"](), "query": nn.Linear(EMBED_DIM, EMBED_DIM)})
    model["out"] = el.OutputHead(model["tokens"], softcap=5.0).follow(model, "tokens", "out")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = peft.get_peft_model(model, peft.LoraConfig(r=3, init_lora_weights=False, **PEFT_CHOICES[choice]))
    return UsesHead(model.base_model.model["out"], model)


def patched() -> UsesHead:
    transformers = pytest.importorskip("transformers", reason="the dev extra is not installed")
    sizes = {"hidden_size": EMBED_DIM, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    config = transformers.Gemma2Config(vocab_size=VOCAB_SIZE, num_key_value_heads=1, **sizes)
    config.final_logit_softcapping = 0.5
    model = el.patch(transformers.Gemma2ForCausalLM(config))
    return UsesHead(model.lm_head, model)


SOURCES: dict[str, Callable[[], Any]] = {
    **HEADS,
    **{f"PEFT, {choice}": lambda choice=choice: adapted(choice) for choice in PEFT_CHOICES},
    "patched": patched,
    "tied to other logits": lambda: UsesHead(el.OutputHead(table := OtherLogits(VOCAB_SIZE, EMBED_DIM)), table),
    **{f"table, {name}": lambda make=make: UsesHead(make()) for name, make in TABLES.items() if name != "row-sparse"},
}
COLUMNS: dict[str, list[list[int]]] = {
    "draft": [UNSORTED],
    "streams": [list(range(sum(SIZES[:k]), sum(SIZES[: k + 1]))) for k in range(len(SIZES))],
    "transform": [list(range(VOCAB_SIZE))],
}
DERIVED: dict[str, Callable[[Any], Any]] = {
    "draft": lambda head: DraftHead(head, UNSORTED),
    "streams": lambda head: StreamHead(head, SIZES),
    "transform": lambda head: PredictionHead(head, dense=nn.Linear(EMBED_DIM, EMBED_DIM), activation="gelu").double(),
}
DRAFTS_ALONE = {"with a transform", *(name for name in SOURCES if name.startswith("table"))}
PAIRS = [(name, kind) for kind in DERIVED for name in SOURCES if kind == "draft" or name not in DRAFTS_ALONE]


@looped("pair, impl, changed", PAIRS, ("plain", "chunked"), (False, True))
def test_a_derived_head_has_the_selected_logits_of_its_source_as_it_is_now(pair, impl, changed) -> None:
    (name, kind), is_streams = pair, pair[1] == "streams"
    module = SOURCES[name]().double()
    head = DERIVED[kind](source := module.head)
    own = nn.ModuleList([module, head])
    with torch.no_grad():
        for parameter in own.parameters():
            parameter.add_(torch.randn_like(parameter))
    for part in own.modules():
        if changed and isinstance(part, el.OutputHead) and part.model_options is None:
            part.softcap, part.logit_scale = 2.0, 0.3
    hidden = batch()[0]
    leaves = leaves_of(own, hidden)
    logits = source.uncomputed_logits(head.transform(hidden) if kind == "transform" else hidden).logits()
    chosen = [logits[..., columns] for columns in COLUMNS[kind]]
    if getattr(source, "model_options", None) is None:  # otherwise a call is the product alone
        assert_same(torch.cat(head(hidden), -1) if is_streams else head(hidden), torch.cat(chosen, -1), leaves)
    places = [torch.randint(0, len(columns), hidden.shape[:-1]) for columns in COLUMNS[kind]]
    targets = torch.stack(places, -1) if is_streams else torch.tensor(COLUMNS[kind][0])[places[0]]
    log_p = [F.log_softmax(each, -1) for each in chosen]
    of_targets = [x.gather(-1, y.unsqueeze(-1))[..., 0] for x, y in zip(log_p, places, strict=True)]
    log_probs = torch.stack(of_targets, -1).view(targets.shape)
    entropy = torch.stack([-(x.exp() * x).sum(-1) for x in log_p], -1).view(targets.shape)
    statistics, loss = head.token_statistics(hidden, targets, impl=impl), head.loss(hidden, targets, impl=impl)
    assert_same(loss.loss if is_streams else loss, -log_probs.mean(), leaves)
    assert_same(head.token_log_probs(hidden, targets, impl=impl), log_probs, leaves)
    assert_same(statistics.log_probs, log_probs, leaves)
    assert_same(statistics.entropy, entropy, leaves)
