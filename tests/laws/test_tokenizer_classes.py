"""Every tokenizer class of transformers is read with the IDs of the original, or refused by name with what helps."""

import importlib
import inspect
import json
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from covering import looped, some
from releases import skip_before, skip_without
from tokenizer_folders import TEXTS, write_class
from tokenizers import normalizers

from embedlayer.core.errors import TokenizerError
from embedlayer.families.tokenizers import (
    BPE_CLASSES,
    CLASS_OF_TYPE,
    SENTENCEPIECE_CLASSES,
    WORDPIECE_CLASSES,
)
from embedlayer.tokenization.read import load_tokenizer
from embedlayer.tokenization.steps import TokenTracer

READ = {**BPE_CLASSES, **WORDPIECE_CLASSES, **SENTENCEPIECE_CLASSES}
OF_OLDER_RELEASES = {"MT5": "T5", "RetriBert": "Bert", "Realm": "Bert", "ChatGLM": "GPT2"}
"""Classes that 5.24 lacks -> one with their files."""

LEFT_OUT_BY_TRANSFORMERS: dict[str, tuple[list[str], list[str]]] = {
    "Blenderbot": ([], ["</s>"]),
    "RemBert": (["[CLS]"], ["[SEP]"]),
}
"""Class -> its tokens around a text, which releases before 5 put there and 5.24 does not."""

NOT_READ_BY_TRANSFORMERS = {"XGLM", "Gemma", "Nllb", "Qwen3_5"}
"""Classes of which 5.24 does not read the files, or reads them otherwise: test_stated_tokenizers.py has them."""


@cache
def classes_of_transformers() -> dict[str, Any]:
    """Every tokenizer class of transformers by its name without `Tokenizer` and `Fast`."""
    transformers = pytest.importorskip("transformers")
    base = transformers.PreTrainedTokenizerBase
    found = {}
    for file in sorted(Path(transformers.__file__).parent.glob("models/*/tokenization_*.py")):
        if file.stem in ("tokenization_pop2piano", "tokenization_bert_legacy"):  # music; a class that no file names
            continue
        module = importlib.import_module(f"transformers.models.{file.parent.name}.{file.stem}")
        for name, kind in vars(module).items():
            if inspect.isclass(kind) and issubclass(kind, base) and name in getattr(module, "__all__", ()):
                found[name.removesuffix("Fast").removesuffix("Tokenizer")] = kind
    return found


def original(name: str) -> Any:
    transformers = pytest.importorskip("transformers")
    name = OF_OLDER_RELEASES.get(name, name)
    if name not in classes_of_transformers():
        skip_without(f"transformers:{name}Tokenizer")
    return getattr(transformers, f"{name}Tokenizer", None) or classes_of_transformers()[name]


def files_of(name: str) -> set[str]:
    return set(original(name).vocab_files_names.values()) - {"tokenizer.json", "tokenizer_config.json"}


def test_a_class_that_is_not_read_is_refused_by_name_and_what_helps_works(tmp_path: Path) -> None:
    transformers, converted = pytest.importorskip("transformers"), 0
    for name in sorted({*classes_of_transformers()} - {*READ}):
        folder = tmp_path / name
        folder.mkdir()
        write_class(folder, name, files_of(name))
        with pytest.raises(TokenizerError, match=f"{name}Tokenizer, which ") as refused:
            load_tokenizer(folder)
        if "AutoTokenizer" not in str(refused.value):
            assert "tokenizer.json of the model" in str(refused.value)
            continue
        assert "save_pretrained" in str(refused.value)
        theirs = transformers.AutoTokenizer.from_pretrained(str(folder))
        theirs.save_pretrained(str(folder))
        ours, converted = load_tokenizer(folder), converted + 1
        for text in TEXTS:
            assert ours.encode(text).ids == theirs.backend_tokenizer.encode(text).ids, (name, text)
        assert len(ours.get_vocab()) > 20
    assert converted


def test_a_model_type_has_the_class_that_it_has_in_transformers() -> None:
    skip_before("tokenizer classes of model types")
    from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES

    without_class = {None, "TokenizersBackend", "MistralCommonBackend", "RagTokenizer"}
    named = {kind: name for kind, name in TOKENIZER_MAPPING_NAMES.items() if name not in without_class}
    theirs = {kind: str(name).removesuffix("Fast").removesuffix("Tokenizer") for kind, name in named.items()}
    assert set(theirs) - set(CLASS_OF_TYPE) == ONLY_IN_TOKENIZER_JSON
    for kind in set(theirs) & set(CLASS_OF_TYPE):
        ours = CLASS_OF_TYPE[kind]
        assert ours == theirs[kind] or READ[ours] == READ[theirs[kind]] or kind in ("opt", "mt5"), kind


def ids_of(theirs: Any, *, specials: bool) -> Callable[[str], list[int]]:
    if hasattr(theirs, "backend_tokenizer"):
        return lambda text: theirs.backend_tokenizer.encode(text, add_special_tokens=specials).ids
    return lambda text: theirs.encode(text, add_special_tokens=specials)


def decoded(theirs: Any, ids: list[int]) -> str:
    text: str = getattr(theirs, "backend_tokenizer", theirs).decode(ids, skip_special_tokens=True)
    return text


def subwords(processor: Any, text: str, *, splits_commas: bool) -> Iterator[str]:
    """Subwords of SentencePiece, each of which `splits_commas` splits as ALBERT's original code does."""
    for subword in processor.encode(text, out_type=str):
        if splits_commas and len(subword) > 1 and subword[-1] == "," and subword[-2].isdigit():
            again = processor.encode(subword[:-1].replace("▁", ""), out_type=str)
            if subword[0] != "▁":
                again = [part for part in (again[0].removeprefix("▁"), *again[1:]) if part]
            yield from (*again, ",")
        else:
            yield subword


ONLY_IN_TOKENIZER_JSON = {
    *("blip-2", "dbrx", "emu3", "falcon_mamba", "hyperclovax_vision_v2", "instructblip", "instructblipvideo"),
    *("jais2", "mpt", "starcoder2"),
}
"""Model types with a class of GPT-2's kind whose models split text otherwise, or differ from one another."""

SETTINGS: dict[str, dict[str, object]] = {
    "MT5": {"extra_ids": 0},
    "MBart50": {"src_lang": "de_DE"},
    "M2M100": {"src_lang": "de"},
    "Llama": {"add_bos_token": True},
}


NAMES = sorted(set(READ) - NOT_READ_BY_TRANSFORMERS - {"OPT"})
DISTINCT = [name for place, name in enumerate(NAMES) if READ[name] not in [READ[other] for other in NAMES[:place]]]
"""One class of each set of rules."""


@looped("name", some(DISTINCT, NAMES))
def test_a_class_has_the_ids_of_the_original(tmp_path: Path, name: str) -> None:
    if name == "RemBert":
        skip_before("accents of RemBERT's tokenizer")
    write_class(tmp_path, name, files_of(name), SETTINGS.get(name))
    ours, theirs = load_tokenizer(tmp_path), original(name).from_pretrained(tmp_path)
    texts, encode = list(TEXTS), ids_of(theirs, specials=False)
    if name in SENTENCEPIECE_CLASSES and name != "CodeLlama" and hasattr(theirs, "backend_tokenizer"):
        sentencepiece = pytest.importorskip("sentencepiece")
        rules = SENTENCEPIECE_CLASSES[name]
        processor = sentencepiece.SentencePieceProcessor(str(next(tmp_path.glob("*.model"))))
        texts = [text for text in texts if "<" not in text]
        before = steps_before_sentencepiece(theirs) if rules.steps else normalizers.Sequence([])
        splits = rules.steps is not None and rules.steps.splits_commas

        def encode(text: str) -> list[int]:
            pieces = list(subwords(processor, before.normalize_str(text), splits_commas=splits))
            ids: list[int] = theirs.convert_tokens_to_ids(pieces)
            return ids

    size = theirs.vocab_size
    starts, ends = ends_of(theirs, encode)
    if name in LEFT_OUT_BY_TRANSFORMERS:
        starts, ends = ([ours.get_vocab()[token] for token in side] for side in LEFT_OUT_BY_TRANSFORMERS[name])
    tracer = TokenTracer(ours)
    for text in texts:
        ids = encode(text)
        assert ours.encode(text, add_special_tokens=False).ids == ids, text
        assert ours.encode(text).ids == [*starts, *ids, *ends], text
        assert ours.decode(ids) == decoded(theirs, ids), text
        assert [*tracer.trace(text).ids] == ids, text
    specials = {token: token_id for token, token_id in theirs.added_tokens_encoder.items() if token_id < size}
    assert {token: ours.token_to_id(token) for token in specials} == specials


def steps_before_sentencepiece(theirs: Any) -> normalizers.Normalizer:
    """What the original class changes in a text before the model's own map and spaces."""
    kept = []
    for step in theirs.backend_tokenizer.normalizer:
        if isinstance(step, normalizers.Precompiled):
            break
        kept.append(step)
    return normalizers.Sequence(kept)


def ends_of(theirs: Any, encode: Callable[[str], list[int]]) -> tuple[list[int], list[int]]:
    """The IDs that the original class puts in front of a text, and behind it."""
    inner, around = (ids_of(theirs, specials=each)("dog") for each in (False, True))
    start = next(place for place in range(len(around)) if around[place : place + len(inner)] == inner)
    return around[:start], around[start + len(inner) :]


@pytest.mark.parametrize(
    "settings",
    [{"legacy": False}, {"legacy": False, "add_prefix_space": False}, {"legacy": True, "add_prefix_space": False}],
)
def test_settings_decide_where_llama_puts_a_space(tmp_path: Path, settings: dict[str, object]) -> None:
    write_class(tmp_path, "Llama", files_of("Llama"), {"add_bos_token": True, **settings})
    ours, theirs = load_tokenizer(tmp_path), original("Llama").from_pretrained(tmp_path)
    for text in TEXTS:
        assert ours.encode(text).ids == theirs.backend_tokenizer.encode(text).ids, text
        assert ours.decode(ours.encode(text).ids) == decoded(theirs, ours.encode(text).ids), text


def test_t5_has_the_same_ids_whatever_legacy_is(tmp_path: Path) -> None:
    for legacy in (False, True):
        write_class(tmp_path, "T5", files_of("T5"), {"legacy": legacy})
        ours, theirs = load_tokenizer(tmp_path), original("T5").from_pretrained(tmp_path)
        for text in ("a</s>b c", "one two"):
            assert ours.encode(text).ids == theirs.backend_tokenizer.encode(text).ids, text


NOT_READ: list[tuple[str, dict[str, object]]] = [
    ("XLMRoberta", {"add_prefix_space": False}),
    ("T5", {"add_prefix_space": False}),
    ("DebertaV2", {"split_by_punct": True}),
    ("Albert", {"remove_space": False}),
    ("XLNet", {"keep_accents": True}),
    ("PLBart", {"language_codes": "multi"}),
    ("M2M100", {"language_codes": "wmt21"}),
    ("M2M100", {"src_lang": "xx"}),
    ("Speech2Text", {"lang_codes": "mustc"}),
]


@looped("name, settings", NOT_READ)
def test_a_setting_that_is_not_read_is_refused(tmp_path: Path, name: str, settings: dict[str, object]) -> None:
    write_class(tmp_path, name, files_of(name), settings)
    with pytest.raises(TokenizerError, match="is read with|has no language"):
        load_tokenizer(tmp_path)


def test_settings_of_text_steps_are_read(tmp_path: Path) -> None:
    skip_before("settings of ALBERT's tokenizer")
    for settings in (dict[str, object](do_lower_case=False), dict[str, object](keep_accents=True)):
        write_class(tmp_path, "Albert", files_of("Albert"), settings)
        ours, theirs = load_tokenizer(tmp_path), original("Albert").from_pretrained(tmp_path)
        for text in ("The Dogs", "cet \u00c9t\u00e9 l\u00e0"):
            assert ours.encode(text).ids == theirs.backend_tokenizer.encode(text).ids, (settings, text)


def token(text: str, **rules: bool) -> dict[str, object]:
    default = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
    return {"content": text, **default, **rules}


FORMS: dict[str, Callable[[int], dict[str, dict[str, Any]]]] = {
    "roles with rules": lambda size: {
        "tokenizer_config": {"mask_token": {"__type": "AddedToken", **token("<new>", lstrip=True)}},
        "added_tokens": {"<new>": size},
    },
    "roles as texts": lambda size: {"special_tokens_map": {"pad_token": "<new>", "bos_token": "<extra>"}},
    "map of special tokens": lambda size: {
        "special_tokens_map": {"mask_token": token("<extra>", lstrip=True), "additional_special_tokens": ["<new>"]},
        "added_tokens": {"<new>": size, "<extra>": size + 1},
    },
    "special tokens without IDs": lambda size: {"special_tokens_map": {"additional_special_tokens": ["<new>"]}},
    "added tokens": lambda size: {"added_tokens": {"<extra>": size, "<new>": size + 1}},
    "added tokens by ID": lambda size: {
        "tokenizer_config": {
            "added_tokens_decoder": {
                str(size): {**token("<new>", lstrip=True, rstrip=True), "special": False},
                str(size + 1): {**token("<extra>", single_word=True), "special": True},
            },
            "additional_special_tokens": ["<extra>"],
        },
        "added_tokens": {"<other>": size},
        "special_tokens_map": {"additional_special_tokens": ["<other>"]},
    },
    "tokenizer.json": lambda size: {},
}
FORM_CLASSES = ("GPT2", "Roberta", "CLIP", "Bert", "MPNet", "T5", "XLMRoberta", "Llama", "PLBart")
FORM_TEXTS = ("a <new> b<new>c <extra>d <extra>", "<new>", "The dogs  love <other> them <extra>\n<new> <new>x")


@looped("name, form", FORM_CLASSES, FORMS)
def test_tokens_that_files_state_have_the_ids_of_the_original(tmp_path: Path, name: str, form: str) -> None:
    settings: dict[str, object] = {"legacy": False, "add_bos_token": True} if name == "Llama" else {}
    write_class(tmp_path, name, files_of(name), settings)
    size = len(original(name).from_pretrained(tmp_path))
    beside = FORMS[form](size)
    for file, content in beside.items():
        path = tmp_path / f"{file}.json"
        path.write_text(json.dumps({**(json.loads(path.read_text()) if path.exists() else {}), **content}))
    if name in SENTENCEPIECE_CLASSES and (
        "without IDs" in form or (SENTENCEPIECE_CLASSES[name].first and "as" in form)
    ):
        with pytest.raises(TokenizerError, match="special token '<.*>' without an ID"):
            load_tokenizer(tmp_path)
        (tmp_path / "added_tokens.json").write_text(json.dumps({"<new>": size, "<extra>": size + 1}))
    theirs = original(name).from_pretrained(tmp_path)
    if form == "tokenizer.json" and hasattr(theirs, "backend_tokenizer"):
        theirs.save_pretrained(tmp_path)
    ours, encode = load_tokenizer(tmp_path), ids_of(theirs, specials=True)
    if name == "XLMRoberta" and ("role" in form or "map" in form):  # 5.24 puts the names of roles in place of its own
        assert ours.token_to_id("<new>") == size
        return
    for text in FORM_TEXTS:
        assert ours.encode(text).ids == encode(text), text
    assert ours.token_to_id("<new>") == theirs.added_tokens_encoder.get("<new>")


@looped("name", sorted(name for name, rules in {**BPE_CLASSES, **WORDPIECE_CLASSES}.items() if rules.lstrip))
def test_the_mask_takes_the_space_before_it(tmp_path: Path, name: str) -> None:
    """As `AddedToken(mask_token, lstrip=True)` of these classes in release 4; 5.24 has it in some of them alone."""
    write_class(tmp_path, name, files_of(name))
    ours = load_tokenizer(tmp_path)
    mask, alone = READ[name].roles["mask_token"], ours.encode("dogs", add_special_tokens=False).ids
    for text in (f"dogs {mask}", f"dogs   {mask}"):
        assert ours.encode(text, add_special_tokens=False).ids == [*alone, ours.token_to_id(mask)]
