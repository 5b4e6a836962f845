"""The step Tokenize and the scenes about tokenizers: what the page draws equals what the tokenizers do."""

import json

import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from embedlayer import TokenEmbedding, compare_tokenizers
from embedlayer.explorer.export import write_page
from embedlayer.explorer.text_ids import shown_tokens
from embedlayer.explorer.tiny_layer import TEXTS as TINY_TEXTS
from embedlayer.explorer.tokenization import TEXTS, own_tokenizer
from embedlayer.explorer.word_table import open_word_table
from embedlayer.opening import OpenedModel

pytestmark = pytest.mark.browser

TEXT = "The café of lovely embeddings, qq"
FAMILY = " 👩‍💻!"


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
    return bpe([("o", "v"), ("Ġ", "l"), ("v", "e"), ("Ġl", "o")])


TOKENIZERS = {
    "BPE": lambda: own_tokenizer("small"),
    "WordPiece": word_piece,
    "Unigram": unigram,
}


def opened(tokenizer, title="source", width=6):
    return OpenedModel(title, TokenEmbedding(tokenizer.get_vocab_size(), width), tokenizer=tokenizer)


def to_the_end(page):
    """Make all steps of the model, if it has some."""
    for slider in page.locator(".tok-controls input").all():
        slider.fill(slider.get_attribute("max"))


def symbols(page):
    return page.locator(".tok-steps .tok-symbols").first.locator(".tok-symbol").all_inner_texts()


def open_text(open_page, address, text, more=""):
    page = open_page(f"{address}#pipeline?text={text.replace(' ', '+')}{more}")
    page.locator(".tok-table").wait_for()
    return page


# The law: what is drawn at the end are the tokens


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_the_steps_of_every_model_end_with_the_tokens_of_the_tokenizer(kind, serve, open_page):
    tokenizer = TOKENIZERS[kind]()
    expected = [token["text"] for token in shown_tokens(tokenizer, tokenizer.encode(TEXT).ids)]
    page = open_text(open_page, serve(opened(tokenizer)), TEXT)
    drawn = []
    buttons = page.locator(".tok-piece")
    for number in range(buttons.count()):
        buttons.nth(number).click()
        assert buttons.nth(number).get_attribute("aria-pressed") == "true"
        to_the_end(page)
        said = page.locator(".tok-said").inner_text()
        unknown = buttons.nth(number).locator("small").inner_text().strip()
        drawn += [unknown] if "unknown" in said or unknown in ("[UNK]", "<unk>") else symbols(page)
        if kind == "BPE":
            assert ("It stops:" in said) == (len(symbols(page)) > 1)
    assert drawn == expected
    pressed = page.locator('.pipe-chips [aria-pressed="true"]')
    assert pressed.count() == 1, "the token of the last pre-token is chosen, too"


def test_bpe_shows_the_rank_of_each_pair_and_says_why_it_stops(serve, open_page):
    page = open_text(open_page, serve(opened(love())), "I love", "&token=1")
    assert symbols(page) == ["·", "l", "o", "v", "e"]
    ranks = page.locator(".tok-rank")
    assert ranks.all_inner_texts() == ["1", "no merge", "0", "2"]
    said = page.locator(".tok-said")
    assert said.inner_text() == "Start: 5 symbols. Next: o + v, rank 0, the lowest here."
    slider = page.get_by_role("slider", name="Merge")
    slider.focus()
    page.keyboard.press("ArrowRight")
    assert symbols(page) == ["·", "l", "ov", "e"]
    page.keyboard.press("End")
    assert symbols(page) == ["·l", "ov", "e"]
    assert said.inner_text().startswith("Merge 2: · + l becomes ·l, rank 1. It stops: ·l + ov, ov + e have no merge")
    page.get_by_role("list", name="Merges").get_by_role("button").first.click()
    assert slider.input_value() == "1"
    page.get_by_role("button", name="Play").click()
    said.get_by_text("It stops:").wait_for()
    page.get_by_role("button", name="Play").wait_for()  # it stops at the end
