"""Show how far a trainer's log-probabilities of sampled tokens are from those of the sampler, with and without options.

    python examples/log_ratios.py [MODEL] [--tokens 200] [--write]

MODEL is a LLaMA-type checkpoint, such as llama2.c's stories260K; without it a small model is drawn. The sampler is
`generate`, which reads one token at a time with cached keys and values. The trainer reads the finished texts at once.
The last line: the trainer's head reads the sampler's hidden states instead.
"""

import argparse
from pathlib import Path

import torch
from tables import markdown_table, write_between_markers
from torch import Tensor

import embedlayer as el

PAGE = Path(__file__).resolve().parents[1] / "docs" / "decoding.md"
TEXTS, BAR = 16, 20
BOUNDS = (0.0, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, torch.inf)
OPTIONS = {"before": {}, "after": {"head_dtype": torch.float32, "batch_invariant": True}}


def load(path: str | None, dtype: torch.dtype, options: dict) -> el.DecoderLM:
    """Return the model in a dtype, with the options of its head."""
    torch.manual_seed(0)
    table = el.TokenEmbedding(512, 64, init_std=0.3)
    model = el.DecoderLM(table, "rotary", num_layers=2, num_heads=4) if path is None else el.load_llama(path)
    for name, value in options.items():
        setattr(model.head, name, value)
    return model.to(dtype).eval()


@torch.no_grad()
def log_ratios(model: el.DecoderLM, tokens: int) -> tuple[Tensor, Tensor]:
    """Return trainer minus sampler for each token, from the same hidden states and from those of the whole texts."""
    states: list[Tensor] = []
    hook = model.norm.register_forward_hook(lambda module, inputs, hidden: states.append(hidden[:, -1]))
    beginning = torch.ones(TEXTS, 1, dtype=torch.long)
    torch.manual_seed(0)
    sampled = el.generate(model, beginning, max_new_tokens=tokens, temperature=1.0, return_log_probs=True)
    hook.remove()
    hidden, new = model.hidden(sampled.ids)[:, :-1], sampled.ids[:, 1:]
    trained = [model.head.token_log_probs(each, new) for each in (torch.stack(states, 1), hidden)]
    return trained[0] - sampled.log_probs, trained[1] - sampled.log_probs


def histogram(same: Tensor, whole: Tensor) -> dict[str, str]:
    """Return the share of the absolute log-ratios up to each bound and above the one before, with a bar."""
    sizes, shares, below = whole.abs().flatten(), {}, -1.0
    for bound in BOUNDS:
        share = ((sizes > below) & (sizes <= bound)).double().mean().item()
        name = "0" if bound == 0 else f"up to {bound:g}" if bound < 1 else f"above {below:g}"
        shares[name] = f"{share:.1%} {'█' * round(BAR * share)}".strip()
        below = bound
    for name, ratios in (("largest distance of the ratio from 1", whole), ("the same, from equal hidden states", same)):
        shares[name] = f"{(ratios.double().exp() - 1).abs().max():.1e}"
    return shares


def main() -> None:
    """Print the histograms as a table, or write it into docs/decoding.md."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model", nargs="?")
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    columns: dict[str, dict[str, str]] = {}
    for dtype in (torch.bfloat16, torch.float32):
        for name, options in OPTIONS.items():
            ratios = log_ratios(load(arguments.model, dtype, options), arguments.tokens)
            columns[f"{str(dtype).removeprefix('torch.')}, {name}"] = histogram(*ratios)
    first = next(iter(columns.values()))
    text = markdown_table(
        [{"absolute log-ratio": row, **{name: each[row] for name, each in columns.items()}} for row in first]
    )
    if arguments.write:
        write_between_markers(PAGE, "log-ratios", text)
    print(text)


if __name__ == "__main__":
    main()
