"""Measure two sentences of lessons: a wider table is more capable, and tying regularises.

    python examples/width_and_tying.py --write docs/course/texts.md

trains the same decoder on the Python language reference with tables of three widths; then, on a part of it that is
small enough to be learned by heart, tied and untied. It puts both tables between the markers of the page.
"""

import argparse
from pathlib import Path
from statistics import mean

import torch
from tables import markdown_table, write_between_markers

import embedlayer as el
from embedlayer.cli.demo import carried_text
from embedlayer.io.files import JsonObject

VOCABULARY, LENGTH = 2000, 64
WIDTHS = (16, 64, 192)
SHORT, SEEDS = 60_000, (0, 1, 2)  # characters
WIDTH_OF_TIED = 64


def run(corpus: el.TokenCorpus, dim: int, steps: int, *, tied: bool = True, seed: int = 0) -> list[JsonObject]:
    """Train a decoder of two blocks; return what was logged, and the parameters of table and head with it."""
    torch.manual_seed(seed)
    table = el.TokenEmbedding(VOCABULARY, dim, scale="sqrt_dim")
    head = None if tied else el.OutputHead(vocab_size=VOCABULARY, embed_dim=dim)
    model = el.DecoderLM(table, el.RotaryEmbedding(dim // 4), head, num_layers=2, num_heads=4)
    options = el.TrainingOptions(steps=steps, max_length=LENGTH, seed=seed, log_every=20, validate_every=20)
    return list(el.Trainer(model, *corpus.split(0.1), options).run())


def widths(corpus: el.TokenCorpus, steps: int) -> str:
    """Return the table of validation losses by width."""
    rows = []
    for dim in WIDTHS:
        loss = run(corpus, dim, steps)[-1]["validation_loss"]
        rows.append({"D": str(dim), "V · D": f"{VOCABULARY * dim:,}", "validation loss, nats": f"{loss:.2f}"})
        print(rows[-1], flush=True)
    text = markdown_table(rows)
    return text + f"\n{steps} steps of 8 x {LENGTH} tokens, seed 0, V = {VOCABULARY:,}, 2 layers, tied.\n"


def tying(corpus: el.TokenCorpus, steps: int) -> str:
    """Return the table of losses tied and untied on a text that is learned by heart."""
    rows = []
    for tied in (True, False):
        runs = [run(corpus, WIDTH_OF_TIED, steps, tied=tied, seed=seed) for seed in SEEDS]
        held_out = [[line["validation_loss"] for line in lines if "validation_loss" in line] for lines in runs]
        ends = VOCABULARY * WIDTH_OF_TIED * (1 if tied else 2)
        rows.append(
            {
                "head": "tied" if tied else "untied",
                "parameters at both ends": f"{ends:,}",
                "training loss at the end": f"{mean(mean(x['loss'] for x in lines[-5:]) for lines in runs):.2f}",
                "validation loss at the end": f"{mean(losses[-1] for losses in held_out):.2f}",
                "lowest validation loss": f"{mean(min(losses) for losses in held_out):.2f}",
            }
        )
        print(rows[-1], [round(min(losses), 3) for losses in held_out], flush=True)
    text = markdown_table(rows)
    return text + (
        f"\nMeans over {len(SEEDS)} seeds; the first {SHORT:,} characters, {steps} steps of 8 x {LENGTH} tokens,\n"
        f"V = {VOCABULARY:,}, D = {WIDTH_OF_TIED}, 2 layers. Losses are in nats.\n"
    )


def main(steps: int, page: Path | None) -> None:
    """Measure both, the second with twice the steps, and write the tables into `page`."""
    tokenizer = el.train_tokenizer(carried_text(), vocab_size=VOCABULARY)
    measured = {
        "width-as-capacity": widths(el.TokenCorpus.from_text(carried_text(), tokenizer), steps),
        "tying-as-regularisation": tying(el.TokenCorpus.from_text(carried_text()[:SHORT], tokenizer), 2 * steps),
    }
    for name, text in measured.items():
        print(text)
        if page is not None:
            write_between_markers(page, name, text)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path, help="page to put the tables into")
    parser.add_argument("--steps", type=int, default=300)
    arguments = parser.parse_args()
    main(arguments.steps, arguments.write)
