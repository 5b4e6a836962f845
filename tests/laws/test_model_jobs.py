"""A job that is offered for a model of transformers ends, for every family that is taken.

The families are those of `examples/tiny_models.py`: a sample is run always, the other causal ones of the sample of
`tests/test_all_families.py` with `make test-all`.
"""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from covering import some
from torch import nn

import embedlayer as el

VOCAB = 131
NEW = 3
IDS = torch.randint(20, VOCAB, (2, 9), generator=torch.Generator().manual_seed(0))

CASES = [
    *((kind, "causal") for kind in ("llama", "gpt2", "gemma2", "opt", "granite", "mamba", "bloom", "mpt", "phi")),
    *((kind, "causal") for kind in ("qwen2", "gptj", "gpt_neox", "falcon", "olmo2", "cohere2", "gemma3_text", "jamba")),
    *((kind, "causal") for kind in ("deepseek_v3", "llama4_text", "exaone4", "stablelm", "xglm", "biogpt", "bart")),
    *((kind, "causal") for kind in ("smollm3", "nanochat", "minicpm3", "ministral3", "hunyuan_v1_dense", "gpt_oss")),
    *((kind, "masked") for kind in ("bert", "roberta", "electra", "modernbert", "deberta-v2")),
]
ALWAYS = [("llama", "causal"), ("gpt2", "causal"), ("gemma2", "causal"), ("opt", "causal"), ("bert", "masked")]


def built(model_type: str, kind: str, **settings: object) -> nn.Module:
    """A small random model, patched; soft caps are low, so that leaving them out shows."""
    from tiny_models import build

    settings |= {"final_logit_softcapping": 3.0} if model_type == "gemma2" else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return el.patch(build(model_type, kind, settings)[1])


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


@pytest.mark.parametrize(("model_type", "kind"), some(ALWAYS, CASES))
def test_added_rows_are_trained_merged_and_undone(model_type, kind, unchecked) -> None:
    model = built(model_type, kind)
    before, size = state_of(model), model.config.get_text_config().vocab_size
    receipt = el.vocab.add_tokens(model, NEW, train_only_new=True)
    rows = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert rows
    assert {len(each) for each in rows} == {NEW}
    optimizer, start = torch.optim.AdamW(rows, lr=0.1), [each.detach().clone() for each in rows]
    ids = torch.where(IDS > VOCAB - 60, VOCAB + 1, IDS)
    for _ in range(2):
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
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


@pytest.mark.parametrize("edit", ["add", "reorder"])
@pytest.mark.parametrize(("model_type", "kind"), some(ALWAYS[:2], ALWAYS))
def test_a_receipt_in_a_saved_folder_is_the_one_that_undo_reads(model_type, kind, edit, tmp_path, unchecked) -> None:
    from safetensors.torch import load_file

    model = built(model_type, kind)
    before, config = state_of(model), model.config.to_dict()
    if edit == "add":
        receipt = el.vocab.add_tokens(model, NEW, train_only_new=True)
        for parameter in model.parameters():
            if parameter.requires_grad:
                nn.init.normal_(parameter)
        el.vocab.merge_rows(model)
    else:
        receipt = el.vocab.edit_vocabulary(model, reorder=[*range(VOCAB - 1, -1, -1)])
        assert model.config.eos_token_id != config["eos_token_id"] or config["eos_token_id"] is None
    model.save_pretrained(tmp_path / "new")
    receipt.save(tmp_path / "new")
    assert (tmp_path / "new" / "vocabulary-1.receipt").exists()
    el.vocab.last_receipt(tmp_path / "new").undo(tmp_path / "new", out=tmp_path / "back")
    undone = load_file(tmp_path / "back" / "model.safetensors")
    assert all(torch.equal(tensor, before[name]) for name, tensor in undone.items())
    again = type(model).from_pretrained(tmp_path / "back").config.to_dict()
    assert {key: again[key] for key in config if "token_id" in key or key == "vocab_size"} == {
        key: value for key, value in config.items() if "token_id" in key or key == "vocab_size"
    }


CAUSAL = [case for case in CASES if case[1] == "causal"]
DECODERS = [("llama", "causal"), ("gpt2", "causal"), ("gemma2", "causal"), ("mamba", "causal")]
COMPRESSED = [*DECODERS, ("bert", "masked"), ("t5", "seq2seq")]


def logits_of(model: nn.Module, ids: torch.Tensor = IDS) -> torch.Tensor:
    inputs = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        logits = model(input_ids=ids, **inputs).logits
        return logits + 0


@pytest.mark.parametrize("to", ["int8", "rank=16"])
@pytest.mark.parametrize(
    ("model_type", "kind"),
    some(COMPRESSED, [*CASES, *((kind, "seq2seq") for kind in ("t5", "bart", "marian", "m2m_100"))]),
)
def test_a_compressed_table_is_put_in_measured_saved_and_loaded(model_type, kind, to, tmp_path, unchecked) -> None:
    """The oracle is the model whose dense rows are those of the compressed table."""
    import transformers

    model = built(model_type, kind)
    before, logits = state_of(model), logits_of(model)
    root = model.get_input_embeddings()
    small = el.compress.replace_table(model, el.compress.compress_table(root, to))
    assert isinstance(small.get_input_embeddings(), el.QuantizedEmbedding | el.FactorizedEmbedding)
    dense = copy.deepcopy(model)
    with torch.no_grad():
        dense.get_input_embeddings().weight.copy_(small.get_input_embeddings().rows(0, VOCAB))
    expected = logits_of(dense)
    assert not torch.allclose(expected, logits, atol=1e-4)
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
            with pytest.raises((OSError, ValueError)):
                transformers.AutoModel.from_pretrained(folder)
    assert type(again) is type(model)
    assert type(again.get_input_embeddings()) is type(small.get_input_embeddings())
    torch.testing.assert_close(logits_of(again), expected, rtol=1e-4, atol=1e-4)
    assert el.open_model(tmp_path / "saved").table.vocab_size == VOCAB


@pytest.mark.parametrize(("model_type", "kind"), some(DECODERS, CAUSAL))
def test_the_loss_on_a_text_is_that_of_the_plain_model(model_type, kind, unchecked) -> None:
    from embedlayer.models.causal import causal_outputs

    model = built(model_type, kind).train()
    text = torch.cat([*IDS, *IDS])
    root = model.get_input_embeddings()
    small = el.compress.compress_table(root, "int8")
    found = el.compress.compare_compression(root, {"int8": small}, loss=el.compress.loss_on_text(model, text, length=8))
    assert all(part.training for part in model.modules())
    model.eval()
    plain = el.unpatch(copy.deepcopy(model))
    for rows, result in zip((root.weight, small.rows(0, VOCAB)), found, strict=True):
        with torch.no_grad():
            plain.get_input_embeddings().weight.copy_(rows)
            total = 0.0
            for start in range(0, len(text) - 1, 8):
                ids = text[start : start + 9].unsqueeze(0)
                total += F.cross_entropy(plain(input_ids=ids[:, :-1]).logits[0], ids[0, 1:], reduction="sum").item()
        assert result.loss == pytest.approx(total / (len(text) - 1), rel=1e-4)
    hidden = causal_outputs(model, IDS).hidden
    assert hidden.shape[:2] == IDS.shape
    head = model.get_output_embeddings()
    assert hidden.shape[2] == (head.in_features if isinstance(head, nn.Linear) else head.embed_dim)


@pytest.mark.parametrize(("model_type", "kind"), [("bert", "masked"), ("t5", "seq2seq")])
def test_a_model_that_predicts_no_next_token_is_refused_by_name(model_type, kind, unchecked) -> None:
    model = built(model_type, kind)
    with pytest.raises(el.CheckpointError, match=f"{type(model).__name__} is (no causal|an encoder-decoder)"):
        el.compress.loss_on_text(model, IDS[0])


@pytest.mark.parametrize(("model_type", "kind"), some(DECODERS, CAUSAL))
def test_rows_of_new_tokens_are_distilled_and_nothing_else_changes(model_type, kind, unchecked) -> None:
    model = built(model_type, kind, vocab_size=257)
    teacher, before = copy.deepcopy(model), state_of(model)
    old = el.train_tokenizer((), "byte")
    receipt = el.vocab.add_tokens(model, [" loved"], tokenizer=old)
    assert list(receipt.added) == [257]
    start = state_of(model)
    losses = el.vocab.distill_rows(
        model,
        teacher,
        ["it loved it", "they loved dogs", "no new token"],
        el.TrainingOptions(steps=3, learning_rate=0.05, batch_size=3, max_length=16),
        tokenizer=receipt.tokenizer,
        teacher_tokenizer=old,
        token_ids=receipt.added,
    )
    assert losses.trained == (257,)
    assert losses.hidden[-1] + losses.prediction[-1] < losses.hidden[0] + losses.prediction[0]
    changed = [name for name, tensor in state_of(model).items() if not torch.equal(tensor, start[name])]
    assert changed
    for name in changed:
        assert torch.equal(model.state_dict()[name][:257], before[name])
    receipt.undo(model)
    assert same(state_of(model), before)
