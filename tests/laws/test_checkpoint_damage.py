"""Families x damages: a damaged checkpoint is refused by one error that names file and key, and never read silently.

The models are small ones of transformers (`tools/tiny_models.py`); a family is tested by adding it to `FAMILIES`.
"""

import json
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from covering import some
from safetensors.torch import load_file, save_file

import embedlayer as el

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
from model_families import few_layers
from tiny_models import build, quiet

FAMILIES = {
    "causal": ("gpt2", "opt", "bloom", "llama", "gemma3_text", "gpt_neox", "phi", "cohere2", "granitemoe", "qwen3"),
    "masked": ("bert", "roberta", "electra", "modernbert", "mobilebert", "albert"),
    "seq2seq": ("bart", "t5", "m2m_100", "marian"),
    "image-text": ("mistral3",),
}
"""Kind of `tiny_models` -> model types."""
EVERY_FAMILY = [f"{kind} {name}" for kind, names in FAMILIES.items() for name in names]

FORMS = [f"causal {name}" for name in ("gpt2", "opt", "llama", "phi")] + ["masked bert", "masked mobilebert"]
FORMS += ["seq2seq bart", "seq2seq t5", "seq2seq marian", "image-text mistral3"]
"""Each form of a table, its positions and a head; the others have other names of tensors."""

every_family = pytest.mark.parametrize("sound", some(FORMS, EVERY_FAMILY), indirect=True)
one_of_each_kind = pytest.mark.parametrize(
    "sound", some([f"{kind} {names[0]}" for kind, names in FAMILIES.items()], EVERY_FAMILY), indirect=True
)
"""For laws about files, whatever is in them."""

WIDTHS = ("embedding_size", "hidden_size", "n_embd", "d_model")

Tensors = dict[str, torch.Tensor]


class Sound(NamedTuple):
    """A sound checkpoint.

    Attributes:
        config: Content of `config.json`.
        tensors: All tensors by name.
        read: Names of each tensor that `load` reads, with its equal copies.
        computed: Names of stored tensors without which transformers takes zeros, or computes them.
    """

    config: dict[str, Any]
    tensors: Tensors
    read: tuple[tuple[str, ...], ...]


COMPUTED = ("final_logits_bias", "embed_positions.weight")
"""Tensors of BART's and Marian's families that transformers computes, or takes as zeros, if they are not stored."""


def write(folder: Path, config: dict[str, Any], tensors: Tensors) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def write_shards(folder: Path, config: dict[str, Any], shards: list[Tensors], index: dict[str, str]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    for number, tensors in enumerate(shards):
        save_file(tensors, folder / f"{number}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return folder


def refusal(folder: Path, *named: str) -> str:
    """Return the message of the one error of `load`, which must contain the folder and every string of `named`."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(el.EmbedLayerError) as caught:
            el.load(folder)
    message = str(caught.value)
    assert isinstance(caught.value, el.CheckpointError | el.FileError)
    for part in (str(folder), *named):
        assert part in message, message
    return message


@pytest.fixture(scope="module")
def sound(request, tmp_path_factory) -> Sound:
    kind, model_type = request.param.split()
    folder = tmp_path_factory.mktemp("sound")
    with quiet(), pytest.MonkeyPatch.context() as patch:
        if not request.config.getoption("--all"):
            few_layers(patch)
        build(model_type, kind)[1].save_pretrained(folder)
    layer = el.load(folder)
    assert layer.head is not None
    read = tuple(names for names in layer.tensor_names.values())
    return Sound(json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors"), read)


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration's part for the language model, to be changed in place."""
    inner = config.get("text_config")
    return inner if isinstance(inner, dict) else config


def copy(config: dict[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps(config))


def ends(name: str) -> str:
    """Return the last two parts of a tensor's name, which every record states."""
    return ".".join(name.split(".")[-2:])


@every_family
def test_a_missing_tensor_is_named(sound, tmp_path) -> None:
    for names in sound.read:
        if not names[0].endswith(COMPUTED):
            write(tmp_path, sound.config, {key: tensor for key, tensor in sound.tensors.items() if key not in names})
            message = refusal(tmp_path)
            assert any(ends(name) in message for name in names), message
            assert "Copy the checkpoint again" in message


@every_family
def test_a_tensor_of_another_shape_is_named(sound, tmp_path) -> None:
    for names in sound.read:
        tensor = sound.tensors[names[0]]
        for dim in range(tensor.dim()):
            short = (
                tensor.narrow(dim, 0, tensor.shape[dim] - 1) if tensor.shape[dim] > 1 else torch.cat([tensor] * 2, dim)
            )
            changed = {name: short.clone() for name in names}
            message = refusal(write(tmp_path, sound.config, sound.tensors | changed))
            assert any(ends(name) in message for name in names), message


@every_family
def test_a_tensor_with_another_number_of_dimensions_is_named(sound, tmp_path) -> None:
    """As FSDP flattens it, and `[0]` on the ranks without the shard."""
    for names in sound.read:
        tensor = sound.tensors[names[0]]
        is_matrix = tensor.dim() == 2 and len(tensor) > 1  # a bias may be stored as (V,) or (1, V)
        for other in (torch.zeros(0), *((tensor.flatten(), tensor[None]) if is_matrix else ())):
            changed = {name: other.clone() for name in names}
            message = refusal(write(tmp_path, sound.config, sound.tensors | changed))
            assert any(ends(name) in message for name in names), message
            assert str(list(other.shape)) in message, message


def contradictions(config: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield keys of the configuration, and the configuration with a value of that key that contradicts the tensors."""
    for key in ("vocab_size", next(key for key in WIDTHS if key in text_config(config))):
        for value in (text_config(config)[key] + 1, str(text_config(config)[key]), 0, -1):
            changed = copy(config)
            text_config(changed)[key] = value
            yield key, changed
    changed = copy(config)
    changed["model_type"] = text_config(changed)["model_type"] = "brand_new"
    yield "model_type", changed
    if "rope_parameters" in text_config(config):
        for value in ({"rope_type": "brand_new", "rope_theta": 1e4}, [], "yarn"):
            changed = copy(config)
            text_config(changed)["rope_parameters"] = value
            yield "rope_type" if isinstance(value, dict) else "rope_parameters", changed


@every_family
def test_a_configuration_that_contradicts_the_tensors_is_refused(sound, tmp_path) -> None:
    write(tmp_path, sound.config, sound.tensors)
    for key, config in contradictions(sound.config):
        (tmp_path / "config.json").write_text(json.dumps(config))
        refusal(tmp_path, key)


@every_family
def test_a_wrong_tied_flag_is_refused_or_warned_of(sound, tmp_path) -> None:
    """Without rows of its own, a head that is not tied is missing; rows of its own are not lost in a tied one."""
    layer = el.load(write(tmp_path, sound.config, sound.tensors))
    layer_is_tied = not {"head.weight", "head.output.weight"} & {*layer.tensor_names}
    config = copy(sound.config)
    config["tie_word_embeddings"] = text_config(config)["tie_word_embeddings"] = not layer_is_tied
    (tmp_path / "config.json").write_text(json.dumps(config))
    if not layer_is_tied:
        with pytest.warns(el.EmbedLayerWarning, match="hold other numbers: the head is read as untied"):
            assert not el.load(tmp_path).head.tied
    elif layer.family != "t5":  # tied unless it stores rows of its own, whatever the flag says
        refusal(tmp_path, "is missing", "architectures")


@one_of_each_kind
def test_a_file_that_is_cut_short_is_refused(sound, tmp_path) -> None:
    file = write(tmp_path, sound.config, sound.tensors) / "model.safetensors"
    content = file.read_bytes()
    for size in (len(content) - 1, len(content) // 2, 9, 0):
        file.write_bytes(content[:size])
        refusal(tmp_path, "model.safetensors")


@one_of_each_kind
def test_shards_that_are_missing_cut_short_or_contradict_their_index_are_refused(sound, tmp_path) -> None:
    table = sound.read[0][0]
    shards = [{table: sound.tensors[table]}, {key: value for key, value in sound.tensors.items() if key != table}]
    shards = [{key: value.contiguous() for key, value in shard.items()} for shard in shards]
    index = {name: f"{number}.safetensors" for number, shard in enumerate(shards) for name in shard}
    folder = write_shards(tmp_path / "sound", sound.config, shards, index)
    assert torch.equal(el.load(folder).table.weight, sound.tensors[table])

    (folder / "0.safetensors").write_bytes((folder / "0.safetensors").read_bytes()[:-1])
    refusal(folder, "0.safetensors")
    (folder / "0.safetensors").unlink()
    refusal(folder, "0.safetensors")

    name, tensor = next(iter(shards[1].items()))
    twice = [shards[0] | {name: torch.zeros_like(tensor)}, shards[1]]
    refusal(write_shards(tmp_path / "twice", sound.config, twice, index), name, "0.safetensors", "1.safetensors")
    wrong = write_shards(tmp_path / "wrong", sound.config, shards, index | {table: "1.safetensors"})
    refusal(wrong, table, "1.safetensors")
