"""Every model type of transformers that can be built: what `load` reads, and the folder after one edit."""

import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from golden_cases.edits import hashed, written
from tiny_models import KINDS, CannotBuild, build, model_types, quiet

import embedlayer as el
from embedlayer import vocab


def cases() -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield the cases of this area: each model type in the first kind that has it."""
    first = {model_type: kind for kind in reversed(KINDS) for model_type in model_types(kind)}
    for model_type, kind in sorted(first.items()):
        yield f"{model_type} ({kind})", partial(read_and_edited, model_type, kind)


def read_and_edited(model_type: str, kind: str) -> object:
    """Return the layer of a saved model, and the files after some tokens were added and others removed."""
    results: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as folder, quiet():
        try:
            model = build(model_type, kind)[1]
        except CannotBuild:
            return "cannot be built"
        source = Path(folder, "model")
        model.save_pretrained(source)
        steps: dict[str, Callable[[], object]] = {
            "layer": lambda: _layer(source),
            "edit": lambda: (
                vocab.edit_vocabulary(
                    source, out=Path(folder, "edited"), add=3, remove=[30, 31], init=vocab.MeanInit()
                ).row_map.sources
            ),
        }
        for name, step in steps.items():
            try:
                results[name] = step()
            except el.EmbedLayerError as error:
                results[name] = error
        return {**results, "files": written(Path(folder, "edited"))}


def _layer(source: Path) -> object:
    """Return hashes of the tensors of a layer, and of what it computes."""
    layer = el.load(source)
    with torch.no_grad():
        vectors = layer(torch.tensor([[5, 7, 11, 5]]))
    return {"repr": repr(layer), "vectors": vectors, "tensors": hashed(layer.state_dict())}
