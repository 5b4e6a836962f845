"""The library's two ends inside live transformers models."""

import copy
import warnings

import pytest
import torch

from embedlayer import CheckpointError, OutputHead, TokenEmbedding, patch, unpatch

transformers = pytest.importorskip("transformers", reason="the dev extra is not installed")

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning")  # in peft

SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 99}
IDS = {"pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 2}
GPT2 = {"vocab_size": 99, "n_positions": 64, "n_embd": 16, "n_layer": 2, "n_head": 2}
LLAMA = {**SMALL, "intermediate_size": 24}
GEMMA = {**LLAMA, "num_key_value_heads": 1, "head_dim": 8}
OPT = {**SMALL, "ffn_dim": 24, "max_position_embeddings": 64, "word_embed_proj_dim": 16}
XGLM = {"vocab_size": 99, "d_model": 16, "ffn_dim": 24, "num_layers": 2, "attention_heads": 2}
KINDS = {
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", GPT2),
    "llama": ("LlamaForCausalLM", "LlamaConfig", LLAMA),
    "llama-tied": ("LlamaForCausalLM", "LlamaConfig", {**LLAMA, "tie_word_embeddings": True}),
    "gemma": ("GemmaForCausalLM", "GemmaConfig", GEMMA),
    "xglm": ("XGLMForCausalLM", "XGLMConfig", {**XGLM, "max_position_embeddings": 64}),
    "opt": ("OPTForCausalLM", "OPTConfig", OPT),
}
TIED = [kind for kind in KINDS if kind != "llama"]


def made(kind):
    torch.manual_seed(0)
    model, config, options = KINDS[kind]
    model = getattr(transformers, model)(getattr(transformers, config)(**options, **IDS)).eval()
    with torch.no_grad():  # large enough that a wrong scale, a zeroed padding row or a masked logit shows
        model.get_input_embeddings().weight.normal_(std=0.5)
    return model


def pair(kind):
    plain = made(kind)
    return plain, patch(copy.deepcopy(plain))


def table_name(model):
    return next(name for name, module in model.named_modules() if module is model.get_input_embeddings())


@pytest.fixture
def ids():
    return torch.randint(0, 99, (2, 9))  # token 1, the padding token of most, among them


@pytest.mark.parametrize("kind", KINDS)
def test_a_patched_model_is_saved_and_unpatched_as_the_plain_one(kind, ids, tmp_path) -> None:
    """`tests/laws/test_patch.py` has the outputs, gradients and names of all types."""
    plain, patched = pair(kind)
    kinds = [type(module) for module in plain.modules()]
    table, head = patched.get_input_embeddings(), patched.get_output_embeddings()
    assert isinstance(table, TokenEmbedding)
    assert isinstance(head, OutputHead)
    assert (head.weight is table.weight) == head.tied == (kind in TIED)
    assert patch(patched) is patched
    assert patched.get_input_embeddings() is table
    patched.load_state_dict(plain.state_dict())
    plain.load_state_dict(patched.state_dict())
    options = {"max_new_tokens": 8, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    assert torch.equal(patched.generate(ids.clamp(min=3), **options), plain.generate(ids.clamp(min=3), **options))
    plain.save_pretrained(tmp_path / "plain")
    patched.save_pretrained(tmp_path / "patched")
    files = sorted(file.name for file in (tmp_path / "plain").iterdir())
    assert sorted(file.name for file in (tmp_path / "patched").iterdir()) == files
    for file in files:
        assert (tmp_path / "plain" / file).read_bytes() == (tmp_path / "patched" / file).read_bytes()
    with torch.no_grad():
        for model in (plain, patched):
            model.get_input_embeddings().weight.mul_(1.5)
            model.bfloat16().float()
    assert unpatch(patched) is unpatch(patched) is patched
    assert [type(module) for module in patched.modules()] == kinds
    with torch.no_grad():
        rounded = kind == "gemma"  # transformers' scale stays rounded when the model goes to bfloat16 and back
        assert torch.allclose(patched(ids).logits, plain(ids).logits, atol=1e-2 if rounded else 0.0)


def test_a_copy_reads_its_own_table(ids) -> None:
    _, patched = pair("gpt2")
    twin = copy.deepcopy(patched)
    with torch.no_grad():
        assert torch.equal(twin(ids).logits, patched(ids).logits)
        twin.get_input_embeddings().weight.zero_()
        assert twin(ids).logits.abs().max() == 0
        assert patched(ids).logits.abs().max() > 0


def test_what_is_no_plain_table_is_refused_and_left_alone() -> None:
    with pytest.raises(CheckpointError, match="has no get_input_embeddings"):
        patch(torch.nn.Linear(2, 2))
    model = made("gpt2")
    model.transformer.wte.max_norm = 1.0
    with pytest.raises(CheckpointError, match="has no max_norm"):
        patch(model)
    assert type(model.lm_head) is torch.nn.Linear

    class Odd(torch.nn.Embedding):
        pass

    model.transformer.wte = Odd(99, 16)
    with pytest.raises(CheckpointError, match="What an Odd does beyond look-up"):
        patch(model)
    model.transformer.wte = torch.nn.Linear(2, 2)
    with pytest.raises(CheckpointError, match="are a Linear, not an nn.Embedding"):
        patch(model)


# PEFT


@pytest.fixture
def peft():
    return pytest.importorskip("peft", reason="the dev extra is not installed")


def with_lora(peft, model, targets, **options):
    torch.manual_seed(5)
    config = peft.LoraConfig(r=3, lora_alpha=6, target_modules=targets, init_lora_weights=False, **options)
    with warnings.catch_warnings():  # that the head of a tied model does not follow: here it does
        warnings.filterwarnings("ignore", message=".*tie_word_embeddings=True.*")
        warnings.filterwarnings("ignore", message=".*but no tied modules are added.*")
        warnings.filterwarnings("ignore", message=".*fan_in_fan_out.*")
        return peft.get_peft_model(model, config)


def with_rows(plain, adapted):
    """The plain model with LoRA's product added to its table: what LoRA on the table means."""
    lora = next(
        module for module in adapted.modules() if hasattr(module, "lora_embedding_A") and len(module.lora_embedding_A)
    )
    delta = lora.get_delta_weight("default").detach()
    assert delta.abs().max() > 0.05
    expected = copy.deepcopy(plain)
    with torch.no_grad():
        expected.get_input_embeddings().weight.add_(delta)
    return expected


@pytest.mark.parametrize(("kind", "ensured"), [*((kind, False) for kind in KINDS), *((kind, True) for kind in TIED)])
def test_lora_on_the_table_is_seen_by_a_tied_head_once(peft, kind, ensured, ids) -> None:
    plain, patched = pair(kind)
    name = table_name(plain).rsplit(".", 1)[-1]
    adapted = with_lora(peft, patched, [name], ensure_weight_tying=ensured)
    expected = with_rows(plain, adapted)
    with torch.no_grad():
        logits = adapted(ids).logits
        assert torch.allclose(logits, expected(ids).logits, atol=1e-5)
        assert not torch.allclose(logits, plain(ids).logits, atol=1e-2)
        with adapted.disable_adapter():
            assert torch.equal(adapted(ids).logits, plain(ids).logits)
    adapted(ids, labels=ids).loss.backward()
    trained = {name for name, parameter in adapted.named_parameters() if parameter.grad is not None}
    assert trained
    assert all("lora" in name for name in trained)


@pytest.mark.parametrize("kind", ["gemma", "gpt2"])
@pytest.mark.filterwarnings("ignore:Model with `tie_word_embeddings=True`")  # where PEFT fears that merging unties
def test_merging_lora_gives_the_same_and_unpatching_works_under_it(peft, kind, ids) -> None:
    plain, patched = pair(kind)
    adapted = with_lora(peft, patched, [table_name(plain).rsplit(".", 1)[-1]])
    expected = with_rows(plain, adapted)
    with torch.no_grad():
        adapted.merge_adapter()
        assert torch.allclose(adapted(ids).logits, expected(ids).logits, atol=1e-5)
        adapted.unmerge_adapter()
        merged = copy.deepcopy(adapted).merge_and_unload()
        assert isinstance(merged.get_input_embeddings(), TokenEmbedding)
        assert torch.allclose(unpatch(merged)(ids).logits, expected(ids).logits, atol=1e-5)
        unpatch(adapted)
        assert not any(isinstance(module, TokenEmbedding | OutputHead) for module in adapted.modules())
        with adapted.disable_adapter():
            assert torch.allclose(adapted(ids).logits, plain(ids).logits, atol=1e-5)


def test_a_model_that_peft_has_wrapped_before_is_refused(peft) -> None:
    adapted = with_lora(peft, made("llama-tied"), ["embed_tokens"])
    with pytest.raises(CheckpointError, match="Patch before adding PEFT"):
        patch(adapted)
