"""The step Tokenize and the scenes about tokenizers: what the page draws equals what the tokenizers do."""

import re
import sys
import unicodedata
from itertools import pairwise, product
from urllib.parse import quote

import pytest
from covering import some
from explorer_requests import ids_of
from tokenizer_kinds import tokenizer_of
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from embedlayer import TokenEmbedding
from embedlayer.core import visible_text
from embedlayer.explorer.tokenization import own_tokenizer
from embedlayer.opening import OpenedModel
from embedlayer.tokenization import compare_tokenizers, table_size

TEXT = "The café of lovely embeddings, qq"
FAMILY = "👩‍💻"


def word_piece():
    parts = "[UNK] the cafe of em love ##bed ##ding ##s ##ly , a b e l o".split()
    tokenizer = Tokenizer(models.WordPiece({part: i for i, part in enumerate(parts)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return tokenizer


def unigram():
    letters = [(letter, -9.0) for letter in "▁Thecafofvlymbdings,é"]
    words = [("▁The", -3.0), ("▁of", -3.5), ("▁love", -4.0), ("ly", -4.0), ("▁em", -5.0), ("bed", -5.5), ("▁lo", -4.5)]
    tokenizer = Tokenizer(models.Unigram([("<unk>", -20.0), *dict(letters).items(), *words], unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    return tokenizer


def bpe(merges, **options):
    """A byte-level BPE of some merges."""
    symbols = [*pre_tokenizers.ByteLevel.alphabet(), *("".join(pair) for pair in merges)]
    vocabulary = {symbol: i for i, symbol in enumerate(dict.fromkeys(symbols))}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, **options))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return tokenizer


def love():
    """A tokenizer that splits ` love` into ` lo` and `ve`."""
    return bpe([("Ġ", "l"), ("v", "e"), ("Ġl", "o")])


KINDS = ("BPE", "WordPiece", "Unigram")
TOKENIZERS = {
    "BPE": lambda: own_tokenizer("small"),
    "WordPiece": word_piece,
    "Unigram": unigram,
    "love": love,
    "byte fallback": lambda: tokenizer_of("SentencePiece BPE with byte fallback"),
    "right to left": lambda: Tokenizer(models.BPE({"ا": 0, "ل": 1, "ال": 2}, [("ا", "ل")])),
    "dropout": lambda: bpe([("l", "o")], dropout=0.5),
}


def opened(tokenizer, title="source", width=6):
    return OpenedModel(title, TokenEmbedding(tokenizer.get_vocab_size(), width), tokenizer=tokenizer)


def to_the_end(page):
    """Make all steps of the model, if it has some."""
    for slider in page.locator(".tok-controls input").all():
        slider.fill(slider.get_attribute("max"))


def symbols(page):
    return page.locator(".tok-steps .tok-symbols").first.locator(".tok-symbol").all_inner_texts()


@pytest.fixture(scope="module")
def sources():
    of_tokenizers = {name: opened(make(), name) for name, make in TOKENIZERS.items()}
    return {**of_tokenizers, "rows": OpenedModel("rows", TokenEmbedding(5, 2))}


@pytest.fixture
def open_text(open_page, serve, sources):
    """Open a text by the tokenizer of a name, all in one page: `open_text(name, text, more)`."""
    address = serve(*sources.values())

    def open_(name, text, more=""):
        number = [*sources].index(name)
        page = open_page(f"{address}#pipeline?source={number}&text={text.replace(' ', '+')}{more}", again=True)
        page.locator(".tok-table").wait_for()
        return page

    return open_


# The law: what is drawn at the end are the tokens


@pytest.mark.parametrize("kind", KINDS)
def test_the_steps_of_every_model_end_with_the_tokens_of_the_tokenizer(ask, kind, sources, open_text):
    tokens = ask(sources[kind], "pipeline", text=TEXT)["tokens"]
    assert ids_of({"tokens": tokens}).tolist() == sources[kind].tokenizer.encode(TEXT).ids
    expected = [f"ID {token['id']}" if kind == "Unigram" else token["text"] for token in tokens]
    page = open_text(kind, TEXT)
    drawn = []
    buttons = page.locator(".tok-piece")
    for number in range(buttons.count()):
        buttons.nth(number).click()
        assert buttons.nth(number).get_attribute("aria-pressed") == "true"
        to_the_end(page)
        said = page.locator(".tok-said").inner_text()
        if kind == "Unigram":
            drawn += page.locator(".tok-paths > li").first.locator(".tok-id").all_inner_texts()
        else:
            drawn += ["[UNK]"] if "the whole word is unknown" in said else symbols(page)
        if kind == "BPE":
            assert ("It stops:" in said) == (len(symbols(page)) > 1)
    assert drawn == expected
    pressed = page.locator('.pipe-chips [aria-pressed="true"]')
    assert pressed.count() == 1, "the token of the last pre-token is chosen, too"


def test_bpe_shows_the_rank_of_each_pair_and_says_why_it_stops(open_text):
    page = open_text("love", "I love", "&token=1")
    assert symbols(page) == ["·", "l", "o", "v", "e"]
    assert page.locator(".tok-rank").all_inner_texts() == ["0", "no merge", "no merge", "1"]
    said = page.locator(".tok-said")
    assert said.inner_text() == "Start: 5 symbols. Next: · + l, rank 0, the lowest here."
    slider = page.get_by_role("slider", name="Merge")
    slider.focus()
    page.keyboard.press("ArrowRight")
    assert symbols(page) == ["·l", "o", "v", "e"]
    page.keyboard.press("End")
    assert symbols(page) == ["·lo", "ve"]
    assert said.inner_text() == (
        "Merge 3: ·l + o becomes ·lo, rank 2. It stops: ·lo + ve has no merge in the list. Training added one merge at "
        "a time, that of the most frequent pair, and ended before this pair. So it is 2 tokens."
    )
    page.get_by_role("list", name="Merges").get_by_role("button").nth(1).click()
    assert slider.input_value() == "2"
    page.get_by_role("button", name="Play").click()
    said.get_by_text("It stops:").wait_for()
    page.get_by_role("button", name="Play").wait_for()  # it pauses at the end
    page.locator(".tok-piece").first.click()
    assert said.inner_text() == "Start: one symbol. One symbol is left: one token."
    page.locator(".tok-piece").last.click()
    assert slider.input_value() == "3", "each pre-token keeps its place"


def test_bytes_of_a_character_without_an_entry_are_not_merged_for_their_own_reason(open_text):
    for text, end in (
        ("🙂", "which are never merged. So it is 5 tokens."),
        ("🙂ky", "ended before the other pair. So it is 7 tokens."),
        ("🙂ky2", "ended before the other pairs. So it is 8 tokens."),
    ):
        page = open_text("byte fallback", text)
        to_the_end(page)
        said = page.locator(".tok-said").inner_text()
        assert "have no merge in the list. A character without an entry is written as its bytes" in said
        assert said.endswith(end)


def test_a_merge_of_letters_written_from_right_to_left_keeps_its_order(open_text):
    page = open_text("right to left", "ال")
    for place in (".tok-said .token", ".tok-list bdi"):
        pair = page.locator(place).all()
        assert [each.inner_text() for each in pair] == ["ا", "ل"]
        assert pair[0].bounding_box()["x"] < pair[1].bounding_box()["x"]


def test_wordpiece_tries_from_the_longest_on_and_unigram_adds_scores(open_text):
    page = open_text("WordPiece", TEXT, "&token=5")
    slider = page.get_by_role("slider", name="Try")
    slider.fill("9")
    tries = page.locator(".tok-tries li:not(.tok-later) b").all_inner_texts()
    assert tries == ["embeddings"[:stop] for stop in range(10, 1, -1)]
    assert page.locator(".tok-said").inner_text().startswith("em is in the vocabulary, ID 4. Next: the rest")
    page.locator(".tok-piece").last.click()
    to_the_end(page)
    page.get_by_text("Nothing shorter is left, so the whole word is unknown.").wait_for()
    page = open_text("Unigram", TEXT, "&token=4")
    page.locator(".tok-paths").wait_for()
    for path in page.locator(".tok-paths > li").all():
        shown = [
            *path.locator("small:not(.tok-id)").all_inner_texts(),
            path.locator(".tok-sum").inner_text().removeprefix("= "),
        ]
        *scores, total = (float(score.replace("−", "-")) for score in shown)
        assert sum(scores) == pytest.approx(total)


def test_normalised_text_marks_what_changed_and_words_of_the_table_are_looked_up(open_text, tiny_choices):
    page = open_text("WordPiece", TEXT)
    assert page.locator(".tok-text").inner_text() == "the·cafe·of·lovely·embeddings,·qq"
    assert page.locator(".tok-text mark").all_inner_texts() == ["t", "e"]
    page = open_text("WordPiece", tiny_choices["texts"][0], "&layer=tiny")
    page.get_by_text("Split by the names of the rows", exact=True).wait_for()
    assert re.fullmatch(r"(\w+) is looked up as a whole: its ID is \d+\.", page.locator(".tok-steps").inner_text())
    page = open_text("rows", quote("#0 #3"))
    page.get_by_text("IDs that were typed").wait_for()


@pytest.mark.parametrize("step", some([61], [61, 1]))
def test_the_page_writes_invisible_characters_as_python_does(in_page, step):
    """All characters of the lowest plane but ideographs and Hangul, all tags and variation selectors, and of the others
    those at every `step`."""
    codes = {
        *range(0x3400),
        *range(0xF900, 0x10000),
        *range(0xE0000, 0xE0200),
        *range(0x3400, sys.maxunicode + 1, step),
    }
    characters = map(chr, sorted(codes))
    known = [
        each for each in characters if unicodedata.category(each) not in ("Cs", "Cn")
    ]  # unassigned in this Unicode
    shown = in_page({"d": "dom.js"}, "[...text].map(d.visibleText)", text="".join(known))
    assert shown == [visible_text(each) for each in known]


def test_a_text_that_no_normaliser_changes_is_not_shown_as_changed(open_text):
    newer = "\U0001fae9"  # of Unicode 16, which this Python may not know
    page = open_text("BPE", quote(f"a\x00\xad\r{newer} love"))
    assert page.locator(".tok-text").count() == 0


def test_the_parts_of_a_normalised_text_are_those_that_both_have_in_order(in_page):
    texts = ("", "abc", "Äpfel ÀÉ ﬁ ½", "  a  B ", "\u0301e\u0301", "ABC" * 200, "e\u0301" * 9)
    for text, normalizer in product(texts, (normalizers.NFKC(), normalizers.BertNormalizer(), normalizers.Lowercase())):
        after = normalizer.normalize_str(text)
        parts = in_page({"p": "pipeline/token_player.js"}, "p.changedParts(before, after)", before=text, after=after)
        assert "".join(part for part, _ in parts) == after
        rest = iter(text)
        assert all(letter in rest for part, is_new in parts if not is_new for letter in part) or len(text) > 400
        assert after != text or not any(is_new for _, is_new in parts)


def test_choosing_a_token_chooses_its_pre_token_and_back(open_text):
    page = open_text("BPE", "I love football", "&token=1")
    chips, buttons = page.locator(".pipe-chips button"), page.locator(".tok-piece")
    count = chips.count()
    chips.nth(count - 1).click()
    assert buttons.nth(2).get_attribute("aria-pressed") == "true"
    buttons.nth(0).focus()
    page.keyboard.press("Enter")
    assert chips.nth(0).get_attribute("aria-pressed") == "true"
    assert buttons.nth(0).evaluate("button => button === document.activeElement")
    page.keyboard.press("]")
    assert buttons.nth(1).get_attribute("aria-pressed") == "true"
    assert "step=" not in page.evaluate("location.href"), "it is the first step"


def test_a_tokenizer_that_cannot_be_traced_says_so(open_text):
    page = open_text("dropout", "lo")
    assert "dropout" in page.locator(".tok > .note").inner_text()
    assert page.locator(".tok-piece").count() == 0


# Bytes


def test_bytes_and_code_points_of_an_emoji_are_those_of_unicode(open_text):
    page = open_text("BPE", FAMILY)
    rows = page.locator(".tok-detail .tok-strip-row:not(.tok-ruler)")
    rows.first.wait_for()  # strips are drawn when their width is known
    drawn = {row.locator("span").first.inner_text(): row.locator(".tok-box").all_inner_texts() for row in rows.all()}
    assert drawn["seen"] == [FAMILY]
    points = [f"U+{ord(point):04X}" for point in FAMILY]
    assert [text.split("\n")[-1] for text in drawn["characters"]] == points
    assert drawn["bytes"] == [f"{byte:02X}" for byte in FAMILY.encode()]
    assert len(drawn["tokens"]) == len(own_tokenizer("small").encode(FAMILY).ids)


def test_lines_end_where_no_token_is_cut_if_they_can(in_page):
    ends = [[2, 3, 9, 10, 25], [5, 9, 25], [*range(1, 26)]]
    rows = [{"name": "", "boxes": [{"start": a, "stop": b} for a, b in pairwise([0, *row])]} for row in ends]
    common = set.intersection(*map(set, ends))
    for most in (4, 9, 30):
        starts = in_page({"s": "pipeline/byte_strips.js"}, "s.lineStarts(rows, 25, most)", rows=rows, most=most)
        assert starts[0] == 0
        assert all(0 < after - before <= most for before, after in pairwise([*starts, 25]))
        for before, after in pairwise(starts):
            free = [end for end in common if before + 0.6 * most <= end <= before + most]
            assert after == (max(free) if free else before + most)


def test_side_by_side_aligns_bytes_and_has_the_numbers_of_the_comparison(serve, open_page):
    tokenizers = {"one": word_piece(), "two": unigram()}
    sources = [opened(each, title, 4 * width) for width, (title, each) in enumerate(tokenizers.items(), 1)]
    page = open_page(f"{serve(*sources)}#pipeline?text={TEXT.replace(' ', '+')}")
    page.locator(".tok-table").wait_for()
    everyone = [*tokenizers.values(), own_tokenizer("small"), own_tokenizer("bytes")]
    lines = page.locator(".tok-table tbody tr").all()
    for line, tokenizer, width in zip(lines, everyone, (4, 8, 4, 4), strict=True):
        side = compare_tokenizers(tokenizer, everyone[-1], TEXT).a
        size = table_size(tokenizer)
        assert line.locator("td").all_inner_texts() == [
            str(side.text_tokens),
            f"{side.bytes_per_token:.3f}",
            f"{size:,} × {width} = {size * width:,}",
        ]
    strips = page.locator(".tok-page > section").last.locator(".tok-strip-row:not(.tok-ruler)")
    find = "boxes => boxes.map((box) => Math.round(box.getBoundingClientRect().x))"
    lefts = [set(row.locator(".tok-box").evaluate_all(find)) for row in strips.all()]
    assert len(lefts) == 4
    assert len(lefts[-1]) == len(TEXT.encode())
    for row, line, name in zip(strips.all(), lines, ("[UNK]", "<unk>"), strict=False):
        assert row.locator(".tok-of-special").all_inner_texts() == [name], "the text `qq` is lost"
        assert "1 unknown" in line.locator("th").inner_text()
    assert not any("unknown" in line.locator("th").inner_text() for line in lines[2:])
    assert all(left <= lefts[-1] for left in lefts[:-1]), "each token begins where a byte begins"
