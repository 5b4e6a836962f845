"""The pictures of docs/gallery.md, made by the code that stands under them.

    python examples/gallery.py --write docs/gallery

runs the page from top to bottom and writes each picture. The same page gives the same bytes.
"""

import argparse
import io
import re
from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path

from matplotlib.figure import Figure
from PIL import Image

from embedlayer.io.files import create_folder

PAGE = Path(__file__).resolve().parents[1] / "docs" / "gallery.md"
DPI = 160  # 1,152 pixels wide: sharp at 800
MANY_COLOURS = 10_000
BLOCK = re.compile(r"(?:!\[[^\]]*\]\(gallery/([\w-]+)\.png\)\n\n)?^```python\n(.*?)^```", flags=re.S | re.M)


def figures(page: Path = PAGE) -> Iterator[tuple[str, Figure]]:
    """Run the page beside its files; after each block under a picture, the picture's name and its figure."""
    names: dict = {}
    with chdir(page.parent):
        for picture, code in BLOCK.findall(page.read_text(encoding="utf-8")):
            names.pop("figure", None)
            exec(compile(code, str(page), "exec"), names)
            if picture:
                yield picture, names["figure"]


def png(figure: Figure) -> bytes:
    """The figure as a small PNG: of 256 colours, unless there are so many that it would show."""
    drawn, packed = io.BytesIO(), io.BytesIO()
    figure.savefig(drawn, dpi=DPI)
    picture = Image.open(drawn).convert("RGB")
    if picture.getcolors(MANY_COLOURS) is not None:
        picture = picture.quantize(256, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE)
    picture.save(packed, format="PNG", optimize=True)
    return packed.getvalue()


def main(folder: Path | None) -> None:
    if folder is not None:
        folder = create_folder(folder).resolve()
    for name, figure in figures():
        content = png(figure)
        print(f"{name:<16}{len(content) / 1000:7.1f} kB")
        if folder is not None:
            (folder / f"{name}.png").write_bytes(content)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path, help="folder for the pictures")
    main(parser.parse_args().write)
