"""Which of seven learning rates is best for decoders of four widths, with muP and without it, tied and untied.

    python examples/rates_by_width.py --write docs/rates-by-role.md

trains 112 small decoders (about 4 minutes of CPU time) and puts the table between the markers of the page.
"""

import argparse
import time
from pathlib import Path

import torch
from tables import markdown_table, write_between_markers

import embedlayer as el
from embedlayer.cli.demo import carried_text
from embedlayer.optim import WidthScaling

BASE, WIDTHS, HEAD_DIM, LENGTH, BATCH_SIZE = 64, [64, 128, 256, 512], 16, 32, 4
RATES = [2.0**power for power in range(-11, -4)]
LOGIT_SCALE = 8.0  # of the base: with 1 its logits grow so slowly that the best rate is near the largest stable one


def loss_after(corpus: el.TokenCorpus, width: int, rate: float, steps: int, *, tied: bool, mup: bool) -> float:
    """Train a decoder of one width, and return its loss on held-out text."""
    torch.manual_seed(0)
    scaling = WidthScaling(width if mup else BASE, base_width=BASE)
    table = el.TokenEmbedding(257, width, scale=scaling.table_scale if mup else "sqrt_dim")
    ends = (table,) if tied else (width, 257)
    head = el.OutputHead(*ends, logit_scale=LOGIT_SCALE * scaling.logit_scale)
    model = el.DecoderLM(table, "rotary", head, num_layers=2, num_heads=width // HEAD_DIM)
    options = el.TrainingOptions(
        steps=steps,
        batch_size=BATCH_SIZE,
        max_length=LENGTH,
        learning_rate=rate,
        rates=scaling.rates(rate),
        log_every=steps,
        validation_tokens=2048,
    )
    return float(list(el.Trainer(model, *corpus.split(0.1), options).run())[-1]["validation_loss"])


def main(steps: int, widths: list[int], rates: list[float], page: Path | None) -> None:
    text = carried_text()[:300_000]
    corpus = el.TokenCorpus.from_text(text, el.train_tokenizer(text, kind="byte"))
    started, rows = time.process_time(), []
    for mup in (True, False):
        for tied in (True, False):
            row = {"ends": "tied" if tied else "untied", "parametrization": "muP" if mup else "one rate for all"}
            for width in widths:
                losses = [loss_after(corpus, width, rate, steps, tied=tied, mup=mup) for rate in rates]
                best = min(range(len(rates)), key=losses.__getitem__)
                print(row, width, [f"{loss:.3f}" for loss in losses], flush=True)
                row[f"D = {width}"] = f"{rates[best]:.2g} ({losses[best]:.3f})"
            rows.append(row)
    seconds = time.process_time() - started
    note = (
        f"\nBest of {len(rates)} rates, {rates[0]:.2g} to {rates[-1]:.2g}, and its loss on held-out text in "
        f"nats per byte. {steps} steps of {BATCH_SIZE} x {LENGTH} bytes, seed 0, V = 257, 2 layers, heads of width "
        f"{HEAD_DIM}, base width {BASE} with logit scale {LOGIT_SCALE:.0f}; {seconds / 60:.0f} minutes of CPU time.\n"
    )
    print(markdown_table(rows) + note)
    if page is not None:
        write_between_markers(page, "rates-by-width", markdown_table(rows) + note)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--widths", type=int, nargs="+", default=WIDTHS)
    parser.add_argument("--rates", type=float, nargs="+", default=RATES, help="by factors of 2 without this option")
    parser.add_argument("--write", type=Path, help="page to put the table into")
    arguments = parser.parse_args()
    main(arguments.steps, arguments.widths, arguments.rates, arguments.write)
