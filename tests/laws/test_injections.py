"""What a decoder with an additional table must satisfy, whatever the table and wherever its vectors enter."""

import copy
from itertools import product

import pytest
import torch
from covering import covering, looped, some
from decoders import CACHES, small
from kinds import EMBED_DIM, INJECTIONS, LOOKUP_TABLES, NUM_HEADS, VOCAB_SIZE, in_a_file, ngrams
from torch import Tensor, nn

import embedlayer as el
from embedlayer.inputs.injection import AddedEmbedding
from embedlayer.inputs.ngram import NgramEmbedding
from embedlayer.inputs.per_layer import PerLayerInputs
from embedlayer.inputs.per_layer_embedding import PerLayerEmbedding
from embedlayer.inputs.value import ValueEmbedding
from embedlayer.tables.lookup import LookupTable
from embedlayer.tables.stored.mapped import MappedEmbedding
from embedlayer.vocab import edit_vocabulary

IDS = torch.randint(1, 50, (2, 10), generator=torch.Generator().manual_seed(0))
each_class = pytest.mark.parametrize(
    "name", some(["added, projected", "value", "n-gram, gated", "per-layer"], INJECTIONS)
)
"""One injection of each class; `--all` adds those over other tables."""


def decoder(name: str, **options) -> el.DecoderLM:
    torch.manual_seed(0)
    model = small(injections=[INJECTIONS[name]()], **options)
    for parameter in model.injections.parameters():  # gates that start at zero depend on nothing
        nn.init.normal_(parameter, std=0.5)
    return model


@looped("name", INJECTIONS)
def test_an_injection_changes_the_logits_and_no_token_sees_a_later_one(name) -> None:
    model = decoder(name)
    plain = small()
    plain.load_state_dict(model.state_dict(), strict=False)
    logits, changed = model(IDS), IDS.clone()
    assert not torch.allclose(logits, plain(IDS), atol=1e-3)
    changed[:, 6:] = (IDS[:, 6:] + 7) % 49 + 1
    assert torch.allclose(logits[:, :6], model(changed)[:, :6], atol=1e-6)


@looped("name, parts, kind", INJECTIONS, [[1] * 10, [4, 6]], CACHES)
@torch.no_grad()
def test_cached_decoding_equals_reading_everything_at_once(name, parts, kind) -> None:
    model, cache = decoder(name), CACHES[kind]()
    logits = [model(part, cache=cache) for part in IDS.split(parts, dim=1)]
    torch.testing.assert_close(torch.cat(logits, dim=1), model(IDS), atol=1e-5, rtol=1e-5)


@each_class
def test_the_trace_ends_with_the_input_of_the_first_block(name) -> None:
    model = decoder(name)
    for ids in (IDS, IDS[0]):
        *_, last = model.trace(ids)
        if isinstance(model.injections[0], type(INJECTIONS["added"]())):
            assert [step.name for step in model.trace(ids)][-2:] == ["injections", "dropout"]
        torch.testing.assert_close(last.vectors, next(model.hidden_states(ids)))


@each_class
def test_save_copy_and_meta_keep_every_bit(name, tmp_path) -> None:
    model = decoder(name)
    model.save_pretrained(tmp_path)
    for again in (el.DecoderLM.from_pretrained(tmp_path), copy.deepcopy(model)):
        assert again.config == model.config
        assert torch.equal(again.eval()(IDS), model(IDS))
    with torch.device("meta"):
        assert el.DecoderLM.from_config(model.config)(IDS.to("meta")).shape == (2, 10, 50)


@pytest.mark.parametrize("name", some(["n-gram, gated"], INJECTIONS))
def test_every_parameter_gets_a_gradient_in_one_graph(unchecked: None, name) -> None:
    model = decoder(name).train()
    compiled = torch.compile(model.loss, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(IDS, IDS), model.loss(IDS, IDS))
    model.loss(IDS, IDS).backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


@each_class
def test_an_edit_of_the_vocabulary_moves_what_each_kept_token_reads(name) -> None:
    model, order = decoder(name), [*range(10, 50), *range(10)]
    before = model(IDS)[..., order]
    receipt = edit_vocabulary(model, order=order)
    torch.testing.assert_close(model(receipt.remap(IDS)), before)
    receipt.undo(model)
    torch.testing.assert_close(model(IDS)[..., order], before)


class TableOfAUser(LookupTable):
    """A table of another library: one row for each token, or several tokens for each row."""

    def __init__(self, num_rows: int = VOCAB_SIZE) -> None:
        super().__init__()
        self.vocab_size, self.num_rows, self.embed_dim = VOCAB_SIZE, num_rows, EMBED_DIM
        self.padding_idx = self.scale = None
        self.weight = nn.Parameter(torch.randn(num_rows, EMBED_DIM))

    @property
    def config(self) -> dict[str, object]:
        return {"num_rows": self.num_rows}

    def look_up(self, ids: Tensor) -> Tensor:
        return self.weight[ids % self.num_rows]

    def rows(self, start: int, stop: int) -> Tensor:
        return self.look_up(torch.arange(start, stop))


EVERY_TABLE = {**LOOKUP_TABLES, "of a user": TableOfAUser, "of a user, shared rows": lambda: TableOfAUser(7)}
OVER_A_TABLE = {
    "added": AddedEmbedding,
    "value": lambda table: ValueEmbedding(table, NUM_HEADS, blocks=[0], gate_channels=8),
    "per-layer": lambda table: PerLayerEmbedding(PerLayerInputs(table, EMBED_DIM, 2)),
}


FEW_TABLES = ["dense", "factorised", "int4, groups", "stored, FP8", "delta", "mapped, trained"]
FEW_TABLES += ["of a user", "of a user, shared rows"]


@looped("kind, point", some(covering(product(FEW_TABLES, OVER_A_TABLE)), product(EVERY_TABLE, OVER_A_TABLE)))
def test_an_edit_moves_every_table_with_a_row_for_each_token_or_refuses_it_by_name(kind, point) -> None:
    torch.manual_seed(0)
    table = EVERY_TABLE[kind]()
    model, order = small(injections=[OVER_A_TABLE[point](table)]), [*range(10, 50), *range(10)]
    config, state = model.config, {name: tensor.clone() for name, tensor in model.state_dict().items()}
    before = model(IDS)[..., order]
    if isinstance(
        table, el.TokenEmbedding | el.FactorizedEmbedding | el.QuantizedEmbedding | el.tables.StoredEmbedding
    ):
        receipt = edit_vocabulary(model, order=order)
        torch.testing.assert_close(model(receipt.remap(IDS)), before)
        edit_vocabulary(model, add=3)
        assert model(torch.tensor([52])).shape == (1, 53)
    else:
        name = f"injections.0.{'inputs.' * (point == 'per-layer')}table, a {type(table).__name__},"
        with pytest.raises(el.SizeError, match=name):
            edit_vocabulary(model, order=order)
        assert model.config == config
        assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("trained", [True, False])
def test_an_edit_keeps_an_ngram_table_in_a_file_whose_rows_are_not_those_of_tokens(trained, tmp_path) -> None:
    hash = ngrams().hash
    hash = type(hash)(50, hash.multipliers, [[23], [27]], pad_id=hash.pad_id, token_map=hash.token_map)
    table = in_a_file(trained)  # with as many rows as there are tokens
    model, order = small(injections=[AddedEmbedding(NgramEmbedding(hash, table), EMBED_DIM)]), [*range(49, -1, -1)]
    before, rows = model(IDS)[..., order], table.rows(0, 50).clone()
    receipt = edit_vocabulary(model, order=order)
    torch.testing.assert_close(model(receipt.remap(IDS)), before)
    edit_vocabulary(model, remove=[3], add=2)
    assert isinstance(table, MappedEmbedding)
    assert table.vocab_size == table.num_rows == hash.num_rows == 50
    assert torch.equal(table.rows(0, 50), rows)


@each_class
def test_vectors_need_ids_beside_them(name) -> None:
    model = decoder(name)
    vectors = model.table(IDS)
    torch.testing.assert_close(model(IDS, inputs_embeds=vectors), model(IDS))
    with pytest.raises(el.SizeError, match=f"looks token IDs up in {type(model.injections[0]).__name__}: pass ids"):
        model(inputs_embeds=vectors)


def test_several_injections_are_added_in_order_and_a_shared_table_is_refused() -> None:
    table = el.TokenEmbedding(50, 24)
    model = small(injections=[build() for build in INJECTIONS.values()])
    assert len(model.injections) == len(INJECTIONS)
    assert model(IDS).shape == (2, 10, 50)
    with pytest.raises(el.SizeError, match=r"injections\.0\.table\.weight and table\.weight are one parameter"):
        small(table=table, injections=[el.inputs.AddedEmbedding(table)])
