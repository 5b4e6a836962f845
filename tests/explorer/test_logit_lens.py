"""The logit lens against plain forward passes with hooks, what the page computes from the logits, and both steps."""

import re
from typing import Any

import numpy as np
import pytest
import torch
from covering import some
from decoders import small

from embedlayer import (
    DecoderLM,
    EmbeddingLayer,
    LearnedPositionalEmbedding,
    OutputHead,
    SizeError,
    TokenIdError,
    load_llama,
    train_tokenizer,
)
from embedlayer.core.errors import CheckpointError
from embedlayer.explorer import logit_lens as module
from embedlayer.explorer import pipeline
from embedlayer.explorer.export import write_page
from embedlayer.explorer.logit_lens import LogitLens, answer, exported_requests, logit_lens
from embedlayer.explorer.pipeline_steps import MOST_TOKENS, packed
from embedlayer.explorer.text_ids import shown_tokens
from embedlayer.models.sampling import Sampler
from embedlayer.opening import OpenedModel, open_model
from embedlayer.tables.dense import TokenEmbedding

TEXT = "I love dogs and dogs love me"
HEADS = {
    "tied": lambda: None,
    "untied": lambda: OutputHead(vocab_size=50, embed_dim=24, bias=True, softcap=2.0, logit_scale=0.7, init_std=1.0),
}


@pytest.fixture(scope="module")
def words():
    return train_tokenizer(TEXT + " . " * 3, kind="word")


def decoders(shared_data=None):
    """The decoders of the law, in float64: every point where positions are applied, both heads; and a real one."""
    torch.manual_seed(0)
    cases = {f"{p}, {h}": small(p, head=HEADS[h]()) for p in ("learned", "rotary", "alibi") for h in HEADS}
    if shared_data is not None:
        cases["stories260K"] = load_llama(shared_data / "models" / "stories260K.safetensors")
    return {name: model.double() for name, model in cases.items()}


def plain(model: DecoderLM, ids: torch.Tensor) -> LogitLens:
    """The same numbers from hooks, one plain product and loops."""
    states: list[torch.Tensor] = []
    hooks = [model.blocks[0].register_forward_pre_hook(lambda block, inputs: states.append(inputs[0]))]
    hooks += [
        block.register_forward_hook(lambda block, inputs, output: states.append(output)) for block in model.blocks
    ]
    with torch.no_grad():
        model(ids)
        for hook in hooks:
            hook.remove()
        scale, cap, bias = model.head.logit_scale, model.head.softcap, model.head.bias
        squares = model.norm.eps + torch.stack(states).squeeze(1).square().mean(-1, keepdim=True)
        z = (torch.stack(states).squeeze(1) / squares.sqrt() * model.norm.weight) @ model.head.weight.T * scale
        z = z if bias is None else z + bias
        z = z if cap is None else cap * torch.tanh(z / cap)
        if model.table.padding_idx is not None and model.head.tied:
            z[..., model.table.padding_idx] = 0
    p = z.exp() / z.exp().sum(-1, keepdim=True)
    order = z.argsort(dim=-1, descending=True, stable=True)
    after = [int(token) for token in ids[1:]]
    ranks = [[1 + row.tolist().index(token) for row, token in zip(layer, after, strict=False)] for layer in order]
    return LogitLens(
        order[..., :8],
        p.gather(-1, order[..., :8]),
        -(p * p.log()).sum(-1),
        torch.stack([p[:, t, token] for t, token in enumerate(after)], dim=1),
        torch.tensor(ranks),
    )


@pytest.mark.parametrize("at_once", some([120], [1, 120, 2**22]))
def test_every_layer_is_read_by_the_models_own_norm_and_head(shared_data, monkeypatch, at_once):
    monkeypatch.setattr(module, "LOGITS_AT_ONCE", at_once)
    for name, model in decoders(shared_data).items():
        ids = torch.randint(1, 50, (11,))
        lens = logit_lens(model, ids)
        assert len(lens.top_ids) == len(model.blocks) + 1
        torch.testing.assert_close(lens._asdict(), plain(model, ids)._asdict(), msg=lambda text, name=name: name + text)


def test_the_last_layer_is_the_models_own_output(shared_data):
    for model in decoders(shared_data).values():
        ids = torch.randint(1, 50, (9,))
        lens = logit_lens(model, ids)
        p = model(ids).softmax(-1)
        assert torch.equal(lens.top_ids[-1, :, 0], p.argmax(-1))
        torch.testing.assert_close(lens.top_probs[-1], p.topk(8).values)
        torch.testing.assert_close(lens.next_probs[-1], p[:-1].gather(-1, ids[1:, None])[:, 0])


def test_an_overridden_head_and_equal_logits_are_honoured():
    model = small("rotary", head=OutputHead(vocab_size=50, embed_dim=24))
    ids = torch.tensor([7, 3, 9])
    model.head.register_forward_hook(lambda head, inputs, output: torch.zeros_like(output))
    lens = logit_lens(model, ids, 50)
    assert lens.top_ids.eq(torch.arange(50)).all()
    assert lens.next_ranks.eq(torch.tensor([4, 10])).all()
    torch.testing.assert_close(lens.entropy, torch.full((3, 3), 50.0).log())


def test_one_token_has_no_following_one():
    lens = logit_lens(small(), torch.tensor([4]))
    assert lens.top_ids.shape == (3, 1, 8)
    assert lens.next_ranks.shape == lens.next_probs.shape == (3, 0)


def test_the_page_gets_the_lens_of_the_tokens_that_it_shows(words):
    model = small("learned")
    source = OpenedModel("words", model.table, tokenizer=words, model=model)
    ids = source.encode(TEXT)
    found = answer(source, {"ids": ",".join(map(str, ids))})
    lens = logit_lens(model, torch.tensor(ids))
    assert found["top_ids"] == lens.top_ids.tolist()
    assert found["next_ranks"] == lens.next_ranks.tolist()
    assert found["top_probs"] == packed(lens.top_probs.view(-1, 8))
    assert {token["id"] for token in found["tokens"]} == set(lens.top_ids.flatten().tolist())
    asked = exported_requests(source)
    for params, request in zip(asked, pipeline.exported_requests(source), strict=True):
        shown = pipeline.answer(source, request)["tokens"]
        assert params["ids"] == ",".join(str(token["id"]) for token in shown)
        assert len(answer(source, params)["top_ids"][0]) == len(shown)
    for wrong in ("", ",".join(["1"] * 17)):
        with pytest.raises(SizeError, match="from 1 to 16 tokens"):
            answer(source, {"ids": wrong})
    with pytest.raises(TokenIdError):
        answer(source, {"ids": "50"})


def test_only_whole_decoders_have_a_lens(words, tmp_path):
    layer = EmbeddingLayer(TokenEmbedding(50, 8), LearnedPositionalEmbedding(20, 8))
    layer.head = OutputHead(layer.table)
    source = OpenedModel("layer", layer.table, tokenizer=words, model=layer)
    steps = pipeline.answer(source, {"text": TEXT})["steps"]
    assert [step["name"] for step in steps][-2:] == ["head", "gradient"]
    head = steps[-2]
    assert (head["title"], "logits" in head["values"]) == ("Head", False)
    assert "no blocks to read" in head["sentence"]
    assert "llama and mistral" in head["note"]
    with pytest.raises(CheckpointError, match="no transformer blocks"):
        answer(source, {"ids": "1"})


# Appended tokens


def test_appended_tokens_become_text_without_a_tokenizer_too(words):
    source = OpenedModel("words", small().table, tokenizer=words)
    tiny = {"layer": "tiny", "position": "alibi", "tied": "0"}
    found = pipeline.answer(source, {"text": "dogs", "appended": "2,0", **tiny})
    assert found["text"] == "dogs love <unk>"
    assert [token["text"] for token in found["tokens"]] == ["dogs", "love", "<unk>"]
    assert found["steps"][-1]["name"] == "lens"
    assert len(answer(source, {"ids": "3,2,0", **tiny})["top_ids"]) == 2


@pytest.mark.parametrize("kind", ["word", "bpe"])
def test_the_text_with_appended_tokens_is_computed_as_generation_would(kind):
    tokenizer = train_tokenizer(TEXT, kind=kind, **({} if kind == "word" else {"vocab_size": 270}))
    model = small("rotary", table=TokenEmbedding(300, 24))
    source = OpenedModel("words", model.table, tokenizer=tokenizer, model=model)
    ids = source.encode("dogs")
    appended = [5, 2, 7]
    found = pipeline.answer(source, {"text": "dogs", "appended": "5,2,7"})
    assert [token["id"] for token in found["tokens"]] == [*ids, *appended]
    again = pipeline.answer(source, {"text": found["text"], "appended": ",".join(map(str, found["appended"]))})
    assert again == found


def test_a_story_goes_on_in_the_text_field(shared_data):
    source = open_model(shared_data / "models" / "stories260K.safetensors", shared_data / "models" / "tok512.bin")
    params = {"text": "Once upon a time", "appended": ""}
    for _ in range(3):
        found = pipeline.answer(source, params)
        head: Any = next(step for step in found["steps"] if step["name"] == "head")
        best = head["facts"]["candidates"][0]["id"]
        params = {"text": found["text"], "appended": str(best)}
    found = pipeline.answer(source, params)
    assert (found["text"], found["appended"]) == ("Once upon a time, there was", [])


def test_the_step_has_all_logits_of_the_next_token(words):
    model = small("alibi", head=HEADS["untied"]())
    walked = pipeline.pipeline(model, words, TEXT)
    step = walked.step("head")
    ids = torch.tensor([token["id"] for token in walked.tokens])
    torch.testing.assert_close(step.values["logits"][0], model(ids)[-1])
    best = model(ids)[-1].topk(12).indices.tolist()
    assert [token["id"] for token in step.facts["candidates"]] == best
    assert step.facts["tokens_left"] == MOST_TOKENS - len(ids)


# The page


@pytest.mark.browser
@pytest.mark.parametrize("temperature", [0.0, 0.1, 0.7, 1.0, 2.0])
def test_probabilities_at_a_temperature_are_those_that_generate_samples_from(in_page, temperature):
    torch.manual_seed(1)
    logits = (3 * torch.randn(1, 500)).index_fill(1, torch.tensor([7]), float("-inf"))
    sampler = Sampler(temperature=temperature)
    expected = torch.nn.functional.one_hot(logits[0].argmax(), 500).float()
    if temperature:
        expected = sampler.processed_logits(logits, torch.zeros(1, 1, dtype=torch.long))[0].softmax(-1)
    values = [None if value == -np.inf else value for value in logits[0].tolist()]
    found = in_page(
        {"m": "pipeline/probabilities.js"},
        "m.softmax(Float32Array.from(z, (v) => v ?? -Infinity), t)",
        z=values,
        t=temperature,
    )
    torch.testing.assert_close(torch.tensor(found, dtype=torch.float32), expected, atol=1e-6, rtol=1e-5)


@pytest.mark.browser
def test_samples_are_drawn_with_these_probabilities_and_repeat(in_page):
    p = [0.5, 0.0, 0.3, 0.15, 0.05, 0.0]
    code = "Array.from({ length: 4000 }, (_, n) => m.drawn(Float64Array.from(p), n))"
    found = in_page({"m": "pipeline/probabilities.js"}, code, p=p)
    assert found == in_page({"m": "pipeline/probabilities.js"}, code, p=p)
    shares = np.bincount(found, minlength=6) / len(found)
    assert np.abs(shares - p).max() < 0.03
    assert shares[1] == shares[5] == 0


@pytest.fixture(scope="module")
def source(words):
    torch.manual_seed(0)
    model = small("rotary", head=HEADS["untied"]())
    with torch.no_grad():
        model.head.bias[: words.get_vocab_size()] += 1  # so that words are among the candidates
    return OpenedModel("words", model.table, tokenizer=words, model=model)


def cells(page):
    """The texts of the grid, row by row."""
    return [row.locator("button").all_inner_texts() for row in page.locator(".lens-grid tbody tr").all()]


def chips(page):
    return page.locator(".pipe-chips .pipe-chip > span").all_inner_texts()


@pytest.mark.browser
def test_the_temperature_acts_at_once_and_tokens_are_appended(source, serve, open_page):
    url = serve(source)
    page = open_page(url + "#pipeline?step=head&text=I+love", again=True)
    values = page.locator(".next-list .pipe-value")
    values.first.wait_for()
    logits = source.model(torch.tensor(source.encode("I love")))[-1].detach()
    for temperature in (1.0, 0.25, 2.0, 0.0):
        page.get_by_role("slider", name="Temperature").fill(str(temperature))
        expected = (logits / max(temperature, 1e-9)).softmax(-1).topk(12).values
        assert values.first.inner_text() == f"{float(expected[0]):.1%}"
        assert values.nth(12).inner_text() == (f"{float(1 - expected.sum()):.1%}" if temperature else "0%")
        written = page.locator('[data-value="probability"]').inner_text()
        assert written.endswith(f"= {float(expected[0]):.1%}" if temperature else "p = 100%.")
        if temperature:
            logit, top, bottom = re.search(r"exp\(([-\d.]+).* = (\S+) / (\S+) = ", written.replace("−", "-")).groups()
            top, bottom = (float(text.replace("·10^", "e")) for text in (top, bottom))
            assert top == pytest.approx(np.exp(float(logit) / temperature), rel=2e-3)
            assert bottom == pytest.approx(float((logits / temperature).exp().sum()), rel=2e-3)
    assert "temperature=0" in page.evaluate("location.href")
    candidates = pipeline.pipeline(source.model, source.tokenizer, "I love").step("head").facts["candidates"]
    word = next(token["text"] for token in candidates if token["kind"] == "text")
    page.get_by_label(f"Append {word}", exact=True).click()
    page.locator(".pipe-chips > :nth-child(3)").wait_for()
    assert chips(page) == ["I", "love", word]
    assert page.get_by_label("Text", exact=True).input_value() == f"I love {word}"
    page.get_by_role("slider", name="Temperature").fill("2")
    link = page.evaluate("location.href")
    for count in (4, 5):
        page.get_by_text("Append a sample").click()
        page.locator(f".pipe-chips > :nth-child({count})").wait_for()
    assert "draws=2" in page.evaluate("location.href")
    sampled = chips(page)
    page.goto("about:blank")
    page.goto(link)
    for count in (4, 5):
        page.get_by_text("Append a sample").click()
        page.locator(f".pipe-chips > :nth-child({count})").wait_for()
    assert chips(page) == sampled


@pytest.mark.browser
def test_the_grid_is_the_lens_and_a_cell_lists_its_tokens(source, serve, open_page):
    page = open_page(serve(source) + "#pipeline?step=lens&text=" + TEXT.replace(" ", "+"), again=True)
    page.locator(".lens-grid").wait_for()
    ids = source.encode(TEXT)
    lens = logit_lens(source.model, torch.tensor(ids))
    names = [[token["text"] for token in shown_tokens(source.tokenizer, row)] for row in lens.top_ids[..., 0].tolist()]
    assert cells(page) == names
    right = lens.top_ids[:, :-1, 0].eq(torch.tensor(ids[1:])).sum()
    assert page.locator(".lens-grid .lens-right").count() == right
    page.locator(".lens-grid tbody tr").nth(1).locator("button").nth(4).click()
    assert "layer=1" in page.evaluate("location.href")
    assert "token=4" in page.evaluate("location.href")
    shown = page.locator(".lens .next-list .pipe-value").all_inner_texts()
    assert [float(text.rstrip("%")) for text in shown] == pytest.approx((100 * lens.top_probs[1, 4]).tolist(), abs=0.06)
    ranks = page.locator(".lens .grid-2 tbody tr td:last-child").all_inner_texts()
    assert ranks == [str(rank) for rank in lens.next_ranks[:, 4].tolist()]
    page.keyboard.press("ArrowUp")
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("Enter")
    page.locator("[aria-pressed=true].pipe-chip >> nth=0").wait_for()
    assert "layer=0" in page.evaluate("location.href")
    assert "token=3" in page.evaluate("location.href")
    page.locator(".pipe-chips button").last.click()
    page.get_by_text("No token follows the last one").wait_for()


@pytest.mark.browser
def test_an_exported_page_has_temperature_and_lens_and_says_that_appending_needs_the_model(source, tmp_path, open_page):
    write_page(tmp_path / "page.html", [source])
    page = open_page((tmp_path / "page.html").as_uri() + "#pipeline?step=head", color_scheme="dark")
    page.set_viewport_size({"width": 390, "height": 844})
    page.get_by_text("To append tokens, open the model itself").wait_for()
    assert page.locator(".next-append:enabled").count() == 0
    before = page.locator(".next-list .pipe-value").first.inner_text()
    page.get_by_role("slider", name="Temperature").fill("0.5")
    assert page.locator(".next-list .pipe-value").first.inner_text() != before
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    page.get_by_label("Next step").click()
    page.get_by_label("Next step").click()
    page.locator(".lens-grid").wait_for()
    assert len(cells(page)) == 3
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    page.goto((tmp_path / "page.html").as_uri() + "#pipeline?step=block")
    page.locator(".block-lengths li").nth(1).wait_for()
    page.locator(".block-line canvas").first.wait_for()
