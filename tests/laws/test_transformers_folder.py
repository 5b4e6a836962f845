"""A checkpoint whose vocabulary was edited, opened by transformers: our IDs, and special IDs by what they are for."""

import json
import shutil
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from covering import some
from releases import skip_before
from tiny_models import quiet
from tokenizer_kinds import BUILDERS, ENGLISH, LANGUAGES, tokenizer_of
from tokenizers import AddedToken, Tokenizer

import embedlayer as el
from embedlayer.vocab.special_tokens import class_settings

CODE = "def f(x):\n    return x**2  # code\n\n"
TEXTS = (
    *LANGUAGES,
    "我喜欢狗，也喜欢猫。",
    CODE,
    "Two  spaces, a\ttab\nand a line.",
    " leading",
    "naïve café (don't!) 3.14 ",
)
SIZES = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
FILES = {
    "gpt2": {"gpt2-encoder.json": "vocab.json", "gpt2-vocab.bpe": "merges.txt"},
    "bert": {"bert-base-cased-vocab.txt": "vocab.txt"},
    "llama2": {"llama2-tokenizer.model": "tokenizer.model"},
    "phi-3": {"phi-3-mini.tokenizer.json": "tokenizer.json"},
    "t5": {"t5-small.tokenizer.json": "tokenizer.json"},
}
"""Files of real tokenizers, and their names in a folder."""

EDITED = [("bert", "trim"), ("bert", "add and remove")]
"""Edits of real tokenizers that run always; those of every kind of tokenizer, small, follow below."""
STATED: dict[str, dict[str, Any]] = {
    "gpt2": {"tokenizer_class": "GPT2Tokenizer", "bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"},
    "bert": {"tokenizer_class": "BertTokenizer", "do_lower_case": False, "pad_token": "[PAD]", "unk_token": "[UNK]"}
    | {"cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"},
    "llama2": {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
    "phi-3": {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "<|endoftext|>"}
    | {"pad_token": "<|endoftext|>", "unk_token": "<unk>", "chat_template": "<|user|>{{ messages }}<|end|>"},
    "t5": {"tokenizer_class": "T5Tokenizer", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"},
}
ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def models() -> dict:
    import transformers as hf

    t5 = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2, "decoder_start_token_id": 0}
    gpt2 = {"vocab_size": 50257, "n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 16}
    phi = {"bos_token_id": 1, "eos_token_id": [32000, 32007], "pad_token_id": 32000}
    return {
        "gpt2": lambda: hf.GPT2LMHeadModel(hf.GPT2Config(**gpt2)),
        "bert": lambda: hf.BertForMaskedLM(hf.BertConfig(vocab_size=28996, max_position_embeddings=16, **SIZES)),
        "llama2": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(vocab_size=32000, **SIZES)),
        "phi-3": lambda: hf.Phi3ForCausalLM(hf.Phi3Config(vocab_size=32064, **phi, **SIZES)),
        "t5": lambda: hf.T5ForConditionalGeneration(hf.T5Config(vocab_size=32128, **t5)),
    }


def tokenizer_files(name: str, folder: Path, shared_data: Path) -> Path:
    """Write a real tokenizer's files and its configuration to a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for file, own in FILES[name].items():
        shutil.copyfile(shared_data / "tokenizers" / file, folder / own)
    (folder / "tokenizer_config.json").write_text(json.dumps(STATED[name]))
    specials = {role: token for role, token in STATED[name].items() if role in ROLES}
    (folder / "special_tokens_map.json").write_text(json.dumps(specials))
    return folder


class Folders(dict[str, Path]):
    """A checkpoint of each family with the files of its real tokenizer, written when it is first asked for."""

    def __init__(self, parent: Path, shared_data: Path) -> None:
        super().__init__()
        self.parent, self.shared_data = parent, shared_data

    def __missing__(self, name: str) -> Path:
        folder = self[name] = self.parent / name
        with quiet():
            models()[name]().save_pretrained(folder)
        return tokenizer_files(name, folder, self.shared_data)


@pytest.fixture(scope="module")
def folders(shared_data, tmp_path_factory) -> Folders:
    """Not to be written to."""
    pytest.importorskip("sentencepiece")
    return Folders(tmp_path_factory.mktemp("checkpoints"), shared_data)


def assert_ours(folder: Path, tokenizer) -> object:
    """transformers gives the IDs of `tokenizer`, with and without special tokens."""
    from transformers import AutoTokenizer

    with quiet():
        theirs = AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        bare = theirs(text, add_special_tokens=False)["input_ids"]
        assert bare == tokenizer.encode(text, add_special_tokens=False).ids, text
        if tokenizer.post_processor is not None:
            assert theirs(text)["input_ids"] == tokenizer.encode(text).ids, text
    return theirs


@pytest.mark.parametrize(("name", "edit"), some(EDITED, product(FILES, ("add and remove", "trim"))))
def test_after_an_edit_transformers_gives_our_ids(folders, name, edit, tmp_path) -> None:
    from transformers import AutoConfig, AutoTokenizer

    if edit == "trim":
        receipt = el.vocab.trim_vocabulary(folders[name], list(TEXTS), out=tmp_path / "new")
    else:
        gone = ["dogs" if name == "bert" else " mountain"]
        new = ["zyzzyva"] if name == "bert" else [" zyzzyva"]
        receipt = el.vocab.edit_vocabulary(
            folders[name], add=new, remove=gone, special=["<|tool|>"], out=tmp_path / "new"
        )
    theirs = assert_ours(tmp_path / "new", receipt.tokenizer)
    assert theirs.padding_side == ("left" if name == "llama2" else "right")  # as the class of the old tokenizer
    assert ("token_type_ids" in theirs.model_input_names) == (name == "bert")
    roles = AutoTokenizer.from_pretrained(folders[name]).special_tokens_map
    for role in ROLES:
        token = roles.get(role)
        assert getattr(theirs, role) == token
        if token is not None:
            assert getattr(theirs, f"{role}_id") == receipt.tokenizer.token_to_id(token)
    with quiet():
        old, new = (AutoConfig.from_pretrained(folder) for folder in (folders[name], tmp_path / "new"))
    for role in ("bos", "eos", "pad"):
        before, after = (getattr(config, f"{role}_token_id", None) for config in (old, new))
        mapped = receipt.new_ids.tolist()
        expected = [mapped[i] for i in before] if isinstance(before, list) else before and mapped[before]
        assert after == expected


PAIRS = [("bert", "bert uncased")]
LONG_PAIRS = [
    ("phi-3", "t5"),
    ("gpt2", "llama2"),
    ("gpt2", "bert"),
    ("llama2", "phi-3"),
    ("t5", "bert"),
    ("bert", "gpt2"),
]


def uncased(folder: Path, shared_data: Path) -> Path:
    """Write a lower-casing tokenizer made from BERT's vocabulary."""
    folder.mkdir()
    lines = (shared_data / "tokenizers" / "bert-base-cased-vocab.txt").read_text().splitlines()
    kept = [line for line in lines if line == line.lower() or line.startswith("[")]
    (folder / "vocab.txt").write_text("\n".join(kept))
    (folder / "tokenizer_config.json").write_text(json.dumps({**STATED["bert"], "do_lower_case": True}))
    return folder


@pytest.mark.parametrize(("old", "new"), some(PAIRS, [*PAIRS, *LONG_PAIRS]))
def test_after_a_transplant_transformers_gives_the_new_tokenizers_ids(folders, old, new, shared_data, tmp_path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    source = tmp_path / "tokenizer"
    source = uncased(source, shared_data) if new == "bert uncased" else tokenizer_files(new, source, shared_data)
    stated = STATED[new.split()[0]]
    if old in ("bert", "phi-3", "t5") and "pad_token" not in stated:
        with pytest.raises(el.VocabularyError, match="the new tokenizer none"):
            el.vocab.transplant(folders[old], source, out=tmp_path / "out")
        return
    warned = pytest.warns(el.EmbedLayerWarning, match="chat template is left out") if old == "phi-3" else quiet()
    with warned:
        receipt = el.vocab.transplant(folders[old], source, out=tmp_path / "out")
    theirs = assert_ours(tmp_path / "out", el.load_tokenizer(source))
    ids = {}
    for role in ROLES:
        assert getattr(theirs, role) == stated.get(role)
        ids[role] = None if role not in stated else receipt.tokenizer.token_to_id(stated[role])
    begins = ids["bos_token"] if ids["bos_token"] is not None else ids["cls_token"]
    ends = ids["eos_token"] if ids["eos_token"] is not None else ids["sep_token"]
    with quiet():
        config, before = (AutoConfig.from_pretrained(folder) for folder in (tmp_path / "out", folders[old]))
    if getattr(before, "bos_token_id", None) is not None or ids["bos_token"] is not None:
        assert config.bos_token_id == begins
    if before.eos_token_id is not None or ids["eos_token"] is not None:
        eos = config.eos_token_id
        assert (eos[0] if isinstance(eos, list) else eos) == ends
    assert config.pad_token_id == ids["pad_token"]
    if old == "t5":
        assert (config.decoder_start_token_id, before.decoder_start_token_id) == (ids["pad_token"], 0)
    if (tmp_path / "out" / "generation_config.json").exists():
        with quiet():
            generation = GenerationConfig.from_pretrained(tmp_path / "out")
        eos = generation.eos_token_id
        assert eos is None or (eos[0] if isinstance(eos, list) else eos) == ends
        assert generation.bos_token_id in (None, begins)
    stale = {"vocab.json", "merges.txt", "vocab.txt", "tokenizer.model", "added_tokens.json"}
    assert not stale & {file.name for file in (tmp_path / "out").iterdir()}
    if new != "phi-3":
        assert "<|user|>" not in "".join(file.read_text() for file in (tmp_path / "out").glob("*config.json"))
    if old in ("gpt2", "llama2", "phi-3"):
        with quiet():
            model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
        assert model(torch.tensor([theirs("a dog", add_special_tokens=False)["input_ids"]])).logits.isfinite().all()


def small_gpt2(folder: Path) -> Tokenizer:
    """Write a small checkpoint of GPT-2's type with a small tokenizer, and return that tokenizer."""
    from transformers import GPT2Config, GPT2LMHeadModel

    tokenizer = tokenizer_of("byte-level BPE")
    sizes = {"vocab_size": tokenizer.get_vocab_size(), "n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 16}
    end = tokenizer.token_to_id("<|endoftext|>")
    with quiet():
        GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=end, eos_token_id=end)).save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer


def test_a_tokenizer_that_does_not_say_what_ends_a_text_is_taken_by_name_with_a_warning(tmp_path) -> None:
    small_gpt2(tmp_path / "old")
    phi = Tokenizer.from_str(tokenizer_of("SentencePiece BPE with byte fallback").to_str())
    phi.add_special_tokens(["<|endoftext|>", "<|end|>"])
    with pytest.warns(el.EmbedLayerWarning, match="which token ends a text: '</s>' is assumed, and '<|endoftext|>'"):
        el.vocab.transplant(tmp_path / "old", phi, out=tmp_path / "guessed")
    el.vocab.transplant(tmp_path / "old", phi, special={"eos_token": "<|end|>"}, out=tmp_path / "said")
    config = json.loads((tmp_path / "said" / "config.json").read_text())
    assert config["eos_token_id"] == phi.token_to_id("<|end|>")
    with pytest.raises(el.TokenizerError, match="eos_token='nothing'"):
        el.vocab.transplant(tmp_path / "old", phi, special={"eos_token": "nothing"}, out=tmp_path / "wrong")


def test_the_configuration_of_a_live_model_follows_by_role_too(tmp_path) -> None:
    from transformers import AutoModelForCausalLM

    gpt2, llama = small_gpt2(tmp_path), tokenizer_of("SentencePiece BPE with byte fallback")
    with quiet():
        model = el.patch(AutoModelForCausalLM.from_pretrained(tmp_path))
    before = model.config.bos_token_id, model.config.eos_token_id
    receipt = el.vocab.transplant(model, llama, tokenizer=gpt2)
    assert before != (model.config.bos_token_id, model.config.eos_token_id) == (1, 2)
    receipt.undo(model)
    assert before == (model.config.bos_token_id, model.config.eos_token_id)


def test_a_family_whose_folders_are_opened_with_rules_of_its_own_is_warned_of(tmp_path) -> None:
    from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    old = el.train_tokenizer("dogs love cats", vocab_size=260)
    new = tokenizer_of("SentencePiece BPE with byte fallback")
    with quiet():
        config = Qwen2Config(vocab_size=260, num_key_value_heads=2, bos_token_id=0, eos_token_id=0, **SIZES)
        Qwen2ForCausalLM(config).save_pretrained(tmp_path / "old")
    old.save(str(tmp_path / "old" / "tokenizer.json"))
    with pytest.warns(el.EmbedLayerWarning, match=r"own rules.*PreTrainedTokenizerFast\.from_pretrained"):
        el.vocab.transplant(tmp_path / "old", new, out=tmp_path / "new")
    ours = new.encode("dogs love").ids
    with quiet():
        assert PreTrainedTokenizerFast.from_pretrained(tmp_path / "new")("dogs love")["input_ids"] == ours
        theirs = AutoTokenizer.from_pretrained(tmp_path / "new")("dogs love")["input_ids"]
    skip_before("rules of Qwen2's tokenizer")
    assert theirs != ours


TEMPLATES = {"default": "{{ messages }}", "tool_use": "tools: {{ messages }}"}
WITH_NEW = (
    *TEXTS,
    "The  <mask> zebra <tool> dog<tool>  zebras New York.",
    "<|call|> a <|call|>b York  zebra x",
    "ZEBRA",
)
SPACED = [AddedToken(" zebra", rstrip=True, normalized=False), AddedToken("York", lstrip=True, single_word=True)]


def saved_by_transformers(kind: str, folder: Path):
    """Write a small checkpoint with a kind of tokenizer, saved through transformers, and return that tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    ours = Tokenizer.from_str(tokenizer_of(kind).to_str())
    names = ours.get_vocab(with_added_tokens=True)
    ends = next((name for name in ("<|endoftext|>", "</s>", "[UNK]") if name in names), "<unk>")
    old = PreTrainedTokenizerFast(
        tokenizer_object=ours,
        eos_token=ends,
        chat_template=TEMPLATES,
        extra_special_tokens=["<|a|>"],
        padding_side="left",
    )
    old.add_tokens([AddedToken("<mask>", lstrip=True), AddedToken("<tool>", rstrip=True)])
    with quiet():
        config = LlamaConfig(vocab_size=len(old), bos_token_id=None, eos_token_id=old.eos_token_id, **SIZES)
        LlamaForCausalLM(config).save_pretrained(folder)
        old.save_pretrained(folder)
    return old


WITH_RULES = ["byte-level BPE with </w>", "SentencePiece BPE with byte fallback", "Unigram", "WordPiece"]


@pytest.mark.parametrize("kind", some(WITH_RULES, BUILDERS))
def test_every_kind_of_tokenizer_stays_in_step_with_transformers_after_every_edit(kind, tmp_path) -> None:
    """A folder through `AutoTokenizer`, and `transformers_tokenizer` of a live edit: the edited tokenizer's IDs."""
    from transformers import AutoTokenizer

    old = saved_by_transformers(kind, tmp_path / "old")
    edits = {
        "texts": {"add": ["zebra", " zebras", "New York"], "special": ["<|call|>"]},
        "rules": {"add": SPACED, "special": [AddedToken("<|call|>", lstrip=True, rstrip=True)]},
        "removal": {"remove": ["<tool>", "<|a|>"]},
        "trimmed": {"keep": el.vocab.used_tokens(old, (*TEXTS, ENGLISH[:300]))},
    }
    if kind != "bytes" and "BPE" in kind:
        edits["merges"] = {"add": el.vocab.suggest_tokens(old, CODE * 200, count=8).tokens}
    for name, edit in edits.items():
        with quiet():
            receipt = el.vocab.edit_vocabulary(tmp_path / "old", **edit, out=tmp_path / name)
            opened = AutoTokenizer.from_pretrained(tmp_path / name)
        wrapped = el.vocab.transformers_tokenizer(receipt.tokenizer, like=old)
        for text in WITH_NEW:
            ids = receipt.tokenizer.encode(text, add_special_tokens=False).ids
            for theirs in (opened, wrapped):
                assert theirs(text, add_special_tokens=False)["input_ids"] == ids, (name, text)
                assert theirs.decode(ids, clean_up_tokenization_spaces=False) == receipt.tokenizer.decode(
                    ids, skip_special_tokens=False
                )
        for theirs in (opened, wrapped):
            assert len(theirs) == receipt.num_tokens[1]
            assert theirs.chat_template == TEMPLATES
            assert (theirs.eos_token, theirs.bos_token, theirs.padding_side) == (old.eos_token, None, "left")
            assert theirs.extra_special_tokens == ([] if name == "removal" else ["<|a|>"])
    assert old.backend_tokenizer.get_vocab_size() == len(old)  # the passed tokenizer is not changed


def test_settings_of_tokenizer_classes_are_those_of_transformers() -> None:
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    generic = transformers.PreTrainedTokenizerFast
    families = {each.removesuffix("Config") for each in CONFIG_MAPPING_NAMES.values()}  # `dir` lacks some classes
    for name in sorted(
        {*dir(transformers), *(f"{family}Tokenizer{fast}" for family in families for fast in ("", "Fast"))}
    ):
        one = getattr(transformers, name, None) if name.endswith(("Tokenizer", "TokenizerFast")) else None
        if isinstance(one, type) and issubclass(one, generic) and not name.startswith("LayoutLM"):
            found = {"padding_side": generic.padding_side, "model_input_names": generic.model_input_names}
            family = name.removesuffix("Fast").removesuffix("Tokenizer").lower()
            found |= class_settings(name, {"model_type": family})
            assert found == {"padding_side": one.padding_side, "model_input_names": one.model_input_names}, name
    assert "token_type_ids" in class_settings(None, {"type_vocab_size": 2})["model_input_names"]  # bert's own files
