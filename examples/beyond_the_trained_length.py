"""Train the same decoder with each position scheme on 64 tokens, and ask it to predict with up to 512 before it.

    python examples/beyond_the_trained_length.py --steps 600 --write docs/positions.md

trains each scheme for the same steps on the Python language reference and puts the table between the markers of the
page. Every column has the loss on the very same validation tokens; only the text in front of them grows.
"""

import argparse
import math
from collections.abc import Callable
from pathlib import Path

import torch
from tables import markdown_table, write_between_markers

import embedlayer as el
from embedlayer.cli.demo import carried_text

VOCABULARY, WIDTH, HEADS, LAYERS = 1024, 128, 4, 3
TRAINED, LENGTHS = 64, [64, 128, 256, 512]
TARGETS = 32  # tokens at the end of each window whose loss counts
HEAD = WIDTH // HEADS

TRAINED_SCHEMES: dict[str, Callable[[], el.Position]] = {
    "learned": lambda: el.LearnedPositionalEmbedding(TRAINED, WIDTH),
    "sinusoidal": lambda: el.SinusoidalPositionalEmbedding(max(LENGTHS), WIDTH),
    "rotary": lambda: el.RotaryEmbedding(HEAD),
    "relative (T5)": lambda: el.RelativePositionBias(HEADS, bidirectional=False),
    "ALiBi": lambda: el.AlibiBias(HEADS),
    "none": el.Position,
}


def rotating_share(length: int) -> float:
    """Return the share of the pairs that complete a rotation within `length` positions."""
    completes = el.RotaryEmbedding(HEAD).frequencies() * length >= 2 * torch.pi
    return completes.double().mean().item()


def growing(ratio: float) -> tuple[float, ...]:
    """Return divisors from 1 for the fastest pair to `ratio` for the slowest, in equal logarithmic steps."""
    return tuple(ratio ** (pair / (HEAD // 2 - 1)) for pair in range(HEAD // 2))


def rotary(scaling: object = None, base: float = 10000.0) -> el.Position:
    return el.RotaryEmbedding(HEAD, base=base, scaling=scaling)


def resized(position: el.Position, length: int, method: str) -> el.Position:
    assert isinstance(position, el.LearnedPositionalEmbedding)
    return position.resize(length, method)


# the positions of the trained model for `n` tokens, more than it was trained on
METHODS: dict[str, dict[str, Callable[[el.Position, int], el.Position]]] = {
    "learned": {
        "interpolated": lambda position, n: resized(position, n, "interpolate"),
        "repeated": lambda position, n: resized(position, n, "repeat"),
    },
    "rotary": {
        "NTK-aware base": lambda _, n: rotary(base=10000.0 * (n / TRAINED) ** (HEAD / (HEAD - 2))),
        "`LinearScaling(n / 64)`": lambda _, n: rotary(el.positions.LinearScaling(n / TRAINED)),
        "`DynamicNTKScaling(1, 64)`": lambda _, n: rotary(el.positions.DynamicNTKScaling(1.0, TRAINED)),
        "`YarnScaling(n / 64, 64)`": lambda _, n: rotary(el.positions.YarnScaling(n / TRAINED, TRAINED)),
        "`LongRopeScaling`, divisors 1 to n / 64": lambda _, n: rotary(
            el.positions.LongRopeScaling((1.0,) * (HEAD // 2), growing(n / TRAINED), TRAINED, n / TRAINED)
        ),
        "`Llama3Scaling(n / 64, 64)`": lambda _, n: rotary(el.positions.Llama3Scaling(n / TRAINED, TRAINED)),
        "`ProportionalScaling`, slow pairs stopped": lambda _, n: rotary(
            el.positions.ProportionalScaling(rotating_share(TRAINED))
        ),
    },
}


@torch.no_grad()
def losses(
    model: el.DecoderLM,
    at: Callable[[el.Position, int], el.Position],
    text: torch.Tensor,
    windows: int,
    lengths: list[int],
) -> dict[int, str]:
    """Loss on the last tokens of windows that end at the same places, for each length, in nats per token."""
    own, found = model.position, {}
    ends = torch.linspace(max(lengths), len(text) - 1, windows).long()
    targets = torch.stack([text[end - TARGETS + 1 : end + 1] for end in ends])
    for length in lengths:
        try:
            model.position = own if length == TRAINED else at(own, length)
            ids = torch.stack([text[end - length : end] for end in ends])
            hidden = torch.cat([model.hidden(part)[:, -TARGETS:] for part in ids.split(8)])
            found[length] = f"{model.head.loss(hidden, targets).item():.3f}"
        except el.PositionError:
            found[length] = "cannot"
    model.position = own
    return found


def train(make: Callable[[], el.Position], corpus: el.TokenCorpus, steps: int, seed: int = 0) -> el.DecoderLM:
    torch.manual_seed(seed)
    table = el.TokenEmbedding(VOCABULARY, WIDTH, scale="sqrt_dim")
    model = el.DecoderLM(table, make(), num_layers=LAYERS, num_heads=HEADS)
    options = el.TrainingOptions(
        steps=steps, max_length=TRAINED, batch_size=16, log_every=steps, validation_tokens=1024, seed=seed
    )
    list(el.Trainer(model, *corpus.split(0.1), options).run())
    return model.eval()


def main(steps: int, windows: int, lengths: list[int], seed: int, page: Path | None) -> None:
    torch.set_num_threads(1)  # matrices this small gain nothing from more
    tokenizer = el.train_tokenizer(carried_text(), vocab_size=VOCABULARY)
    corpus = el.TokenCorpus.from_text(carried_text(), tokenizer)
    validation = torch.as_tensor(corpus.split(0.1)[1].ids).long()
    rows = []

    def add(name: str, model: el.DecoderLM, at: Callable[[el.Position, int], el.Position]) -> None:
        found = losses(model, at, validation, windows, lengths)
        rows.append({"scheme": name} | {f"{length} tokens": loss for length, loss in found.items()})
        print(rows[-1], flush=True)

    for name, make in TRAINED_SCHEMES.items():
        model = train(make, corpus, steps, seed)
        add(name, model, lambda position, n: position)
        for how, method in METHODS.get(name, {}).items():
            add(f"{name}, {how}", model, method)
    text = markdown_table(rows)
    text += (
        f"\nLoss in nats per token on the last {TARGETS} tokens of {windows} windows, the same tokens in every column; "
    )
    text += (
        f"trained on {TRAINED} tokens for {steps} steps of 16 windows, seed {seed}, V = {VOCABULARY:,}, D = {WIDTH}, "
    )
    text += f"{LAYERS} layers, {HEADS} heads; ln V = {math.log(VOCABULARY):.2f}. n is the length of the window.\n"
    print(text)
    if page is not None:
        write_between_markers(page, "beyond-the-trained-length", text)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--windows", type=int, default=96, help="windows of the validation text for each length")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, choices=LENGTHS, help="of the windows")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and of the order of training")
    parser.add_argument("--write", type=Path, help="page to put the table into")
    arguments = parser.parse_args()
    main(arguments.steps, arguments.windows, arguments.lengths, arguments.seed, arguments.write)
