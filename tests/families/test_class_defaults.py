"""Token IDs that a configuration file leaves to its class are written moved, as a live edit moves them, or refused."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from covering import cases
from releases import skip_without
from tiny_models import build, quiet

import embedlayer as el

REVERSED = [*range(130, -1, -1)]


def saved(folder: Path, model_type: str, kind: str = "causal", without: tuple[str, ...] = ()) -> Any:
    """A model whose files do not have some entries, which are defaults of the class of its configuration."""
    with quiet():
        config, model = build(model_type, kind)
        model.save_pretrained(folder)
    path = folder / "config.json"
    content = json.loads(path.read_text())
    owner = content.get("text_config", content)
    for key in without:
        owner.pop(key, None)
    path.write_text(json.dumps(content))
    (folder / "generation_config.json").unlink(missing_ok=True)
    read = config.from_dict(content).get_text_config()
    assert all(getattr(read, key) == getattr(config.get_text_config(), key) for key in without)
    return model


@pytest.fixture
def no_transformers(monkeypatch) -> None:
    """As where transformers is not installed."""
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "transformers" else found(name, *a)
    )


@cases(
    "saved_type, is_installed",
    [
        ("llama", "causal", ("bos_token_id", "eos_token_id", "pad_token_id")),
        ("bert", "masked", ("pad_token_id",)),
        ("gemma3", "image-text", ("bos_token_id", "eos_token_id", "pad_token_id")),
    ],
    [True, False],
)
def test_an_id_of_the_class_is_written_and_moved(saved_type, is_installed, tmp_path, request, unchecked) -> None:
    model_type, kind, keys = saved_type
    if not is_installed:
        request.getfixturevalue("no_transformers")
    model = saved(tmp_path / "old", model_type, kind, keys)
    el.vocab.edit_vocabulary(tmp_path / "old", order=REVERSED, out=tmp_path / "new")
    el.vocab.edit_vocabulary(el.patch(model), order=REVERSED)
    content = json.loads((tmp_path / "new" / "config.json").read_text())
    live, part = (each.get("text_config", each) for each in (model.config.to_dict(), content))
    assert {key: part.get(key) for key in keys} == {key: live[key] for key in keys}


@pytest.mark.parametrize("is_installed", [True, False])
def test_a_token_that_the_class_names_cannot_be_removed(is_installed, tmp_path, request, unchecked) -> None:
    if not is_installed:
        request.getfixturevalue("no_transformers")
    saved(tmp_path / "old", "llama", without=("eos_token_id",))
    with pytest.raises(el.VocabularyError, match="names it as eos_token_id.*\n.*default of its class, 2: state it"):
        el.vocab.remove_tokens(tmp_path / "old", [2], out=tmp_path / "new")
    path = tmp_path / "old" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": 5}))  # what the error says
    el.vocab.remove_tokens(tmp_path / "old", [2], out=tmp_path / "new")
    assert json.loads((tmp_path / "new" / "config.json").read_text())["eos_token_id"] == 4


def test_the_number_of_tokens_of_the_class_is_written(tmp_path, unchecked) -> None:
    skip_without("transformers:EsmcConfig")
    from transformers import EsmcConfig, EsmcForMaskedLM

    with quiet():
        model = EsmcForMaskedLM(
            EsmcConfig(
                hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2
            )
        )
        model.save_pretrained(tmp_path / "old")
    path = tmp_path / "old" / "config.json"
    content = json.loads(path.read_text())
    assert content.pop("vocab_size") == 64
    path.write_text(json.dumps(content))
    el.vocab.add_tokens(tmp_path / "old", 3, out=tmp_path / "new")
    assert json.loads((tmp_path / "new" / "config.json").read_text())["vocab_size"] == 67
    EsmcForMaskedLM.from_pretrained(tmp_path / "new")


def test_roles_of_an_unknown_class_are_named_in_a_warning(tmp_path, unchecked) -> None:
    saved(tmp_path / "old", "gemma2", without=("eos_token_id",))
    path = tmp_path / "old" / "config.json"
    content = json.loads(path.read_text()) | {"model_type": "gemma2-like", "bos_token_id": 1, "pad_token_id": None}
    path.write_text(json.dumps({key: value for key, value in content.items() if key != "architectures"}))
    texts = ("only its table", "does not state eos_token_id, and the defaults")
    with pytest.warns(el.EmbedLayerWarning, match=texts[0]), pytest.warns(el.EmbedLayerWarning, match=texts[1]):
        el.vocab.edit_vocabulary(tmp_path / "old", order=REVERSED, out=tmp_path / "new")
