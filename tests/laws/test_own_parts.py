"""Tables, schemes and heads that a user writes: combined, tied, saved, loaded, quantised and compiled as ours are."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from covering import cases
from kinds import EMBED_DIM, NUM_HEADS, VOCAB_SIZE, TableOfAUser
from torch import Tensor, nn

import embedlayer as el
from embedlayer.compress import compress_table, replace_table
from embedlayer.heads import PredictionHead

IDS = torch.tensor([[1, 7, 0, 49], [3, 7, 48, 2]])


class DoubledTable(el.TokenEmbedding):
    """A kind of ours with another look-up and other rows, and the constructor that it inherits."""

    def look_up(self, ids: Tensor) -> Tensor:
        return 2 * super().look_up(ids)

    def rows(self, start: int, stop: int) -> Tensor:
        return 2 * super().rows(start, stop)


class NarrowTable(el.TokenEmbedding):
    """A kind of ours with a constructor of its own, which takes less than ours, and an argument more."""

    def __init__(self, vocab_size: int, embed_dim: int, *, spread: float = 1.0) -> None:
        self.spread = spread
        super().__init__(vocab_size, embed_dim, padding_idx=0, init_std=0.02 * spread)


class ShiftedPositions(el.Position):
    def __init__(self, shift: float) -> None:
        super().__init__()
        self.shift = shift

    def rotate(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        factor = torch.cos(self.shift * positions.float()).view(-1, 1)
        return q * factor, k * factor


class LearnedDistance(el.Position):
    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.slopes = nn.Parameter(torch.rand(num_heads))

    def bias(self, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        query, key = torch.atleast_2d(query_positions), torch.atleast_2d(key_positions)
        distance = (query.unsqueeze(-1) - key.unsqueeze(-2)).abs().unsqueeze(1)
        return -self.slopes.view(1, -1, 1, 1) * distance


class TripledHead(el.OutputHead):
    """Other logits, and the constructor of ours."""

    def forward(self, hidden: Tensor) -> Tensor:
        return 3 * super().forward(hidden)


class GainHead(el.OutputHead):
    """A parameter of its own, and a constructor that takes a table and no option."""

    def __init__(self, table: el.TokenTable) -> None:
        super().__init__(table, softcap=5.0)
        self.gain = nn.Parameter(torch.full((), 1.5))

    def forward(self, hidden: Tensor) -> Tensor:
        return self.gain * super().forward(hidden)


class PowerHead(el.OutputHead):
    """An argument of its own, which is an attribute, and those of ours."""

    def __init__(self, table: el.TokenTable | None = None, *, power: float = 1.0, **options: Any) -> None:
        super().__init__(table, **options)
        self.power = power

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden.sign() * hidden.abs() ** self.power)


OWN_TABLES = {
    "of a user": lambda: TableOfAUser(VOCAB_SIZE, EMBED_DIM, padding_idx=0),
    "doubled": lambda: DoubledTable(VOCAB_SIZE, EMBED_DIM, padding_idx=0),
    "narrow": lambda: NarrowTable(VOCAB_SIZE, EMBED_DIM, spread=3.0),
    "ours": lambda: el.TokenEmbedding(VOCAB_SIZE, EMBED_DIM),
}
OWN_SCHEMES = {
    "rotation": lambda: ShiftedPositions(0.25),
    "bias": lambda: LearnedDistance(NUM_HEADS),
    "ours": lambda: el.RotaryEmbedding(EMBED_DIM // NUM_HEADS),
}
SIZES = {"vocab_size": VOCAB_SIZE, "embed_dim": EMBED_DIM}
OWN_HEADS = {
    "tripled": lambda table: TripledHead(table, bias=True),
    "tripled, untied": lambda table: TripledHead(EMBED_DIM, VOCAB_SIZE),
    "gain": GainHead,
    "power": lambda table: PowerHead(table, power=2.0),
    "power, untied": lambda table: PowerHead(power=2.0, logit_scale=0.5, **SIZES),
    "ours": el.OutputHead,
}


def layer_of(kind: str, table: str, scheme: str, head: str) -> el.DecoderLM | el.EmbeddingLayer:
    """A decoder or an embedding layer with own parts, whose parameters all differ from those of a new one."""
    rows, position = OWN_TABLES[table](), OWN_SCHEMES[scheme]()
    ends = OWN_HEADS[head](rows)
    if kind == "DecoderLM":
        layer: Any = el.DecoderLM(rows, position, ends, num_layers=1, num_heads=NUM_HEADS)
    else:
        layer = el.EmbeddingLayer(rows, position, ends)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(torch.randn_like(parameter) / 5)
    return layer.eval()


def logits(layer: nn.Module) -> Tensor:
    return layer(IDS) if isinstance(layer, el.DecoderLM) else layer.head(layer.input(IDS))


def require_same(layer: nn.Module, other: nn.Module) -> None:
    for name in ("table", "position", "head"):
        assert type(getattr(other, name)) is type(getattr(layer, name))
    assert other.head.tied == layer.head.tied
    assert other.state_dict().keys() == layer.state_dict().keys()
    torch.testing.assert_close(logits(other), logits(layer), rtol=0, atol=0)


@cases("kind, table, scheme, head", ["DecoderLM", "EmbeddingLayer"], OWN_TABLES, OWN_SCHEMES, OWN_HEADS)
def test_own_parts_are_saved_loaded_copied_quantised_and_compiled(
    unchecked: None, kind, table, scheme, head, tmp_path, pytestconfig
) -> None:
    layer = layer_of(kind, table, scheme, head)
    expected = logits(layer)
    layer.save_pretrained(tmp_path / "whole")
    require_same(layer, type(layer).from_pretrained(tmp_path / "whole").eval())
    require_same(layer, copy.deepcopy(layer))
    loss = layer.head.loss(layer.input(IDS) if kind == "EmbeddingLayer" else layer.hidden(IDS), IDS)
    torch.testing.assert_close(loss, F.cross_entropy(expected.flatten(0, 1), IDS.flatten()))
    if kind == "DecoderLM" or pytestconfig.getoption("--all"):
        backend = "aot_eager" if pytestconfig.getoption("--all") else "eager"
        compiled = torch.compile(lambda: logits(layer), fullgraph=True, backend=backend)
        with torch.no_grad():
            torch.testing.assert_close(compiled(), expected)
    small = replace_table(layer, compress_table(layer.table, "int8"))
    assert type(small.head) is type(layer.head)
    with torch.no_grad():
        assert (logits(small) - expected).norm() < 0.1 * expected.norm()
    small.save_pretrained(tmp_path / "small")
    require_same(small, type(small).from_pretrained(tmp_path / "small").eval())


@pytest.mark.parametrize("name", [name for name in OWN_TABLES if name != "ours"])
def test_an_own_table_is_saved_alone(name, tmp_path) -> None:
    table = OWN_TABLES[name]()
    table.save_pretrained(tmp_path)
    again = type(table).from_pretrained(tmp_path)
    assert torch.equal(again(IDS), table(IDS))
    assert again.config == table.config


class LostArgument(el.OutputHead):
    """An argument of its own, of which nothing remains."""

    def __init__(self, table: el.TokenTable, power: float) -> None:
        super().__init__(table)
        self.exponent = power


class OtherNames(el.TokenEmbedding):
    def __init__(self, rows: int, columns: int) -> None:
        super().__init__(rows, columns)


class AddedLater(el.OutputHead):
    """A parameter that no new one has."""


def with_a_parameter(table: el.TokenTable) -> el.OutputHead:
    head = AddedLater(table)
    head.late = nn.Parameter(torch.zeros(2))
    return head


def capped_later(table: el.TokenTable) -> el.OutputHead:
    head = GainHead(table)
    head.softcap = 7.0
    return head


NOT_LOADABLE = {
    "LostArgument cannot be saved: its constructor takes power": lambda table: LostArgument(table, 2.0),
    "head.late would be unexpected": with_a_parameter,
    r"head.softcap is 7.0, and would be 5.0": capped_later,
}


@pytest.mark.parametrize("message", NOT_LOADABLE)
def test_what_cannot_be_loaded_is_refused_before_a_file_is_written(message, tmp_path) -> None:
    table = el.TokenEmbedding(VOCAB_SIZE, EMBED_DIM)
    for layer in (
        el.DecoderLM(table, "rotary", NOT_LOADABLE[message](table), num_layers=1),
        el.EmbeddingLayer(table, None, NOT_LOADABLE[message](table)),
    ):
        with pytest.raises(el.CheckpointError, match=message):
            layer.save_pretrained(tmp_path / "refused")
        assert not (tmp_path / "refused").exists()


def test_a_table_whose_constructor_has_other_names_is_refused(tmp_path) -> None:
    with pytest.raises(el.CheckpointError, match=r"OtherNames cannot be saved: its constructor takes (rows|columns)"):
        OtherNames(7, 4).save_pretrained(tmp_path / "refused")


def test_a_tied_head_alone_is_refused_and_what_the_error_says_works(tmp_path) -> None:
    table = el.TokenEmbedding(VOCAB_SIZE, EMBED_DIM)
    head = TripledHead(table)
    with pytest.raises(el.CheckpointError, match=r"no rows of its own.*save the table, and tie a new head to it"):
        head.save_pretrained(tmp_path / "head")
    table.save_pretrained(tmp_path / "table")
    again = TripledHead(el.TokenEmbedding.from_pretrained(tmp_path / "table"))
    assert torch.equal(again(torch.ones(EMBED_DIM)), head(torch.ones(EMBED_DIM)))


def test_a_module_that_was_exchanged_for_another_class_is_refused(tmp_path) -> None:
    model = layer_of("DecoderLM", "ours", "ours", "ours")
    model.norm = nn.LayerNorm(EMBED_DIM, bias=False)
    with pytest.raises(el.CheckpointError, match="norm is a LayerNorm, and would be a RMSNorm"):
        model.save_pretrained(tmp_path)


class OwnTransform(PredictionHead):
    pass


def test_a_subclass_of_a_head_with_a_transform_is_refused(tmp_path) -> None:
    table = el.TokenEmbedding(VOCAB_SIZE, EMBED_DIM)
    head = OwnTransform(el.OutputHead(table), dense=nn.Linear(EMBED_DIM, EMBED_DIM))
    with pytest.raises(el.CheckpointError, match="head is an OwnTransform, and would be a PredictionHead"):
        el.EmbeddingLayer(table, None, head).save_pretrained(tmp_path)


def test_saving_keeps_the_state_of_random_generators(tmp_path) -> None:
    model, before = layer_of("DecoderLM", "of a user", "bias", "gain"), torch.get_rng_state()
    model.save_pretrained(tmp_path)
    assert torch.equal(torch.get_rng_state(), before)


class ShiftedHead(el.OutputHead):
    """A bias of its own for each token, behind a cap that is no option of `OutputHead`."""

    def __init__(self, table: el.TokenTable | None = None, **options: Any) -> None:
        super().__init__(table, **options)
        self.shift = nn.Parameter(torch.linspace(-1, 1, self.out_features))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return 10 * torch.tanh((super().forward(hidden) + self.shift) / 10)


@pytest.mark.parametrize("tied", [True, False])
def test_an_edit_refuses_values_of_tokens_that_a_users_class_has(tied) -> None:
    table = el.TokenEmbedding(20, 8)
    head = ShiftedHead(table) if tied else ShiftedHead(vocab_size=20, embed_dim=8)
    model = nn.ModuleDict({"table": table, "head": head})
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for edit in (lambda: el.vocab.edit_vocabulary(model, remove=[3]), lambda: el.vocab.add_tokens(model, 2)):
        with pytest.raises(el.VocabularyError, match=r"head\.shift has values for each token beside the rows"):
            edit()
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("where", ["call", "head"])
def test_mask_padding_is_honoured_by_a_head_with_its_own_forward(where) -> None:
    table = el.TokenEmbedding(20, 8, padding_idx=3)
    hidden, targets = torch.randn(5, 8), torch.tensor([1, 2, 4, 5, 6])
    head = ShiftedHead(table, mask_padding=where == "head")
    options = {"mask_padding": True} if where == "call" else {}
    logits = head(hidden).index_fill(1, torch.tensor([3]), -torch.inf)
    torch.testing.assert_close(head.loss(hidden, targets, **options), nn.functional.cross_entropy(logits, targets))
    with pytest.raises(el.SizeError, match="label_smoothing spreads over all tokens"):
        head.loss(hidden, targets, label_smoothing=0.1, **options)
