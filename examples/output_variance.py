"""How large is what enters the first block? Output variance by width, scale and start.

python examples/output_variance.py --write docs/initialisation.md
"""

import argparse
from pathlib import Path

import torch
from tables import markdown_table, write_between_markers

import embedlayer as el

WIDTHS = (8, 32, 128, 512)
VARIANTS = {
    "no scale, std 0.02": {"scale": None, "init_std": 0.02},
    "scale sqrt(D), std 0.02": {"scale": "sqrt_dim", "init_std": 0.02},
    "scale sqrt(D), std 1/sqrt(D)": {"scale": "sqrt_dim", "init_std": "1/sqrt_dim"},
    "no scale, std 1 (`nn.Embedding`)": {"scale": None, "init_std": 1.0},
}


def main(page: Path | None) -> None:
    ids = torch.randint(0, 1000, (16, 128))
    rows = []
    for name, options in VARIANTS.items():
        torch.manual_seed(0)
        layers = [el.TransformerEmbedding(1000, width, 128, dropout=0.0, **options) for width in WIDTHS]
        cells = {f"D = {width}": f"{layer(ids).var().item():.4f}" for width, layer in zip(WIDTHS, layers, strict=True)}
        rows.append({"variance of the output": name, **cells})
    text = markdown_table(rows)
    print(text)
    if page is not None:
        write_between_markers(page, "output-variance", text)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path, help="page to put the table into")
    main(parser.parse_args().write)
