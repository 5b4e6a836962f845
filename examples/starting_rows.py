"""Measure the loss of new tokens before any training, for each initialisation of their rows, on held-out text.

    python examples/starting_rows.py --steps 400 --write docs/vocabulary.md

trains a small tied decoder on the Python language reference, adds the words of the held-out text that are encoded with
the most subwords in total, and writes the table between the markers of the page. `--run out/demo` reads a finished run
instead.
"""

import argparse
import copy
import math
import re
from collections import Counter
from pathlib import Path

import numpy as np
import torch
from tables import markdown_table, write_between_markers
from tokenizers import Tokenizer

import embedlayer as el
from embedlayer.cli.demo import carried_text
from embedlayer.vocab.row_init import (
    CopyInit,
    MeanInit,
    MeanNoiseInit,
    NewToken,
    RandomInit,
    RowInit,
    SubwordMeanInit,
)
from embedlayer.vocab.tokenizer_match import spell_new_tokens

Place = tuple[int, int]
LENGTH = 128


def starts(tokens: list[NewToken]) -> dict[str, RowInit]:
    """Return the initialisations to compare, by the name in the table."""
    return {
        "`SubwordMeanInit()`, the default": SubwordMeanInit(),
        "`CopyInit(of=...)` its first subword": CopyInit(of=[token.old_ids[0] for token in tokens]),
        "`MeanInit()`": MeanInit(),
        "`MeanNoiseInit(scale=0.1)`": MeanNoiseInit(scale=0.1),
        "`MeanNoiseInit()`": MeanNoiseInit(),
        "`RandomInit()`, as wide as trained rows": RandomInit(),
        "`RandomInit(std=0.02)`": RandomInit(std=0.02),
    }


def trained(run: Path | None, steps: int, vocab_size: int) -> tuple[el.DecoderLM, Tokenizer, str]:
    """Return a model, its tokenizer, and text that it was not trained on."""
    if run is not None:
        opened = el.open_model(run)
        model, tokenizer = opened.model, opened.tokenizer
        fraction = el.RunDirectory(run).read()["validation_fraction"]
        held_out = el.TokenCorpus.open(run / "corpus").split(fraction)[1]
    else:
        torch.manual_seed(0)
        tokenizer = el.train_tokenizer(carried_text(), vocab_size=vocab_size)
        table = el.TokenEmbedding(vocab_size, 192, scale="sqrt_dim")
        model = el.DecoderLM(table, el.RotaryEmbedding(32), num_layers=4, num_heads=6)
        parts = el.TokenCorpus.from_text(carried_text(), tokenizer).split(0.1)
        list(el.Trainer(model, *parts, el.TrainingOptions(steps=steps, max_length=LENGTH, seed=0)).run())
        held_out = parts[1]
    return model.eval(), tokenizer, tokenizer.decode(held_out.ids.tolist(), skip_special_tokens=False)


def costly_words(text: str, tokenizer: Tokenizer, number: int) -> list[str]:
    """Return the words, with the space before them, that would save the most tokens of a text as single tokens."""
    counts = Counter(re.findall(r" [A-Za-z]\w{2,}", text))
    subwords = {word: len(tokenizer.encode(word).ids) for word in counts}
    costly = [word for word in counts if subwords[word] > 1]
    return sorted(costly, key=lambda word: (-counts[word] * (subwords[word] - 1), word))[:number]


def with_rows(model: el.DecoderLM, values: torch.Tensor) -> el.DecoderLM:
    """Return a copy of the model with more rows in its (tied) table."""
    config = copy.deepcopy(model.config)
    config["table"]["vocab_size"] += len(values)
    larger = el.DecoderLM.from_config(config)
    larger.load_state_dict({**model.state_dict(), "table.weight": torch.cat([model.table.weight.detach(), values])})
    return larger.eval()


@torch.no_grad()
def losses(model: el.DecoderLM, ids: list[int]) -> np.ndarray:
    """Return the loss of each token in nats; that of the first token of each window is NaN."""
    found = []
    for window in torch.tensor(ids).split(LENGTH):
        nats = -model.head.token_log_probs(model.hidden(window[:-1]), window[1:]) if len(window) > 1 else window[:0]
        found += [math.nan, *nats.tolist()]
    return np.array(found)


def measured(
    name: str, nats: np.ndarray, places: list[tuple[int, int]], text: str, words: list[range]
) -> dict[str, str]:
    """Return a row of the table.

    Args:
        name: The initialisation.
        nats: Loss of each token, or NaN.
        places: Start and end of each token in the text.
        text: The text.
        words: Start and end of each new token in the text.
    """
    inside = np.zeros(len(text), dtype=bool)
    for word in words:
        inside[word.start : word.stop] = True
    is_new = np.array([inside[min(start, len(text) - 1)] for start, _ in places])
    seen = ~np.isnan(nats)
    size = sum(len(text[start:stop].encode()) for (start, stop), there in zip(places, seen, strict=True) if there)
    in_all_windows = seen[is_new].sum() / max(is_new.sum(), 1)
    return {
        "rows of the new tokens": name,
        "loss of a new token": f"{nats[is_new & seen].sum() / (len(words) * in_all_windows):.2f}",
        "loss of another token": f"{nats[~is_new & seen].mean():.3f}",
        "bits per byte": f"{nats[seen].sum() / math.log(2) / size:.3f}",
    }


def main(run: Path | None, steps: int, vocab_size: int, number: int, page: Path | None) -> None:
    model, tokenizer, text = trained(run, steps, vocab_size)
    terms = costly_words(text, tokenizer, number)
    edit = el.vocab.edit_tokenizer(tokenizer, add=terms)
    new_ids = [token_id for token_id, source in enumerate(edit.sources) if source is None]
    tokens = spell_new_tokens(tokenizer, edit.tokenizer, new_ids)

    before, after = tokenizer.encode(text), edit.tokenizer.encode(text)
    words = [range(*place) for i, place in zip(after.ids, after.offsets, strict=True) if i >= new_ids[0]]
    rows = [measured("not added: the subwords of its text", losses(model, before.ids), before.offsets, text, words)]
    for name, start in starts(tokens).items():
        values = start.rows(model.table, tokens, torch.Generator().manual_seed(0)).values
        rows.append(measured(name, losses(with_rows(model, values), after.ids), after.offsets, text, words))
        print(rows[-1], flush=True)
    result = markdown_table(rows)
    result += f"\n{len(terms)} new tokens, such as {', '.join(f'`{term!r}`' for term in terms[:4])}: "
    result += f"{len(words):,} of the {len(after.ids):,} tokens of the held-out text, "
    result += f"which has {len(before.ids):,} tokens without them. Losses in nats.\n"
    print(result)
    if page is not None:
        write_between_markers(page, "starting-rows", result)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, help="folder of a finished run with a byte-level tokenizer")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--vocab-size", type=int, default=1024)
    parser.add_argument("--terms", type=int, default=200)
    parser.add_argument("--write", type=Path, help="page to put the table into")
    arguments = parser.parse_args()
    main(arguments.run, arguments.steps, arguments.vocab_size, arguments.terms, arguments.write)
