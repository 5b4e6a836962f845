"""Evaluation, conversion and generation by other libraries, with patched models and edited folders."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import embedlayer as el

pytestmark = pytest.mark.filterwarnings("ignore")  # advice of these libraries
TEXT = "the otter ate a fish and the fish ate the otter "


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    transformers = pytest.importorskip("transformers")
    own = el.train_tokenizer(TEXT * 30, vocab_size=290)
    names = dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>")
    return transformers.PreTrainedTokenizerFast(tokenizer_object=own, **names)


def llama(vocab_size: int, layers: int = 1) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(layers)
    sizes = {"hidden_size": 32, "intermediate_size": 24, "num_attention_heads": 2, "max_position_embeddings": 64}
    return LlamaForCausalLM(LlamaConfig(vocab_size=vocab_size, num_hidden_layers=layers, **sizes)).eval()


@pytest.mark.parametrize("do_sample", [False, True])
def test_a_patched_target_generates_the_same_tokens_with_a_patched_draft(do_sample) -> None:
    target, draft = llama(99, layers=2), llama(99)
    ids = torch.tensor([[5, 6, 7]])

    def generated(**options: Any) -> torch.Tensor:
        torch.manual_seed(0)
        result: torch.Tensor = target.generate(ids, max_new_tokens=12, do_sample=do_sample, **options)
        return result

    expected = [generated(assistant_model=draft), generated(prompt_lookup_num_tokens=3)]
    el.patch(target)
    el.patch(draft)
    assert torch.equal(generated(assistant_model=draft), expected[0])
    assert torch.equal(generated(prompt_lookup_num_tokens=3), expected[1])


def test_lm_eval_gives_a_patched_model_the_same_results(tokenizer) -> None:
    huggingface = pytest.importorskip("lm_eval.models.huggingface")
    from lm_eval.api.instance import Instance

    def results(model: Any) -> list[Any]:
        lm = huggingface.HFLM(pretrained=model, tokenizer=tokenizer, batch_size=2, device="cpu")
        pairs = [("the otter", " ate a fish"), ("a fish", " and the otter"), ("the", " fish")]
        return [
            lm.loglikelihood([Instance("loglikelihood", {}, pair, 0) for pair in pairs]),
            lm.loglikelihood_rolling([Instance("loglikelihood_rolling", {}, (TEXT,), 0)]),
            lm.generate_until([Instance("generate_until", {}, ("the otter", {"until": ["\n"], "max_gen_toks": 5}), 0)]),
        ]

    model = llama(len(tokenizer))
    expected = results(model)
    assert results(el.patch(model)) == expected


@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
def test_ctranslate2_converts_an_edited_folder(model_type, tokenizer, tmp_path: Path) -> None:
    ctranslate2 = pytest.importorskip("ctranslate2")
    from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

    sizes = {"n_positions": 64, "n_embd": 32, "n_layer": 1, "n_head": 2}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), **sizes)) if model_type == "gpt2" else None
    model = el.patch(model or llama(len(tokenizer)))
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    el.vocab.add_tokens(tmp_path / "model", [" zebra"], out=tmp_path / "edited")
    ctranslate2.converters.TransformersConverter(str(tmp_path / "edited")).convert(str(tmp_path / "converted"))

    edited = AutoTokenizer.from_pretrained(tmp_path / "edited")
    ids = edited("the zebra ate a fish").input_ids
    tokens = edited.convert_ids_to_tokens(ids)
    assert " zebra" in tokens
    logits = ctranslate2.Generator(str(tmp_path / "converted")).forward_batch([tokens])
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(tmp_path / "edited")(torch.tensor([ids])).logits
    torch.testing.assert_close(torch.from_numpy(np.array(logits)), expected, rtol=1e-4, atol=1e-4)
