"""`embedlayer generate` on a run of ours and on LLaMA-type checkpoints."""

import re
from typing import Any

import pytest
import torch
from commands import answer, printed, refused, run

from embedlayer import (
    DecoderLM,
    LearnedPositionalEmbedding,
    OutputHead,
    RotaryEmbedding,
    TokenEmbedding,
    generate,
    train_tokenizer,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(3)
    folder = tmp_path_factory.mktemp("run")
    head = OutputHead(vocab_size=257, embed_dim=16, init_std=1.0)
    model = DecoderLM(TokenEmbedding(257, 16, init_std=1.0), RotaryEmbedding(8), head, num_layers=1, num_heads=2)
    model.save_pretrained(folder, tokenizer=train_tokenizer((), "byte"))
    return folder


def test_a_run_of_ours_continues_the_text(folder, capsys) -> None:
    result = answer("generate", folder, "Once", "--tokens", 20, "--greedy")
    model, tokenizer = DecoderLM.from_pretrained(folder), train_tokenizer((), "byte")
    prompt = torch.tensor(tokenizer.encode("Once").ids)
    assert result["ids"] == generate(model, prompt, max_new_tokens=20, stop_id=256).tolist()
    assert result["text"] == tokenizer.decode(result["ids"])
    assert result["new_tokens"] == len(result["ids"]) - 4
    assert result["stopped"] == (result["ids"][-1] == 256)
    assert run("generate", folder, "Once", "--tokens", 20, "--greedy") == 0
    shown = capsys.readouterr()
    assert shown.out == result["text"] + "\n"
    assert f"{folder} added {result['new_tokens']} tokens to the 4 of the prompt" in shown.err
    assert "the most likely token each time (--greedy)" in shown.err


def test_what_is_sampled_is_that_of_the_function_and_the_last_sentence_says_how_it_comes_again(folder, capsys) -> None:
    model, asked = DecoderLM.from_pretrained(folder), ["generate", folder, "Once", "--tokens", 20]
    default: dict[str, Any] = {"temperature": 0.8, "top_p": 0.95}
    penalty = ["--repetition-penalty", 1.3]
    for words, options, how in (
        ([], default, "sampled at temperature 0.8, top-p 0.95"),
        (
            ["--min-p", 0.1, *penalty],
            {**default, "min_p": 0.1, "repetition_penalty": 1.3},
            "top-p 0.95, min-p 0.1, repe",
        ),
        (
            ["--greedy", *penalty],
            {"repetition_penalty": 1.3},
            "the most likely token each time (--greedy), repetition-",
        ),
    ):
        assert run(*asked, *words) == 0
        first = capsys.readouterr()
        assert how in first.err
        found = re.search(r"; --seed (\d+) gives the same text again\.", first.err)
        seed = ["--seed", found[1]] if found else []
        assert bool(seed) == ("--greedy" not in words)
        assert run(*asked, *words, *seed) == 0
        assert capsys.readouterr().out == first.out
        result = answer(*asked, *words, *seed)
        prompt = torch.tensor(result["ids"][:4])
        torch.manual_seed(int(seed[1]) if seed else 0)
        assert result["ids"] == generate(model, prompt, max_new_tokens=20, stop_id=256, **options).tolist()
        assert {name: result[name] for name in options} == options
    for mode in ("raw_logprobs", "processed_logprobs"):
        result = answer(*asked, "--seed", 4, "--log-probs", mode)
        torch.manual_seed(4)
        kept: dict[str, Any] = {"return_log_probs": True, "logprobs_mode": mode}
        expected = generate(model, prompt, max_new_tokens=20, stop_id=256, **default, **kept)
        assert (result["ids"], result["logprobs_mode"]) == (expected.ids.tolist(), mode)
        assert result["log_probs"] == expected.log_probs.tolist()
    assert "pass --json too" in refused(*asked, "--log-probs", mode)


def test_without_a_number_of_tokens_it_says_what_its_positions_reach(tmp_path) -> None:
    head = OutputHead(vocab_size=257, embed_dim=16, init_std=1.0)
    position = LearnedPositionalEmbedding(12, 16)
    DecoderLM(TokenEmbedding(257, 16), position, head, num_layers=1, num_heads=2).save_pretrained(
        tmp_path, tokenizer=train_tokenizer((), "byte", special_tokens=())
    )
    assert len(answer("generate", tmp_path, "Once")["ids"]) == 13
    assert "exceeds the 12 positions" in refused("generate", tmp_path, "Once", "--tokens", 40)
    assert "pass a text of at least one token" in refused("generate", tmp_path)


def test_a_checkpoint_of_transformers_is_continued(tmp_path) -> None:
    transformers = pytest.importorskip("transformers", reason="the dev extra is not installed")
    from tokenizers import processors

    tokenizer = train_tokenizer("Once upon a time there was a cat. " * 9, vocab_size=300, special_tokens=["<s>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    stops = {"initializer_range": 0.5, "bos_token_id": 0, "eos_token_id": [7, 8]}
    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=300, **sizes, **stops))
    theirs.save_pretrained(tmp_path)
    result = answer("generate", tmp_path, "Once", "--tokens", 9, "--greedy")
    prompt = torch.tensor([tokenizer.encode("Once").ids])
    assert prompt[0, 0] == 0
    expected = theirs.generate(prompt, max_new_tokens=9, do_sample=False, eos_token_id=[0, 7, 8], pad_token_id=0)
    assert result["ids"] == expected[0].tolist()


def test_stories260k_says_its_story(shared_data) -> None:
    models = shared_data / "models"
    result = answer("generate", models / "stories260K.safetensors", "--greedy", "--tokens", 64)
    assert result["text"] in (models / "stories260K.md").read_text()
    assert len(result["ids"]) == 65
    assert printed("generate", models, "Once upon", "--tokens", 5, "--greedy") == "Once upon a time, there was\n"
