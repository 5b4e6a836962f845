"""A job that is offered for a model of transformers ends, for every family that is taken.

The families are those of docs/families.md: a sample is run always, all with `make test-all`.
"""

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from covering import looped, some
from model_families import families
from torch import nn

import embedlayer as el

VOCAB = 131
NEW = 3
IDS = torch.randint(20, VOCAB, (2, 9), generator=torch.Generator().manual_seed(0))

CASES = [(model_type, kind) for kind, model_type in families() if kind in ("causal", "masked")]
ALWAYS = [("gpt2", "causal"), ("gemma2", "causal"), ("bert", "masked")]


DECODERS_ONLY = (
    "bert bert-generation big_bird camembert data2vec-text electra ernie megatron-bert rembert roberta "
    "roberta-prelayernorm roc_bert roformer xlm-roberta xlm-roberta-xl xmod"
).split()
"""Types that predict the next token if their configuration says so."""
SETTINGS: dict[str, dict[str, Any]] = {
    "gemma2": {"final_logit_softcapping": 3.0},  # low, so that leaving it out shows
    "reformer": {"axial_pos_embds": False},  # positions of any number of tokens in training
    **{key: {"is_decoder": True} for key in DECODERS_ONLY},
}
OTHER_ROWS, SHARED, SIZES = "values for each token beside the rows", "share one weight", "do not share a vocabulary"
COLUMNS = "Leave out train_only_new"
EDIT_REFUSED = {
    "bart-masked": SHARED,
    "deepseek_v4": OTHER_ROWS,
    "mbart-masked": SHARED,
    "mllama": SIZES,
    "mobilebert": COLUMNS,
    "moshi": SIZES,
    "mvp-masked": SHARED,
    "prophetnet": SHARED,
    "qwen4_exp": "hashed n-grams",
    "qwen4_exp_text": "hashed n-grams",
}
"""Model types, some by their kind, in which `add_tokens` is refused by name, with the reason."""
NOT_CAUSAL = {"prophetnet": "does not read one hidden state", "xlm": "no causal", "xlnet": "no causal"}
"""Model types whose loss of the next token is refused by name, with the reason: streams, masks, permutations."""


def built(model_type: str, kind: str, **settings: object) -> nn.Module:
    """A small random model, patched."""
    from tiny_models import build

    settings |= SETTINGS.get(model_type, {}) if kind == "causal" or model_type == "reformer" else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return el.patch(build(model_type, kind, settings)[1])


def with_vocabulary(model_type: str, kind: str, size: int) -> nn.Module:
    """A small random model with so many tokens, wherever its configuration states them."""
    from transformers import CONFIG_MAPPING

    config = built(model_type, kind).config.get_text_config()
    parts = [f"{name}." for name in CONFIG_MAPPING[model_type].sub_configs if "text" in name or "language" in name]
    keys = [key for key in ("vocab_size", "vocab_size_per_layer_input") if hasattr(config, key)]
    return built(model_type, kind, **{f"{part}{key}": size for part in (parts or [""]) for key in keys})


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def logits_of(model: nn.Module, ids: torch.Tensor = IDS) -> torch.Tensor:
    inputs = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        logits = model(input_ids=ids, **inputs).logits
        return logits + 0


@pytest.mark.parametrize(("model_type", "kind"), some(ALWAYS, CASES))
def test_added_rows_are_trained_merged_and_undone(model_type, kind, unchecked) -> None:
    model = built(model_type, kind)
    before, size = state_of(model), model.config.get_text_config().vocab_size
    if refusal := EDIT_REFUSED.get(model_type, EDIT_REFUSED.get(f"{model_type}-{kind}")):
        with pytest.raises(el.core.errors.EmbedLayerError, match=refusal):
            el.vocab.add_tokens(model, NEW, train_only_new=True)
        assert same(state_of(model), before)
        return
    receipt = el.vocab.add_tokens(model, NEW, train_only_new=True)
    rows = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert rows
    assert {len(each) for each in rows} == {NEW}
    optimizer, start = torch.optim.AdamW(rows, lr=0.1), [each.detach().clone() for each in rows]
    ids = torch.where(IDS > VOCAB - 60, VOCAB + 1, IDS)
    model.train()
    for _ in range(2):
        optimizer.zero_grad()
        logits = model(input_ids=ids).logits
        F.cross_entropy(logits.flatten(0, -2), ids.flatten()).backward()
        optimizer.step()
    model.eval()
    assert not any(torch.equal(each, old) for each, old in zip(rows, start, strict=True))
    with pytest.raises(el.CheckpointError, match=r"call embedlayer\.vocab\.merge_rows\(model\) before unpatch"):
        el.unpatch(model)
    logits = model(input_ids=ids).logits.detach()
    el.vocab.merge_rows(model)
    torch.testing.assert_close(model(input_ids=ids).logits.detach(), logits)
    receipt.undo(model)
    assert same(state_of(model), before)
    assert model.config.get_text_config().vocab_size == size
    el.unpatch(model)
    assert same(state_of(model), before)
    assert not any(isinstance(part, el.TokenEmbedding | el.OutputHead) for part in model.modules())


CAUSAL = [case for case in CASES if case[1] == "causal"]
DECODERS = [("gemma2", "causal"), ("mamba", "causal")]
COMPRESSED = [*DECODERS, ("bert", "masked"), ("t5", "seq2seq")]


SMALLER = ("int8", "rank=16")
IN_TURN = [(*case, SMALLER[number % 2]) for number, case in enumerate(COMPRESSED)]
ALL_COMPRESSED = [*CASES, *((kind, "seq2seq") for kind in ("t5", "bart", "marian", "m2m_100"))]


@looped("model_type, kind, to", some(IN_TURN, [(*case, to) for case in ALL_COMPRESSED for to in SMALLER]))
def test_a_compressed_table_is_put_in_measured_saved_and_loaded(model_type, kind, to, tmp_path, unchecked) -> None:
    """The oracle is the model whose dense rows are those of the compressed table."""
    import transformers

    model = built(model_type, kind)
    before, logits = state_of(model), logits_of(model)
    root = model.get_input_embeddings()
    if model_type == "mobilebert":
        with pytest.raises(el.CheckpointError, match="itself, beside other rows: its table is not replaced"):
            el.compress.replace_table(model, el.compress.compress_table(root, to))
        return
    small = el.compress.replace_table(model, el.compress.compress_table(root, to))
    assert isinstance(small.get_input_embeddings(), el.QuantizedEmbedding | el.FactorizedEmbedding)
    dense = copy.deepcopy(model)
    with torch.no_grad():
        dense.get_input_embeddings().weight.copy_(small.get_input_embeddings().rows(0, root.vocab_size))
    expected = logits_of(dense)
    assert not torch.equal(expected, logits)
    torch.testing.assert_close(logits_of(small), expected, rtol=1e-4, atol=1e-4)
    assert same(state_of(model), before)
    assert torch.equal(logits_of(model), logits)
    assert torch.equal(logits_of(el.compress.replace_table(model, root)), logits)
    with pytest.raises(el.CheckpointError, match=r"embedlayer\.compress\.save_model\(model, folder\)"):
        small.save_pretrained(tmp_path / "refused")
    with pytest.raises(el.CheckpointError, match="unpatch the model before replace_table"):
        el.unpatch(small)
    el.compress.save_model(small, tmp_path / "saved")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        again = el.compress.load_model(tmp_path / "saved")
        for folder in (tmp_path / "saved", tmp_path / "saved" / "model"):
            for each in (transformers.AutoModel, type(model)):
                with pytest.raises((OSError, ValueError)):
                    each.from_pretrained(folder)
    assert type(again) is type(model)
    assert type(again.get_input_embeddings()) is type(small.get_input_embeddings())
    torch.testing.assert_close(logits_of(again), expected, rtol=1e-4, atol=1e-4)
    assert el.open_model(tmp_path / "saved").table.vocab_size == root.vocab_size


@pytest.mark.parametrize(("model_type", "kind"), some(DECODERS, CAUSAL))
def test_the_loss_on_a_text_is_that_of_the_plain_model(model_type, kind, unchecked) -> None:
    model = built(model_type, kind).train()
    text = torch.cat([*IDS, *IDS])[:33]  # four windows of 8 tokens
    root = model.get_input_embeddings()
    if model_type in NOT_CAUSAL:
        with pytest.raises(el.CheckpointError, match=NOT_CAUSAL[model_type]):
            el.compress.loss_on_text(model, text, window=8)
        return
    small = el.compress.compress_table(root, "int8")
    found = el.compress.compare_compression(
        root, {"int8": small}, loss=el.compress.loss_on_text(model, text, window=8, stride=8)
    )
    assert all(part.training for part in model.modules()) or model_type == "big_bird"  # it builds blocks as it runs
    model.eval()
    plain = el.unpatch(copy.deepcopy(model))
    for rows, result in zip((root.weight, small.rows(0, root.vocab_size)), found, strict=True):
        with torch.no_grad():
            plain.get_input_embeddings().weight.copy_(rows)
            total = 0.0
            for start in range(0, len(text) - 1, 8):
                ids = text[start : start + 9].unsqueeze(0)
                total += F.cross_entropy(plain(input_ids=ids[:, :-1]).logits[0], ids[0, 1:], reduction="sum").item()
        assert result.loss == pytest.approx(total / (len(text) - 1), rel=1e-4)


@pytest.mark.parametrize(("model_type", "kind"), [("bert", "masked"), ("t5", "seq2seq")])
def test_a_model_that_predicts_no_next_token_is_refused_by_name(model_type, kind, unchecked) -> None:
    model = built(model_type, kind)
    with pytest.raises(el.CheckpointError, match=f"{type(model).__name__} is (no causal|an encoder-decoder)"):
        el.compress.loss_on_text(model, IDS[0])


@pytest.mark.parametrize(("model_type", "kind"), some(DECODERS, CAUSAL))
def test_rows_of_new_tokens_are_distilled_and_nothing_else_changes(model_type, kind, unchecked) -> None:
    model = with_vocabulary(model_type, kind, 257)
    teacher, before = copy.deepcopy(model), state_of(model)
    old = el.train_tokenizer((), "byte")
    refusal = NOT_CAUSAL.get(model_type, EDIT_REFUSED.get(model_type))
    if refusal and model_type not in NOT_CAUSAL:
        with pytest.raises(el.core.errors.EmbedLayerError, match=refusal):
            el.vocab.add_tokens(model, [" loved"], tokenizer=old)
        return
    receipt = el.vocab.add_tokens(model, [" loved"], tokenizer=old)
    assert list(receipt.added) == [257]
    start = state_of(model)

    def distilled() -> el.vocab.DistillationLosses:
        return el.vocab.distill_rows(
            model,
            teacher,
            ["it loved it", "they loved dogs", "no new token"],
            el.TrainingOptions(steps=3, learning_rate=0.005, batch_size=3, max_length=16),
            tokenizer=receipt.tokenizer,
            teacher_tokenizer=old,
            token_ids=receipt.added,
        )

    if refusal:
        with pytest.raises(el.core.errors.EmbedLayerError, match=refusal):
            distilled()
        return
    if model_type == "reformer":  # its code computes gradients in training mode alone
        with pytest.raises(AssertionError, match=r"model\.train\(\)"):
            distilled()
        return
    losses = distilled()
    assert losses.trained == (257,)
    first, *later = (sum(pair) for pair in zip(losses.hidden, losses.prediction, strict=True))
    assert min(later) < first  # a step may change which experts a token has, and then raise the loss
    changed = [name for name, tensor in state_of(model).items() if not torch.equal(tensor, start[name])]
    assert changed
    for name in changed:
        assert torch.equal(model.state_dict()[name][:257], before[name])
    receipt.undo(model)
    assert same(state_of(model), before)
