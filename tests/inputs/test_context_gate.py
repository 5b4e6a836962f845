"""Context-aware gating beside one stream of transformers' Qwen4-Exp, and beside a restatement of Engram."""

import copy

import pytest
import torch
import torch.nn.functional as F
from releases import skip_without
from torch import nn

import embedlayer as el
from embedlayer.inputs import ContextGate, NgramEmbedding, NgramHash, ShortConvolution

B, T, D, E = 2, 21, 8, 12


def gate(*, conv: bool = True, bias: bool = False, dtype: torch.dtype = torch.float64) -> ContextGate:
    made = ContextGate(
        D, E, conv=ShortConvolution(D, kernel_size=3, dilation=2) if conv else None, bias=bias, init_std=0.5
    )
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.7)
    return made.to(dtype)


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(B, T, D, dtype=torch.float64), torch.randn(B, T, E, dtype=torch.float64)


def plain(made: ContextGate, x: torch.Tensor, vectors: torch.Tensor) -> torch.Tensor:
    """Engram with one stream, from the description; the convolution is torch's."""

    def normed(values: torch.Tensor, norm: nn.RMSNorm) -> torch.Tensor:
        return F.rms_norm(values, norm.weight.shape, norm.weight, norm.eps)

    key = normed(F.linear(vectors, made.key_proj.weight, made.key_proj.bias), made.key_norm)
    score = torch.einsum("btd,btd->bt", key, normed(x, made.query_norm)) / D**0.5
    strength = torch.sigmoid(score.sign() * score.abs().clamp(min=1e-6) ** 0.5)
    gated = strength[..., None] * F.linear(vectors, made.value_proj.weight, made.value_proj.bias)
    if made.conv is None:
        return gated
    size, dilation = made.conv.kernel_size, made.conv.dilation
    signal = F.pad(normed(gated, made.conv.norm).mT, ((size - 1) * dilation, 0))
    return gated + F.silu(F.conv1d(signal, made.conv.weight[:, None], dilation=dilation, groups=D)).mT


@pytest.mark.parametrize("conv", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_the_addend_is_that_of_the_formula(conv, bias) -> None:
    made, (x, vectors) = gate(conv=conv, bias=bias), inputs()
    torch.testing.assert_close(made(x, vectors), plain(made, x, vectors))
    torch.testing.assert_close(made(x[0], vectors[0]), plain(made, x, vectors)[0])


def stream_of(theirs: nn.Module, stream: int) -> ContextGate:
    """One stream of transformers' layer, whose norms store weight - 1."""
    width = theirs.hidden_size
    part = slice(stream * width, (stream + 1) * width)
    conv = ShortConvolution(
        width, theirs.conv1d.kernel_size[0], theirs.conv1d.dilation[0], norm_eps=theirs.norm_conv.eps
    )
    made = ContextGate(width, theirs.value_proj.in_features, conv=conv, norm_eps=theirs.norm_key.eps)
    made.load_state_dict(
        {
            "key_proj.weight": theirs.key_proj.weight[part],
            "value_proj.weight": theirs.value_proj.weight,
            "key_norm.weight": 1 + theirs.norm_key.weight[part],
            "query_norm.weight": 1 + theirs.norm_query.weight[part],
            "conv.norm.weight": 1 + theirs.norm_conv.weight[part],
            "conv.weight": theirs.conv1d.weight[part, 0],
        }
    )
    return made


@torch.no_grad()
def test_the_addend_is_that_of_one_stream_of_transformers_qwen4_exp() -> None:
    skip_without("transformers:Qwen4ExpTextConfig")
    from transformers import DynamicCache, Qwen4ExpTextConfig
    from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpTextPLELayer

    config = Qwen4ExpTextConfig(
        vocab_size=60,
        hidden_size=8,
        hc_count=3,
        eos_token_id=1,
        heads_per_ngram=2,
        ngram_vocab_size_base=40,
        num_hidden_layers=1,
        layer_types=["linear_attention"],
        ple_layer_ids=[1],
        ple_embed_dim=16,
    )
    theirs = Qwen4ExpTextPLELayer(config, 0, 0)
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.5)
    table = el.TokenEmbedding.from_embedding(theirs.ple_embedding.ngram_embedding)
    ngrams = NgramEmbedding(NgramHash.qwen4_exp(config), table)
    ids, x = torch.randint(0, 60, (2, T)), torch.randn(2, T, 3 * 8)
    mask = torch.ones(2, T, dtype=torch.int64)
    mask[1, :4] = 0
    padded = theirs(x, torch.where(mask == 1, ids, 1), None, mask)
    cache, cuts = DynamicCache(config=config), [1, 7, 1, 2, T - 11]
    parts = zip(x.split(cuts, 1), ids.split(cuts, 1), strict=True)
    decoded = torch.cat([theirs(vectors, tokens, cache) for vectors, tokens in parts], 1)
    for stream in range(3):
        own, part = stream_of(theirs, stream), slice(8 * stream, 8 * stream + 8)
        close = {"rtol": 1e-6, "atol": 1e-6}
        torch.testing.assert_close(own(x[..., part], ngrams(ids)), theirs(x, ids, None)[..., part], **close)
        torch.testing.assert_close(own(x[..., part], ngrams(ids, mask), mask), padded[..., part], **close)
        state: dict[str, torch.Tensor] = {}  # one for both layers
        parts = zip(x[..., part].split(cuts, 1), ids.split(cuts, 1), strict=True)
        found = [own(hidden, ngrams(tokens, None, state), None, state) for hidden, tokens in parts]
        torch.testing.assert_close(torch.cat(found, 1), decoded[..., part], **close)


def test_documents_are_apart_and_parts_give_the_whole() -> None:
    made, (x, vectors) = gate(), inputs()
    documents = torch.tensor([[0] * 3 + [1] * 8 + [2] + [3] * 9, [1] * 5 + [2] * 9 + [0] * 7])
    whole = made(x, vectors, documents)
    assert not whole[documents == 0].any()
    for row in range(B):
        for number in {*documents[row].tolist()} - {0}:
            inside = (row, documents[row] == number)
            torch.testing.assert_close(whole[inside], made(x[inside], vectors[inside]))
    state: dict[str, torch.Tensor] = {}
    parts = [made(x[:, [at]], vectors[:, [at]], documents[:, [at]], state) for at in range(T)]
    torch.testing.assert_close(torch.cat(parts, 1), whole)


@pytest.mark.usefixtures("unchecked")
def test_gradients_graphs_and_files(tmp_path) -> None:
    made, (x, vectors) = gate(), inputs()
    x, vectors = x[:, :4].contiguous().requires_grad_(), vectors[:, :4].contiguous().requires_grad_()
    assert torch.autograd.gradcheck(lambda *both: made(*both), (x, vectors))
    compiled = torch.compile(made, fullgraph=True, backend="eager")
    mask = torch.tensor([[0, 1, 1, 2], [1, 1, 1, 1]])
    torch.testing.assert_close(compiled(x, vectors, mask, {}), made(x, vectors, mask))
    made.save_pretrained(tmp_path)
    loaded = ContextGate.from_pretrained(tmp_path)
    assert torch.equal(loaded(x, vectors), made(x, vectors))
    assert loaded.config == made.config == copy.deepcopy(made).config


def test_a_new_convolution_adds_nothing_and_bad_sizes_are_refused() -> None:
    x, vectors = torch.randn(1, 5, D), torch.randn(1, 5, E)
    made = ContextGate(D, E, conv=ShortConvolution(D))
    without = copy.deepcopy(made)
    without.conv = None
    assert torch.equal(made(x, vectors), without(x, vectors))
    with pytest.raises(el.SizeError):
        ShortConvolution(D, kernel_size=1)
    for arguments in ((x[None], vectors[None]), (x, vectors, torch.tensor([[1, 0, 1, 1, 1]]))):
        with pytest.raises(el.ShapeError):
            made(*arguments)
