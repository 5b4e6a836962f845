"""A module with a row-sparse table trains under `torch.compile` as in eager mode; what it cannot do is refused by name.

No graph may contain the sparse gradient: Inductor takes it for a dense tensor.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from covering import some
from kinds import EMBED_DIM, INJECTIONS, NUM_HEADS, VOCAB_SIZE, dense, in_a_file
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.utils._pytree import tree_leaves

import embedlayer as el

pytestmark = [
    pytest.mark.usefixtures("unchecked"),
    pytest.mark.filterwarnings("ignore:The .grad attribute"),  # Dynamo reads it of the vectors that enter a graph
]

IDS = torch.tensor([[1, 2, 3, 7, 7], [7, 48, 0, 49, 1]])
TARGETS = IDS.roll(-1, 1)

TABLES: dict[str, Callable[[], el.LookupTable]] = {
    "row-sparse": lambda: dense(el.RowSparseEmbedding, init_std=1.0),
    "mapped": lambda: in_a_file(trained=True),
}


class Block(nn.Module):
    """Vectors of a table, and a module of torch after them."""

    def __init__(self, table: el.LookupTable, after: nn.Module) -> None:
        super().__init__()
        self.table, self.after = table, after

    def loss(self, ids: Tensor, targets: Tensor) -> Tensor:
        return self.after(self.table(ids)).sin().mean()


class BothEnds(Block):
    """The table is looked up twice, so that two gradients are added."""

    def loss(self, ids: Tensor, targets: Tensor) -> Tensor:
        return (self.after(self.table(ids)) - self.table(targets)).square().mean()


def decoder(table: el.LookupTable, **options: Any) -> el.DecoderLM:
    head = el.OutputHead(vocab_size=VOCAB_SIZE, embed_dim=EMBED_DIM)
    return el.DecoderLM(table, "rotary", num_layers=1, num_heads=NUM_HEADS, head=head, **options)


MODULES: dict[str, Callable[[el.LookupTable], nn.Module]] = {
    "LayerNorm": lambda table: Block(table, nn.LayerNorm(EMBED_DIM)),
    "TransformerEncoderLayer": lambda table: Block(
        table, nn.TransformerEncoderLayer(EMBED_DIM, NUM_HEADS, 32, 0.0, batch_first=True)
    ),
    "both ends": lambda table: BothEnds(table, nn.LayerNorm(EMBED_DIM)),
    "DecoderLM": decoder,
    **{
        f"DecoderLM, {name}": lambda table, name=name: decoder(table, injections=[INJECTIONS[name]()])
        for name in ("added, projected", "n-gram at the input")
    },
}


def without_sparse_tensors(graph: GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
    """Return the graph as it is, after a check that each of its tensors is dense."""
    from functorch.compile import make_boxed_func

    values = [value for node in graph.graph.nodes for value in tree_leaves(node.meta.get("val"))]
    assert all(value.layout is torch.strided for value in values if isinstance(value, Tensor))
    return make_boxed_func(graph.forward)


def losses_and_gradients(build: Callable[[], nn.Module], **options: Any) -> list[Tensor]:
    """Train for three steps, compiled if there are `options`: return losses, the last gradients, and the rows."""
    torch.manual_seed(0)
    model = build().double()
    optimizer = el.RowAdamW(model.parameters(), lr=0.1)
    loss_of = torch.compile(model.loss, **options) if options else model.loss
    losses = []
    for step in range(3):
        optimizer.zero_grad()
        loss = loss_of((IDS + step) % VOCAB_SIZE, (TARGETS + step) % VOCAB_SIZE)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    grads = [each.grad.to_dense() for each in model.parameters() if each.grad is not None]
    assert any(each.grad is not None and each.grad.is_sparse for each in model.parameters())
    return [*losses, *grads, *(each.detach().clone() for each in model.parameters())]


@pytest.mark.parametrize(
    ("table", "module"),
    some(
        {("row-sparse", "both ends"), ("mapped", "LayerNorm")},
        [*(("row-sparse", module) for module in MODULES), ("mapped", "LayerNorm"), ("mapped", "both ends")],
    ),
)
def test_no_graph_contains_the_sparse_gradient_and_training_is_that_of_eager_mode(table, module) -> None:
    from torch._dynamo.backends.common import aot_autograd

    def build() -> nn.Module:
        return MODULES[module](TABLES[table]())

    backend = aot_autograd(fw_compiler=without_sparse_tensors)
    torch.testing.assert_close(losses_and_gradients(build, backend=backend), losses_and_gradients(build))


REMEDIES: dict[str, Callable[[Block], Tensor]] = {
    "without fullgraph": lambda block: torch.compile(block.loss, backend="aot_eager")(IDS, TARGETS),
    "what follows the look-up": lambda block: (
        torch.compile(block.after, fullgraph=True, backend="aot_eager")(block.table(IDS)).sin().mean()
    ),
    "no_grad": lambda block: torch.no_grad()(torch.compile(block.loss, fullgraph=True, backend="eager"))(IDS, TARGETS),
}


def test_one_graph_with_gradients_is_refused_and_what_the_error_advises_works() -> None:
    block = Block(dense(el.RowSparseEmbedding), nn.LayerNorm(EMBED_DIM))
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"looks up a row-sparse table with gradients on"):
        torch.compile(block.loss, fullgraph=True, backend="aot_eager")(IDS, TARGETS)
    expected = block.loss(IDS, TARGETS)
    for name, remedy in REMEDIES.items():
        torch.testing.assert_close(remedy(block), expected, msg=lambda text, name=name: f"{name}: {text}")
    plain = Block(dense(), block.after)
    plain.table.load_state_dict(block.table.state_dict())
    found = torch.compile(plain.loss, fullgraph=True, backend="aot_eager")(IDS, TARGETS)
    torch.testing.assert_close(found, expected)


def test_a_frozen_row_sparse_table_is_part_of_one_graph() -> None:
    block = Block(dense(el.RowSparseEmbedding).requires_grad_(False), nn.LayerNorm(EMBED_DIM))
    found = torch.compile(block.loss, fullgraph=True, backend="aot_eager")(IDS, TARGETS)
    torch.testing.assert_close(found, block.loss(IDS, TARGETS))


def test_a_weight_that_was_computed_has_the_gradient_of_eager_mode_also_in_a_graph() -> None:
    block = Block(dense(el.RowSparseEmbedding), nn.LayerNorm(EMBED_DIM))
    weight = torch.randn(VOCAB_SIZE, EMBED_DIM, requires_grad=True)

    def loss(ids: Tensor) -> Tensor:
        return torch.func.functional_call(block.table, {"weight": 2 * weight}, (ids,)).sin().sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    grads = [torch.autograd.grad(each(IDS), weight)[0].to_dense() for each in (loss, compiled)]
    torch.testing.assert_close(*grads)
    assert grads[0].any(1).nonzero().flatten().tolist() == [1, 2, 3, 7, 48, 49]  # not the padding row
