"""Edits of live modules: everything moves together, or nothing does, and an undo restores every bit."""

import copy
from typing import Any

import pytest
import torch
from covering import covering, some
from hypothesis import given, settings
from hypothesis import strategies as st
from vocab_models import IDS, MODELS, OPTIMIZERS, D, V, close, interrupt_sets, model, same, state_of, train

import embedlayer as el
from embedlayer.inputs import NgramEmbedding, NgramHash
from embedlayer.vocab import CopyInit, VectorsInit, add_tokens, edit_vocabulary, remove_tokens


@pytest.mark.parametrize("kind", MODELS)
def test_kept_tokens_keep_their_rows_and_logits_to_the_bit(kind) -> None:
    made = MODELS[kind]()
    before, rows = made(IDS), made.table.rows(0, V).clone()
    receipt = edit_vocabulary(made, add=3, remove=[V - 2, V - 3])
    assert made.table.vocab_size == made.head.out_features == V + 1
    kept = receipt.row_map.sources[: V - 2]
    assert torch.equal(made.table.rows(0, V - 2), rows[kept])
    close(made(receipt.remap(IDS))[..., : V - 2], before[..., kept])
    made.loss(IDS, IDS + 6).backward()  # the new tokens as well


def trains(name: str, *, row_sparse: bool) -> bool:
    """Whether to test an optimizer with tables of this kind: row state makes no difference to dense ones."""
    return name.startswith("RowAdamW") if row_sparse else name != "RowAdamW, rowwise"


TRAINED = [(kind, name) for kind in MODELS for name in OPTIMIZERS if trains(name, row_sparse=kind == "row-sparse")]


@pytest.mark.parametrize(("kind", "name"), some(covering(TRAINED), TRAINED))
def test_undo_gives_back_every_bit_of_model_and_optimizer(kind, name) -> None:
    made = MODELS[kind]()
    optimizer = OPTIMIZERS[name](made.parameters())
    train(made, optimizer, IDS)
    if name.startswith("RowAdamW"):
        optimizer.apply_pending_updates()
    before, described = state_of(made, optimizer), made.config
    order = [*range(9, V - 4), *range(9)]
    receipt = edit_vocabulary(made, add=5, order=order, remove=range(V - 4, V), optimizer=optimizer)
    assert not same(state_of(made, optimizer), before)
    receipt.undo(made, optimizer=optimizer)
    assert made.config == described
    assert same(state_of(made, optimizer), before)
    train(made, optimizer, IDS)  # with the loss of the first training still alive, and its graph


@pytest.mark.parametrize("kind", ["tied", "free", "row-sparse"])
def test_a_whole_training_goes_on_as_if_the_ids_had_always_been_the_new_ones(kind) -> None:
    made, untouched = MODELS[kind](), None
    untouched = copy.deepcopy(made)
    optimizer, other = (el.RowAdamW(each.parameters(), lr=0.01) for each in (made, untouched))
    train(made, optimizer, IDS)
    train(untouched, other, IDS)
    receipt = edit_vocabulary(made, order=[*range(V - 1, -1, -1)], optimizer=optimizer)
    train(made, optimizer, receipt.remap(IDS))
    train(untouched, other, IDS)
    torch.testing.assert_close(made.table.rows(0, V).flip(0), untouched.table.rows(0, V), rtol=0, atol=2e-6)
    assert made.table.padding_idx == V - 1
    assert not made.table.weight[V - 1].any()


@settings(max_examples=30)
@given(
    kept=st.lists(st.integers(1, V - 1), unique=True, min_size=1),
    added=st.integers(0, 5),
    multiple=st.sampled_from([None, 1, 8]),
    place=st.integers(0, 9),
)
def test_any_choice_of_rows_can_be_taken_and_undone(kept, added, multiple, place) -> None:
    table = el.TokenEmbedding(V, D, padding_idx=0)
    before = table.weight.detach().clone()
    order = [*kept[:place], 0, *kept[place:]]
    receipt = edit_vocabulary(table, keep=order, order=order, add=added, pad_to_multiple_of=multiple)
    size = len(order)
    assert (table.vocab_size, table.num_rows % (multiple or 1)) == (size + added, 0)
    assert torch.equal(table.weight[:size], before[order])
    assert table.padding_idx == order.index(0)
    assert not table.weight[table.vocab_size :].any()
    assert receipt.remap(torch.tensor(order)).tolist() == list(range(size))
    assert [*receipt.dropped] == sorted({*range(V)} - {*order})
    with torch.no_grad():
        table.weight[size : size + added] += 1  # new rows may be trained
        table.weight[size - 1, 0] += 1
    with pytest.raises(el.CheckpointError):
        receipt.undo(table)
    with torch.no_grad():
        table.weight[size - 1] = before[order[-1]]
    receipt.undo(table)
    assert torch.equal(table.weight, before)


def test_a_tied_head_stays_tied_and_parameters_stay_the_same_objects() -> None:
    made = model()
    weight, groups = made.table.weight, el.param_groups(made)
    add_tokens(made, 3)
    assert made.table.weight is made.head.weight is weight
    assert [group["params"] for group in el.param_groups(made)] == [group["params"] for group in groups]
    made.requires_grad_(False)
    add_tokens(made, 1)
    assert not weight.requires_grad


def test_a_graph_that_is_alive_and_gradients_do_not_stand_in_the_way() -> None:
    made = model()
    loss = made.loss(IDS[:, :-1], IDS[:, 1:])
    loss.backward()
    grad = made.table.weight.grad.clone()
    receipt = edit_vocabulary(made, add=2, remove=[V - 1])
    assert torch.equal(made.table.weight.grad[: V - 1], grad[: V - 1])
    assert not made.table.weight.grad[V - 1 :].any()
    ids = receipt.remap(IDS)
    again = made.loss(ids[:, :-1], ids[:, 1:])
    again.backward()
    assert loss.requires_grad
    torch.testing.assert_close(made.table.weight.grad[: V - 1], 2 * grad[: V - 1], rtol=0.2, atol=0.02)


def test_a_row_sparse_gradient_follows_its_rows() -> None:
    table = el.RowSparseEmbedding(V, D, padding_idx=0)
    table(torch.tensor([[3, 0, 9, 3, 20]])).sum().backward()
    edit_vocabulary(table, remove=[9], order=[*range(20, V), *range(9), *range(10, 20)])
    dense = table.weight.grad.to_dense()
    assert dense.shape == (V - 1, D)
    assert dense.sum(1).nonzero().squeeze(1).tolist() == [0, 13]
    assert table.padding_idx == 10
    table(torch.tensor([[10, 1]])).sum().backward()  # padding by its new ID gets none
    assert not table.weight.grad.to_dense()[10].any()


def test_starting_values_go_to_table_head_and_bias() -> None:
    made = MODELS["free"]()
    torch.nn.init.normal_(made.head.bias)
    receipt = add_tokens(made, 2, init=CopyInit(of=[7, 9]), init_head=VectorsInit(torch.ones(2, D)))
    assert torch.equal(made.table.weight[V:], made.table.weight[[7, 9]])
    assert torch.equal(made.head.weight[V:], torch.ones(2, D))
    torch.testing.assert_close(made.head.bias[V:], made.head.bias[:V].mean().expand(2))
    assert receipt.origins == {V: "copy of 7", V + 1: "copy of 9"}
    tied = MODELS["tied, with a bias"]()
    add_tokens(tied, 2, init=CopyInit(of=[7, 9]))
    assert torch.equal(tied.head.bias[V:], tied.head.bias[[7, 9]])


def test_what_fails_in_the_middle_leaves_everything_as_it_was() -> None:
    made = MODELS["free"]()
    optimizer = torch.optim.AdamW(made.parameters(), lr=0.01)
    train(made, optimizer, IDS)
    made.loss(IDS[:, :-1], IDS[:, 1:]).backward()
    before, described, grad = state_of(made, optimizer), made.config, made.table.weight.grad
    for number in range(1, 6):
        with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
            interrupt_sets(patch, number)
            add_tokens(made, 3, optimizer=optimizer)
        assert same(state_of(made, optimizer), before)
        assert made.config == described
        assert made.table.weight.grad is grad
    train(made, optimizer, IDS)


def refused_edits(made: el.DecoderLM) -> list[tuple[type[Exception], Any]]:
    stranger = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(V, D))])
    two_sizes = torch.nn.ModuleList([el.TokenEmbedding(4, 2), el.TokenEmbedding(5, 2)])
    engram, hashed = model(), WithNgrams("identity")
    engram.engram = torch.nn.ModuleDict({"embedding": torch.nn.Embedding(9, 2)})  # hashed n-grams of another library
    hashed.ngrams.hash = NgramHash(V, [1, (2**63 - 1) // (V - 1)], [[17]], pad_id=0)  # without room for new tokens
    of_another_size = torch.nn.ModuleList([el.TokenEmbedding(V - 1, D), WithNgrams("identity").ngrams])
    optimizers = []
    for unknown in (torch.zeros(V, D, dtype=torch.uint8), torch.zeros(V * D)):  # in 8 bits, and as LBFGS stores them
        optimizers.append(torch.optim.SGD(made.parameters(), lr=0.1, momentum=0.9))
        optimizers[-1].state[made.table.weight]["unknown"] = unknown
    return [
        (el.VocabularyError, lambda: remove_tokens(made, [V])),
        (el.VocabularyError, lambda: add_tokens(made, ["otter"])),  # and no tokenizer
        (el.VocabularyError, lambda: remove_tokens(made, ["otter"])),
        (el.VocabularyError, lambda: add_tokens(made, -1)),
        (el.VocabularyError, lambda: add_tokens(made, ["a b"], tokenizer=el.train_tokenizer((), "byte"))),
        (el.TokenIdError, lambda: remove_tokens(made, [0])),  # the padding token
        (el.SizeError, lambda: add_tokens(made, 1, optimizer=stranger)),
        (el.SizeError, lambda: add_tokens(made, 1, pad_to_multiple_of=0)),
        (el.SizeError, lambda: add_tokens(made, 1, out="there")),
        (el.SizeError, lambda: add_tokens(torch.nn.Linear(2, 2), 1)),
        (el.SizeError, lambda: add_tokens(el.DeltaEmbedding(el.TokenEmbedding(V, D), [3]), 1)),
        (el.SizeError, lambda: add_tokens(two_sizes, 1)),
        (el.ShapeError, lambda: add_tokens(made, 2, init=VectorsInit(torch.zeros(3, D)))),
        (el.VocabularyError, lambda: add_tokens(engram, 1)),
        (el.VocabularyError, lambda: add_tokens(hashed, 1)),
        (el.SizeError, lambda: add_tokens(of_another_size, 1)),
        *((el.SizeError, lambda each=each: add_tokens(made, 1, optimizer=each)) for each in optimizers),
    ]


def test_bad_input_is_refused_before_anything_changes() -> None:
    made = model()
    before, described = state_of(made), made.config
    for error, refused in refused_edits(made):
        with pytest.raises(error):
            refused()
        assert same(state_of(made), before)
        assert made.config == described


def test_a_compiled_table_takes_the_new_vocabulary(unchecked) -> None:
    table = el.TokenEmbedding(V, D)
    compiled = torch.compile(table, fullgraph=True, backend="eager")
    with pytest.raises(el.TokenIdError):
        compiled(torch.tensor([V]))
    receipt = add_tokens(table, 2)
    assert torch.equal(compiled(torch.tensor([V + 1])), table.weight[V + 1 :])
    receipt.undo(table)
    with pytest.raises(el.TokenIdError):
        compiled(torch.tensor([V]))


def test_undo_refuses_what_it_does_not_belong_to() -> None:
    made = MODELS["free"]()
    optimizer = torch.optim.AdamW(made.parameters(), lr=0.01)
    train(made, optimizer, IDS)
    receipt = add_tokens(made, 2, optimizer=optimizer)
    after = state_of(made, optimizer)
    ones = el.TokenEmbedding.from_pretrained(torch.ones(V, D))
    of_ones, _ = add_tokens(ones, 2), ones.double()  # the same numbers in another type
    other, another = MODELS["free"](), MODELS["free"]()
    add_tokens(other, 2)
    of_another = add_tokens(another, 2)
    for one, module in ((of_ones, ones), (receipt, made), (receipt, model()), (of_another, other)):
        with pytest.raises(el.CheckpointError):
            one.undo(module)
    assert same(state_of(made, optimizer), after)
    train(made, optimizer, IDS, steps=1)
    with pytest.raises(el.CheckpointError):
        receipt.undo(made, optimizer=optimizer)


def test_no_third_copy_of_a_table_is_made() -> None:
    import resource

    table = el.TokenEmbedding(200_000, 128, device="meta").to_empty(device="cpu")
    torch.nn.init.ones_(table.weight)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    add_tokens(table, 4)
    used = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert used < 1.7 * 200_000 * 128 * 4  # the new table, and room for chunks


# Hashed n-grams


class WithNgrams(torch.nn.Module):
    """A model beside hashed n-grams, with as many compressed IDs as tokens or fewer."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.model = model()
        token_map = {"compressed": torch.arange(V) // 2, "identity map": torch.arange(V), "identity": None}[kind]
        self.ngrams = NgramEmbedding.dense(NgramHash.for_rows(V, V, heads=1, token_map=token_map), 4)

    @property
    def hash(self) -> NgramHash:
        return self.ngrams.hash


EDITS = {
    "add": {"add": 3},
    "remove": {"remove": [4, 9, V - 1]},
    "remove the last": {"remove": [V - 1]},
    "reorder": {"order": [*range(V - 1, -1, -1)]},
    "all": {"add": 2, "remove": [3], "order": [*range(7, V), *range(3), *range(4, 7)]},
}


@pytest.mark.parametrize("kind", ["compressed", "identity", "identity map"])
@pytest.mark.parametrize("edit", EDITS)
def test_kept_tokens_keep_their_ngrams_and_undo_gives_back_every_bit(kind, edit, tmp_path) -> None:
    made = WithNgrams(kind)
    ids = torch.tensor([[1, 2, 5, 6, 1, 2, 8], [20, 21, 22, 22, 10, 7, 2]])
    before, vectors, config = state_of(made), made.ngrams(ids), made.ngrams.config
    old_ids = {*made.hash.compressed_ids.tolist(), made.hash.pad_id}
    receipt = edit_vocabulary(made, **EDITS[edit])
    size = made.model.table.vocab_size
    assert made.hash.vocab_size == made.hash.index_check.size == size
    assert made.ngrams.table.vocab_size == made.hash.num_rows == made.ngrams.table.num_rows
    assert torch.equal(made.ngrams(receipt.remap(ids)), vectors)
    new = made.hash.compressed_ids[[*receipt.added]].tolist()
    assert len({*new}) == len(receipt.added) == EDITS[edit].get("add", 0)
    assert not {*new} & old_ids
    assert max(made.hash.compressed_ids) < made.hash.compressed_size
    made.ngrams(torch.arange(size))
    made.ngrams.save_pretrained(tmp_path)
    again = NgramEmbedding.from_pretrained(tmp_path)
    assert torch.equal(again(torch.arange(size)), made.ngrams(torch.arange(size)))
    receipt.undo(made)
    assert same(state_of(made), before)
    assert made.ngrams.config == config
    assert torch.equal(made.ngrams(ids), vectors)


# Modules and what they state


def modules_with_a_vocabulary() -> dict[str, torch.nn.Module]:
    table = el.TokenEmbedding(V, D)
    typed = el.EmbeddingLayer(table, head=el.OutputHead(table), types=el.TokenEmbedding(2, D), recipe=["types"])
    return {
        "input": el.TransformerEmbedding(V, D, 16),
        "of a book": el.lessons.GPTEmbedding(V, D, 16),
        "tied head": el.OutputHead(table),
        "untied head": el.OutputHead(vocab_size=V, embed_dim=D, bias=True),
        "two tables": torch.nn.ModuleList([el.TokenEmbedding(V, D), el.TokenEmbedding(V, D)]),
        "layer with types": typed,
    }


def test_each_kind_of_module_is_edited() -> None:
    for kind, made in modules_with_a_vocabulary().items():
        before = {name: parameter.detach().clone() for name, parameter in made.named_parameters()}
        receipt = edit_vocabulary(made, add=2, remove=[3])
        for name, parameter in made.named_parameters():
            rows = [row for row in range(V) if row != 3] if len(before[name]) == V else range(len(before[name]))
            assert torch.equal(parameter[: len(rows)], before[name][[*rows]]), kind
            assert len(parameter) == len(rows) + 2 * (len(before[name]) == V), kind
        receipt.undo(made)
        assert all(torch.equal(parameter, before[name]) for name, parameter in made.named_parameters()), kind


def test_a_patched_model_of_transformers_is_edited_with_what_refers_to_it() -> None:
    """`tests/laws/test_edited_families.py` has its tensors, configuration and logits, and the undo, for all types."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    ids = {"bos_token_id": 1, "eos_token_id": [28, 29], "pad_token_id": 0}
    made = el.patch(LlamaForCausalLM(LlamaConfig(vocab_size=V, tie_word_embeddings=True, **ids, **sizes)).eval())
    unread = made(IDS).logits
    receipt = edit_vocabulary(made, remove=[5], add=3)
    with pytest.raises(el.StaleRowsError):
        unread.sum()
    new_ids = receipt.remap(torch.where(IDS == 5, 6, IDS))
    made(new_ids, labels=new_ids).loss.backward()
    assert made.lm_head.weight is made.model.embed_tokens.weight
    with pytest.raises(el.VocabularyError, match="eos_token_id"):
        remove_tokens(made, [27])


def sizes_of(model: torch.nn.Module) -> dict[str, object]:
    names = ("num_embeddings", "padding_idx", "in_features", "out_features", "vocab_size")
    parts = model.named_modules()
    return {f"{name}.{key}": getattr(part, key) for name, part in parts for key in names if hasattr(part, key)}


@pytest.mark.parametrize(("kind", "model_type"), [("causal", "gpt2"), ("masked", "mobilebert"), ("seq2seq", "bart")])
def test_an_edit_is_undone_after_unpatch_as_the_error_says(kind: str, model_type: str, unchecked) -> None:
    from tiny_models import build

    model = build(model_type, kind)[1]
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    receipt = el.vocab.edit_vocabulary(el.patch(model), remove=[20], add=2)
    el.unpatch(model)
    assert sizes_of(model) == sizes_of(type(model)(model.config))
    with pytest.raises(el.SizeError):
        receipt.undo(model)
    receipt.undo(el.patch(model))
    assert same(el.unpatch(model).state_dict(), before)
    assert sizes_of(model) == sizes_of(type(model)(model.config))
