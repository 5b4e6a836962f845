"""Tensors of a checkpoint with a row for each token, by its class of transformers: for families without a record.

The class is built on the meta device and patched, so the tensors are those that an edit of the live model moves.
"""

from dataclasses import replace
from typing import Any

from embedlayer.checkpoints.patching import patch
from embedlayer.checkpoints.reader import Checkpoint
from embedlayer.checkpoints.refusals import quantised_parts
from embedlayer.core.errors import EmbedLayerError, transformers_errors
from embedlayer.families.vocabulary_tensors import built_on_meta, class_named_in, named_tensors
from embedlayer.vocab.map import RowTensor
from embedlayer.vocab.targets.live import row_tensors
from embedlayer.vocab.targets.module_parts import vocabulary_modules


def rows_of_class(checkpoint: Checkpoint) -> tuple[dict[str, RowTensor], dict[str, str]] | None:
    """Return the tensors with a row for each token, as the class that `config.json` names has them."""
    try:
        class_and_config = class_named_in(checkpoint.config)
        if class_and_config is None:
            return None
        model = built_on_meta(*class_and_config)
        own_names: dict[int, list[str]] = {}
        for name, tensor in named_tensors(model):
            own_names.setdefault(id(tensor), []).append(name)
        file_names = _stored_names(model)
        modules = vocabulary_modules(patch(model))
        ends = row_tensors(model, modules)[0]
    except EmbedLayerError:
        return None
    present = {
        name: [each for each in names if each in checkpoint.names or quantised_parts(checkpoint, (each,))]
        for name, names in file_names.items()
    }
    tensors: dict[str, RowTensor] = {}
    aliases: dict[str, str] = {}
    for rows in ends.values():
        names = [each for own in own_names[id(rows.tensor)] for each in present.get(own, ())]
        names = [each for each in names if each in checkpoint.names or checkpoint.stored(each) is not None]
        if not names or not all(
            checkpoint.matrix_info(name).shape == tuple(rows.tensor.shape) and checkpoint.is_same(name, names[0])
            for name in names
        ):
            return None
        is_stored = checkpoint.stored(names[0]) is not None
        tensors[names[0]] = (
            RowTensor.of_stored(checkpoint.read_stored(names[0]), rows.end)
            if is_stored
            else replace(rows, tensor=checkpoint.read(names[0]))
        )
        aliases |= dict.fromkeys(names, names[0])
    is_complete = all(
        any(present.get(own) for own in names) for names in own_names.values() if {*names} & file_names.keys()
    )
    known = {each for names in file_names.values() for each in names}
    known |= {part for name in aliases if checkpoint.stored(name) for part in checkpoint.module_tensors(name).values()}
    others = [name for name in checkpoint.names if modules.vocab_size in checkpoint.info(name).shape]
    return (tensors, aliases) if is_complete and known.issuperset(others) else None


def _stored_names(model: Any) -> dict[str, list[str]]:
    """Return the names that transformers writes for each tensor of a model, by the name of the tensor in it."""
    state = model.state_dict()
    with transformers_errors(f"name the tensors that {type(model).__name__} writes"):
        from transformers.core_model_loading import revert_weight_conversion

        written, as_they_are = revert_weight_conversion(model, state), dict[int, list[str]]()
        for name, tensor in written.items():
            as_they_are.setdefault(id(tensor), []).append(name)
        # What is split, or joined with others, is another tensor in a file: it is converted alone to see its names.
        return {
            name: as_they_are.get(id(tensor)) or [*revert_weight_conversion(model, {name: tensor})]
            for name, tensor in state.items()
        }
