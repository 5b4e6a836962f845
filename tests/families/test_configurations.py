"""Token IDs in configurations: every form moves, in a live model, its folder and back; unknown and read ones refuse."""

import copy
import json
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from tiny_models import build, quiet

import embedlayer as el
from embedlayer.families import configurations
from embedlayer.tokenization import save_tokenizer

FORMS: dict[str, tuple[Any, Any]] = {
    "eos_token_id": ([2, 7], [7, 2]),
    "suppress_tokens": ([3, 9], [6]),
    "bad_words_ids": ([[4], [5, 9]], [[5]]),
    "force_words_ids": ([[[6], [7, 8]], [3]], [[[3], [2, 1]], [6]]),
    "forced_decoder_ids": ([[1, 12], [2, None], [3, 13]], [[1, 11], [2, None], [3, 12]]),
    "sequence_bias": ([[[14], -1.0], [[15, 9], 2.0]], [[[13], -1.0]]),
    "lang_to_id": ({"<|de|>": 16, "<|en|>": 9}, {"<|de|>": 15}),
    "task_to_id": ({"transcribe": 17}, {"transcribe": 16}),
    "id_to_text": ({"18": "a", "9": "b"}, {"17": "a"}),
    "alignment_heads": ([[1, 2], [3, 4]], [[1, 2], [3, 4]]),
    "num_assistant_tokens": (20, 20),
}
"""Entry of a generation configuration -> value before and after an edit that turns 1 .. 8 round, and removes 9."""

STATED, MOVED = ({key: values[place] for key, values in FORMS.items()} for place in (0, 1))


def order(size: int) -> list[int]:
    """The tokens 1 to 8 in reverse order, and the others without token 9."""
    return [0, *range(8, 0, -1), *range(10, size)]


@pytest.fixture
def plain() -> Any:
    with quiet():
        return build("gpt2", "causal", {"bos_token_id": 0, "eos_token_id": 2, "n_layer": 1})[1]


@pytest.fixture
def gpt2(plain) -> Any:
    for key, value in STATED.items():
        setattr(plain.generation_config, key, copy.deepcopy(value))
    return plain


def test_every_form_of_an_entry_follows_live_and_in_the_folder_and_comes_back(gpt2, tmp_path, unchecked) -> None:
    before = gpt2.generation_config.to_dict()
    (tmp_path / "old").mkdir()
    gpt2.save_pretrained(tmp_path / "old", save_original_format=False)
    path = tmp_path / "old" / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | STATED))
    el.patch(gpt2)
    receipt = el.vocab.edit_vocabulary(gpt2, keep=order(131), order=order(131))
    assert {key: getattr(gpt2.generation_config, key) for key in MOVED} == MOVED
    el.vocab.edit_vocabulary(tmp_path / "old", keep=order(131), order=order(131), out=tmp_path / "new")
    content = json.loads((tmp_path / "new" / "generation_config.json").read_text())
    assert {key: content[key] for key in MOVED} == MOVED
    receipt.undo(gpt2)
    assert gpt2.generation_config.to_dict() == before


def test_a_bias_by_tuples_keeps_its_form(gpt2, unchecked) -> None:
    gpt2.generation_config.sequence_bias = {(14,): -1.0, (15, 9): 2.0}
    el.patch(gpt2)
    receipt = el.vocab.edit_vocabulary(gpt2, keep=order(131), order=order(131))
    assert gpt2.generation_config.sequence_bias == {(13,): -1.0}
    receipt.undo(gpt2)
    assert gpt2.generation_config.sequence_bias == {(14,): -1.0, (15, 9): 2.0}


def test_a_token_that_is_needed_cannot_be_removed(gpt2, unchecked) -> None:
    el.patch(gpt2)
    for key, value in (("eos_token_id", 30), ("force_words_ids", [[30]]), ("forced_decoder_ids", [[1, 30]])):
        kept = getattr(gpt2.generation_config, key)
        setattr(gpt2.generation_config, key, value)
        with pytest.raises(el.VocabularyError, match=f"generation_config names it as {key}"):
            el.vocab.remove_tokens(gpt2, [30])
        setattr(gpt2.generation_config, key, kept)


def test_an_unknown_key_that_holds_an_id_is_refused_by_name(gpt2, tmp_path, unchecked) -> None:
    gpt2.save_pretrained(tmp_path / "old")
    path = tmp_path / "old" / "config.json"
    content = json.loads(path.read_text())
    el.patch(gpt2)
    values = {"gmask_id": 40, "stop_ids": [40], "call_tokens": [[40]], "word_to_id": {"a": 40}, "end_index": 40}
    for key, value in values.items():
        setattr(gpt2.config, key, value)
        path.write_text(json.dumps(content | {key: value}))
        for target, options in ((gpt2, {}), (tmp_path / "old", {"out": tmp_path / "new"})):
            with pytest.raises(el.VocabularyError, match=f"{key} = .*may be a token ID"):
                el.vocab.add_tokens(target, 1, **options)
        assert gpt2.transformer.wte.vocab_size == 131
        delattr(gpt2.config, key)  # what the error says
    assert el.vocab.remove_tokens(gpt2, [20]).new_ids[40] == 39


def test_large_numbers_counts_and_truth_values_are_no_ids(gpt2, unchecked) -> None:
    for key, value in {"far_id": 131, "num_tokens": 3, "use_tokens": True, "text_id": None, "scale_id": 1.5}.items():
        setattr(gpt2.config, key, value)
    el.vocab.add_tokens(el.patch(gpt2), 1)
    assert gpt2.config.far_id == 131


def test_a_placeholder_without_a_row_is_not_given_to_a_new_token(gpt2, unchecked) -> None:
    gpt2.config.image_token_id = 131
    el.patch(gpt2)
    with pytest.raises(el.VocabularyError, match="which has no row"):
        el.vocab.add_tokens(gpt2, 1)
    gpt2.config.image_token_id = 132  # what the error says
    el.vocab.add_tokens(gpt2, 1)


NESTED: dict[str, Any] = {
    "image_token_id": 5,
    "text_config": {"vocab_size": 131, "eos_token_id": 5},
    "vision_config": {"image_token_id": 5},
    "audio_config": {"vocab_size": 131, "pad_token_id": 5},
    "encoder": {"vocab_size": 9, "pad_token_id": 5},
    "id2label": {"0": "a_id"},
}


def test_a_part_with_another_vocabulary_stays(plain, tmp_path, unchecked) -> None:
    plain.save_pretrained(tmp_path / "old")
    path = tmp_path / "old" / "config.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"text_config": content | NESTED["text_config"]} | {
        key: value for key, value in NESTED.items() if key != "text_config"}))  # fmt: skip
    el.vocab.remove_tokens(tmp_path / "old", [3], out=tmp_path / "new")
    after = json.loads((tmp_path / "new" / "config.json").read_text())
    moved = (after["image_token_id"], after["text_config"]["eos_token_id"], after["vision_config"]["image_token_id"])
    assert moved == (4, 4, 4)
    assert all(after[part] == NESTED[part] for part in ("audio_config", "encoder", "id2label"))


def test_whisper_starts_with_the_language_after_an_edit_of_its_folder(tmp_path, unchecked) -> None:
    from transformers import GenerationConfig, WhisperConfig, WhisperForConditionalGeneration

    sizes: dict[str, Any] = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2}
    sizes |= {"decoder_attention_heads": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "max_source_positions": 8}
    ids = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 1) | {"decoder_start_token_id": 2}
    with quiet():
        model = WhisperForConditionalGeneration(WhisperConfig(vocab_size=60, num_mel_bins=4, **sizes, **ids)).eval()
    languages = {"<|en|>": 3, "<|de|>": 4}
    tasks = {"translate": 5, "transcribe": 6}
    named = {"lang_to_id": languages, "task_to_id": tasks, "no_timestamps_token_id": 50, "is_multilingual": True}
    model.generation_config = GenerationConfig(**named, **ids)
    model.save_pretrained(tmp_path / "old")
    features, options = torch.randn(1, 4, 16), {"language": "de", "task": "transcribe", "max_new_tokens": 6}
    before = model.generate(features, **options)
    sources = [*range(49, -1, -1), *range(50, 60)]  # times keep their places
    el.vocab.edit_vocabulary(tmp_path / "old", order=sources, out=tmp_path / "new")
    edited = WhisperForConditionalGeneration.from_pretrained(tmp_path / "new").eval()
    assert edited.generation_config.lang_to_id == {"<|en|>": 46, "<|de|>": 45}
    assert [sources[token] for token in edited.generate(features, **options)[0].tolist()] == before[0].tolist()
    with pytest.raises(el.VocabularyError, match="above no_timestamps_token_id = 50 as a number"):
        el.vocab.add_tokens(tmp_path / "old", 1, out=tmp_path / "other")


REMOVED: dict[str, Any] = {"remove": [3]}
SWAPPED: dict[str, Any] = {"order": [*range(120), 121, 120, *range(122, 131)]}
ADDED: dict[str, Any] = {"add": 1}


def test_what_reads_the_order_or_the_size_of_ids_stays_or_is_refused(plain, unchecked) -> None:
    """Of a text, CLIP reads the vector of the largest ID, BLT hashes bytes, RoBERTa counts from its padding token."""
    for entries, edit, is_taken in (
        ({"model_type": "clip_text_model", "eos_token_id": 2}, REMOVED, True),
        ({"model_type": "clip_text_model", "eos_token_id": 2}, SWAPPED, False),
        ({"model_type": "clip_text_model", "eos_token_id": 2}, ADDED, False),
        ({"model_type": "clip_text_model", "eos_token_id": 130}, SWAPPED, True),
        ({"model_type": "clip_text_model", "eos_token_id": 4}, REMOVED, True),
        ({"model_type": "clip_text_model", "eos_token_id": 3}, {"remove": [2]}, False),
        ({"model_type": "owlvit_text_model", "eos_token_id": 130}, SWAPPED, False),
        ({"no_timestamps_token_id": 10}, REMOVED, True),
        ({"no_timestamps_token_id": 10}, SWAPPED, False),
        ({"no_timestamps_token_id": 10}, ADDED, False),
        ({"model_type": "blt"}, REMOVED, False),
        ({"model_type": "blt"}, ADDED, True),
        ({"vocab_offset": 129}, SWAPPED, True),
        ({"vocab_offset": 120}, SWAPPED, False),
        ({"model_type": "roberta", "pad_token_id": 4}, REMOVED, False),
        ({"model_type": "lilt", "pad_token_id": 1}, REMOVED, True),
    ):
        model = copy.deepcopy(plain)
        for config in (model.config, model.generation_config):
            config.eos_token_id = config.bos_token_id = None
        for name, value in entries.items():
            setattr(model.config, name, value)
        with nullcontext() if is_taken else pytest.raises(el.VocabularyError):
            el.vocab.edit_vocabulary(el.patch(model), **edit)


@pytest.mark.long
def test_every_key_of_transformers_that_ends_as_ids_do_is_in_a_list() -> None:
    import inspect

    from transformers import GenerationConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    from embedlayer.families.token_ids import COUNTS, ENDINGS, FIRST_IDS, NO_IDS

    names = set(vars(GenerationConfig()))
    for model_type in CONFIG_MAPPING:
        config_class = CONFIG_MAPPING[model_type]
        for each in (config_class, *(part for part in config_class.sub_configs.values() if isinstance(part, type))):
            names |= set(inspect.signature(each.__init__).parameters) | set(getattr(each, "attribute_map", {}).values())
    truth_values = {"attn_uses_sequence_id", "router_ignore_padding_tokens", "use_task_id"}
    truth_values |= {"pred_zero_init_mask_tokens"}
    known = configurations.KNOWN_IDS | NO_IDS | {*FIRST_IDS} | truth_values
    assert {name for name in names if name.endswith(ENDINGS) and not name.startswith(COUNTS)} <= known
    assert not configurations.KNOWN_IDS & NO_IDS


def test_a_bias_that_transformers_wrote_as_text_is_moved_or_refused_by_name(plain, tmp_path, unchecked) -> None:
    """JSON has no tuples as keys, so `generation_config.json` has their texts."""
    plain.save_pretrained(tmp_path / "old")
    path = tmp_path / "old" / "generation_config.json"
    edit: dict[str, Any] = {"order": [0, 2, 1, *range(4, 131)], "remove": [3]}
    path.write_text(json.dumps({"sequence_bias": {"a b": 1.0}}))
    with pytest.raises(el.VocabularyError, match="The key 'a b' of a sequence_bias is no tuple"):
        el.vocab.edit_vocabulary(tmp_path / "old", **edit, out=tmp_path / "new")
    path.write_text(json.dumps({"sequence_bias": {"(1, 2)": -5.0, "(2,)": 1.0, "(3,)": 2.0}}))
    el.vocab.edit_vocabulary(tmp_path / "old", **edit, out=tmp_path / "new")
    moved = json.loads((tmp_path / "new" / "generation_config.json").read_text())
    assert moved["sequence_bias"] == {"(2, 1)": -5.0, "(1,)": 1.0}


def test_a_new_tokenizer_that_does_not_say_what_ends_a_text_is_warned_of(plain, tmp_path, unchecked) -> None:
    plain.generation_config = type(plain.generation_config)(eos_token_id=2)
    plain.save_pretrained(tmp_path / "old")
    save_tokenizer(el.train_tokenizer((), "byte", special_tokens=()), tmp_path / "tokenizer.json")
    names = ["a", "b", *(f"w{number}" for number in range(129))]
    save_tokenizer(el.train_tokenizer(" ".join(names), "word", vocab_size=131), tmp_path / "old" / "tokenizer.json")
    with pytest.warns(el.EmbedLayerWarning, match="config.json names the token that ends a text as eos_token_id"):
        el.vocab.transplant(tmp_path / "old", tmp_path / "tokenizer.json", out=tmp_path / "new")
    assert json.loads((tmp_path / "new" / "config.json").read_text()).get("eos_token_id") is None
