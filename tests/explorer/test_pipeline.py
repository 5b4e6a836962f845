"""A text's way through a model: the steps against the model itself, and the view that shows them."""

import base64
import itertools
import json
import threading

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from covering import some
from decoders import small
from kinds import POSITIONS
from page_waiting import until

from embedlayer import (
    EmbeddingLayer,
    FactorizedEmbedding,
    LearnedPositionalEmbedding,
    OutputHead,
    TextError,
    TokenEmbedding,
    TokenIdError,
    TokenizerError,
    TransformerEmbedding,
    load_llama,
    load_tokenizer,
    train_tokenizer,
)
from embedlayer.explorer import pipeline_steps as module
from embedlayer.explorer.example_tokens import TEXTS as EXAMPLES
from embedlayer.explorer.export import write_page
from embedlayer.explorer.pipeline import answer, choices, exported_requests, pipeline
from embedlayer.explorer.pipeline_steps import packed
from embedlayer.explorer.positions import described
from embedlayer.explorer.text_ids import NamedRows, shown_tokens
from embedlayer.explorer.tiny_layer import TEXTS as TINY_TEXTS
from embedlayer.explorer.tiny_layer import WORDS, tiny_layer
from embedlayer.inputs.embedding import embed
from embedlayer.opening import OpenedModel

TEXT = "I love dogs and dogs love me"
LONG_TEXT = "dogs love me and I love dogs and dogs love me and I love"


@pytest.fixture(scope="module")
def words():
    return train_tokenizer(TEXT + " . " * 3, kind="word")


@pytest.fixture(params=sorted(POSITIONS))
def model(request):
    return small(request.param)


def ids_of(walked):
    return torch.tensor([token["id"] for token in walked.tokens])


def test_the_last_vectors_are_those_of_the_models_input_embedding(model, words):
    walked = pipeline(model, words, TEXT)
    expected = embed(ids_of(walked)[None], model.table, model.position)[0]
    torch.testing.assert_close(walked.vectors, expected)
    assert not walked.vectors.requires_grad
    assert walked.step("look_up").vectors.equal(model.table.weight[ids_of(walked)])
    names = [step.name for step in walked.steps]
    assert names[:5] == ["tokenize", "one_hot", "look_up", "scale", "position"]
    assert names[-2:] == ["head", "gradient"]


def test_a_scheme_has_a_step_where_it_is_applied(words):
    steps_of_hook = {"add": {"sum"}, "rotate": {"rotation"}, "bias": {"bias"}, None: set()}
    for name, make in POSITIONS.items():
        position, steps = make(), {step.name for step in pipeline(small(name), words, TEXT).steps}
        drawn = steps_of_hook[position.hook] if described(position).get("channels", "no rotation") else set()
        assert steps & {"sum", "rotation", "bias"} == drawn, name


def test_the_chances_are_those_of_the_model(model, words):
    walked = pipeline(model, words, TEXT)
    ids = ids_of(walked)
    chances = model(ids).softmax(-1)
    head = walked.step("head").facts
    for shown, row in zip(head["top_tokens"], chances, strict=True):
        assert [token["chance"] for token in shown] == pytest.approx(row.topk(8).values.tolist(), abs=1e-6)
    assert head["next"] == pytest.approx(chances[:-1].gather(1, ids[1:, None])[:, 0].tolist(), abs=1e-6)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("at_once", [7, 8192])
def test_the_gradient_is_autograds(words, tied, at_once, monkeypatch):
    monkeypatch.setattr(module, "ROWS_AT_ONCE", at_once)
    head = None if tied else OutputHead(vocab_size=50, embed_dim=24, softcap=3.0, logit_scale=0.7, bias=True)
    model = small("learned", head=head)
    model.head.head_dtype = torch.float32
    walked = pipeline(model, words, TEXT)
    ids = ids_of(walked)
    model.loss(ids[:-1], ids[1:]).backward()
    expected = model.table.weight.grad.norm(dim=-1)
    step = walked.step("gradient")
    torch.testing.assert_close(step.values["norms"][0], expected, rtol=1e-4, atol=1e-6)
    assert step.facts["touched"] == int(expected.count_nonzero())
    assert step.facts["used"] == len(set(ids.tolist()))
    for row in step.facts["rows"]:
        assert row["norm"] == pytest.approx(float(expected[row["id"]]), rel=1e-4)
    if not tied:
        assert step.facts["touched"] == len(set(ids[:-1].tolist()))
        assert all(row["through_head"] == 0 for row in step.facts["rows"])


@pytest.mark.parametrize("tied", [True, False])
def test_the_scores_of_a_head_in_float32_are_not_rounded(words, tied):
    head = None if tied else OutputHead(vocab_size=50, embed_dim=24, softcap=3.0, bias=True)
    model = small("learned", head=head).bfloat16()
    model.head.head_dtype = torch.float32
    step = pipeline(model, words, TEXT).step("head")
    assert torch.equal(step.values["logits"], model.head(step.values["hidden"])[-1:])
    assert not torch.equal(step.values["logits"], step.values["logits"].bfloat16())


def test_the_loss_is_that_of_the_model(model, words):
    walked = pipeline(model, words, TEXT)
    ids = ids_of(walked)
    assert walked.step("gradient").facts["loss"] == pytest.approx(model.loss(ids[:-1], ids[1:]).item(), rel=1e-5)


def test_a_factorised_table_has_rows_and_gradients_too(words):
    table = FactorizedEmbedding(50, 24, 6, scale="sqrt_dim", init_std=0.5)
    model = small("learned", table=table)
    walked = pipeline(model, words, TEXT)
    torch.testing.assert_close(walked.vectors, embed(ids_of(walked), table, model.position))
    rows = table.rows(0, 50).detach().requires_grad_()
    dense = small("learned", table=TokenEmbedding.from_pretrained(rows, scale=table.scale, freeze=False))
    dense.load_state_dict({k: v for k, v in model.state_dict().items() if not k.startswith("table")}, strict=False)
    ids = ids_of(walked)
    dense.loss(ids[:-1], ids[1:]).backward()
    torch.testing.assert_close(
        walked.step("gradient").values["norms"][0], dense.table.weight.grad.norm(dim=-1), rtol=1e-4, atol=1e-6
    )


def test_queries_are_turned_as_the_models_attention_turns_them(words):
    model = small("rotary")
    walked = pipeline(model, words, TEXT)
    values = walked.step("rotation").values
    places = torch.arange(len(walked.tokens))
    queries, keys = model.position.rotate(values["queries"], values["keys"], places)
    torch.testing.assert_close(values["queries_turned"], queries)
    torch.testing.assert_close(values["keys_turned"], keys)
    block = model.blocks[0]
    expected = block.attention.query(block.attention_norm(walked.vectors)).unflatten(-1, (4, 6)).transpose(0, 1)
    torch.testing.assert_close(values["queries"], expected)
    angles = torch.outer(places.double(), 10000.0 ** -(torch.arange(3).double() / 3))
    torch.testing.assert_close(values["angles"], torch.atan2(angles.sin(), angles.cos()).float())


def test_the_two_ends_of_a_checkpoint_take_its_own_recipe(words):
    layer = EmbeddingLayer(
        TokenEmbedding(50, 8),
        LearnedPositionalEmbedding(20, 12),
        recipe=["project", "types", "position", "norm"],
        types=TokenEmbedding(2, 12),
        norm=torch.nn.LayerNorm(12),
        projection=torch.nn.Linear(8, 12),
    )
    walked = pipeline(layer, words, TEXT, add_special_tokens=True)
    names = ["tokenize", "one_hot", "look_up", "scale", "project", "types", "position", "sum", "norm", "dropout"]
    assert [step.name for step in walked.steps] == names
    torch.testing.assert_close(walked.vectors, layer.input(ids_of(walked)).detach())


@pytest.mark.parametrize(
    ("dtype", "parts"), [(torch.float32, None), (torch.float16, "2,048"), (torch.bfloat16, "256")], ids=str
)
def test_a_model_of_low_precision_says_how_far_its_numbers_are_rounded(words, dtype, parts):
    model = small("rotary").to(dtype)
    walked = pipeline(model, words, TEXT)
    for name in ("block", "head"):
        said = walked.step(name).note.partition("; computed in ")[2]
        expected = f"{str(dtype).removeprefix('torch.')}, which rounds by up to 1 part in {parts}"
        assert said == ("" if parts is None else expected)
    if parts is not None:
        exact = torch.linspace(1, 2, 5000)
        assert ((exact.to(dtype).float() - exact).abs() / exact).max() <= 1 / int(parts.replace(",", ""))


def test_a_model_with_a_head_and_no_blocks_says_why_they_are_not_read():
    table = TokenEmbedding(50, 8)
    layer = EmbeddingLayer(table, head=OutputHead(table))
    why = "model/config.json: sliding_window 4 is not what DecoderLM has (known: False)."
    for source in (OpenedModel("ours", table, model=layer), OpenedModel("read", table, model=layer, no_decoder=why)):
        head = next(step for step in answer(source, {"text": "#3 #4"})["steps"] if step["name"] == "head")
        assert ("The blocks are read of embedlayer's own decoders" in head["note"]) == (source.title == "ours")
        assert head["note"].endswith(f"The blocks are not read: {why}") == (source.title == "read")


def test_a_table_alone_and_an_input_embedding_alone_have_fewer_steps(words):
    table = TokenEmbedding(50, 8)
    assert [step.name for step in pipeline(table, words, TEXT).steps] == [
        "tokenize",
        "one_hot",
        "look_up",
        "scale",
        "position",
        "dropout",
    ]
    layer = TransformerEmbedding(50, 8, 16, dropout=0.25).eval()
    walked = pipeline(layer, words, TEXT)
    assert walked.step("dropout").facts == {"p": 0.25, "shown_p": 0.25}
    torch.testing.assert_close(walked.vectors, layer(ids_of(walked)))


def test_dropout_is_shown_without_drawing_from_the_programs_generator(words):
    model = small("none", dropout=0.5)
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    values = pipeline(model, words, TEXT).step("dropout").values
    assert torch.rand(4).equal(expected)
    kept = values["dropped"] != 0
    torch.testing.assert_close(values["dropped"][kept], 2 * values["kept"][kept])
    assert 0.3 < 1 - kept.float().mean() < 0.7


def test_one_token_has_no_next_one_and_so_no_gradient(words):
    assert pipeline(small(), words, "dogs").step("gradient") is None


def test_a_long_text_is_cut_and_says_so(words):
    walked = pipeline(small("learned"), words, "dogs " * 40)
    assert (len(walked.tokens), walked.left_out) == (16, 24)
    assert len(pipeline(small("rotary"), words, "dogs " * 400).tokens) == module.MOST_TOKENS


def test_what_cannot_be_shown_says_why(words):
    with pytest.raises(TextError, match="no tokens"):
        pipeline(small(), words, "  ")
    with pytest.raises(TokenizerError, match="no tokenizer"):
        pipeline(small(), None, "dogs")
    with pytest.raises(TokenIdError):
        pipeline(TokenEmbedding(2, 4), words, TEXT)


def test_tokens_are_readable_and_special_ones_marked():
    tokenizer = train_tokenizer("naïve café", vocab_size=258)
    ids = tokenizer.encode("a é<|endoftext|>", add_special_tokens=False).ids
    kinds = [(token["text"], token["kind"]) for token in shown_tokens(tokenizer, ids)]
    assert kinds[0] == ("a", "text")
    assert ("·", "text") in kinds
    assert kinds[-1] == ("<|endoftext|>", "special")
    assert any(kind == "byte" for _, kind in kinds)


def test_packed_numbers_come_back_bit_for_bit():
    values = torch.randn(3, 5)
    content = packed(values)
    numbers = np.frombuffer(base64.b64decode(content["float32"]), "<f4").reshape(content["shape"])
    assert torch.from_numpy(numbers.copy()).equal(values)


def test_json_has_no_nan_even_where_the_table_has(words):
    model = small("none")
    with torch.no_grad():
        model.table.weight[words.token_to_id("dogs")] = float("nan")
    text = json.dumps(pipeline(model, words, TEXT).to_json(), allow_nan=False)
    assert json.loads(text)["steps"][-1]["facts"]["loss"] is None


def test_walks_at_the_same_time_do_not_meet(words):
    model = small("rotary")
    texts = [TEXT, "dogs love me", "me me me"] * 4
    expected = {text: pipeline(model, words, text).step("head").facts["next"] for text in set(texts)}
    found: list[tuple[str, list[float]]] = []
    threads = [
        threading.Thread(
            target=lambda text=text: found.append((text, pipeline(model, words, text).step("head").facts["next"]))
        )
        for text in texts
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == len(texts)
    assert all(next_ == expected[text] for text, next_ in found)


def test_what_is_exported_can_be_answered(words):
    model = small()
    source = OpenedModel("words", model.table, tokenizer=words, model=model)
    asked, offered = exported_requests(source), choices(source, {})
    assert [params["text"] for params in asked if "layer" not in params] == offered["texts"]
    tiny = [params for params in asked if params.get("layer") == "tiny"]
    assert {params["text"] for params in tiny} == set(offered["tiny"]["texts"])
    assert len(tiny) == len(offered["tiny"]["texts"]) * len(offered["tiny"]["positions"]) * 2
    assert all(answer(source, params)["tokens"] for params in asked)


def test_a_real_model_goes_on_as_it_was_trained(shared_data):
    model = load_llama(shared_data / "models" / "stories260K.safetensors")
    tokenizer = load_tokenizer(shared_data / "models" / "tok512.bin")
    walked = pipeline(model, tokenizer, "Once upon a time", add_special_tokens=True)
    assert [token["kind"] for token in walked.tokens] == ["special", "text", "text", "text", "text"]
    top_tokens = walked.step("head").facts["top_tokens"]
    assert [row[0]["decoded"] for row in top_tokens[:-1]] == [" Once", " upon", " a", " time"]
    assert top_tokens[-1][0]["decoded"] == ","


# What can be chosen


@pytest.mark.parametrize("vocabulary", [None, NamedRows(["a", "b", "c"])])
def test_a_table_without_a_tokenizer_shows_its_rows(vocabulary):
    walked = pipeline(TokenEmbedding(3, 4), vocabulary, "#2 #0 #2")
    assert [token["text"] for token in walked.tokens] == (["#2", "#0", "#2"] if vocabulary is None else ["c", "a", "c"])
    assert [step.name for step in walked.steps if not step.idle] == ["tokenize", "one_hot", "look_up"]


def test_every_source_offers_texts_that_it_can_read(words):
    table = TokenEmbedding(50, 4)
    sources = {
        "tokenizer": OpenedModel("tokenizer", table, tokenizer=words),
        "names": OpenedModel("names", table, tokens=[f"word{row}" for row in range(50)]),
        "ids": OpenedModel("ids", table),
        "names that no text has": OpenedModel("odd", table, tokens=["\ud800", *([""] * 49)]),
    }
    for reads, source in sources.items():
        offered = choices(source, {})
        assert reads.startswith(offered["reads"])
        assert offered["texts"]
        assert all(answer(source, {"text": text})["tokens"] for text in offered["texts"])
    source = OpenedModel("part", table, table_only="Its family is unknown.")
    assert choices(source, {})["refused"].endswith("Its family is unknown.")
    assert all("layer" in params for params in exported_requests(source))


# The tiny layer

TINY = list(itertools.product(("learned", "sinusoidal", "rotary", "alibi"), (True, False)))


@pytest.mark.parametrize(("position", "tied"), TINY)
def test_the_tiny_layer_is_computed_by_the_model(position, tied):
    model = tiny_layer(position, tied=tied)
    params = {"layer": "tiny", "position": position, "tied": str(int(tied)), "text": TINY_TEXTS[0]}
    shown = answer(OpenedModel("any", TokenEmbedding(3, 2)), params)
    walked = pipeline(model, WORDS, TINY_TEXTS[0])
    assert [token["text"] for token in shown["tokens"]] == TINY_TEXTS[0].split()
    unknown = answer(OpenedModel("any", TokenEmbedding(3, 2)), {**params, "text": TINY_TEXTS[-1]})
    assert (unknown["tokens"][-1]["text"], unknown["tokens"][-1]["id"]) == ("<unk>", 0)
    assert unknown["how"].endswith("“me”.")
    torch.testing.assert_close(walked.vectors, embed(ids_of(walked)[None], model.table, model.position)[0])
    assert model.head.tied == tied
    assert walked.step("look_up").values["near"][0].equal(model.table.weight)


@pytest.mark.parametrize(("position", "tied"), TINY)
def test_the_gradient_of_a_small_table_is_shown_whole_and_by_its_two_ways(position, tied):
    model = tiny_layer.__wrapped__(position, tied=tied)
    walked = pipeline(model, WORDS, TINY_TEXTS[1])
    ids = ids_of(walked)
    model.loss(ids[:-1], ids[1:]).backward()
    step = walked.step("gradient")
    through_rows, through_head = step.values["rows_gradient"], step.values["head_gradient"]
    assert through_rows.norm(dim=1).nonzero()[:, 0].tolist() == ids[:-1].unique().tolist()
    assert step.facts["touched_by_look_up"] == len(ids[:-1].unique())
    assert step.facts["touched_by_head"] == 10
    torch.testing.assert_close(step.values["through_rows"][0], through_rows.norm(dim=1))
    torch.testing.assert_close(step.values["through_head"][0], through_head.norm(dim=1))
    torch.testing.assert_close(model.table.weight.grad, through_rows + through_head if tied else through_rows)
    if not tied:
        torch.testing.assert_close(model.head.weight.grad, through_head)


def test_the_rows_near_a_token_are_those_of_the_table(words):
    model = small("none")
    walked, weight = pipeline(model, words, TEXT), model.table.weight
    near, facts = walked.step("look_up").values["near"], walked.step("look_up").facts
    for token, part in zip(walked.tokens, facts["part_of"], strict=True):
        first, names = facts["parts"][part]["first"], facts["parts"][part]["names"]
        assert first <= token["id"] < first + len(names) == first + 7
        assert near[part].equal(weight[first : first + 7])
        assert names[token["id"] - first] == token["text"]
    wide = TokenEmbedding(50, 200)
    shown = pipeline(wide, words, "dogs").step("look_up")
    row = wide.weight[shown.facts["parts"][0]["first"]]
    padded = F.pad(row, (0, 4)).view(-1, 4)
    assert shown.values["near"][0, 0].abs().equal(padded.abs().amax(1)[:50])


def test_steps_that_change_nothing_say_so(words):
    idle = {name: {s.name for s in pipeline(small(name), words, TEXT).steps if s.idle} for name in ("none", "learned")}
    assert idle == {"none": {"position", "dropout"}, "learned": {"dropout"}}
    layer = TransformerEmbedding(50, 8, 16, dropout=0.25, scale=None).eval()
    assert {s.name for s in pipeline(layer, words, TEXT).steps if s.idle} == {"scale"}


# The view


@pytest.fixture(scope="module")
def source(words):
    torch.manual_seed(0)
    model = small("rotary")
    return OpenedModel("words", model.table, tokenizer=words, model=model)


@pytest.fixture(scope="module")
def exported(source, tmp_path_factory) -> str:
    """The address of the exported page of `source`."""
    path = tmp_path_factory.mktemp("exported") / "page.html"
    write_page(path, [source])
    return path.as_uri()


def wait_for_tokens(page, count):
    page.locator(f".pipe-chips > :nth-child({count}):last-child").wait_for()


def readout(page):
    return page.locator(".pipe-stage output").first.inner_text()


@pytest.mark.browser
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


@pytest.mark.browser
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


@pytest.mark.browser
def test_the_number_under_the_pointer_and_the_keys_is_the_tables(source, serve, open_page):
    page = open_page(serve(source) + "#pipeline?step=look_up&text=" + TEXT.replace(" ", "+"), again=True)
    canvas = page.locator(".heat-canvas").first
    canvas.scroll_into_view_if_needed()
    walked = pipeline(source.model, source.tokenizer, TEXT)
    rows = walked.step("look_up").vectors
    box = canvas.bounding_box()
    for t, d in itertools.product((0, 3, 6), (0, 11, 23)):
        page.mouse.move(box["x"] + (d + 0.5) / 24 * box["width"], box["y"] + (t + 0.5) / 7 * box["height"])
        number, rest = readout(page).replace("−", "-").split(maxsplit=1)
        assert float(number) == pytest.approx(float(rows[t, d]), abs=6e-5)
        assert rest == f"{walked.tokens[t]['text']} · dimension {d}"
    page.mouse.move(0, 0)
    canvas.focus()
    for key in ("ArrowDown", "ArrowRight", "ArrowRight"):
        page.keyboard.press(key)
    number, rest = readout(page).replace("−", "-").split(maxsplit=1)
    assert float(number) == pytest.approx(float(rows[1, 2]), abs=6e-5)
    assert rest == f"{walked.tokens[1]['text']} · dimension 2"
    assert "step=look_up" in page.evaluate("location.href")  # the arrows moved in the picture, not along the steps


@pytest.mark.browser
def test_a_typed_text_is_read_by_the_model_and_kept_in_the_address(source, serve, open_page):
    page = open_page(serve(source) + "#pipeline?step=head", again=True)
    page.locator(".next-list").wait_for()
    page.get_by_label("Text", exact=True).fill("dogs love me")
    wait_for_tokens(page, 3)
    page.locator(".pipe-chips button").nth(1).click()
    head = pipeline(source.model, source.tokenizer, "dogs love me").step("head").facts
    shown = page.locator(".next-list .pipe-value").first.inner_text()
    assert shown == f"{head['top_tokens'][-1][0]['chance']:.1%}"
    assert "text=dogs+love+me" in page.evaluate("location.href")
    page.get_by_label("Text", exact=True).fill("")
    page.get_by_text("Type a text", exact=True).wait_for()


@pytest.mark.browser
def test_no_typed_text_is_lost_when_the_layer_changes(source, serve, open_page):
    url = serve(source)
    page = open_page(url + "#pipeline", again=True)
    field = page.get_by_label("Text", exact=True)
    unknown = shown_tokens(source.tokenizer, source.tokenizer.encode("zebra").ids)[0]["decoded"]

    def switch(layer: str, text: str, tokens: list[str]) -> None:
        page.locator(f'.pipe-switches [data-key="{layer}"]').click()
        wait_for_tokens(page, len(tokens))
        shown = "[...document.querySelectorAll('.pipe-chips span')].map((each) => each.textContent)"
        until(page, f"String({shown}) === {json.dumps(','.join(tokens))}")
        assert field.input_value() == text

    wait_for_tokens(page, len(source.tokenizer.encode(EXAMPLES[0]).ids))
    switch("tiny", TINY_TEXTS[0], TINY_TEXTS[0].split())  # nothing was typed: each layer has its own example
    field.fill("the zebra sat")
    wait_for_tokens(page, 3)
    page.get_by_text("Replaced by <unk>, row 0, because no row has such a name: “zebra”.").wait_for()
    switch("model", "the zebra sat", [unknown] * 3)
    field.fill("dogs love me")
    wait_for_tokens(page, 3)
    switch("tiny", "the zebra sat", ["the", "<unk>", "sat"])
    page.reload()
    switch("model", "dogs love me", ["dogs", "love", "me"])
    page.goto("about:blank")
    page.goto(url + "#pipeline?text=me+me")  # the tiny layer knows no word of it, so it shows an example
    wait_for_tokens(page, 2)
    switch("tiny", TINY_TEXTS[0], TINY_TEXTS[0].split())
    switch("model", "me me", ["me", "me"])


@pytest.mark.browser
def test_on_a_phone_in_the_dark_nothing_runs_out_of_the_page(source, serve, open_page):
    page = open_page(serve(source) + "#pipeline?text=" + TEXT.replace(" ", "+"), again=True, color_scheme="dark")
    page.set_viewport_size({"width": 390, "height": 844})
    heading = page.locator(".pipe-head h2")
    heading.wait_for()
    for _ in range(8):
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), heading.inner_text()
        page.get_by_label("Next step").click(force=True)


@pytest.mark.browser
@pytest.mark.parametrize(
    ("text", "layer"),
    some([(LONG_TEXT, "tiny")], itertools.product(["dogs", LONG_TEXT, TINY_TEXTS[-1]], ["model", "tiny"])),
)
def test_on_a_phone_predictions_begin_on_the_first_screen(source, serve, open_page, text, layer):
    state = f"step=head&layer={layer}&token=1&text={text.replace(' ', '+')}"
    page = open_page(f"{serve(source)}#pipeline?{state}", again=True)
    page.set_viewport_size({"width": 390, "height": 844})
    page.locator(".next-list .pipe-value").first.wait_for()
    until(page, "document.querySelector('.next-list li').getBoundingClientRect().bottom <= innerHeight")
    fold, switches = page.locator(".pipe-fold"), page.locator(".pipe-switches")
    said = {"model": "this model, 50 × 24 · rotary · tied", "tiny": "tiny, 10 × 4 · learned · tied"}
    assert fold.inner_text() == said[layer]
    assert not switches.is_visible()
    fold.press("Enter")
    assert switches.is_visible()
    other = "tiny" if layer == "model" else "model"
    switches.locator(f'[data-key="{other}"]').click()
    page.locator(".pipe-fold", has_text=said[other]).wait_for()
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


def test_the_rows_of_the_loss_are_those_that_plain_cross_entropy_touches(words):
    model = small("none", head=OutputHead(vocab_size=50, embed_dim=24))
    walked = pipeline(model, words, TEXT)
    ids = ids_of(walked)
    F.cross_entropy(model(ids[:-1]), ids[1:]).backward()
    touched = model.table.weight.grad.norm(dim=-1).nonzero()[:, 0].tolist()
    assert walked.step("gradient").values["norms"][0].nonzero()[:, 0].tolist() == touched


# The machine


def numbers_of(texts):
    return [float(text.replace("−", "-")) for text in texts]


def wait_for_step(page, title):
    page.locator(".pipe-head h2", has_text=title).wait_for()


@pytest.mark.browser
@pytest.mark.parametrize("scheme", some(["learned"], ["learned", "rotary"]))
def test_the_machine_shows_the_models_numbers_and_its_sums(source, serve, open_page, scheme):
    page = open_page(serve(source) + f"#pipeline?layer=tiny&step=look_up&token=2&dim=1&position={scheme}", again=True)
    page.locator(".mach-line").first.wait_for()
    for button, tied in (("tied", True), ("untied", False)):
        page.locator(".pipe-switch").get_by_role("button", name=button, exact=True).click()
        page.locator(f".pipe-switch [data-key={button}][aria-pressed=true]").wait_for()
        walked = pipeline(tiny_layer(scheme, tied=tied), WORDS, TINY_TEXTS[0])
        steps = ["look_up", "scale", *(["position", "sum"] if scheme == "learned" else [])]
        for name in steps:
            shown = numbers_of(page.locator(f".mach-line[data-link={name}] .vec > span").all_inner_texts())
            assert shown == pytest.approx(walked.step(name).vectors[2].tolist(), abs=5.1e-5)
        row, scaled = (float(walked.step(name).vectors[2, 1]) for name in ("look_up", "scale"))
        sums = page.locator(".mach-sum").inner_text().replace("−", "-")
        assert f"W[{WORDS.ids('dogs')[0][0]}] = {row:.4f}" in sums
        shown_row = f"{row:.4f}" if row >= 0 else f"({row:.4f})"
        assert f"2 · {shown_row} = {scaled:.4f}" in sums
        if scheme == "learned":
            place, total = (float(walked.step(name).vectors[2, 1]) for name in ("position", "sum"))
            shown_place = f"{place:.4f}" if place >= 0 else f"({place:.4f})"
            assert f"{scaled:.4f} + {shown_place} = {total:.4f}" in sums
    whole = numbers_of(page.locator(".mach-w .vec > span").all_inner_texts())
    assert whole == pytest.approx(tiny_layer(scheme, tied=True).table.weight.flatten().tolist(), abs=1e-6)
    products = page.locator(".mach-products .vec > span").all_inner_texts()
    assert products.count("0") == 36
    assert "tied=0" in page.evaluate("location.href")


@pytest.mark.browser
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


@pytest.mark.browser
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


@pytest.mark.browser
def test_all_occurrences_of_a_token_are_compared(source, serve, open_page):
    text = TINY_TEXTS[2]
    page = open_page(serve(source) + f"#pipeline?layer=tiny&step=sum&token=0&text={text.replace(' ', '+')}", again=True)
    page.locator(".pipe-cosines").wait_for()
    sums = pipeline(tiny_layer("learned", tied=True), WORDS, text).step("sum").vectors
    places = [t for t, word in enumerate(text.split()) if word == "dogs"]
    assert len(places) == 3
    shown = numbers_of(page.locator(".pipe-cosines tbody td").all_inner_texts())
    unit = F.normalize(sums[places], dim=-1)
    assert shown == pytest.approx((unit @ unit.T).flatten().tolist(), abs=6e-5)


@pytest.mark.browser
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


@pytest.mark.browser
def test_a_table_with_names_reads_words_and_ids(serve, open_page):
    named = OpenedModel("named", TokenEmbedding(20, 12), tokens=[f"word{row}" for row in range(20)])
    url = serve(named)
    page = open_page(url + "#pipeline?text=word3+zebra+WORD17")
    wait_for_tokens(page, 2)
    page.get_by_text("no row has such a name: “zebra”").wait_for()
    page.get_by_label("Text", exact=True).fill("#17 #4 #17")
    wait_for_tokens(page, 3)
    assert page.locator(".pipe-chips small").all_inner_texts() == ["17", "4", "17"]
    assert page.locator(".pipe-chips [data-token]").count() == 3


@pytest.mark.browser
def test_an_exported_page_shows_its_texts_and_says_that_it_holds_no_others(source, exported, open_page):
    page = open_page(f"{exported}#pipeline?step=head", again=True)
    page.locator(".next-list").wait_for()
    page.get_by_text("This is an exported page: it contains").wait_for()
    choice = page.locator(".pipe-entry select")
    texts = choices(source, {})["texts"]
    assert choice.locator("option").all_inner_texts() == texts
    choice.select_option(texts[1])
    walked = pipeline(source.model, source.tokenizer, texts[1])
    wait_for_tokens(page, len(walked.tokens))
    assert (
        page.locator(".next-list .pipe-value").first.inner_text()
        == f"{walked.step('head').facts['top_tokens'][-1][0]['chance']:.1%}"
    )


@pytest.mark.browser
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
