"""Hashed n-grams beside transformers' Qwen4-Exp, a restatement of Engram in NumPy, and IDs of Engram's own demo."""

import hashlib
from typing import Any

import numpy as np
import pytest
import torch
from covering import looped
from hypothesis import given, settings
from hypothesis import strategies as st
from releases import skip_without
from safetensors.torch import save_file

import embedlayer as el
from embedlayer.inputs import NgramEmbedding, NgramHash
from embedlayer.tokenization import compressed_tokens
from embedlayer.tokenization.train import train_tokenizer

V = 60
MAP = torch.arange(V) // 2

HASHES = {
    "for rows": lambda: NgramHash.for_rows(400, V, heads=3, token_map=MAP),
    "identity, separator": lambda: NgramHash.for_rows(300, V, max_order=4, heads=2, separator_id=7),
    "engram": lambda: NgramHash.engram(MAP, [50, 60, 70], layer_id=3, heads=2),
}


def embedding(name: str = "for rows") -> NgramEmbedding:
    ngrams = HASHES[name]()
    return NgramEmbedding.dense(ngrams, 2 * ngrams.num_hashes)


# Qwen4-Exp


def qwen4_exp(eos: int | list[int], ngram_size: int, heads: int, base: int, layers: list[int]) -> Any:
    skip_without("transformers:Qwen4ExpTextConfig")
    from transformers import Qwen4ExpTextConfig

    return Qwen4ExpTextConfig(
        vocab_size=V,
        eos_token_id=eos,
        ngram_size=ngram_size,
        heads_per_ngram=heads,
        ngram_vocab_size_base=base,
        num_hidden_layers=4,
        layer_types=["linear_attention"] * 4,
        ple_layer_ids=layers,
        ple_embed_dim=(ngram_size - 1) * heads,
        make_ngram_vocab_size_divisible_by=8,
        seed=base,
    )


QWEN4_EXP: dict[str, tuple[Any, ...]] = {
    "trigrams": (1, 3, 4, 90, [1]),
    "bigrams, list of ends": ([5, 1], 2, 1, 40, [1, 3]),
    "five tokens": (0, 5, 2, 1000, [2, 3, 4]),
}


def rows_of_transformers(module: torch.nn.Module, ids: torch.Tensor, cache=None) -> torch.Tensor:
    return module(ids, cache).long()


@pytest.mark.parametrize("name", QWEN4_EXP)
def test_rows_are_those_of_transformers_qwen4_exp(name) -> None:
    skip_without("transformers.models.qwen4_exp.modeling_qwen4_exp")
    from transformers import DynamicCache
    from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpTextNGramEmbedding

    config = qwen4_exp(*QWEN4_EXP[name])
    for index, layer in enumerate(config.ple_layer_ids):
        theirs = Qwen4ExpTextNGramEmbedding(config, config.ple_embed_dim, layer - 1, index)
        table = theirs.ngram_embedding.weight
        theirs.ngram_embedding = torch.nn.Embedding.from_pretrained(torch.arange(len(table)).double()[:, None])
        ours = NgramHash.qwen4_exp(config, index)
        assert ours.num_rows == theirs.total_vocab_size
        generator = torch.Generator().manual_seed(index)
        for length in (1, 2, 30):
            ids = torch.randint(0, 12, (4, length), generator=generator)  # of 12 tokens, texts end often
            assert torch.equal(ours(ids), rows_of_transformers(theirs, ids))
        cache = DynamicCache(config=config)
        state: dict[str, Any] = {}
        for part in torch.randint(0, 12, (4, 20), generator=generator).split([1, 1, 6, 2, 1, 9], dim=1):
            assert torch.equal(ours(part, state=state), rows_of_transformers(theirs, part, cache))
        mask = torch.tensor([[0, 0, 0, 1, 1, 1, 1], [1] * 7, [0, 1, 1, 1, 1, 1, 1]])
        ids = torch.randint(0, V, mask.shape, generator=generator)
        expected = rows_of_transformers(theirs, torch.where(mask == 1, ids, ours.pad_id))
        assert torch.equal(ours(ids, mask), expected)


# Engram


def engram_rows(compressed: np.ndarray, pad: int, sizes: list[int], heads: int, layers: list[int], seed: int):
    """Rows of each layer, from the description: seeds, primes and hashes in NumPy with plain loops."""
    taken, rows = set(), {}
    limit = np.iinfo(np.int64).max // int(compressed.max() + 1) // 2
    for layer in layers:
        random = np.random.default_rng(seed + 10007 * layer)
        multipliers = 2 * random.integers(0, limit, size=len(sizes) + 1) + 1
        offset, found = 0, []
        for order, smallest in enumerate(sizes, start=2):
            size = smallest - 1
            for _ in range(heads):
                size += 1
                while size in taken or any(size % factor == 0 for factor in range(2, int(size**0.5) + 1)):
                    size += 1
                taken.add(size)
                hashes = np.zeros_like(compressed)
                for row, text in enumerate(compressed):
                    padded = [pad] * (order - 1) + list(text)
                    for place in range(len(text)):
                        gram = padded[place : place + order]  # the token itself is the last
                        mixed = 0
                        for token, multiplier in zip(reversed(gram), multipliers, strict=False):
                            mixed ^= int(token) * int(multiplier)
                        hashes[row, place] = offset + mixed % size
                found.append(hashes)
                offset += size
        rows[layer] = np.stack(found, axis=-1)
    return rows


@pytest.mark.parametrize(("kind", "sizes", "layers"), [("bpe", [50, 40], [4, 1]), ("unigram", [20, 31, 20], [0])])
def test_rows_are_those_of_engram_in_numpy(kind, sizes, layers) -> None:
    tokenizer = train_tokenizer("The otter met THE Otter at the café, the CAFÉ by a river. " * 3, kind, vocab_size=280)
    token_map = compressed_tokens(tokenizer)
    ids = np.random.default_rng(2).integers(0, len(token_map), (3, 17))
    compressed, pad = token_map.numpy()[ids], int(token_map[5])
    ids[0, 0] = int(token_map.argmax())
    compressed = token_map.numpy()[ids]
    expected = engram_rows(compressed, pad, sizes, 2, layers, seed=9)
    for layer in layers:
        ours = NgramHash.engram(tokenizer, sizes, layer_id=layer, layer_ids=layers, heads=2, pad_token_id=5, seed=9)
        assert np.array_equal(ours(ids).numpy(), expected[layer])


def test_rows_are_those_of_the_demo_of_engram() -> None:
    """The digest is that of `NgramHashMapping(...).hash(ids)` plus offsets, of engram_demo_v1.py at 1aac57aa.

    Its arguments: engram_vocab_size [1000, 1200], max_ngram_size 3, n_head_per_ngram 4, layer_ids [1, 15], pad_id 2,
    seed 0; the tokenizer is the one below in a PreTrainedTokenizerFast.
    """
    tokenizer = train_tokenizer((), kind="byte")
    ids = torch.arange(257 * 4).view(4, 257) ** 2 % 257
    digest = hashlib.sha256()
    for layer in (1, 15):
        ngrams = NgramHash.engram(tokenizer, [1000, 1200], layer_id=layer, layer_ids=(1, 15), heads=4)
        digest.update(ngrams(ids).numpy().astype("<i8").tobytes())
    assert digest.hexdigest() == DEMO


DEMO = "733552acb1f4c3380526964864369189417ba6fcb22775a8a25af370cd88b45f"


# Documents and cached decoding


@st.composite
def packed_rows(draw) -> list[list[int]]:
    """Rows of one length: padding, documents from 1 on, padding."""
    length = draw(st.integers(1, 12))
    rows = []
    for _ in range(draw(st.integers(1, 3))):
        row = [0] * draw(st.integers(0, length))
        number = 1
        while len(row) < length and draw(st.booleans()):
            row += [number] * draw(st.integers(1, 5))
            number += 1
        rows.append((row + [0] * length)[:length])
    return rows


@pytest.mark.parametrize("name", HASHES)
@settings(max_examples=25)
@given(rows=packed_rows(), seed=st.integers(0, 99), data=st.data())
def test_each_document_has_the_rows_that_it_has_alone_and_parts_those_of_the_whole(name, rows, seed, data) -> None:
    ngrams, documents = HASHES[name](), torch.tensor(rows)
    ids = torch.randint(0, V, documents.shape, generator=torch.Generator().manual_seed(seed))
    whole = ngrams(ids, documents)
    for row, numbers in enumerate(rows):
        for number in {*numbers} - {0}:
            inside = documents[row] == number
            assert torch.equal(whole[row, inside], ngrams(ids[row, inside]))
    state: dict[str, Any] = {}
    cuts = sorted(data.draw(st.sets(st.integers(1, ids.shape[1]))))
    parts = [
        ngrams(ids[:, start:stop], documents[:, start:stop], state)
        for start, stop in zip([0, *cuts], [*cuts, ids.shape[1]], strict=True)
    ]
    assert torch.equal(torch.cat(parts, 1), whole)


def test_decoding_without_a_mask_continues_the_last_document() -> None:
    ngrams = HASHES["for rows"]()
    state: dict[str, Any] = {}
    documents = torch.tensor([[0, 0, 1, 1, 2, 2], [1, 1, 1, 0, 0, 0]])  # packed; padded at the end
    ids = torch.arange(12).view(2, 6)
    ngrams(ids, documents, state)
    following = torch.cat([ngrams(torch.tensor([[token], [token + 1]]), state=state) for token in (30, 40)], 1)
    assert torch.equal(following[0], ngrams(torch.tensor([4, 5, 30, 40]))[2:])
    assert torch.equal(following[1], ngrams(torch.tensor([6, 7, 8, 31, 41]))[3:])


# The layer


@looped("kind", ["dense", "row-sparse", "int8"])
def test_vectors_are_the_concatenated_rows_of_any_table(kind) -> None:
    ngrams = HASHES["engram"]()
    dense = (el.RowSparseEmbedding if kind == "row-sparse" else el.TokenEmbedding)(ngrams.num_rows + 3, 4, scale=2.0)
    table = el.QuantizedEmbedding.from_table(dense, 8) if kind == "int8" else dense
    layer, ids = NgramEmbedding(ngrams, table), torch.randint(0, V, (2, 9))
    vectors = layer(ids)
    assert vectors.shape == (2, 9, layer.embed_dim) == (2, 9, ngrams.num_hashes * 4)
    rows = ngrams(ids)
    assert torch.equal(vectors, torch.cat([table(rows[..., head]) for head in range(ngrams.num_hashes)], -1))
    assert torch.equal(layer(ids[0].int()), vectors[0])
    if kind == "row-sparse":
        vectors.sum().backward()
        assert torch.equal(table.weight.grad.coalesce().indices()[0], rows.unique())


@pytest.mark.usefixtures("unchecked")
def test_masks_and_states_are_compiled_as_one_graph_and_exported() -> None:
    layer, mask = embedding("identity, separator"), torch.tensor([[0, 1, 1, 2, 2], [1, 1, 1, 1, 1]])
    ids = torch.randint(0, V, (2, 5))
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    states: tuple[dict, dict] = {}, {}
    for _ in range(2):
        assert torch.equal(compiled(ids, mask, states[0]), layer(ids, mask, states[1]))
    sizes = {0: torch.export.Dim("B"), 1: torch.export.Dim("T", max=64)}
    program = torch.export.export(layer, (ids, mask), dynamic_shapes=(sizes, sizes)).module()
    ids, mask = ids.repeat(2, 2)[:3, :7], mask.repeat(2, 2).sort(-1).values[:3, :7]
    assert torch.equal(program(ids, mask), layer(ids, mask))


@looped("rows", [17, 18, 1000, 1 << 20])
def test_head_sizes_are_consecutive_primes_that_leave_few_rows(rows) -> None:
    ngrams = NgramHash.for_rows(rows, V, heads=2)
    sizes = [size for order in ngrams.head_sizes for size in order]
    between = range(sizes[0], sizes[-1] + 1)
    assert sizes == [n for n in between if all(n % factor for factor in range(2, int(n**0.5) + 1))]
    assert rows * 0.94 <= ngrams.num_rows <= rows


BAD = [
    lambda: NgramHash(V, [1, 3, 5], [[7, 11]], pad_id=0),
    *(lambda m=m: NgramHash(V, [1, m], [[7]], pad_id=0) for m in (-3, 1 << 62)),
    lambda: NgramHash(2, [1, 1 << 60], [[7]], pad_id=8),
    lambda: NgramHash(4, [3, 3], [[5]], pad_id=0, token_map=torch.tensor([0, 1, 2, 9]), compressed_size=2),
    *(lambda m=m: NgramHash(V, [1, 3], [[7]], pad_id=0, token_map=m) for m in (MAP.where(MAP != 3, -1), MAP[1:])),
    lambda: NgramHash.for_rows(16, V, heads=2),  # 2 + 3 + 5 + 7 are needed
    lambda: NgramEmbedding(HASHES["for rows"](), el.TokenEmbedding(17, 2)),
    lambda: NgramEmbedding.dense(HASHES["for rows"](), 13),
]


@looped("build", BAD)
def test_sizes_that_do_not_fit_are_refused(build) -> None:
    with pytest.raises(el.SizeError):
        build()


@looped("bad", [-1, 30, 1 << 62])
def test_a_loaded_token_map_with_ids_outside_those_of_the_configuration_is_refused(bad, tmp_path) -> None:
    layer = embedding()
    state = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    layer.save_pretrained(tmp_path)
    state["hash.token_map"][7] = bad
    save_file(state, tmp_path / "model.safetensors")
    for load in (lambda: NgramEmbedding.from_pretrained(tmp_path), lambda: layer.load_state_dict(state)):
        with pytest.raises(el.CheckpointError):
            load()
    assert torch.equal(layer.hash.token_map, MAP)


def test_bad_ids_and_masks_are_refused() -> None:
    layer, ids = embedding(), torch.ones(2, 4, dtype=torch.int64)
    with pytest.raises(el.TokenIdError):
        layer([[0, 1], [V, 1]])
    with pytest.raises(el.TokenIdError):
        NgramHash.engram(MAP, [9], layer_id=0, pad_token_id=V)
    for wrong in (torch.tensor(3), ids[None]):
        with pytest.raises(el.ShapeError):
            layer(wrong)
    for row in ([1, 0, 1, 1], [1, 2, 1, 0], [0, 3, 0, 3]):
        with pytest.raises(el.ShapeError):
            layer(ids, torch.tensor([[1, 1, 1, 1], row]))
    whole, right = torch.tensor([[0, 0, 1, 1], [2, 2, 5, 5]]) > 0, torch.tensor([[0, 0, 1, 1], [1] * 4])
    assert torch.equal(layer(ids, whole), layer(ids, right))
