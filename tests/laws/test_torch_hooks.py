"""What torch's tools do with `nn.Linear`, `nn.Embedding` and `nn.EmbeddingBag` they do with heads, tables and bags.

Tools are hooks, another `forward`, and what recomputes a weight: `prune`, `weight_norm`, `spectral_norm`. What no call
computes, such as a loss without logits, follows from the numbers of the call, or is an error.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from covering import looped
from kinds import (
    EMBED_DIM,
    INJECTIONS,
    LOOKUP_TABLES,
    NUM_HEADS,
    POSITIONS,
    STREAM_HEADS,
    STREAM_IDS,
    STREAM_SIZES,
    TABLES,
    TIED_HEADS,
    UNTIED_HEADS,
    VOCAB_SIZE,
    dense,
)
from tiny_models import build
from torch import Tensor, nn
from torch.nn.modules import module as global_hooks
from torch.nn.utils import parametrizations, parametrize, prune, spectral_norm, weight_norm

import embedlayer as el
from embedlayer.heads import DraftHead, StreamHead
from embedlayer.heads.prediction import PredictionHead
from embedlayer.losses import ForwardKL, LinearLogits, divergence
from embedlayer.tables.streams import StreamTable

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*weight_norm.*is deprecated", "ignore:Full backward hook", "ignore:For backward hooks"
)
V, D = VOCAB_SIZE, EMBED_DIM
DRAFT = [3, 7, 11, 48]


def steered(module: nn.Module, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    states = arguments[0].flip(0)
    return (1.5 * states if states.is_floating_point() else states, *arguments[1:])


def changed(module: nn.Module, arguments: Any, result: Any) -> Any:
    """Logits that depend on their place in the batch, as a hook may."""
    if isinstance(result, list):
        return [changed(module, arguments, each) for each in result]
    places = torch.arange(result.shape[0], dtype=result.dtype).view(-1, *[1] * (result.dim() - 1))
    return result * (1 + places) + torch.linspace(-1, 1, result.shape[-1], dtype=result.dtype)


def halved(module: nn.Module, received: Any, of_output: Any) -> Any:
    return tuple(None if each is None else each / 2 for each in received)


def doubled(module: nn.Module, of_output: Any) -> Any:
    return tuple(None if each is None else 2 * each for each in of_output)


def replace_forward(module: Any) -> None:
    before = module.forward

    def forward(*arguments: Any, **options: Any) -> Any:  # a loss calls it for some tokens at a time
        result = before(*arguments, **options)
        return [each.sin() for each in result] if isinstance(result, list) else result.sin()

    module.forward = forward


Tool = Callable[[nn.Module], Any]
REGISTERED: dict[str, Callable[..., Any]] = {
    "forward_hook": changed,
    "forward_pre_hook": steered,
    "full_backward_hook": halved,
    "full_backward_pre_hook": doubled,
}
HOOKS: dict[str, Tool] = {
    **{
        name: lambda module, name=name, hook=hook: getattr(module, f"register_{name}")(hook)
        for name, hook in REGISTERED.items()
    },
    **{
        f"global {name}": lambda module, name=name, hook=hook: getattr(global_hooks, f"register_module_{name}")(
            lambda each, *others: hook(each, *others) if each is module else None
        )
        for name, hook in REGISTERED.items()
    },
    "forward of the instance": replace_forward,
}
WEIGHTS: dict[str, Tool] = {
    "prune": lambda module: prune.l1_unstructured(module, "weight", 0.5),
    "weight_norm": weight_norm,
    "spectral_norm": spectral_norm,
    "parametrizations.weight_norm": parametrizations.weight_norm,
    "parametrizations.spectral_norm": parametrizations.spectral_norm,
    "parametrizations.orthogonal": parametrizations.orthogonal,
}
TOOLS = {**HOOKS, **WEIGHTS}


@contextmanager
def applied(tool: Tool, *modules: nn.Module) -> Iterator[None]:
    """Apply a tool; global hooks are removed at the end."""
    with ExitStack() as stack:
        for module in modules:
            torch.manual_seed(1)  # the vectors with which spectral_norm starts
            handle = tool(module)
            if isinstance(handle, torch.utils.hooks.RemovableHandle):
                stack.callback(handle.remove)
        yield


def with_transform() -> PredictionHead:
    return PredictionHead(el.OutputHead(D, V), dense=nn.Linear(D, D), activation="gelu")


def draft_of(head: el.OutputHead) -> DraftHead:
    draft = DraftHead(head, DRAFT)
    draft.trained = head  # so that its parameters are found
    return draft


HEADS: dict[str, Callable[[], Any]] = {
    **{name: lambda make=make: (head := make(), head) for name, make in UNTIED_HEADS.items()},
    **{
        name: lambda table=table: (head := el.OutputHead(TABLES[table](), bias=True), head)
        for name, table in TIED_HEADS.items()
    },
    "float32 head": lambda: (head := el.OutputHead(D, V, head_dtype=torch.float32), head),
    "invariant": lambda: (head := el.OutputHead(D, V, batch_invariant=True), head),
    "with a transform": lambda: (head := with_transform(), head),
    "the product of a transform": lambda: (head := with_transform(), head.output),
    "draft": lambda: (head := draft_of(el.OutputHead(D, V, bias=True)), head),
    "the head of a draft": lambda: (head := draft_of(el.OutputHead(D, V, bias=True)), head.trained),
    "the head of a draft, tied": lambda: (head := draft_of(el.OutputHead(dense(), bias=True)), head.trained),
    **{f"streams, {name}": lambda make=make: (head := make(), head) for name, make in STREAM_HEADS.items()},
    "streams, output": lambda: (head := STREAM_HEADS["one weight"](), head.output),
    "streams, one of three outputs": lambda: (head := STREAM_HEADS["three weights"](), head.output[1]),
}
"""A head, and the module to which a tool is applied."""


def targets_of(head: nn.Module, hidden: Tensor) -> Tensor:
    torch.manual_seed(2)
    if isinstance(head, StreamHead):
        return torch.stack([torch.randint(0, size, (2, 5)) for size in head.sizes], -1)
    places = torch.randint(0, len(DRAFT) if isinstance(head, DraftHead) else V, (2, 5))
    ids = torch.tensor(DRAFT)[places] if isinstance(head, DraftHead) else places
    return ids.index_fill(0, torch.tensor([1]), -100) if isinstance(head, el.OutputHead) else ids


def hidden_of(head: nn.Module) -> Tensor:
    torch.manual_seed(3)
    streams = [head.num_streams] if isinstance(head, StreamHead) and head.hidden_per_stream else []
    return torch.randn(2, 5, *streams, D, requires_grad=True)


def plain_loss(head: nn.Module, hidden: Tensor, targets: Tensor) -> Tensor:
    """The mean of the cross entropy of the logits that a call returns."""
    logits = head(hidden)
    if isinstance(head, StreamHead):
        losses = [
            F.cross_entropy(x.flatten(0, -2), y.flatten()) for x, y in zip(logits, targets.unbind(-1), strict=True)
        ]
        return torch.stack(losses).mean()
    if isinstance(head, DraftHead):
        targets = head.to_draft(targets)
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def loss_of(head: Any, hidden: Tensor, targets: Tensor) -> Tensor:
    loss = head.loss(hidden, targets)
    return loss.loss if isinstance(head, StreamHead) else loss


def grads(loss: Tensor, head: nn.Module, hidden: Tensor) -> list[Tensor]:
    tables = [each.table for each in head.modules() if isinstance(each, el.OutputHead) and each.table is not None]
    leaves = [hidden, *head.parameters(), *(p for table in tables for p in table.parameters() if p.requires_grad)]
    found = torch.autograd.grad(loss, leaves, allow_unused=True)
    return [torch.zeros_like(leaf) if each is None else each for leaf, each in zip(leaves, found, strict=True)]


@looped("name, tool", HEADS, HOOKS)
def test_a_loss_is_that_of_the_logits_of_a_call(name, tool) -> None:
    torch.manual_seed(0)
    head, hooked = HEADS[name]()
    hidden, without = hidden_of(head), hidden_of(head)
    targets = targets_of(head, hidden)
    before = loss_of(head, without, targets)
    gradient = grads(before, head, without)
    with applied(HOOKS[tool], hooked):
        loss, expected = loss_of(head, hidden, targets), plain_loss(head, hidden, targets)
        torch.testing.assert_close(loss, expected)
        found = grads(loss, head, hidden)
        torch.testing.assert_close(found, grads(expected, head, hidden), rtol=1e-4, atol=1e-6)
        if tool == "forward of the instance":
            del hooked.forward
        if "backward" not in tool or not isinstance(hooked, StreamHead):  # torch runs none for a list of logits
            assert not torch.allclose(loss, before) or not torch.allclose(found[0], gradient[0])
    torch.testing.assert_close(loss_of(head, without, targets), before)


def teacher(hidden: Tensor) -> LinearLogits:
    return LinearLogits(hidden.detach(), torch.linspace(-1, 1, V * D).sin().view(V, D))


OUTPUTS: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "log-probabilities": (
        lambda head, hidden, ids: head.token_log_probs(hidden, ids),
        lambda log_p, hidden, ids: log_p.gather(-1, ids.unsqueeze(-1)).squeeze(-1),
    ),
    "entropy": (
        lambda head, hidden, ids: head.token_statistics(hidden, ids).entropy,
        lambda log_p, hidden, ids: -(log_p.exp() * log_p).sum(-1),
    ),
    "largest": (
        lambda head, hidden, ids: head.token_statistics(hidden, statistics=(), top_k=3).top_ids,
        lambda log_p, hidden, ids: log_p.topk(3, -1).indices,
    ),
    "temperature": (
        lambda head, hidden, ids: head.loss(hidden, ids, temperature=2.0, reduction="sum"),
        lambda log_p, hidden, ids: F.cross_entropy((log_p / 2).flatten(0, 1), ids.flatten(), reduction="sum"),
    ),
    "chunks": (
        lambda head, hidden, ids: head.loss(hidden, ids, impl="chunked", chunk_bytes=400, label_smoothing=0.1),
        lambda log_p, hidden, ids: F.cross_entropy(log_p.flatten(0, 1), ids.flatten(), label_smoothing=0.1),
    ),
    "student": (
        lambda head, hidden, ids: divergence((hidden, head), teacher(hidden), ForwardKL(), reduction="none"),
        lambda log_p, hidden, ids: F.kl_div(
            log_p, teacher(hidden).logits().log_softmax(-1), log_target=True, reduction="none"
        ).sum(-1),
    ),
    "teacher": (
        lambda head, hidden, ids: divergence(teacher(hidden), (hidden, head), ForwardKL(), reduction="none"),
        lambda log_p, hidden, ids: F.kl_div(
            teacher(hidden).logits().log_softmax(-1), log_p, log_target=True, reduction="none"
        ).sum(-1),
    ),
    "two depths": (
        lambda head, hidden, ids: head.multi_token_loss([hidden, hidden], ids).losses[0],
        lambda log_p, hidden, ids: F.cross_entropy(log_p[:, :-1].flatten(0, 1), ids[:, 1:].flatten()),
    ),
}


@looped(
    "name, tool, output", ("untied", "tied to int8", "with a transform", "the product of a transform"), HOOKS, OUTPUTS
)
def test_all_outputs_are_those_of_the_logits_of_a_call(name, tool, output) -> None:
    of_a_call(name, tool, output)


@looped("tool, output", WEIGHTS, OUTPUTS)
def test_all_outputs_are_of_the_weight_of_a_call(tool, output) -> None:
    of_a_call("untied", tool, output)


def of_a_call(name: str, tool: str, output: str) -> None:
    torch.manual_seed(0)
    head, hooked = HEADS[name]()
    hidden = hidden_of(head).detach()
    ids = torch.randint(1, V, (2, 5))
    ours, plain = OUTPUTS[output]
    with applied(TOOLS[tool], hooked):
        hooked.eval()  # spectral_norm makes a power iteration at each call in training
        expected = plain(head(hidden).log_softmax(-1), hidden, ids)
        torch.testing.assert_close(ours(head, hidden, ids), expected)


def like(module: Any) -> Any:
    """The module with certain numbers in its weight."""
    with torch.no_grad():
        module.weight.copy_(torch.linspace(-3, 3, V * D).sin().view(V, D) * torch.linspace(0.5, 2, V).unsqueeze(1))
    return module


def table_of() -> Any:
    return like(el.TokenEmbedding(V, D))


def rows_of(table: nn.Module) -> Tensor:
    """All rows, by a call."""
    rows: Tensor = table(torch.arange(V))
    return rows


def entropy_of(logits: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), IDS.flatten())


def bags_of(table: nn.Module) -> Tensor:
    """The mean of each bag of `IDS`, by one call of a table."""
    means: Tensor = table(IDS).mean(-2)
    return means


IDS, OFFSETS = torch.tensor([[1, 2, 2, 7, 49], [48, 7, 7, 0, 3]]), torch.tensor([0, 2, 2, 5])
IDS_OF_STREAMS = STREAM_IDS + torch.tensor([0, *STREAM_SIZES[:-1]]).cumsum(0)
Step = Callable[[Any, Tensor], Tensor]
linear, embedding = (lambda: like(nn.Linear(D, V, bias=False))), (lambda: like(nn.Embedding(V, D)))

CALLED: dict[str, tuple[Callable[[], nn.Module], Step, Callable[[], nn.Module], Step]] = {
    "head": (
        lambda: like(el.OutputHead(D, V)),
        lambda head, hidden: head.loss(hidden, IDS),
        linear,
        lambda head, hidden: entropy_of(head(hidden)),
    ),
    "head, called and measured": (
        lambda: like(el.OutputHead(D, V)),
        lambda head, hidden: entropy_of(head(hidden)) + head.loss(hidden, IDS),
        linear,
        lambda head, hidden: entropy_of(head(hidden)) + entropy_of(head(hidden)),
    ),
    "head of a draft": (
        lambda: like(el.OutputHead(D, V)),
        lambda head, hidden: DraftHead(head, range(V)).loss(hidden, IDS),
        linear,
        lambda head, hidden: entropy_of(head(hidden)),
    ),
    "table": (table_of, lambda table, _: table(IDS).sin().sum(), embedding, lambda table, _: table(IDS).sin().sum()),
    "table of an input layer": (
        table_of,
        lambda table, _: el.EmbeddingLayer(table)(IDS).sin().sum(),
        embedding,
        lambda table, _: table(IDS).sin().sum(),
    ),
    "bag": (
        lambda: el.tables.Bag(table_of()),
        lambda bag, _: bag(IDS.flatten(), OFFSETS).sin().sum(),
        lambda: like(nn.EmbeddingBag(V, D)),
        lambda bag, _: bag(IDS.flatten(), OFFSETS).sin().sum(),
    ),
    "bag, weighted": (
        lambda: el.tables.Bag(table_of(), mode="sum"),
        lambda bag, _: bag(IDS, per_sample_weights=IDS.cos()).sin().sum(),
        lambda: like(nn.EmbeddingBag(V, D, mode="sum")),
        lambda bag, _: bag(IDS, per_sample_weights=IDS.cos()).sin().sum(),
    ),
    "table of a bag": (
        table_of,
        lambda table, _: el.tables.Bag(table)(IDS).sin().sum(),
        embedding,
        lambda table, _: bags_of(table).sin().sum(),
    ),
    "table of streams": (
        table_of,
        lambda table, _: StreamTable(table, STREAM_SIZES)(STREAM_IDS).sin().sum(),
        embedding,
        lambda table, _: table(IDS_OF_STREAMS).sum(-2).sin().sum(),
    ),
}
"""Module that is called, a step of its training, and the same of a module of torch."""

READ: dict[str, tuple[Step, Step]] = {
    "rows": (lambda table, _: table.rows(3, 20).sin().sum(), lambda rows, _: rows[3:20].sin().sum()),
    "look-up": (lambda table, _: table.look_up(IDS).sin().sum(), lambda rows, _: rows[IDS].sin().sum()),
    "sums": (lambda table, _: table.summed(IDS).sin().sum(), lambda rows, _: rows[IDS].sum(-2).sin().sum()),
    "logits": (
        lambda table, hidden: table.logits(hidden).sin().sum(),
        lambda rows, hidden: (hidden @ rows.T).sin().sum(),
    ),
    "tied head": (
        lambda table, hidden: el.OutputHead(table).loss(hidden, IDS),
        lambda rows, hidden: entropy_of(hidden @ rows.T),
    ),
    "draft of a tied head": (
        lambda table, hidden: DraftHead(el.OutputHead(table), range(V)).loss(hidden, IDS),
        lambda rows, hidden: entropy_of(hidden @ rows.T),
    ),
    "tied streams": (
        lambda table, hidden: StreamHead(el.OutputHead(table), [V]).loss(hidden, IDS.unsqueeze(-1)).loss,
        lambda rows, hidden: entropy_of(hidden @ rows.T),
    ),
    "DecoderLM": (
        lambda table, hidden: el.OutputHead(table).loss(table(IDS).sin(), IDS),
        lambda rows, hidden: entropy_of(rows[IDS].sin() @ rows.T),
    ),
}
"""What reads a table without a call of it, and the same for rows."""


def trained(module: nn.Module, tool: Tool, step: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """The losses of three steps, and the parameters and buffers behind them."""
    losses = []
    with applied(tool, module):
        optimizer = torch.optim.SGD([*module.parameters()], lr=0.5)
        for number in range(3):
            optimizer.zero_grad()
            loss = step(torch.linspace(0, number + 2, 10 * D).cos().view(2, 5, D))
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
    return [*losses, *(each.detach() for each in module.state_dict().values())]


@looped("name, tool", CALLED, TOOLS, pairs=["name, tool"])
def test_training_with_a_tool_is_that_of_a_module_of_torch(name, tool) -> None:
    build, step, build_plain, plain_step = CALLED[name]
    ours, plain = build(), build_plain()
    module = ours.table if isinstance(ours, el.tables.Bag) and tool in WEIGHTS else ours
    expected = trained(plain, TOOLS[tool], lambda hidden: plain_step(plain, hidden))
    torch.testing.assert_close(
        trained(module, TOOLS[tool], lambda hidden: step(ours, hidden)), expected, rtol=1e-3, atol=1e-4
    )


@looped("name, tool", READ, WEIGHTS, pairs=["name, tool"])
def test_rows_that_are_read_without_a_call_are_those_of_a_call(name, tool) -> None:
    (step, plain_step), table, plain = READ[name], table_of().eval(), embedding().eval()
    expected = trained(plain, WEIGHTS[tool], lambda hidden: plain_step(rows_of(plain), hidden))
    torch.testing.assert_close(
        trained(table, WEIGHTS[tool], lambda hidden: step(table, hidden)), expected, rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("part", ["inner", "projection"])
@looped("tool", WEIGHTS)
def test_both_factors_of_a_table_may_be_recomputed(part, tool) -> None:
    torch.manual_seed(0)
    table, hidden = el.FactorizedEmbedding(V, D, 8).eval(), torch.randn(2, 5, D)
    optimizer = torch.optim.SGD(table.parameters(), lr=0.5)
    with applied(WEIGHTS[tool], table.get_submodule(part)):
        for _ in range(2):
            expected = entropy_of(hidden @ rows_of(table).T)
            loss = el.OutputHead(table).loss(hidden, IDS)
            torch.testing.assert_close(loss, expected)
            torch.testing.assert_close(entropy_of(hidden @ table.rows(0, V).T), expected)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


PRUNED: dict[str, Callable[[], nn.Module]] = {
    **{name: lambda make=make: decoder_with(make()) for name, make in INJECTIONS.items()},
    "tied": lambda: el.DecoderLM(dense(), "learned", num_layers=1, num_heads=2, max_seq_len=16),
    "factorised": lambda: el.DecoderLM(TABLES["factorised"](), "learned", num_layers=1, num_heads=2, max_seq_len=16),
}


def decoder_with(injection: Any) -> nn.Module:
    return el.DecoderLM(dense(), "rotary", num_layers=2, num_heads=NUM_HEADS, injections=[injection])


@looped("name", PRUNED)
def test_a_pruned_model_is_that_of_its_weights(name) -> None:
    torch.manual_seed(0)
    model: Any = PRUNED[name]()
    pruned = [each for each in model.modules() if isinstance(each._parameters.get("weight"), nn.Parameter)]
    for part in pruned:
        prune.random_unstructured(part, "weight", 0.3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(2):
        optimizer.zero_grad()
        model(input_ids=IDS, labels=IDS).loss.backward()
        optimizer.step()
    loss, logits = model(input_ids=IDS, labels=IDS).loss, model(IDS)
    for part in pruned:
        prune.remove(part, "weight")
    torch.testing.assert_close((loss, logits), (model(input_ids=IDS, labels=IDS).loss, model(IDS)))


@looped("name", [*LOOKUP_TABLES, "relative positions"])
def test_pruned_rows_are_never_those_of_an_earlier_step(name) -> None:
    torch.manual_seed(0)
    part = POSITIONS["relative"]() if name == "relative positions" else LOOKUP_TABLES[name]()
    trained = [(each, own) for each in part.modules() for own, p in [*each._parameters.items()] if p is not None]
    trained = [(each, own) for each, own in trained if each._parameters[own].requires_grad]
    if not trained:
        pytest.skip("has no parameter that is trained")
    if name == "mapped, trained":
        prune.random_unstructured(part, "weight", 0.3)
        for read in (lambda: part(IDS), lambda: part.rows(0, 3), lambda: el.tables.Bag(part)(IDS)):
            with pytest.raises(el.SizeError):
                read()
        return
    for each, own in trained:
        prune.random_unstructured(each, own, 0.3)

    def reads() -> list[Tensor]:
        if isinstance(part, el.RelativePositionBias):
            return [part.bias(torch.arange(5), torch.arange(5))]
        found = [part(IDS), part.look_up(IDS), part.summed(IDS), el.tables.Bag(part)(IDS)]
        if isinstance(part, el.TokenTable) and not part.row_sparse:
            found += [el.OutputHead(part)(torch.ones(2, D)), part.loss(torch.ones(2, D), torch.tensor([7, 8])).view(1)]
        return found

    optimizer = torch.optim.SGD(part.parameters(), lr=0.5)
    for _ in range(2):
        optimizer.zero_grad()
        sum(each.sin().sum() for each in reads()).backward()
        optimizer.step()
    found = reads()
    for each, own in trained:
        prune.remove(each, own)
    torch.testing.assert_close(found, reads(), rtol=1e-4, atol=2e-3)  # as factors, in another order


def test_stacked_rows_may_be_pruned() -> None:
    torch.manual_seed(0)
    head, hidden = STREAM_HEADS["stacked"](), torch.randn(2, 5, 3, D)
    targets = torch.randint(0, 10, (2, 5, 3))
    prune.l1_unstructured(head.output, "weight", 0.5)
    for _ in range(2):
        loss = head.loss(hidden, targets).loss
        with torch.no_grad():
            logits = torch.einsum("btkd,kvd->btkv", hidden, head.output.weight_orig * head.output.weight_mask)
        torch.testing.assert_close(loss.detach(), F.cross_entropy(logits.flatten(0, 2), targets.flatten()))
        loss.backward()
        torch.optim.SGD(head.parameters(), lr=5.0).step()


class Counted(nn.Module):
    """A parametrization that changes nothing."""

    reads = 0

    def forward(self, weight: Tensor) -> Tensor:
        Counted.reads += 1
        return weight


@looped("name, row_sparse", [name for name in [*CALLED, *READ] if name != "head, called and measured"], [False, True])
def test_a_parametrized_weight_is_computed_once_a_call_or_read(name, row_sparse) -> None:
    ours: Any = CALLED[name][0]() if name in CALLED else table_of()
    step = CALLED[name][1] if name in CALLED else READ[name][0]
    module = ours.table if isinstance(ours, el.tables.Bag) else ours
    if row_sparse and name in CALLED and isinstance(module, el.TokenEmbedding):
        module.__class__ = el.RowSparseEmbedding  # type: ignore[assignment]
    parametrize.register_parametrization(module, "weight", Counted())
    Counted.reads = 0
    step(ours, torch.randn(2, 5, D))
    assert Counted.reads == 1 + (name == "DecoderLM")


def test_hooks_see_one_call_with_all_hidden_states() -> None:
    torch.manual_seed(0)
    head, shapes = el.OutputHead(D, V), []
    head.register_forward_hook(lambda module, arguments, result: shapes.append((*arguments[0].shape, result.shape[-1])))
    head.loss(torch.randn(2, 5, D, requires_grad=True), IDS, impl="chunked", chunk_bytes=400).backward()
    assert shapes == [(2, 5, D, V)]


def test_an_option_that_the_call_applies_cannot_be_replaced() -> None:
    head, hidden = el.OutputHead(D, V, softcap=5.0), torch.randn(2, 5, D)
    head.register_forward_hook(changed)
    torch.testing.assert_close(head.loss(hidden, IDS, softcap=5.0), head.loss(hidden, IDS))
    for options in ({"softcap": 3.0}, {"head_dtype": torch.float32}):
        with pytest.raises(el.SizeError):
            head.loss(hidden, IDS, **options)


@pytest.mark.parametrize("rows", ["dense", "compressed"])
def test_hooks_on_the_head_of_a_patched_model_act_once(rows) -> None:
    torch.manual_seed(0)
    model = el.patch(build("gemma2", "causal", {"final_logit_softcapping": 2.0})[1])
    if rows == "compressed":
        model = el.compress.replace_table(model, el.compress.compress_table(model.get_input_embeddings(), "int8"))
    head = model.get_output_embeddings()
    head.register_forward_pre_hook(steered)
    head.register_forward_hook(changed)
    hidden, expected = model.model(IDS).last_hidden_state, model(IDS).logits + 0.0
    loss = F.cross_entropy(expected.flatten(0, 1), IDS.flatten())
    torch.testing.assert_close(head.loss(hidden, IDS), loss)
    torch.testing.assert_close(model(IDS, labels=IDS).loss, F.cross_entropy(expected[:, :-1].mT, IDS[:, 1:]))


def test_generation_chooses_by_the_logits_of_a_call() -> None:
    torch.manual_seed(0)
    model = el.DecoderLM(dense(), "rotary", el.OutputHead(D, V), num_layers=1, num_heads=2).eval()
    model.head.register_forward_hook(lambda head, arguments, logits: -2 * logits)
    ids = torch.tensor([[1, 2, 3]])
    logits = model(ids)[:, -1]
    found = el.generate(model, ids, max_new_tokens=1, temperature=0.0, return_log_probs=True)
    assert torch.equal(found.ids[:, -1], logits.argmax(-1))
    torch.testing.assert_close(found.log_probs[:, -1], logits.log_softmax(-1).amax(-1))
    outputs = model(input_ids=ids, labels=ids)
    torch.testing.assert_close(outputs.loss, F.cross_entropy(model(ids)[0, :-1], ids[0, 1:]))


class Model(nn.Module):
    """A loss of token IDs, one number for each sequence, from an input table and a head."""

    def __init__(self, table: nn.Module, head: nn.Module, outputs: Callable[[Any, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.table, self.dense, self.head, self.outputs = table, nn.Linear(D, D), head, outputs

    def forward(self, ids: Tensor) -> Tensor:
        return self.outputs(self.head, self.dense(self.table(ids)), ids)


def each_loss(logits: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(logits.mT, ids, reduction="none").sum(-1)


PRIVATE: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "call": lambda head, hidden, ids: each_loss(head(hidden), ids),
    "loss": lambda head, hidden, ids: head.loss(hidden, ids, reduction="none").sum(-1),
    "draft": lambda head, hidden, ids: each_loss(DraftHead(head, range(V))(hidden), ids),
}


def private(model: nn.Module) -> Any:
    return pytest.importorskip("opacus.grad_sample").GradSampleModule(model, loss_reduction="sum")


def assert_private(model: nn.Module) -> None:
    """Check the gradients of each sample under Opacus against one backward pass for each."""
    leaves = [each for each in model.parameters() if each.requires_grad]
    each = [torch.autograd.grad(model(ids.unsqueeze(0)).sum(), leaves) for ids in IDS]
    expected = [torch.stack(found) for found in zip(*each, strict=True)]
    private(model)(IDS).sum().backward()
    torch.testing.assert_close([each.grad_sample for each in leaves], expected)


@pytest.mark.filterwarnings("ignore:In CPU autocast")
@looped("name, outputs", [name for name in TIED_HEADS if "int" not in name and "stored" not in name], PRIVATE)
def test_opacus_and_a_tied_head_are_an_error(name, outputs) -> None:
    table = TABLES[TIED_HEADS[name]]()
    model = Model(table, el.OutputHead(table, bias=outputs == "loss"), PRIVATE[outputs])
    with pytest.raises((el.SizeError, NotImplementedError)):  # a buffer, by Opacus itself
        private(model)(IDS)


@pytest.mark.filterwarnings("ignore:In CPU autocast")
@pytest.mark.parametrize("outputs", PRIVATE)
def test_opacus_sees_all_of_an_untied_head(outputs) -> None:
    torch.manual_seed(0)
    assert_private(Model(el.TokenEmbedding(V, D, 0, scale=2.0), el.OutputHead(D, V, bias=True), PRIVATE[outputs]))
