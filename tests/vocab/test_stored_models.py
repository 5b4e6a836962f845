"""Models whose table and head a library quantised: edited in their folder, and opened by that library itself."""

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from covering import some
from stored_cases import built, gemma_case, mlx_case, weights
from stored_folders import HEAD, TABLE, model_of, words, write_folder
from tiny_models import quiet
from torch import Tensor

import embedlayer as el

Logits = Callable[[Tensor], Tensor]
"""Returns the logits of token IDs, `(1, T)` to `(1, T, V)`."""


def by_transformers(folder: Path, *, is_training: bool = False, **options: Any) -> Logits:
    """Open a folder with transformers, without a tensor that is missing or left over."""
    from transformers import AutoModelForCausalLM

    with quiet(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "You passed `quantization_config`")
        model, facts = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, **options)
    assert not facts["missing_keys"]
    assert not facts["unexpected_keys"]
    assert not facts["mismatched_keys"]

    def logits(ids: Tensor) -> Tensor:
        with torch.no_grad(), warnings.catch_warnings(action="ignore"):
            return model.train(is_training)(ids).logits

    return logits


def by_compressed_tensors(folder: Path) -> Logits:
    from transformers import CompressedTensorsConfig

    return by_transformers(folder, quantization_config=CompressedTensorsConfig(dequantize=True))


def by_bitsandbytes(folder: Path) -> Logits:
    """Open a folder for training: evaluation on CPUs with AVX512 takes 4 bits only of multiples of 32 tokens."""
    return by_transformers(folder, is_training=True)


def by_mlx(folder: Path) -> Logits:
    """Compute the logits of the rows themselves with MLX's layers, as mlx-lm builds them from a configuration."""
    mx, nn = pytest.importorskip("mlx.core"), pytest.importorskip("mlx.nn")
    config = json.loads((folder / "config.json").read_text())
    sizes = (config["vocab_size"], config["hidden_size"])
    layers = {TABLE: nn.Embedding(*sizes)}
    layers |= {} if config["tie_word_embeddings"] else {HEAD: nn.Linear(*sizes[::-1], bias=False)}
    loaded = mx.load(str(folder / "model.safetensors"))
    for name, layer in layers.items():
        layers[name] = layer.to_quantized(**config["quantization"])
        parts = {key.rpartition(".")[2]: value for key, value in loaded.items() if key.startswith(f"{name}.")}
        layers[name].load_weights([*parts.items()], strict=False)
    head = layers[TABLE].as_linear if config["tie_word_embeddings"] else layers[HEAD]

    def logits(ids: Tensor) -> Tensor:
        return torch.from_dlpack(head(layers[TABLE](mx.array(ids.numpy()))).astype(mx.float32)).clone()

    return logits


def compressed(name: str) -> Callable[[Path, bool], None]:
    """Return a function that writes a folder as llm-compressor does, with table and head in a layout."""

    def write(folder: Path, tied: bool) -> None:
        case = built(name)
        scheme = {**case.settings["config_groups"]["group_0"], "targets": ["re:.*embed_tokens", "re:.*lm_head"]}
        settings = {**case.settings, "config_groups": {"group_0": scheme}, "ignore": []}
        settings["quantization_status"] = "compressed"
        write_folder(folder, case, None if tied else case, config={"quantization_config": settings})

    return write


def of_mlx(mode: str, **sizes: int) -> Callable[[Path, bool], None]:
    def write(folder: Path, tied: bool) -> None:
        case = mlx_case(weights(192), "bfloat16", mode, **sizes)
        write_folder(folder, case, None if tied else case)
        mx = pytest.importorskip("mlx.core")
        tensors = mx.load(str(folder / "model.safetensors"))
        mx.save_safetensors(str(folder / "model.safetensors"), tensors, {"format": "mlx"})  # a header of its own kind

    return write


def gemma(folder: Path, tied: bool) -> None:
    table, head = (gemma_case(weights(192), 4, is_head=is_head) for is_head in (False, True))
    head = head.changed(output_activation_scale=torch.tensor(0.0))
    settings = {"quant_method": "gemma", "num_bits": 4, "quantize_embeddings": True}
    settings["modules_to_not_convert"] = ["model.layers"]
    write_folder(folder, table, head, config={"quantization_config": settings})


def saved(folder: Path, settings: Any) -> None:
    """Quantise a model with transformers, its blocks left dense, and save it."""
    from transformers import AutoModelForCausalLM

    with quiet():
        model_of(weights(192), weights(192) + 0.01).save_pretrained(folder / "dense")
        AutoModelForCausalLM.from_pretrained(folder / "dense", quantization_config=settings).save_pretrained(folder)
    for file in (folder / "dense").iterdir():
        file.unlink()
    (folder / "dense").rmdir()


def bitsandbytes(**options: Any) -> Callable[[Path, bool], None]:
    def write(folder: Path, tied: bool) -> None:
        pytest.importorskip("bitsandbytes")
        from transformers import BitsAndBytesConfig

        saved(folder, BitsAndBytesConfig(llm_int8_skip_modules=["model.layers"], **options))

    return write


def torchao(config: str, **options: Any) -> Callable[[Path, bool], None]:
    def write(folder: Path, tied: bool) -> None:
        quantization = pytest.importorskip("torchao.quantization")
        from transformers import TorchAoConfig

        chosen = getattr(quantization, config)(**options)
        settings = {"include_input_output_embeddings": True, "modules_to_not_convert": ["model.layers"]}
        saved(folder, TorchAoConfig(chosen, **settings))

    return write


MODELS: dict[str, tuple[Callable[[Path, bool], None], Callable[[Path], Logits], tuple[bool, ...]]] = {
    **{
        f"compressed-tensors, {name}": (compressed(name), by_compressed_tensors, (True, False))
        for name in (
            "pack-quantized 4 bits, group, asymmetric, bfloat16",
            "pack-quantized 8 bits, channel, symmetric, float32",
            "int-quantized channel, symmetric, bfloat16",
            "float-quantized tensor, bfloat16",
            "nvfp4-pack-quantized",
        )
    },
    "MLX affine": (of_mlx("affine", group_size=64, bits=4), by_mlx, (True, False)),
    "MLX nvfp4": (of_mlx("nvfp4", group_size=16, bits=4), by_mlx, (True, False)),
    "Gemma": (gemma, by_transformers, (False,)),
    "bitsandbytes int8": (bitsandbytes(load_in_8bit=True), by_transformers, (False,)),
    "bitsandbytes nf4": (bitsandbytes(load_in_4bit=True, bnb_4bit_quant_type="nf4"), by_bitsandbytes, (False,)),
    "torchao int8": (torchao("Int8WeightOnlyConfig", version=2), by_transformers, (False,)),
}


def train(layer: el.EmbeddingLayer, ids: list[int]) -> None:
    """Train the rows of some tokens, table and head, for three steps."""
    el.vocab.train_only_rows(layer, ids)
    optimizer = torch.optim.AdamW([each for each in layer.parameters() if each.requires_grad], lr=0.01)
    inputs = torch.tensor([ids[:24]])
    for _ in range(3):
        optimizer.zero_grad()
        layer.head.loss(layer.input(inputs), inputs.roll(-1)).backward()
        optimizer.step()
    el.vocab.merge_rows(layer)


SOME = [
    ("compressed-tensors, pack-quantized 4 bits, group, asymmetric, bfloat16", False),
    ("compressed-tensors, nvfp4-pack-quantized", True),
    ("MLX affine", True),
    *((name, False) for name in ("Gemma", "bitsandbytes int8", "bitsandbytes nf4", "torchao int8")),
]
"""Each library; for compressed-tensors and bitsandbytes two ways to store rows."""


@pytest.mark.parametrize(
    ("name", "tied"), some(SOME, [(name, tied) for name, kind in MODELS.items() for tied in kind[2]])
)
def test_the_library_opens_edited_and_trained_folders_with_the_same_logits_of_kept_tokens(tmp_path, name, tied) -> None:
    write, opened, _ = MODELS[name]
    write(tmp_path / "old", tied)
    size = json.loads((tmp_path / "old" / "config.json").read_text())["vocab_size"]
    words(size).save(str(tmp_path / "old" / "tokenizer.json"))
    added = [f"new{i}" for i in range(200)]
    receipt = el.vocab.edit_vocabulary(tmp_path / "old", add=added, remove=["t7", "t9"], out=tmp_path / "new")
    layer = el.load(tmp_path / "new")
    train(layer, [*receipt.added])
    written = layer.write_into(tmp_path / "new", tmp_path / "trained")
    assert all(name.startswith((TABLE, HEAD)) for name in written.changed)
    ids = torch.tensor([[i for i in range(40) if i not in (7, 9)]])
    before, kept = opened(tmp_path / "old")(ids), receipt.row_map.sources >= 0
    for folder in ("new", "trained"):
        after = opened(tmp_path / folder)(receipt.remap(ids))
        assert after.shape[-1] == size + 198
        assert torch.equal(after[..., kept], before[..., receipt.row_map.sources[kept]])
        assert after[..., ~kept].isfinite().all()
    assert not torch.equal(opened(tmp_path / "new")(receipt.remap(ids)), after)
