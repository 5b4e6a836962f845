"""The logit lens against plain forward passes with hooks, what the page computes from the logits, and both steps."""

import re

import numpy as np
import pytest
import torch
from decoders import small
from explorer_requests import ids_of, steps_of

from embedlayer import (
    DecoderLM,
    EmbeddingLayer,
    LearnedPositionalEmbedding,
    OutputHead,
    TokenEmbedding,
    load_llama,
    train_tokenizer,
)
from embedlayer.opening import OpenedModel

TEXT = "I love dogs and dogs love me"
HEADS = {
    "tied": lambda: None,
    "untied": lambda: OutputHead(vocab_size=50, embed_dim=24, bias=True, softcap=2.0, logit_scale=0.7, init_std=1.0),
}


def plain(model: DecoderLM, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """The numbers of the lens from hooks, one plain product and loops."""
    states: list[torch.Tensor] = []
    hooks = [model.blocks[0].register_forward_pre_hook(lambda block, inputs: states.append(inputs[0]))]
    hooks += [
        block.register_forward_hook(lambda block, inputs, output: states.append(output)) for block in model.blocks
    ]
    with torch.no_grad():
        p = model(ids).softmax(-1)
        for hook in hooks:
            hook.remove()
        scale, cap, bias = model.head.logit_scale, model.head.softcap, model.head.bias
        squares = model.norm.eps + torch.stack(states).squeeze(1).square().mean(-1, keepdim=True)
        z = (torch.stack(states).squeeze(1) / squares.sqrt() * model.norm.weight) @ model.head.weight.T * scale
        z = z if bias is None else z + bias
        z = z if cap is None else cap * torch.tanh(z / cap)
        if model.table.padding_idx is not None and model.head.tied:
            z[..., model.table.padding_idx] = 0
    torch.testing.assert_close(z[-1].softmax(-1), p, msg="the last layer is the model's own output")
    p = z.softmax(-1)
    best, after = z.topk(8).indices, ids[1:].expand(len(z), -1).unsqueeze(-1)
    of_after = z[:, :-1].gather(-1, after)
    return {
        "top_ids": best,
        "top_probs": p.gather(-1, best).flatten(0, 1),
        "entropy": torch.special.entr(p).sum(-1),
        "next_probs": p[:, :-1].gather(-1, after).squeeze(-1),
        "next_ranks": 1 + (z[:, :-1] > of_after).sum(-1),
    }


def lens_of(ask, model, ids):
    source = model if isinstance(model, OpenedModel) else OpenedModel("model", model.table, model=model)
    answer = ask(source, "logit-lens", ids=",".join(str(int(token)) for token in ids))
    return answer | {name: torch.tensor(answer[name]) for name in ("top_ids", "next_ranks")}


def test_every_layer_is_read_by_the_models_own_norm_and_head(ask, shared_data):
    """At every point where positions are applied, with both heads; and a table whose logits are computed in parts."""
    models = [
        small(p, head=HEADS[h]()).double() for p, h in (("learned", "tied"), ("rotary", "untied"), ("alibi", "tied"))
    ]
    models += [
        load_llama(shared_data / "models" / "stories260K.safetensors").double(),
        small(table=TokenEmbedding(2**17, 24, init_std=1.0)),
    ]
    for model in models:
        ids = torch.randint(1, 50, (40 if model.table.vocab_size > 512 else 11,))
        lens, expected = lens_of(ask, model, ids), plain(model, ids)
        assert len(lens["top_ids"]) == len(model.blocks) + 1
        for name, values in expected.items():
            torch.testing.assert_close(lens[name], values, check_dtype=False, rtol=1e-4, atol=1e-6)
        assert {token["id"] for token in lens["tokens"]} == {*lens["top_ids"].flatten().tolist()}


def test_an_overridden_head_and_equal_logits_are_honoured(ask):
    model = small("rotary", head=OutputHead(vocab_size=50, embed_dim=24))
    model.head.register_forward_hook(lambda head, inputs, output: torch.zeros_like(output))
    lens = lens_of(ask, model, [7, 3, 9])
    assert lens["top_ids"].eq(torch.arange(8)).all()
    assert lens["next_ranks"].eq(torch.tensor([4, 10])).all()
    torch.testing.assert_close(lens["entropy"], torch.full((3, 3), 50.0).log())
    alone = lens_of(ask, small(), [4])
    assert (alone["top_ids"].shape, alone["next_ranks"].shape) == ((3, 1, 8), (3, 0)), "no token follows one token"


def test_only_whole_decoders_have_a_lens(ask, words):
    layer = EmbeddingLayer(TokenEmbedding(50, 8), LearnedPositionalEmbedding(20, 8))
    layer.head = OutputHead(layer.table)
    source = OpenedModel("layer", layer.table, tokenizer=words, model=layer)
    steps = steps_of(ask(source, "pipeline", text=TEXT))
    assert [*steps][-2:] == ["head", "gradient"]
    assert (steps["head"]["title"], "logits" in steps["head"]["values"]) == ("Head", False)
    assert "no blocks to read" in steps["head"]["sentence"]
    assert "llama and mistral" in steps["head"]["note"]


# Appended tokens


@pytest.mark.parametrize("kind", ["word", "bpe"])
def test_the_text_with_appended_tokens_is_computed_as_generation_would(ask, kind):
    tokenizer = train_tokenizer(TEXT, kind=kind, **({} if kind == "word" else {"vocab_size": 270}))
    model = small("rotary", table=TokenEmbedding(300, 24))
    source = OpenedModel("words", model.table, tokenizer=tokenizer, model=model)
    found = ask.raw(source, "pipeline", text="dogs", appended="5,2,7")
    assert ids_of(found).tolist() == [*source.encode("dogs"), 5, 2, 7]
    appended = ",".join(map(str, found["appended"]))
    assert ask.raw(source, "pipeline", text=found["text"], appended=appended) == found


def test_the_step_has_all_logits_of_the_next_token(ask, words):
    model = small("alibi", head=HEADS["untied"]())
    answer = ask(OpenedModel("words", model.table, tokenizer=words, model=model), "pipeline", text=TEXT)
    step, logits = steps_of(answer)["head"], model(ids_of(answer))[-1]
    torch.testing.assert_close(step["values"]["logits"][0], logits)
    assert [token["id"] for token in step["facts"]["candidates"]] == logits.topk(12).indices.tolist()
    assert step["facts"]["tokens_left"] == 64 - len(answer["tokens"])


# The page


def test_probabilities_at_a_temperature_are_the_softmax_of_the_logits_divided_by_it(in_page):
    torch.manual_seed(1)
    logits = (3 * torch.randn(500)).index_fill(0, torch.tensor([7]), float("-inf"))
    values = [None if value == -np.inf else value for value in logits.tolist()]
    code = "m.softmax(Float32Array.from(z, (v) => v ?? -Infinity), t)"
    for t in (0.0, 0.1, 0.7, 1.0, 2.0):
        expected = (logits / t).softmax(-1) if t else torch.nn.functional.one_hot(logits.argmax(), 500).float()
        found = torch.tensor(in_page({"m": "pipeline/probabilities.js"}, code, z=values, t=t), dtype=torch.float32)
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)


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


def test_the_temperature_acts_at_once_and_tokens_are_appended(ask, source, serve, open_page):
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
    candidates = steps_of(ask(source, "pipeline", text="I love"))["head"]["facts"]["candidates"]
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


def test_the_grid_is_the_lens_and_a_cell_lists_its_tokens(ask, source, serve, open_page):
    page = open_page(serve(source) + "#pipeline?step=lens&text=" + TEXT.replace(" ", "+"), again=True)
    page.locator(".lens-grid").wait_for()
    ids = source.encode(TEXT)
    lens = lens_of(ask, source, ids)
    texts = {token["id"]: token["text"] for token in lens["tokens"]}
    assert cells(page) == [[texts[token] for token in row] for row in lens["top_ids"][..., 0].tolist()]
    right = lens["top_ids"][:, :-1, 0].eq(torch.tensor(ids[1:])).sum()
    assert page.locator(".lens-grid .lens-right").count() == right
    page.locator(".lens-grid tbody tr").nth(1).locator("button").nth(4).click()
    assert "layer=1" in page.evaluate("location.href")
    assert "token=4" in page.evaluate("location.href")
    expected = pytest.approx((100 * lens["top_probs"].view(3, 7, 8)[1, 4]).tolist(), abs=0.06)
    shown = page.locator(".lens .next-list .pipe-value").all_inner_texts()
    assert [float(text.rstrip("%")) for text in shown] == expected
    ranks = page.locator(".lens .grid-2 tbody tr td:last-child").all_inner_texts()
    assert ranks == [str(rank) for rank in lens["next_ranks"][:, 4].tolist()]
    page.keyboard.press("ArrowUp")
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("Enter")
    page.locator("[aria-pressed=true].pipe-chip >> nth=0").wait_for()
    assert "layer=0" in page.evaluate("location.href")
    assert "token=3" in page.evaluate("location.href")
    page.locator(".pipe-chips button").last.click()
    page.get_by_text("No token follows the last one").wait_for()


def test_an_exported_page_has_temperature_and_lens_and_says_that_appending_needs_the_model(source, export, open_page):
    page = open_page(export(source) + "#pipeline?step=head", color_scheme="dark")
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
    page.goto(export(source) + "#pipeline?step=block")
    page.locator(".block-lengths li").nth(1).wait_for()
    page.get_by_text("Block 2 does the same with weights of its own").wait_for()
    page.locator(".block-line canvas").first.wait_for()
