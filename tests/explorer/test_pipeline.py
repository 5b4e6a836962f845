"""A text's way through a model: the steps against the model itself, and the view that shows them."""

import itertools
import json
import re
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import parse_qsl, urlencode
from urllib.request import urlopen

import pytest
import torch
import torch.nn.functional as F
from decoders import small
from explorer_requests import ids_of, request, steps_of, stored_answers
from kinds import POSITIONS
from pages import until

from embedlayer import (
    EmbeddingLayer,
    FactorizedEmbedding,
    LearnedPositionalEmbedding,
    OutputHead,
    TokenEmbedding,
    TransformerEmbedding,
    open_model,
    train_tokenizer,
)
from embedlayer.explorer.pipeline import pipeline
from embedlayer.inputs.embedding import embed
from embedlayer.opening import OpenedModel

TEXT = "I love dogs and dogs love me"
LONG_TEXT = "dogs love me and I love dogs and dogs love me and I love"


@pytest.fixture
def walk(ask, words):
    """The pipeline of a text in a model, or in a table alone."""

    def ask_for(model, text=TEXT):
        parts = {} if isinstance(model, TokenEmbedding) else {"model": model}
        return ask(
            OpenedModel("model", getattr(model, "table", model), tokenizer=words, **parts), "pipeline", text=text
        )

    return ask_for


def untied(**options):
    return OutputHead(vocab_size=50, embed_dim=24, **options)


STEPS_OF_HOOK = {"add": {"sum"}, "rotate": {"rotation"}, "bias": {"bias"}, None: set()}


def test_every_step_of_every_scheme_is_that_of_the_model(ask, walk):
    for name in POSITIONS:
        model = small(name)
        answer = walk(model)
        steps, ids = steps_of(answer), ids_of(answer)
        names = [*steps]
        assert (names[:5], names[-3:]) == (["tokenize", "one_hot", "look_up", "scale", "position"],
                                           ["head", "gradient", "lens"])  # fmt: skip
        scheme = ask(OpenedModel(name, model.table, model=model), "positions")["schemes"][0]
        drawn = STEPS_OF_HOOK[model.position.hook] if scheme.get("channels", "no rotation") else set()
        assert steps.keys() & {"sum", "rotation", "bias"} == drawn, name
        torch.testing.assert_close(steps["dropout"]["values"]["kept"], embed(ids, model.table, model.position))
        assert steps["look_up"]["values"]["rows"].equal(model.table.weight[ids])
        chances = model(ids).softmax(-1).detach()
        head = steps["head"]["facts"]
        for shown, row in zip(head["top_tokens"], chances, strict=True):
            assert [token["chance"] for token in shown] == pytest.approx(row.topk(8).values.tolist(), abs=1e-6)
        assert head["next"] == pytest.approx(chances[:-1].gather(1, ids[1:, None])[:, 0].tolist(), abs=1e-6)
        assert steps["gradient"]["facts"]["loss"] == pytest.approx(model.loss(ids[:-1], ids[1:]).item(), rel=1e-5)


@pytest.mark.parametrize("tied", [True, False])
def test_the_gradient_is_autograds(walk, tied):
    """Of a table with more rows than are multiplied at once, whose bins of rows have the largest norm."""
    head = None if tied else OutputHead(vocab_size=9000, embed_dim=24, softcap=3.0, logit_scale=0.7, bias=True)
    model = small("learned", table=TokenEmbedding(9000, 24, padding_idx=0), head=head)
    model.head.head_dtype = torch.float32
    answer = walk(model)
    ids, step = ids_of(answer), steps_of(answer)["gradient"]
    model.loss(ids[:-1], ids[1:]).backward()
    expected = model.table.weight.grad.norm(dim=-1)
    assert step["facts"]["rows_a_bin"] == 9
    torch.testing.assert_close(step["values"]["norms"][0], expected.view(1000, 9).amax(1), rtol=1e-4, atol=1e-6)
    assert step["facts"]["touched"] == int(expected.count_nonzero())
    assert step["facts"]["used"] == len(set(ids.tolist()))
    for row in step["facts"]["rows"]:
        assert row["norm"] == pytest.approx(float(expected[row["id"]]), rel=1e-4)
    if not tied:
        assert expected.nonzero()[:, 0].tolist() == ids[:-1].unique().tolist()
        assert all(row["through_head"] == 0 for row in step["facts"]["rows"])


@pytest.mark.parametrize("tied", [True, False])
def test_the_scores_of_a_head_in_float32_are_not_rounded(walk, tied):
    model = small("learned", head=None if tied else untied(softcap=3.0, bias=True)).bfloat16()
    model.head.head_dtype = torch.float32
    values = steps_of(walk(model))["head"]["values"]
    assert torch.equal(values["logits"], model.head(values["hidden"].bfloat16())[-1:])
    assert not torch.equal(values["logits"], values["logits"].bfloat16())


def test_a_factorised_table_has_rows_and_gradients_too(walk):
    model = small("learned", table=FactorizedEmbedding(50, 24, 6, scale="sqrt_dim", init_std=0.5))
    answer = walk(model)
    steps, ids = steps_of(answer), ids_of(answer)
    torch.testing.assert_close(steps["dropout"]["values"]["kept"], embed(ids, model.table, model.position))
    rows = model.table.rows(0, 50).detach()
    dense = small("learned", table=TokenEmbedding.from_pretrained(rows, scale=model.table.scale, freeze=False))
    dense.load_state_dict({k: v for k, v in model.state_dict().items() if not k.startswith("table")}, strict=False)
    dense.loss(ids[:-1], ids[1:]).backward()
    norms = dense.table.weight.grad.norm(dim=-1)
    torch.testing.assert_close(steps["gradient"]["values"]["norms"][0], norms, rtol=1e-4, atol=1e-6)


def test_queries_are_turned_as_the_models_attention_turns_them(walk):
    model = small("rotary")
    steps = steps_of(walk(model))
    values, places, block = steps["rotation"]["values"], torch.arange(7), model.blocks[0]
    queries, keys = model.position.rotate(values["queries"], values["keys"], places)
    torch.testing.assert_close(values["queries_turned"], queries)
    torch.testing.assert_close(values["keys_turned"], keys)
    normed = block.attention_norm(steps["dropout"]["values"]["kept"])
    torch.testing.assert_close(values["queries"], block.attention.query(normed).unflatten(-1, (4, 6)).transpose(0, 1))
    angles = torch.outer(places.double(), 10000.0 ** -(torch.arange(3).double() / 3))
    torch.testing.assert_close(values["angles"], torch.atan2(angles.sin(), angles.cos()).float())


def test_a_result_of_which_all_is_read_holds_no_graph_of_autograd(words):
    """Only memory shows it, so the object itself is looked at."""
    assert not pipeline(small("none"), words, TEXT).vectors.requires_grad


def test_the_two_ends_of_a_checkpoint_take_its_own_recipe(walk):
    layer = EmbeddingLayer(
        TokenEmbedding(50, 8),
        LearnedPositionalEmbedding(20, 12),
        recipe=["project", "types", "position", "norm"],
        types=TokenEmbedding(2, 12),
        norm=torch.nn.LayerNorm(12),
        projection=torch.nn.Linear(8, 12),
    )
    answer = walk(layer)
    steps = steps_of(answer)
    assert " ".join(steps) == "tokenize one_hot look_up scale project types position sum norm dropout"
    torch.testing.assert_close(steps["dropout"]["values"]["kept"], layer.input(ids_of(answer)).detach())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_a_model_of_low_precision_says_how_far_its_numbers_are_rounded(walk, dtype):
    steps, parts = steps_of(walk(small("rotary").to(dtype))), round(2 / torch.finfo(dtype).eps)
    expected = f"{str(dtype).removeprefix('torch.')}, which rounds by up to 1 part in {parts:,}"
    for name in ("block", "head"):
        said = steps[name]["note"].partition("; computed in ")[2]
        assert said == ("" if dtype == torch.float32 else expected)
    exact = torch.linspace(1, 2, 5000)
    assert ((exact.to(dtype).float() - exact).abs() / exact).max() <= 1 / parts


def test_a_model_with_a_head_and_no_blocks_says_why_they_are_not_read(ask):
    table = TokenEmbedding(50, 8)
    layer = EmbeddingLayer(table, head=OutputHead(table))
    why = "model/config.json: sliding_window 4 is not what DecoderLM has (known: False)."
    for source in (OpenedModel("ours", table, model=layer), OpenedModel("read", table, model=layer, no_decoder=why)):
        note = steps_of(ask(source, "pipeline", text="#3 #4"))["head"]["note"]
        assert ("The blocks are read of embedlayer's own decoders" in note) == (source.title == "ours")
        assert note.endswith(f"The blocks are not read: {why}") == (source.title == "read")


def test_a_table_alone_and_an_input_embedding_alone_have_fewer_steps(walk):
    assert " ".join(steps_of(walk(TokenEmbedding(50, 8)))) == "tokenize one_hot look_up scale position dropout"
    layer = TransformerEmbedding(50, 8, 16, dropout=0.25).eval()
    answer = walk(layer)
    dropout = steps_of(answer)["dropout"]
    assert dropout["facts"] == {"p": 0.25, "shown_p": 0.25}
    torch.testing.assert_close(dropout["values"]["kept"], layer(ids_of(answer)))


def test_dropout_is_shown_without_drawing_from_the_programs_generator(walk):
    model = small("none", dropout=0.5)
    state = torch.get_rng_state()
    values = steps_of(walk(model))["dropout"]["values"]
    assert torch.get_rng_state().equal(state)
    kept = values["dropped"] != 0
    torch.testing.assert_close(values["dropped"][kept], 2 * values["kept"][kept])
    assert 0.3 < 1 - kept.float().mean() < 0.7


def test_long_and_short_texts(walk):
    assert "gradient" not in steps_of(walk(small(), "dogs")), "one token has no next one"
    cut = walk(small("learned"), "dogs " * 40)
    assert (len(cut["tokens"]), cut["left_out"]) == (16, 24)
    assert len(walk(small("rotary"), "dogs " * 400)["tokens"]) == 64


def test_tokens_are_readable_and_special_ones_marked(ask):
    tokenizer = train_tokenizer("naïve café", vocab_size=258)
    source = OpenedModel("bytes", TokenEmbedding(258, 4), tokenizer=tokenizer)
    kinds = [(token["text"], token["kind"]) for token in ask(source, "pipeline", text="a é<|endoftext|>")["tokens"]]
    assert (kinds[0], kinds[-1]) == (("a", "text"), ("<|endoftext|>", "special"))
    assert ("·", "text") in kinds
    assert any(kind == "byte" for _, kind in kinds)


def test_a_table_with_nan_has_an_answer(walk, words):
    model = small("none")
    with torch.no_grad():
        model.table.weight[words.token_to_id("dogs")] = float("nan")
    assert steps_of(walk(model))["gradient"]["facts"]["loss"] is None


def test_walks_at_the_same_time_do_not_meet(serve, words):
    model = small("rotary")
    address = serve(OpenedModel("words", model.table, tokenizer=words, model=model))
    texts = [TEXT, "dogs love me", "me me me"]

    def next_of(text):
        with urlopen(f"{address}data/pipeline?{urlencode({'text': text})}") as response:
            return steps_of(json.load(response))["head"]["facts"]["next"]

    expected = [*map(next_of, texts)]
    with ThreadPoolExecutor(12) as pool:
        assert [*pool.map(next_of, 4 * texts)] == 4 * expected


def test_a_real_model_goes_on_as_it_was_trained(ask, shared_data):
    answer = ask(open_model(shared_data / "models"), "pipeline", text="Once upon a time")
    assert [token["kind"] for token in answer["tokens"]] == ["special", "text", "text", "text", "text"]
    likely = [row[0]["decoded"] for row in steps_of(answer)["head"]["facts"]["top_tokens"]]
    assert likely == [" Once", " upon", " a", " time", ","]


# What can be chosen


def test_a_table_without_a_tokenizer_shows_its_rows(ask):
    for tokens in (None, ["a", "b", "c"]):
        answer = ask(OpenedModel("three", TokenEmbedding(3, 4), tokens=tokens), "pipeline", text="#2 #0 #2")
        assert [token["text"] for token in answer["tokens"]] == (["c", "a", "c"] if tokens else ["#2", "#0", "#2"])
        assert [step["name"] for step in answer["steps"] if not step["idle"]] == ["tokenize", "one_hot", "look_up"]


def test_every_source_offers_texts_that_it_can_read(ask, export, words):
    table = TokenEmbedding(50, 4)
    sources = {
        "tokenizer": OpenedModel("tokenizer", table, tokenizer=words),
        "names": OpenedModel("names", table, tokens=[f"word{row}" for row in range(50)]),
        "ids": OpenedModel("ids", table),
        "names that no text has": OpenedModel("odd", table, tokens=["\ud800", *([""] * 49)]),
    }
    for reads, source in sources.items():
        offered = ask(source, "pipeline-choices")
        assert reads.startswith(offered["reads"])
        assert offered["texts"]
        assert all(ask(source, "pipeline", text=text)["tokens"] for text in offered["texts"])
    part = OpenedModel("part", table, table_only="Its family is unknown.")
    assert ask(part, "pipeline-choices")["refused"].endswith("Its family is unknown.")


def test_an_exported_page_holds_the_texts_that_are_offered(ask, source, exported):
    content, offered = stored_answers(exported), ask(source, "pipeline-choices")
    held = [dict(parse_qsl(key.partition("?")[2])) for key in content if key.startswith("pipeline?")]
    assert [params["text"] for params in held if "layer" not in params] == offered["texts"]
    tiny = [(params["text"], params["position"], params["tied"]) for params in held if "layer" in params]
    assert tiny == [*itertools.product(offered["tiny"]["texts"], offered["tiny"]["positions"], "10")]
    for params in held:
        asked = {name: value for name, value in params.items() if name != "source"}
        stored = content[request("pipeline", **params)]
        assert ask.raw(source, "pipeline", **asked) == stored
        ids = ",".join(str(token["id"]) for token in stored["tokens"])
        assert request("logit-lens", source="0", ids=ids, **{k: asked[k] for k in asked if k != "text"}) in content


def test_the_rows_near_a_token_are_those_of_the_table(walk):
    model = small("none")
    answer, weight = walk(model), model.table.weight
    step = steps_of(answer)["look_up"]
    for token, part in zip(answer["tokens"], step["facts"]["part_of"], strict=True):
        first, names = step["facts"]["parts"][part]["first"], step["facts"]["parts"][part]["names"]
        assert first <= token["id"] < first + len(names) == first + 7
        assert step["values"]["near"][part].equal(weight[first : first + 7])
        assert names[token["id"] - first] == token["text"]
    wide = TokenEmbedding(50, 200)
    shown = steps_of(walk(wide, "dogs"))["look_up"]
    row = wide.weight[shown["facts"]["parts"][0]["first"]]
    assert shown["values"]["near"][0, 0].abs().equal(F.pad(row, (0, 4)).view(-1, 4).abs().amax(1)[:50])


def test_steps_that_change_nothing_say_so(walk):
    def idle(model):
        return {step["name"] for step in walk(model)["steps"] if step["idle"]}

    assert [idle(small(name)) for name in ("none", "learned")] == [{"position", "dropout"}, {"dropout"}]
    assert idle(TransformerEmbedding(50, 8, 16, dropout=0.25, scale=None).eval()) == {"scale"}


# The view


@pytest.fixture(scope="module")
def source(words):
    torch.manual_seed(0)
    model = small("rotary")
    return OpenedModel("words", model.table, tokenizer=words, model=model)


@pytest.fixture(scope="module")
def exported(source, export) -> str:
    """The address of the exported page of `source`."""
    return export(source)


def wait_for_tokens(page, count):
    page.locator(f".pipe-chips > :nth-child({count}):last-child").wait_for()


def test_the_view_steps_through_the_text_with_slider_and_keys(source, serve, open_page):
    page = open_page(serve(source) + "#pipeline?text=" + TEXT.replace(" ", "+"), again=True)
    titles = ["Tokenize", "One-hot", "Rows", "Scale", "Rotation", "Block", "Next token", "Gradient", "Logit lens"]
    heading = page.locator(".pipe-head h2")
    heading.wait_for()
    assert page.locator(".pipe-chips button").count() == 7
    for number, title in enumerate(titles, start=1):
        assert heading.inner_text().split() == [str(number), *title.split()]
        if title == "Rows":
            page.get_by_text("(T, D) = (7, 24); a batch of this text has the shape (1, 7, 24).").wait_for()
        page.keyboard.press("ArrowRight")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    page.keyboard.press("ArrowLeft")
    assert "Gradient" in heading.inner_text()
    slider = page.get_by_label("Step", exact=True)
    slider.fill("2")
    assert "Rows" in heading.inner_text()
    slider.press("ArrowRight")
    assert "Scale" in heading.inner_text()
    assert "step=scale" in page.evaluate("location.href")
    page.get_by_text("2 steps change nothing here: Positions, Dropout").click()
    page.locator(".pipe-idle").get_by_role("button", name="Positions").click()
    assert heading.inner_text().split() == ["–", "Positions"]
    page.keyboard.press("ArrowRight")
    assert "Rotation" in heading.inner_text()


def test_the_tokens_are_one_stop_of_the_tab_key_in_which_arrows_move_and_enter_chooses(source, serve, open_page):
    page = open_page(serve(source) + "#pipeline?token=3&step=scale&text=" + LONG_TEXT.replace(" ", "+"), again=True)
    wait_for_tokens(page, 14)
    focused = "document.activeElement.closest('[role=group]')?.getAttribute('aria-label') ?? document.activeElement.id"
    page.locator("#pipe-text").focus()
    stops = []
    while page.evaluate("document.activeElement.type") != "range":
        page.keyboard.press("Tab")
        stops.append(page.evaluate(focused))
    assert [stops.count(name) for name in ("Example texts", "Tokens")] == [1, 1]
    page.keyboard.press("Shift+Tab")  # to the button beside the slider
    page.keyboard.press("Shift+Tab")
    at = "[...document.querySelectorAll('.pipe-chips button')].indexOf(document.activeElement)"
    assert page.evaluate(at) == 3
    for key, place in {"ArrowRight": 4, "ArrowLeft": 3, "End": 13, "Home": 0}.items():
        page.keyboard.press(key)
        assert page.evaluate(at) == place
    page.keyboard.press("Enter")
    assert "token=0" in page.evaluate("location.href")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Space")
    assert "token=2" in page.evaluate("location.href")
    assert page.evaluate(at) == 2
    assert "step=scale" in page.evaluate("location.href")
    page.locator(".pipe-chips button").nth(5).click()
    page.keyboard.press("ArrowRight")  # whoever chooses with the pointer moves on to the next step
    assert "step=rotation" in page.evaluate("location.href")
    page.keyboard.press("ArrowRight")
    assert "step=block" in page.evaluate("location.href")


def test_no_typed_text_is_lost_when_the_layer_changes(ask, tiny_choices, source, serve, open_page):
    url = serve(source)
    page = open_page(url + "#pipeline", again=True)
    field = page.get_by_label("Text", exact=True)
    unknown = ask(source, "pipeline", text="zebra")["tokens"][0]["text"]
    own, of_tiny = ask(source, "pipeline-choices")["texts"][0], tiny_choices["texts"][0]

    def switch(layer: str, text: str, tokens: list[str]) -> None:
        page.locator(f'.pipe-switches [data-key="{layer}"]').click()
        wait_for_tokens(page, len(tokens))
        shown = "[...document.querySelectorAll('.pipe-chips span')].map((each) => each.textContent)"
        until(page, f"String({shown}) === {json.dumps(','.join(tokens))}")
        assert field.input_value() == text

    wait_for_tokens(page, len(source.tokenizer.encode(own).ids))
    switch("tiny", of_tiny, of_tiny.split())  # nothing was typed: each layer has its own example
    field.fill("the zebra sat")
    wait_for_tokens(page, 3)
    page.get_by_text("Replaced by <unk>, row 0, because no row has such a name: “zebra”.").wait_for()
    switch("model", "the zebra sat", [unknown] * 3)
    field.fill("dogs love me")
    switch("tiny", "the zebra sat", ["the", "<unk>", "sat"])  # while the text waits for more letters
    page.wait_for_timeout(100)
    assert field.input_value() == "the zebra sat"
    page.reload()
    switch("model", "dogs love me", ["dogs", "love", "me"])
    page.goto("about:blank")
    page.goto(url + "#pipeline?text=me+me")  # the tiny layer knows no word of it, so it shows an example
    wait_for_tokens(page, 2)
    switch("tiny", of_tiny, of_tiny.split())
    switch("model", "me me", ["me", "me"])


def test_on_a_phone_predictions_begin_on_the_first_screen(source, serve, open_page):
    state = f"step=head&layer=tiny&token=1&text={LONG_TEXT.replace(' ', '+')}"
    page = open_page(f"{serve(source)}#pipeline?{state}", again=True)
    page.set_viewport_size({"width": 390, "height": 844})
    page.locator(".next-list .pipe-value").first.wait_for()
    until(page, "document.querySelector('.next-list li').getBoundingClientRect().bottom <= innerHeight")
    fold, switches = page.locator(".pipe-fold"), page.locator(".pipe-switches")
    assert fold.inner_text() == "tiny, 10 × 4 · learned · tied"
    assert not switches.is_visible()
    fold.press("Enter")
    assert switches.is_visible()
    switches.locator('[data-key="model"]').click()
    page.locator(".pipe-fold", has_text="this model, 50 × 24 · rotary · tied").wait_for()
    page.locator(".next-list .pipe-value").first.wait_for()
    assert switches.is_visible()
    fold.click()
    assert not switches.is_visible()
    for key in "]" * 12:
        page.keyboard.press(key)
    row, chip = (
        page.locator(".pipe-chips").bounding_box(),
        page.locator(".pipe-chips [aria-pressed=true]").bounding_box(),
    )
    assert row["x"] <= chip["x"] <= chip["x"] + chip["width"] <= row["x"] + row["width"] + 1


# The machine


def numbers_of(texts):
    return [float(text.replace("−", "-")) for text in texts]


def wait_for_step(page, title):
    page.locator(".pipe-head h2", has_text=title).wait_for()


def test_the_machine_shows_the_models_numbers_and_its_sums(tiny, source, serve, open_page):
    page = open_page(serve(source) + "#pipeline?layer=tiny&step=look_up&token=2&dim=1&position=learned", again=True)
    page.locator(".mach-line").first.wait_for()
    for button, tied in (("tied", True), ("untied", False)):
        page.locator(".pipe-switch").get_by_role("button", name=button, exact=True).click()
        page.locator(f".pipe-switch [data-key={button}][aria-pressed=true]").wait_for()
        answer = tiny("learned", tied=tied)
        of = {name: step["values"] for name, step in steps_of(answer).items()}
        parts = {"look_up": "rows", "scale": "scaled", "position": "positions", "sum": "result"}
        rows = {name: of[name][part][2] for name, part in parts.items()}
        for name, values in rows.items():
            shown = numbers_of(page.locator(f".mach-line[data-link={name}] .vec > span").all_inner_texts())
            assert shown == pytest.approx(values.tolist(), abs=5.1e-5)
        row, scaled, place, total = (float(values[1]) for values in rows.values())
        shown_row, shown_place = (f"{each:.4f}" if each >= 0 else f"({each:.4f})" for each in (row, place))
        sums = page.locator(".mach-sum").inner_text().replace("−", "-")
        assert f"W[{answer['tokens'][2]['id']}] = {row:.4f}" in sums
        assert f"2 · {shown_row} = {scaled:.4f}" in sums
        assert f"{scaled:.4f} + {shown_place} = {total:.4f}" in sums
    whole = numbers_of(page.locator(".mach-w .vec > span").all_inner_texts())
    assert whole == pytest.approx(of["look_up"]["near"].flatten().tolist(), abs=1e-6)
    products = page.locator(".mach-products .vec > span").all_inner_texts()
    assert products.count("0") == 36
    assert "tied=0" in page.evaluate("location.href")


def test_a_dimension_lights_in_every_vector_and_is_kept_in_the_address(source, serve, open_page):
    page = open_page(serve(source) + "#pipeline?layer=tiny&step=sum", again=True)
    page.locator(".mach-line").first.wait_for()
    lit = "[...document.querySelectorAll('.mach .vec-mark')].map((mark) => mark.hidden ? '' : mark.style.left)"
    assert set(page.evaluate(lit)) == {""}
    page.locator(".mach-line .vec > span").nth(2).hover()
    assert set(page.evaluate(lit)) == {"50%"}
    assert "dimension 2" in page.locator(".mach-sum").inner_text()
    page.locator(".pipe-stage h3").first.hover()
    assert set(page.evaluate(lit)) == {""}
    page.locator(".pipe-stage td").nth(6).hover()  # a number of the picture below
    assert len(set(page.evaluate(lit))) == 1
    page.locator(".mach-line .vec > span").nth(3).click()
    page.locator(".pipe-stage h3").first.hover()
    assert set(page.evaluate(lit)) == {"75%"}
    assert page.locator(".pipe-stage .pipe-lit").count() >= 7
    assert "dim=3" in page.evaluate("location.href")
    page.locator(".mach-chain").press("ArrowLeft")
    assert "dim=2" in page.evaluate("location.href")
    assert "step=sum" in page.evaluate("location.href")
    page.locator(".mach-chain").press("Escape")
    assert "dim=" not in page.evaluate("location.href")
    page.get_by_role("button", name="Sinusoidal").click()
    for token, dimension in itertools.product(range(2), (0, 3)):  # position 0 has the numbers 0 and 1
        page.locator(".pipe-chips button").nth(token).click()
        page.locator(".mach-line .vec > span").nth(dimension).hover()
        sums = page.locator(".mach-sum").inner_text().split("\n")[2:]
        assert all(re.fullmatch(r"\S+ [·+] (\(−[\d.]+\)|[\d.]+) = \S+", each) for each in sums), sums


@pytest.mark.parametrize("motion", ["no-preference", "reduce"])
def test_the_row_moves_out_of_the_table_unless_the_reader_prefers_no_motion(source, serve, open_page, motion):
    page = open_page(serve(source) + "#pipeline?layer=tiny&step=one_hot", again=True, reduced_motion=motion)
    page.locator(".mach-line").first.wait_for()
    page.evaluate("""() => {
        window.moved = 0;
        new MutationObserver((changes) => changes.forEach(({ addedNodes }) => addedNodes.forEach((node) => {
            window.moved += Number(node.classList?.contains("mach-moving") ?? false);
        }))).observe(document.querySelector(".mach"), { childList: true });
    }""")
    for title in ("Rows", "Scale", "Positions", "Sum"):
        page.keyboard.press("ArrowRight")
        wait_for_step(page, title)
    assert page.evaluate("window.moved") == (0 if motion == "reduce" else 5)  # two vectors move into the sum
    page.locator(".mach-moving").first.wait_for(state="detached")


def test_all_occurrences_of_a_token_are_compared(tiny, tiny_choices, source, serve, open_page):
    text = tiny_choices["texts"][2]
    page = open_page(serve(source) + f"#pipeline?layer=tiny&step=sum&token=0&text={text.replace(' ', '+')}", again=True)
    page.locator(".pipe-cosines").wait_for()
    sums = steps_of(tiny(text=text))["sum"]["values"]["result"]
    places = [t for t, word in enumerate(text.split()) if word == "dogs"]
    assert len(places) == 3
    shown = numbers_of(page.locator(".pipe-cosines tbody td").all_inner_texts())
    unit = F.normalize(sums[places], dim=-1)
    assert shown == pytest.approx((unit @ unit.T).flatten().tolist(), abs=6e-5)


def test_switches_that_need_other_weights_are_disabled_and_say_why(source, serve, open_page):
    page = open_page(serve(source) + "#pipeline?text=" + TEXT.replace(" ", "+"), again=True)
    page.locator(".mach-line").first.wait_for()
    switches = page.locator(".pipe-switches")
    assert switches.get_by_role("button", name="rotary").get_attribute("aria-pressed") == "true"
    assert switches.get_by_role("button", name="tied", exact=True).get_attribute("aria-pressed") == "true"
    assert switches.locator("button:disabled").count() == 6
    switches.get_by_text("would need other trained weights").wait_for()
    switches.get_by_role("button", name="tiny").click()
    page.locator(".mach-products").wait_for()
    assert switches.locator("button:disabled").count() == 0
    assert page.get_by_label("Text", exact=True).input_value() == TEXT


def test_an_exported_page_shows_its_texts_and_says_that_it_holds_no_others(ask, source, exported, open_page):
    page = open_page(f"{exported}#pipeline?step=head", again=True)
    page.locator(".next-list").wait_for()
    page.get_by_text("This is an exported page: it contains").wait_for()
    choice = page.locator(".pipe-entry select")
    texts = ask(source, "pipeline-choices")["texts"]
    assert choice.locator("option").all_inner_texts() == texts
    choice.select_option(texts[1])
    answer = ask(source, "pipeline", text=texts[1])
    wait_for_tokens(page, len(answer["tokens"]))
    chance = steps_of(answer)["head"]["facts"]["top_tokens"][-1][0]["chance"]
    assert page.locator(".next-list .pipe-value").first.inner_text() == f"{chance:.1%}"


def test_the_machine_fits_a_screen_and_is_in_an_exported_page(exported, open_page):
    page = open_page(f"{exported}#pipeline?layer=tiny&step=one_hot", again=True)
    page.locator(".mach-products").wait_for()
    for scheme in ("sinusoidal", "rotary", "alibi", "learned"):
        page.locator(f".pipe-switch [data-key={scheme}]").click()
        page.locator(f".pipe-switch [data-key={scheme}][aria-pressed=true]").wait_for()
        page.locator(".mach-line").first.wait_for()
        assert page.evaluate("document.querySelector('.mach').getBoundingClientRect().bottom <= innerHeight")
    page.locator(".pipe-switch [data-key=model]").click()
    page.locator(".mach-line canvas").first.wait_for()
    assert page.evaluate("document.querySelector('.mach').getBoundingClientRect().bottom <= innerHeight")
