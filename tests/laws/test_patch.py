"""A patched model of transformers is the same function, of whatever type it is, and so is one that is resized."""

import copy

import pytest
import torch
from torch import nn

from embedlayer import OutputHead, TokenEmbedding, patch, unpatch

transformers = pytest.importorskip("transformers", reason="the dev extra is not installed")
auto = pytest.importorskip("transformers.models.auto.modeling_auto")

V, D = 99, 16
WIDTHS = dict.fromkeys(["hidden_size", "d_model", "n_embd", "dim", "emb_dim", "embed_dim"], D)
INNER = ["d_ff", "intermediate_size", "encoder_ffn_dim", "decoder_ffn_dim", "ffn_dim", "hidden_dim", "n_inner"]
LAYERS = ["num_layers", "num_hidden_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers"]
LAYERS += ["num_encoder_layers", "num_decoder_layers"]
HEADS = ["num_heads", "num_attention_heads", "n_head", "n_heads", "encoder_attention_heads", "decoder_attention_heads"]
HEADS += ["num_key_value_heads", "num_encoder_attention_heads", "num_decoder_attention_heads"]
LENGTHS = ["max_position_embeddings", "n_positions"]
TINY = {
    **dict.fromkeys(["vocab_size", "decoder_vocab_size", "src_vocab_size", "tgt_vocab_size"], V),
    **WIDTHS,
    **dict.fromkeys(INNER, 24),
    **dict.fromkeys(LAYERS, 2),
    **dict.fromkeys(HEADS, 2),
    **dict.fromkeys(LENGTHS, 64),
    **{"embedding_size": 8, "head_dim": 8, "d_kv": 8, "attention_window": 4, "num_experts": 2, "num_local_experts": 2},
    **{"num_experts_per_tok": 1, "pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 2, "forced_eos_token_id": None},
}
"""Every size that configurations of text models have, under the names that they use."""

HEARING = ["audioflamingo3", "glmasr", "granite_speech", "granite_speech_plus", "moss_transcribe_diarize"]
HEARING += ["musicflamingo", "nemo_speechlm", "qwen2_audio", "qwen3_asr", "vibevoice_asr", "voxtral"]
NESTED = ["encoder-decoder", "t5gemma", "t5gemma2", *HEARING, "voxtral_realtime"]
"""Sequence-to-sequence types whose sizes are in configurations of their parts."""

SEQ_TO_SEQ = [kind for kind in auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES if kind not in NESTED]
CAUSAL = ["bart", "bert", "biogpt", "bloom", "cohere", "ctrl", "gemma", "gemma2", "gemma3_text", "gpt2", "gpt_neox"]
CAUSAL += ["granite", "llama", "mamba", "minicpm3", "mistral", "mixtral", "mpt", "olmo2", "opt", "phi3", "qwen3"]
CAUSAL += ["rwkv", "starcoder2", "stablelm", "vaultgemma", "xglm", "xlm"]
MASKED = ["albert", "bert", "deberta-v2", "distilbert", "electra", "fnet", "mobilebert", "modernbert", "mpnet"]
MASKED += ["rembert", "roberta", "xlm-roberta-xl"]
NAMES = {
    "sequence to sequence": auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    "causal": auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "masked": auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
}
CASES = [
    *(("sequence to sequence", kind) for kind in SEQ_TO_SEQ),
    *(("causal", kind) for kind in CAUSAL),
    *(("masked", kind) for kind in MASKED),
]
IDS = torch.randint(3, 90, (2, 8), generator=torch.Generator().manual_seed(0))
IDS[0, 3] = TINY["pad_token_id"]


def built(task: str, kind: str, **options: object) -> nn.Module:
    base = transformers.CONFIG_MAPPING[kind]()
    sizes = {name: value for name, value in TINY.items() if hasattr(base, name)}
    if kind == "prophetnet":
        del sizes["num_hidden_layers"]  # it refuses that one
    torch.manual_seed(0)
    model = getattr(transformers, NAMES[task][kind])(type(base)(**sizes, decoder_start_token_id=2, **options))
    with torch.no_grad():  # large enough that a wrong scale, a zeroed padding row or a masked logit shows
        model.get_input_embeddings().weight.normal_(std=0.5)
    return model


def outputs(model: nn.Module, ids: torch.Tensor = IDS) -> dict[str, torch.Tensor]:
    """Logits in evaluation, loss in training, and all gradients."""
    with torch.no_grad():
        logits = model.eval()(input_ids=ids, labels=ids).logits
    torch.manual_seed(5)
    loss = model.train()(input_ids=ids, labels=ids).loss
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"logits": logits, "loss": loss.detach(), **gradients}


def assert_same(ours: nn.Module, theirs: nn.Module, ids: torch.Tensor = IDS) -> None:
    found, expected = outputs(ours, ids), outputs(theirs, ids)
    assert found.keys() == expected.keys()
    assert not [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)]


@pytest.mark.parametrize(("task", "kind"), CASES)
def test_every_type_of_model_stays_the_same_to_the_bit(task, kind) -> None:
    plain = built(task, kind)
    patched = copy.deepcopy(plain)
    before = dict(patched.named_parameters(remove_duplicate=False))
    kinds = {name: type(module) for name, module in plain.named_modules() if isinstance(module, nn.Embedding)}
    patch(patched)
    weight = patched.get_input_embeddings().weight
    holders = [module for module in patched.modules() if any(p is weight for p in module._parameters.values())]
    assert holders
    assert all(isinstance(module, TokenEmbedding | OutputHead) for module in holders)
    assert isinstance(patched.get_output_embeddings(), TokenEmbedding | OutputHead)
    after = dict(patched.named_parameters(remove_duplicate=False))
    assert list(after) == list(before)
    assert all(after[name] is before[name] for name in before)
    patched.tie_weights()
    after = dict(patched.named_parameters(remove_duplicate=False))
    assert all(after[name] is before[name] for name in before)
    assert list(patched.state_dict()) == list(plain.state_dict())
    assert_same(patched, plain)
    unpatch(patched)
    assert {name: type(module) for name, module in patched.named_modules() if name in kinds} == kinds
    assert not any(isinstance(module, TokenEmbedding | OutputHead) for module in patched.modules())
    for model in (plain, patched):
        model.zero_grad()
    assert_same(patched, plain)


RESIZED = [
    *(("sequence to sequence", kind, {}) for kind in ("t5", "bart", "marian", "m2m_100")),
    *(("causal", kind, {}) for kind in ("gpt2", "llama", "opt", "gemma3_text")),
    ("causal", "llama", {"tie_word_embeddings": True}),
    ("masked", "bert", {}),
]


@pytest.mark.parametrize(
    ("task", "kind", "options", "size"),
    [
        *((*case, size) for case in RESIZED for size in (120, 64)),
        *((*case, (100, 64)) for case in RESIZED if case[1] != "marian"),  # which fails without a patch too
    ],
)
def test_a_resized_model_agrees_with_the_plain_one_and_with_itself(task, kind, options, size) -> None:
    plain = built(task, kind, **options)
    patched = patch(copy.deepcopy(plain))
    for model in (plain, patched):
        torch.manual_seed(1)
        model.resize_token_embeddings(*(size if isinstance(size, tuple) else (size,)))
    table, head = patched.get_input_embeddings(), patched.get_output_embeddings()
    rows = len(table.weight)
    ids = torch.randint(max(0, rows - 20), rows, (2, 8))
    assert_same(patched, plain, ids)
    assert isinstance(head, OutputHead)
    sizes = (table.vocab_size, table.num_embeddings, head.out_features, head.weight.shape[0])
    assert {*sizes, patched.config.vocab_size, patched.vocab_size} == {rows}
    with pytest.raises(IndexError, match=f"token id {rows} .* table of {rows} rows"):
        table(torch.tensor([[rows]]))
    hidden, targets = torch.randn(5, head.in_features), torch.randint(0, rows, (5,))
    expected = nn.functional.cross_entropy(head(hidden), targets)
    torch.testing.assert_close(head.loss(hidden, targets), expected)
    unpatch(patched)
    assert isinstance(patched.get_output_embeddings(), nn.Linear)
    assert patched.get_input_embeddings().num_embeddings == rows
    assert patched.get_output_embeddings().out_features == rows
    for model in (plain, patched):
        model.zero_grad()
    assert_same(patched, plain, ids)


@pytest.mark.parametrize(("task", "kind"), [("sequence to sequence", "t5"), ("causal", "llama"), ("causal", "gpt2")])
def test_a_patched_model_follows_the_setters_of_transformers(task, kind) -> None:
    plain = built(task, kind)
    patched = patch(copy.deepcopy(plain))
    for model in (plain, patched):
        torch.manual_seed(1)
        model.set_input_embeddings(nn.Embedding(V + 11, D))
        if not model.config.tie_word_embeddings:
            model.set_output_embeddings(nn.Linear(D, V + 11, bias=False))
        model.config.vocab_size = V + 11
        model.tie_weights()
    ids = torch.randint(V, V + 11, (2, 8))
    assert_same(patched, plain, ids)
    patch(patched)
    assert isinstance(patched.get_input_embeddings(), TokenEmbedding)
    assert isinstance(patched.get_output_embeddings(), OutputHead)
    for model in (plain, patched):
        model.zero_grad()
    assert_same(patched, plain, ids)


@pytest.mark.parametrize("kind", ["t5", "bart"])
def test_a_sequence_to_sequence_model_is_saved_and_read_as_before(kind, tmp_path) -> None:
    plain = built("sequence to sequence", kind).eval()
    patched = patch(copy.deepcopy(plain))
    ids = IDS.clamp(min=3)
    options = {"max_new_tokens": 6, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    assert torch.equal(patched.generate(ids, **options), plain.generate(ids, **options))
    for name, model in (("plain", plain), ("patched", patched)):
        model.save_pretrained(tmp_path / name)
    for file in (tmp_path / "plain").iterdir():
        assert file.read_bytes() == (tmp_path / "patched" / file.name).read_bytes()
    again = patch(type(plain).from_pretrained(tmp_path / "patched"))
    assert_same(again, plain)


def test_an_encoder_and_a_decoder_with_tables_of_their_own_are_both_replaced() -> None:
    sizes = {"hidden_size": D, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    encoder = transformers.BertConfig(vocab_size=V, **sizes)
    decoder = transformers.BertConfig(vocab_size=50, is_decoder=True, add_cross_attention=True, **sizes)
    config = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    torch.manual_seed(0)
    plain = transformers.EncoderDecoderModel(config)
    patched = patch(copy.deepcopy(plain))
    tables = [module.vocab_size for module in patched.modules() if isinstance(module, TokenEmbedding)]
    assert sorted(tables) == [50, V]
    ids = IDS.clamp(max=49)
    for model in (plain, patched):
        torch.manual_seed(2)
        model.train()(input_ids=IDS, decoder_input_ids=ids).logits.square().mean().backward()
    found, expected = (dict(model.named_parameters()) for model in (patched, plain))
    assert all(torch.equal(found[name].grad, p.grad) for name, p in expected.items() if p.grad is not None)
    assert torch.equal(patched.eval()(IDS, decoder_input_ids=ids).logits, plain.eval()(IDS, decoder_input_ids=ids).logits)
