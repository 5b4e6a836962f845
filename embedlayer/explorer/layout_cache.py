"""Store computed layouts in the user's cache folder, so that a table's map is computed once.

The folder is `$EMBEDLAYER_CACHE`, else `$XDG_CACHE_HOME/embedlayer`, else `~/.cache/embedlayer`. A file is named after
the rows that it was computed from. A damaged file is computed again; a folder that cannot be written costs one line in
the log.
"""

import logging
import os
from contextlib import suppress
from pathlib import Path

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from embedlayer.analysis.layout import NeighborLayout
from embedlayer.core.errors import EmbedLayerError
from embedlayer.io.files import create_folder
from embedlayer.io.safetensors_files import load_tensors, save_tensors
from embedlayer.vocab.map import row_fingerprint

VERSION = "1"  # changes when the same rows get other coordinates

MOST_FILES = 64

log = logging.getLogger("embedlayer")


def cache_folder() -> Path:
    """Return the folder of the cache, which may not exist yet."""
    if chosen := os.environ.get("EMBEDLAYER_CACHE"):
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "embedlayer"


def layout_path(rows: Float[Tensor, "V D"], keep: Bool[Tensor, " V"]) -> Path:
    """Return the file that stores the layout of some rows of a table, by a digest of the rows and of `keep`."""
    return cache_folder() / "layouts" / f"{VERSION}-{row_fingerprint(rows)}-{row_fingerprint(keep)}.safetensors"


def load_layout(path: Path, size: int) -> NeighborLayout | None:
    """Read a layout; return `None` if there is no file, or it is damaged or not a layout of `size` rows.

    A file that is damaged or of another size is named in the log.
    """
    if not path.is_file():
        return None
    with suppress(EmbedLayerError, KeyError, ValueError):
        tensors, metadata = load_tensors(path)
        places = tensors["places"]
        if places.shape == (size, 2) and places.dtype == torch.float32:
            return NeighborLayout(places, float(metadata["recall"]))
    log.warning("The stored layout %s cannot be read; it is computed again.", path)
    return None


def store_layout(path: Path, layout: NeighborLayout) -> None:
    """Write a layout atomically, and remove the oldest files above `MOST_FILES`; a failure is logged, not raised."""
    try:
        create_folder(path.parent)
        save_tensors(path, {"places": layout.places.float().contiguous()}, {"recall": repr(layout.recall)})
        files = sorted(path.parent.glob("*.safetensors"), key=lambda file: file.stat().st_mtime)
        for file in files[:-MOST_FILES]:
            file.unlink(missing_ok=True)
    except (EmbedLayerError, OSError) as error:
        log.warning("The layout is not stored: %s", error)
