"""Edits of the vocabulary of 40 model types, live and in folders, and edits that need a tokenizer."""

import tempfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from golden import files_of
from stored_folders import words
from tiny_models import SAMPLE, VOCAB, build, quiet
from tokenizer_kinds import ENGLISH, tokenizer_of
from torch import nn

import embedlayer as el
from embedlayer import vocab

ORDER = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(5)).tolist()
EDITS: dict[str, Mapping[str, Any]] = {
    "permute": {"order": ORDER},
    "remove": {"remove": [30, 31, 77, 90]},
    "add": {"add": 3, "init": vocab.MeanInit()},
    "all": {"add": 5, "remove": [30, 31], "merge": {40: 41}, "init": vocab.RandomInit(), "pad_to_multiple_of": 8},
    "missing": {"remove": [100_000]},
}
WITH_WORDS: dict[str, Mapping[str, Any]] = {
    "add": {"add": ["new", "t1 t2"], "init": vocab.SubwordMeanInit()},
    "add special": {"special": ["<new>"], "init": vocab.MeanNoiseInit()},
    "copy": {"add": ["new"], "init": vocab.CopyInit("t3")},
    "remove": {"remove": ["t7", "t9"]},
    "unknown": {"remove": ["nothing"]},
}
FAMILIES = [(model_type, kind) for kind, types in SAMPLE.items() for model_type in types]
SOME = [("llama", "causal"), ("gpt2", "causal"), ("bert", "masked"), ("t5", "seq2seq"), ("gemma3_text", "causal")]


def cases() -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield the cases of this area."""
    for model_type, kind in FAMILIES:
        for edit in EDITS:
            yield f"{model_type} ({kind}), {edit}, live", partial(edited_live, model_type, kind, edit)
            yield f"{model_type} ({kind}), {edit}, folder", partial(edited_folder, model_type, kind, edit)
    for model_type, kind in SOME:
        for edit in WITH_WORDS:
            yield f"{model_type}, words, {edit}", partial(edited_with_words, model_type, kind, edit)
        yield f"{model_type}, trim", partial(trimmed, model_type, kind)
        yield f"{model_type}, transplant", partial(transplanted, model_type, kind)
        yield f"{model_type}, rows trained", partial(rows_trained, model_type, kind)
    for kind in ("byte-level BPE", "WordPiece", "SentencePiece BPE with byte fallback"):
        yield f"tokenizer, {kind}", partial(tokenizer_edited, kind)
        yield f"suggestions, {kind}", partial(suggested, kind)


def model_of(model_type: str, kind: str) -> Any:
    """Build a small model of a type."""
    with quiet():
        return build(model_type, kind)[1]


def state(model: nn.Module) -> dict[str, object]:
    """Return hashes of the tensors of a model, and its configuration."""
    config = getattr(model, "config", None)
    return {"tensors": hashed(model.state_dict()), "config": None if config is None else str(config.to_dict())}


def hashed(value: object) -> object:
    """Return a result with the bytes of tensors instead of the tensors, of which only a hash is recorded."""
    if isinstance(value, Mapping):
        return {key: hashed(each) for key, each in value.items()}
    if isinstance(value, torch.Tensor):
        return value.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return value


def written(folder: Path) -> object:
    """Return hashes of the tensors in the safetensors files of a folder, and the start of the others."""
    return hashed(files_of(folder))


def edited_live(model_type: str, kind: str, edit: str) -> object:
    """Return a model after an edit, and the map of the receipt."""
    model = model_of(model_type, kind)
    el.patch(model)
    receipt = vocab.edit_vocabulary(model, **EDITS[edit])
    return {"map": receipt.row_map.sources, **state(model)}


def edited_folder(model_type: str, kind: str, edit: str) -> object:
    """Return the folder of a model after an edit."""
    with tempfile.TemporaryDirectory() as folder:
        model_of(model_type, kind).save_pretrained(Path(folder, "model"))
        receipt = vocab.edit_vocabulary(Path(folder, "model"), out=Path(folder, "edited"), **EDITS[edit])
        return {"map": receipt.row_map.sources, "files": written(Path(folder, "edited"))}


def with_words(model_type: str, kind: str, folder: Path) -> Path:
    """Save a model with a tokenizer of words, and return its folder."""
    model_of(model_type, kind).save_pretrained(folder)
    tokenization_file = folder / "tokenizer.json"
    words(VOCAB).save(str(tokenization_file))
    return folder


def edited_with_words(model_type: str, kind: str, edit: str) -> object:
    """Return the folder of a model with a tokenizer after an edit."""
    with tempfile.TemporaryDirectory() as folder:
        source = with_words(model_type, kind, Path(folder, "model"))
        vocab.edit_vocabulary(source, out=Path(folder, "edited"), **WITH_WORDS[edit])
        return written(Path(folder, "edited"))


def trimmed(model_type: str, kind: str) -> object:
    """Return the folder of a model that keeps the tokens of a text."""
    with tempfile.TemporaryDirectory() as folder:
        source = with_words(model_type, kind, Path(folder, "model"))
        Path(folder, "text.txt").write_text("t1 t2 t3 t50 t99\n" * 3)
        vocab.trim_vocabulary(source, Path(folder, "text.txt"), out=Path(folder, "edited"))
        return written(Path(folder, "edited"))


def transplanted(model_type: str, kind: str) -> object:
    """Return the folder of a model with another tokenizer."""
    with tempfile.TemporaryDirectory() as folder:
        source = with_words(model_type, kind, Path(folder, "model"))
        vocab.transplant(source, tokenizer_of("word"), out=Path(folder, "edited"))
        return written(Path(folder, "edited"))


def rows_trained(model_type: str, kind: str) -> object:
    """Return a model of which some rows were trained and merged, and the adapter of these rows."""
    model = model_of(model_type, kind)
    el.patch(model)
    vocab.train_only_rows(model, [3, 5])
    ids = torch.tensor([[1, 3, 5, 3]])
    model.get_input_embeddings()(ids).square().sum().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter -= 0.1 * parameter.grad
    with tempfile.TemporaryDirectory() as folder:
        vocab.save_adapter(model, folder)
        files = files_of(folder)
    vocab.merge_rows(model)
    return {"files": files, **state(model)}


def tokenizer_edited(kind: str) -> object:
    """Return tokenizers after edits."""
    edits: list[Mapping[str, Any]] = [{"add": ["loveliest", "<new>"]}, {"remove": [40, 41]}, {"special": ["<|s|>"]}]
    results = []
    for edit in edits:
        result = vocab.edit_tokenizer(tokenizer_of(kind), **edit)
        results.append((result.sources, result.tokenizer.to_str(), result.tokenizer.encode(ENGLISH[:300]).ids))
    return results


def suggested(kind: str) -> object:
    """Return suggestions of tokens to add and to remove."""
    tokenizer = tokenizer_of(kind)
    texts = [ENGLISH, "The loveliest loveliness loves lovely dogs. " * 20]
    return [repr(each(tokenizer, texts, count=10)) for each in (vocab.suggest_tokens, vocab.suggest_removals)]
