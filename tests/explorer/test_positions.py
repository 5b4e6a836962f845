"""Positions as the page shows them: its mathematics against the library, and the view that draws them."""

from functools import partial

import numpy as np
import pytest
import torch
from covering import some
from decoders import small
from explorer_requests import ids_of
from kinds import POSITIONS
from pages import faults

from embedlayer import (
    AlibiBias,
    EmbeddingLayer,
    LearnedPositionalEmbedding,
    Position,
    RelativePositionBias,
    RotaryEmbedding,
    SinusoidalPositionalEmbedding,
    TokenEmbedding,
    train_tokenizer,
)
from embedlayer.opening import OpenedModel
from embedlayer.positions import DynamicNTKScaling, YarnScaling
from embedlayer.positions.alibi import alibi_slopes
from embedlayer.positions.sinusoidal import sinusoids

TEXT = "The cat sat on the mat and the dog sat on the cat ."
PLACES = [0, 1, 2, 7, 31, 127, 128, 511, 2047, 10_000, 131_072, 1_000_000]


@pytest.fixture(scope="module")
def words():
    return train_tokenizer(TEXT, kind="word")


# The data


@pytest.fixture(scope="module")
def described(ask):
    """What the page gets of a scheme, of any kind."""

    def ask_for(position, raw=False):
        width = getattr(position, "embed_dim", None) or 24
        layer = EmbeddingLayer(TokenEmbedding(5, width), position)
        return (ask.raw if raw else ask)(OpenedModel("layer", layer.table, model=layer), "positions")["schemes"][0]

    return ask_for


class DecayingRotation(Position):
    """Queries grow and keys shrink with the position, in each pair at another rate; the last channel stays (xPos)."""

    head_dim = 7

    def rotate(self, q, k, positions):
        p = positions.unsqueeze(-1)
        angle, size = p * torch.tensor([1.0, 0.3, 0.01]), 1.01 ** (p * torch.tensor([1.0, 2.0, 3.0]))
        cos, sin = angle.cos(), angle.sin()

        def rotated(x, factor):
            a, b, rest = x[..., 0:6:2], x[..., 1:6:2], x[..., 6:]
            pairs = torch.stack([a * cos - b * sin, a * sin + b * cos], -1) * factor.unsqueeze(-1)
            return torch.cat([pairs.flatten(-2), rest], -1)

        return rotated(q, size), rotated(k, 1 / size)


class MixingRotation(Position):
    """A rotation that mixes all channels."""

    head_dim = 6

    def rotate(self, q, k, positions):
        skew = torch.arange(36.0).view(6, 6).tril(-1) / 36
        turned = torch.linalg.matrix_exp((skew - skew.T) * positions[:, None, None])
        return tuple((x.unsqueeze(-2) @ turned).squeeze(-2) for x in (q, k))


OF_HOOK = {"add": {"learned", "sinusoidal"}, "rotate": {"rotation", "undrawn"}, "bias": {"alibi", "relative"}}


def test_each_scheme_is_described_by_the_hook_that_it_overrides(described):
    for make in POSITIONS.values():
        position = make()
        content = described(position)
        assert content["kind"] in OF_HOOK.get(position.hook, {"none"})
        assert (content["kind"] == "sinusoidal") == isinstance(position, SinusoidalPositionalEmbedding)
        assert (content["kind"] == "alibi") == isinstance(position, AlibiBias)
        assert not (content["kind"] == "undrawn" and isinstance(position, RotaryEmbedding))


def test_learned_rows_and_relative_biases_are_sent_as_they_are(described):
    learned = LearnedPositionalEmbedding(16, 8, offset=2)
    with torch.no_grad():
        learned.weight[5] = learned.weight[3]
    content = described(learned)
    assert content["rows"].equal(learned.weight[2:])
    assert (content["checked"], content["distinct"], content["trained_length"]) == (16, 15, 16)
    relative = RelativePositionBias(4, num_buckets=8, max_distance=12, bidirectional=True, init_std=1.0)
    biases, places = described(relative)["biases"], torch.arange(30)
    bias = relative.bias(places, places)[0]
    for i, j in [(0, 0), (3, 9), (29, 0), (0, 29), (20, 11)]:
        assert biases[:, (biases.shape[1] - 1) // 2 + j - i].equal(bias[:, i, j])


def test_a_rotary_scheme_says_its_rotations_and_where_it_was_trained(ask, described, of_run):
    schemes = [make() for name, make in POSITIONS.items() if name.startswith("rotary")]
    schemes += [RotaryEmbedding(16, base=500.0, scaling=YarnScaling(factor=4.0, original_max_seq_len=64))]
    for position in schemes:
        content = described(position)
        assert content["channels"] == position.pair_channels().tolist()
        assert content["keys"] is None or position.query_scaling is not None
        turned = content["keys"] if content["keys"] is not None else content["queries"]
        expected = torch.stack([*position.cos_sin(torch.arange(len(turned)))], -1).flatten(1)
        torch.testing.assert_close(turned[:, :-1], expected, rtol=1e-5, atol=1e-5)
    assert content["trained_length"] == 64
    assert position.attention_scaling != 1
    dynamic = described(RotaryEmbedding(16, scaling=DynamicNTKScaling(factor=2.0, original_max_seq_len=64)))
    assert "shown for texts of the trained length" in dynamic["note"]
    assert dynamic["queries"].equal(described(RotaryEmbedding(16))["queries"])
    assert ask(of_run, "positions")["schemes"][0]["trained_length"] == 16


def test_rotations_of_a_user_are_read_from_their_results(described):
    content = described(DecayingRotation())
    assert content["channels"] == [[0, 1], [2, 3], [4, 5]]
    sizes = 1.01 ** (5 * torch.arange(1.0, 4))
    for columns, expected in ((content["queries"], sizes), (content["keys"], 1 / sizes)):
        torch.testing.assert_close(columns[5, 0:6:2].hypot(columns[5, 1:6:2]), expected)
        assert (columns[:, 6] == 1).all()
    first = content["queries"][1, :-1]
    torch.testing.assert_close(torch.atan2(first[1::2], first[::2]), torch.tensor([1.0, 0.3, 0.01]))
    assert described(MixingRotation())["kind"] == "undrawn", "it mixes more than two channels"
    scaled = POSITIONS["query-scaled"]()
    content = described(scaled)
    assert content["channels"] == []
    factors = scaled.query_scaling.factors(torch.arange(len(content["queries"])))
    torch.testing.assert_close(content["queries"][:, 0], factors)
    assert (content["keys"] == 1).all()


def test_tokens_come_with_their_vectors_and_their_queries_and_keys(ask, words):
    model = small("rotary")
    content = ask(OpenedModel("words", model.table, tokenizer=words, model=model), "positions")
    vectors = model.table(ids_of(content))
    assert content["vectors"].equal(vectors)
    block = model.blocks[0]
    queries = block.attention.query(block.attention_norm(vectors)).unflatten(-1, (4, 6)).transpose(0, 1)
    torch.testing.assert_close(content["queries"], queries.detach(), rtol=1e-5, atol=1e-6)
    learned = small("learned")
    assert "queries" not in ask(OpenedModel("words", learned.table, tokenizer=words, model=learned), "positions")


def test_a_table_without_a_tokenizer_and_layers_of_several_kinds_are_described(ask):
    for tokens, texts in ((None, ["#0", "#1", "#2"]), (["king", "queen", "man"],) * 2):
        content = ask(OpenedModel("vectors", TokenEmbedding(3, 4), tokens=tokens), "positions")
        assert [token["text"] for token in content["tokens"]] == texts
        assert content["schemes"][0]["kind"] == "none"
    layer = EmbeddingLayer(TokenEmbedding(5, 4), RotaryEmbedding(4), other_positions={"full": RotaryEmbedding(4, 1e6)})
    schemes = ask(OpenedModel("layer", layer.table, model=layer), "positions")["schemes"]
    assert [(s["layers"], "base=1e+06" in s["name"]) for s in schemes] == [("", False), ("full", True)]


# The mathematics of the page


@pytest.fixture(scope="module")
def maths(in_page):
    """Evaluate an expression with `math.js` and `schemes.js` in a browser: `maths("m.dot(a, b)", a=..., b=...)`."""
    return partial(in_page, {"m": "math.js", "s": "schemes.js"})


@pytest.mark.parametrize("dim", some([1, 2, 7, 64], [1, 2, 7, 8, 64, 129, 512]))
def test_sinusoids_of_the_page_are_the_librarys(maths, dim):
    for layout, endpoint, base in [
        ("interleaved", False, 10000.0),
        ("concatenated", False, 10000.0),
        ("concatenated", True, 500.0),
        ("cosines_first", True, 10000.0),
        ("cosines_first", False, 500.0),
    ]:
        if endpoint and dim < 4:
            continue
        options = {"base": base, "layout": layout, "endpoint": endpoint}
        found = maths("places.map((p) => m.sinusoid(p, dim, options))", places=PLACES, dim=dim, options=options)
        expected = sinusoids(torch.tensor(PLACES, dtype=torch.float64), dim, base, layout=layout, endpoint=endpoint)
        np.testing.assert_allclose(np.array(found), expected.numpy(), atol=1e-9, rtol=0)
        position = SinusoidalPositionalEmbedding(2048, dim, base=base, layout=layout, endpoint=endpoint)
        near = [place for place in PLACES if place < 2048]
        rows = position.vectors(torch.tensor(near)).numpy()
        np.testing.assert_allclose(np.array(found)[: len(near)], rows, atol=2e-7, rtol=0)


def test_rotations_of_the_page_are_the_librarys(maths):
    for base in [10000.0, 500000.0]:
        vectors = torch.randn(len(PLACES), 32)
        frequencies = [base ** (-2 * i / 24) for i in range(12)]
        assert maths("m.frequencies(24, base)", base=base) == pytest.approx(frequencies, rel=1e-14)
        code = "((scheme) => vectors.map((v, t) => scheme.apply(v, places[t])))(s.rotary(32, base))"
        found = maths(code, vectors=vectors.tolist(), places=PLACES, base=base)
        x = vectors[None, None]
        expected = RotaryEmbedding(32, base).rotate(x, x, torch.tensor(PLACES))[0][0, 0]
        np.testing.assert_allclose(np.array(found), expected.numpy(), atol=2e-6, rtol=0)


def test_slopes_and_biases_of_the_page_are_the_librarys(maths):
    for heads in [1, 2, 3, 6, 8, 12, 20, 32, 40]:
        assert maths("m.alibiSlopes(heads)", heads=heads) == alibi_slopes(heads).tolist()
    bias = AlibiBias(6).bias(torch.tensor([9, 4000]), torch.tensor([0, 9, 3999]))[0]
    found = maths("m.alibiSlopes(6).map((s) => [9, 4000].map((q) => [0, 9, 3999].map((k) => m.alibiBias(s, q, k))))")
    np.testing.assert_allclose(np.array(found), bias.numpy(), rtol=1e-6)


def test_a_described_scheme_acts_in_the_page_as_in_the_library(described, maths):
    for name, make in {**POSITIONS, "decaying": DecayingRotation}.items():
        check_scheme(described, maths, name, make())


def check_scheme(described, maths, name, position):
    content = described(position, raw=True)
    if content["kind"] == "undrawn":
        return
    places, width = torch.arange(16), getattr(position, "head_dim", 6)
    x = torch.randn(16, 24 if content["kind"] in ("learned", "sinusoidal") else width)
    code = "((scheme) => x.map((v, t) => scheme.apply(v, t)))(s.fromSource(content))"
    found = maths(code, x=x.tolist(), content=content)
    expected = {
        "learned": lambda: position.add(x, places),
        "sinusoidal": lambda: position.add(x, places),
        "rotation": lambda: position.rotate(x[None, None], x[None, None], places)[1][0, 0],
    }.get(content["kind"], lambda: x)()
    if name != "dynamic":  # its frequencies depend on the length; the page shows those of the trained one
        np.testing.assert_allclose(np.array(found), expected.detach().numpy(), atol=1e-6)
    query, key = torch.randn(2, 1, 1, 1, width)
    code = "((scheme) => places.map((p) => s.score(scheme, query, key, p, 3)))(s.fromSource(content))"
    if position.hook == "rotate" and name != "dynamic":
        found = maths(
            code, query=query.flatten().tolist(), key=key.flatten().tolist(), places=list(range(16)), content=content
        )
        rotated, _ = position.rotate(query.expand(1, 1, 16, width), key.expand(1, 1, 16, width), places)
        _, kept = position.rotate(query, key, torch.tensor([3]))
        np.testing.assert_allclose(np.array(found), (rotated @ kept.mT / width**0.5).flatten().numpy(), atol=1e-5)
    bias = position.bias(places, places)
    if bias is not None:
        code = "heads.map((h) => places.map((q) => places.map((k) => scheme.bias(h, q, k))))"
        code = f"((scheme) => {code})(s.fromSource(content))"
        found = maths(code, heads=list(range(bias.shape[1])), places=places.tolist(), content=content)
        np.testing.assert_allclose(np.array(found), bias[0].detach().numpy(), rtol=1e-6)


def test_the_closest_positions_and_similarities_are_numpys(maths):
    rows = torch.randn(9, 5, dtype=torch.float64)
    rows[7] = rows[2] + 0.01
    found = maths("m.closest(m.fromRows(rows))", rows=rows.tolist())
    assert [found[name] for name in ("a", "b", "alike", "pairs")] == [2, 7, 1, 36]
    angles = torch.arange(40, dtype=torch.float32).outer(torch.tensor([0.3, 0.1]))
    circles = torch.cat([angles.cos(), angles.sin()], 1).double()
    turned = maths("m.closest(m.fromRows(rows))", rows=circles.tolist())
    assert [turned[name] for name in ("a", "b", "alike")] == [0, 1, 39], "rounding makes no pair the closest"
    assert found["distance"] == pytest.approx(float((rows[7] - rows[2]).norm()))
    alike = maths("m.similarities(m.fromRows(rows))", rows=rows.tolist())["data"]
    units = torch.nn.functional.normalize(rows, dim=-1)
    np.testing.assert_allclose(np.array(alike).reshape(9, 9), (units @ units.T).numpy(), atol=1e-12)


# The view


@pytest.fixture(scope="module")
def sources(words):
    torch.manual_seed(0)
    models = {name: small(name) for name in POSITIONS}
    opened = {name: OpenedModel(name, model.table, tokenizer=words, model=model) for name, model in models.items()}
    return opened | {"table": OpenedModel("table", TokenEmbedding(12, 8))}


@pytest.fixture
def open_source(sources, serve, open_page):
    """Open the view of a source by its name, all in one page: `open_source(name, more)`."""
    address = serve(*sources.values())

    def open_(name, more="", **media):
        return open_page(f"{address}#positions?source={[*sources].index(name)}{more}", again=True, **media)

    return open_


def shown(page, name):
    return float(page.locator(f'[data-value="{name}"]').inner_text().replace("−", "-"))


def move(page, label, value):
    page.get_by_label(label, exact=True).fill(str(value))


def test_sliders_change_the_similarity_to_what_the_library_says(open_source):
    page = open_source("rotary", "&scheme=sinusoidal&dim=64&length=64")
    page.locator('[data-value="cosine"]').wait_for()
    rows = sinusoids(torch.arange(64, dtype=torch.float64), 64)
    assert shown(page, "cosine") == 0.9662
    for a, b in [(0, 32), (5, 6), (63, 1)]:
        move(page, "Position a", a)
        move(page, "Position b", b)
        expected = torch.cosine_similarity(rows[a], rows[b], dim=0)
        assert shown(page, "cosine") == pytest.approx(float(expected), abs=5.1e-5)
        assert shown(page, "distance") == pytest.approx(float((rows[a] - rows[b]).norm()), abs=5.1e-5)
    together = page.get_by_label("move both together")
    together.check()
    before = shown(page, "dot")
    move(page, "Position a", 40)  # b can go one step back only, and takes a along
    assert [page.get_by_label(f"Position {each}", exact=True).input_value() for each in "ab"] == ["62", "0"]
    assert shown(page, "dot") == before
    together.uncheck()
    move(page, "Position a", 40)
    assert shown(page, "dot") == pytest.approx(float(rows[40] @ rows[0]), abs=5.1e-5)
    text = page.locator('[data-value="distinct"]').inner_text()
    assert "No two positions are identical" in text
    assert "2,016 pairs" in text
    assert "0.884 at D = 8, 0.966 at D = 64" in page.locator(".pos-panels").inner_text()
    move(page, "Dimensions D", 1)
    assert shown(page, "cosine") == 0.8838


def test_the_score_of_the_models_own_query_and_key_depends_on_their_distance_only(ask, sources, open_source):
    source = sources["rotary"]
    page = open_source("rotary", "&a=3&b=9&token=1&key=2&head=1&length=64")
    page.locator('[data-value="score"]').wait_for()
    content = ask(source, "positions")
    query, key = content["queries"][1, 1], content["keys"][1, 2]

    def score(a, b):
        q, k = (
            source.model.position.rotate(v[None, None, None], v[None, None, None], torch.tensor([p]))[0].flatten()
            for v, p in ((query, a), (key, b))
        )
        return float(q @ k) / 6**0.5

    assert shown(page, "score") == pytest.approx(score(3, 9), abs=6e-5)
    page.get_by_label("move both together").check()
    for a in (4, 20, 50):
        move(page, "Query at a", a)
        assert page.get_by_label("Key at b", exact=True).input_value() == str(a + 6)
        assert shown(page, "score") == pytest.approx(score(3, 9), abs=6e-5)
    page.get_by_label("move both together").uncheck()
    move(page, "Key at b", 51)
    assert shown(page, "score") == pytest.approx(score(50, 51), abs=6e-5)
    assert shown(page, "score") != pytest.approx(score(3, 9), abs=1e-3)


def test_each_head_of_alibi_takes_its_slope_times_the_distance(open_source):
    page = open_source("alibi", "&a=12&b=2&length=32")
    page.locator(".pos-bars").wait_for()
    bias = AlibiBias(4).bias(torch.tensor([12]), torch.tensor([2]))[0, :, 0, 0].tolist()
    values = [float(text.replace("−", "-")) for text in page.locator(".pos-bars .pipe-value").all_inner_texts()]
    assert values == pytest.approx(bias, abs=6e-5)
    page.locator(".pos-bars button").nth(2).click()
    assert shown(page, "bias") == pytest.approx(bias[2], abs=6e-5)


def test_the_same_token_at_two_positions_has_the_layers_own_vectors(ask, sources, open_source):
    source = sources["learned"]
    page = open_source("learned", "&a=2&b=11&token=1")
    page.locator('[data-value="token-cosine"]').wait_for()
    token = ask(source, "positions")["tokens"][1]["id"]
    x = source.table(torch.tensor([token, token]))
    two = source.model.position.add(x, torch.tensor([2, 11]))
    assert shown(page, "token-cosine") == pytest.approx(torch.cosine_similarity(*two, dim=0).item(), abs=6e-5)
    assert "16 of 16 vectors are different" in page.locator('[data-value="distinct"]').inner_text()


def test_permuting_the_tokens_of_the_view_permutes_scores_only_without_positions(open_source):
    for name in ("rotary", "alibi"):
        page = open_source(name)
        page.get_by_role("button", name="Swap the first two").click()
        assert "the same scores" in page.locator('[data-value="without"]').inner_text()
        assert "The order matters" in page.locator('[data-value="with"]').inner_text()
        assert "order=1.0.2.3.4.5.6.7" in page.evaluate("location.href")
    chips = page.locator(".pos-wide .pipe-chips [data-token] span")
    page.get_by_role("button", name="Shuffle").click()
    shuffled = chips.all_inner_texts()
    page.get_by_role("button", name="Original order").click()
    assert sorted(shuffled) == sorted(chips.all_inner_texts())
    page.get_by_role("button", name="Reverse").click()
    assert "keeps every distance" in page.locator('[data-value="with"]').inner_text()  # ALiBi uses distances only


@pytest.mark.parametrize("name", some(["rotary"], ["rotary", "relative", "alibi"]))
def test_every_control_and_chart_of_a_scheme_answers_also_on_a_phone(open_source, name):
    page = open_source(name, "&length=16", color_scheme="dark")
    page.set_viewport_size({"width": 390, "height": 844})
    page.locator(".pos-wide").wait_for()
    assert faults(page, "#view-positions", besides=("move both together",)) == []
    for value in ("sinusoidal", "alibi", "rotary"):
        page.locator(".pos-controls select").select_option(value)
        page.locator(".pos-wide").wait_for()
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
