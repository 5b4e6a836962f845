"""Hidden states and loss of a causal model, ours or one of transformers; tests/laws/test_model_jobs.py has families."""

import dataclasses

import pytest
import torch
from decoders import gpt2
from torch import nn

import embedlayer as el
from embedlayer.models.causal import PatchedDecoder, causal_outputs, check_causal, evaluating, longest_sequence

IDS = torch.randint(3, 90, (2, 6), generator=torch.Generator().manual_seed(0))


def decoder() -> el.DecoderLM:
    return el.DecoderLM(el.TokenEmbedding(99, 16), "learned", num_layers=1, num_heads=2, max_seq_len=16).eval()


@pytest.mark.parametrize("make", [gpt2, decoder])
def test_the_loss_and_its_gradients_are_those_of_the_logits(make, unchecked) -> None:
    model = make()
    mask = torch.tensor([[1] * 6, [1] * 4 + [0] * 2])
    targets = IDS.masked_fill(mask == 0, -100)
    hidden, loss = causal_outputs(model, IDS, mask)
    head = model.get_output_embeddings()
    logits = torch.nn.functional.linear(hidden, head.weight)
    expected = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(2, 6)
    for reduction, want in (("none", expected), ("sum", expected.sum()), ("mean", expected.sum() / 10)):
        torch.testing.assert_close(loss(targets, reduction=reduction), want)
    parameters = list(model.parameters())
    found = torch.autograd.grad(loss(targets), parameters, retain_graph=True, allow_unused=True)
    wanted = torch.autograd.grad(expected.sum() / 10, parameters, allow_unused=True)
    torch.testing.assert_close(found, wanted)
    assert longest_sequence(model) == 16


def test_a_patched_decoder_is_trained_by_our_trainer(unchecked) -> None:
    model = gpt2()
    corpus = el.TokenCorpus.from_text("the cat sat on the mat . " * 40, el.train_tokenizer((), "byte"))
    model.resize_token_embeddings(257)
    options = el.TrainingOptions(steps=8, batch_size=4, max_length=12, learning_rate=0.05)
    trainer = el.Trainer(PatchedDecoder(model), *corpus.split(0.2), options)
    lines = list(trainer.run())
    assert lines[-1]["validation_loss"] < lines[0]["validation_loss"] - 0.5
    with pytest.raises(el.CheckpointError):
        _ = trainer.decoder
    with pytest.raises(el.SizeError):
        el.Trainer(PatchedDecoder(model), *corpus.split(0.2), dataclasses.replace(options, documents=True))


def test_what_is_no_causal_language_model_is_refused(unchecked) -> None:
    from transformers import BertConfig, BertForMaskedLM

    sizes = {"vocab_size": 99, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    bert = BertForMaskedLM(BertConfig(**sizes, intermediate_size=24)).train()
    with pytest.raises(el.CheckpointError):
        check_causal(bert, IDS[0])
    assert all(part.training for part in bert.modules())
    with pytest.raises(el.CheckpointError):
        causal_outputs(bert.bert, IDS)
    check_causal(gpt2(), IDS[0])


def test_modes_are_restored_module_by_module() -> None:
    model = decoder().train()
    model.norm.eval()
    with pytest.raises(KeyError), evaluating(model):
        assert not any(part.training for part in model.modules())
        raise KeyError
    assert [name for name, part in model.named_modules() if not part.training] == ["norm"]
