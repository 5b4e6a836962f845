"""Rules of the tokenizer classes of transformers, for folders that have the vocabulary and no `tokenizer.json`.

A class is named without `Tokenizer` and `TokenizerFast`. `BPE_CLASSES` has those that read `vocab.json` and
`merges.txt`, `WORDPIECE_CLASSES` those of `vocab.txt`, `SENTENCEPIECE_CLASSES` those of a SentencePiece model.

Reference: models/*/tokenization_*.py and convert_slow_tokenizer.py of transformers.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from embedlayer.families.field_types import Names
from embedlayer.families.gguf import PRE_TOKENIZERS

Roles = Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class BpeRules:
    """Rules of a class whose BPE has a vocabulary and a list of merges."""

    # CLIP's NFC, single spaces and lower case; BERT's with lower case, or without
    normalizer: Literal["", "nfc", "clip", "lower case", "words"] = ""
    patterns: Names = PRE_TOKENIZERS["gpt-2"].patterns  # one after the other; empty: BERT's rules
    drops_rest: bool = False  # whether what no pattern matches is left out (CLIP)
    is_byte_level: bool = True  # whether entries are in GPT-2's alphabet of bytes
    end_of_word: str = ""  # of an entry
    unknown: bool = False  # whether `unk_token` replaces what the vocabulary lacks
    adds_space: bool = False  # before a text, if `add_prefix_space` is not set
    roles: Roles = field(default_factory=dict)  # tokens by role, if no file sets them
    starts: Names = ()  # roles or tokens
    ends: Names = ()
    between: Names | None = None  # two texts; `None` for `ends`, or `starts` without them
    lstrip: Names = ()  # roles whose token takes the spaces before it


_END = "<|endoftext|>"
_GPT2 = BpeRules(roles={"bos_token": _END, "eos_token": _END, "unk_token": _END})
_FAIRSEQ: Roles = {
    "bos_token": "<s>",
    "eos_token": "</s>",
    "unk_token": "<unk>",
    "sep_token": "</s>",
    "pad_token": "<pad>",
    "cls_token": "<s>",
    "mask_token": "<mask>",
}
_BERT: Roles = {
    "unk_token": "[UNK]",
    "sep_token": "[SEP]",
    "pad_token": "[PAD]",
    "cls_token": "[CLS]",
    "mask_token": "[MASK]",
}
_ROBERTA = BpeRules(
    roles=_FAIRSEQ,
    starts=("cls_token",),
    ends=("sep_token",),
    between=("sep_token", "sep_token"),
    lstrip=("mask_token",),
)
_QWEN2 = BpeRules(
    normalizer="nfc",
    patterns=PRE_TOKENIZERS["qwen2"].patterns,
    roles={"eos_token": _END, "unk_token": _END, "pad_token": _END},
)
_CLIP = BpeRules(
    normalizer="clip",
    patterns=(r"<\|startoftext\|>|<\|endoftext\|>|'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+",),
    drops_rest=True,
    end_of_word="</w>",
    unknown=True,
    roles={"bos_token": "<|startoftext|>", **dict.fromkeys(("eos_token", "unk_token", "pad_token"), _END)},
    starts=("bos_token",),
    ends=("eos_token",),
    between=("eos_token", "eos_token"),
)
_WORDS = BpeRules(
    normalizer="lower case",
    patterns=(),
    is_byte_level=False,
    end_of_word="</w>",
    unknown=True,
    roles={"unk_token": "<unk>"},
)

BPE_CLASSES: Mapping[str, BpeRules] = {
    **dict.fromkeys(("GPT2", "CodeGen"), _GPT2),
    "OPT": BpeRules(
        roles={**dict.fromkeys(("bos_token", "eos_token", "unk_token"), "</s>"), "pad_token": "<pad>"},
        starts=("bos_token",),
    ),
    **dict.fromkeys(("Roberta", "Bart", "LED", "Longformer", "Mvp"), _ROBERTA),
    "LayoutLMv3": replace(_ROBERTA, adds_space=True),
    "Blenderbot": replace(_ROBERTA, adds_space=True, starts=(), between=None),
    "Deberta": BpeRules(
        roles={**_BERT, "bos_token": "[CLS]", "eos_token": "[SEP]"},
        starts=("cls_token",),
        ends=("sep_token",),
        lstrip=("mask_token",),
    ),
    "GPTNeoX": replace(_GPT2, normalizer="nfc", roles={**_GPT2.roles, "pad_token": "<|padding|>"}),
    "Qwen2": _QWEN2,
    "Qwen3_5": replace(
        _QWEN2,
        patterns=(
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|"
            r"\s*[\r\n]+|\s+(?!\S)|\s+",
        ),
    ),
    "Cohere": replace(
        _GPT2,
        normalizer="nfc",
        patterns=(r"\p{N}", *_GPT2.patterns),
        roles={
            "bos_token": "<BOS_TOKEN>",
            "eos_token": "<|END_OF_TURN_TOKEN|>",
            "unk_token": "<UNK>",
            "sep_token": "<SEP>",
            "pad_token": "<PAD>",
            "cls_token": "<CLS>",
            "mask_token": "<MASK_TOKEN>",
        },
    ),
    "Whisper": replace(_GPT2, starts=("<|startoftranscript|>", "<|notimestamps|>"), ends=("eos_token",)),
    "CLIP": _CLIP,
    "OpenAIGPT": _WORDS,
    "Herbert": replace(
        _WORDS,
        normalizer="words",
        roles={key: token for key, token in _FAIRSEQ.items() if key not in ("bos_token", "eos_token")},
        starts=("cls_token",),
        ends=("sep_token",),
    ),
}
"""Class that reads `vocab.json` and `merges.txt` -> its rules. OPT is GPT-2's class with other special tokens."""


@dataclass(frozen=True, kw_only=True)
class WordPieceRules:
    """Rules of a class that reads `vocab.txt` and splits text as BERT does."""

    roles: Roles = field(default_factory=lambda: dict(_BERT))  # tokens by role, if no file sets them
    lstrip: Names = ()  # roles whose token takes the spaces before it
    doubles_separator: bool = False  # between two texts


WORDPIECE_CLASSES: Mapping[str, WordPieceRules] = {
    **dict.fromkeys(
        (
            *("Bert", "DistilBert", "Electra", "MobileBert", "ConvBert", "SqueezeBert", "LayoutLM", "Lxmert"),
            *("RetriBert", "Realm", "DPRQuestionEncoder", "DPRContextEncoder", "DPRReader", "LayoutLMv2", "Splinter"),
        ),
        WordPieceRules(),
    ),
    "Funnel": WordPieceRules(
        roles={
            **dict(zip(_BERT, ("<unk>", "<sep>", "<pad>", "<cls>", "<mask>"), strict=True)),
            "bos_token": "<s>",
            "eos_token": "</s>",
        }
    ),
    "MPNet": WordPieceRules(roles={**_FAIRSEQ, "unk_token": "[UNK]"}, lstrip=("mask_token",), doubles_separator=True),
}
"""Class that reads `vocab.txt` -> its rules."""


@dataclass(frozen=True, kw_only=True)
class TextSteps:
    """What a class changes in a text before SentencePiece reads it."""

    quotes: bool = True  # two backticks or apostrophes become a double quotation mark
    keeps_accents: bool = True  # if `keep_accents` is not set
    lower_case: bool = False  # if `do_lower_case` is not set
    splits_commas: bool = False  # whether a comma behind a digit is a subword of its own


@dataclass(frozen=True, kw_only=True)
class SentencePieceRules:
    """Which IDs a class gives to the subwords of a SentencePiece model."""

    fixed: Mapping[str, object] = field(default_factory=dict)  # settings that are read with this value alone
    reads_vocabulary: bool = False  # whether a `vocab.json` has the IDs
    steps: TextSteps | None = None
    first: Names = ()  # tokens of the first IDs, in place of the model's first subwords
    skipped: int = 0  # first subwords without an ID
    last: Names = ()  # tokens behind the subwords
    unknown: str = ""  # token of unknown text, if not the model's own
    # default of the setting `legacy`: SentencePiece puts its space before each text between special tokens; without it
    # the class puts one before the whole text, and changes nothing else. `None`: there is no such setting
    legacy: bool | None = None
    languages: Names = ()  # among `last`; `src_lang` names the one in `starts` or `ends`
    language: str = ""  # without `src_lang`
    language_form: str = "{}"
    starts: Names = ()  # tokens; "" is the language, and "bos" the token of that role
    ends: Names = ()  # as `starts`, with "eos"
    between: Names | None = None  # two texts; `None` for `ends`, or `starts` without them
    lstrip: Names = ()  # tokens that take the spaces before them
    roles: Roles = field(default_factory=dict)  # special tokens that get the next IDs if the model lacks them


_LANGUAGES_OF_MBART = (
    "ar_AR cs_CZ de_DE en_XX es_XX et_EE fi_FI fr_XX gu_IN hi_IN it_IT ja_XX kk_KZ ko_KR lt_LT lv_LV my_MM ne_NP "
    "nl_XX ro_RO ru_RU si_LK tr_TR vi_VN zh_CN"
)
_LANGUAGES_OF_MBART50 = (
    "af_ZA az_AZ bn_IN fa_IR he_IL hr_HR id_ID ka_GE km_KH mk_MK ml_IN mn_MN mr_IN pl_PL ps_AF pt_XX sv_SE sw_KE "
    "ta_IN te_IN th_TH tl_XX uk_UA ur_PK xh_ZA gl_ES sl_SI"
)
_LANGUAGES_OF_NLLB = (
    "ace_Arab ace_Latn acm_Arab acq_Arab aeb_Arab afr_Latn ajp_Arab aka_Latn amh_Ethi apc_Arab arb_Arab ars_Arab "
    "ary_Arab arz_Arab asm_Beng ast_Latn awa_Deva ayr_Latn azb_Arab azj_Latn bak_Cyrl bam_Latn ban_Latn bel_Cyrl "
    "bem_Latn ben_Beng bho_Deva bjn_Arab bjn_Latn bod_Tibt bos_Latn bug_Latn bul_Cyrl cat_Latn ceb_Latn ces_Latn "
    "cjk_Latn ckb_Arab crh_Latn cym_Latn dan_Latn deu_Latn dik_Latn dyu_Latn dzo_Tibt ell_Grek eng_Latn epo_Latn "
    "est_Latn eus_Latn ewe_Latn fao_Latn pes_Arab fij_Latn fin_Latn fon_Latn fra_Latn fur_Latn fuv_Latn gla_Latn "
    "gle_Latn glg_Latn grn_Latn guj_Gujr hat_Latn hau_Latn heb_Hebr hin_Deva hne_Deva hrv_Latn hun_Latn hye_Armn "
    "ibo_Latn ilo_Latn ind_Latn isl_Latn ita_Latn jav_Latn jpn_Jpan kab_Latn kac_Latn kam_Latn kan_Knda kas_Arab "
    "kas_Deva kat_Geor knc_Arab knc_Latn kaz_Cyrl kbp_Latn kea_Latn khm_Khmr kik_Latn kin_Latn kir_Cyrl kmb_Latn "
    "kon_Latn kor_Hang kmr_Latn lao_Laoo lvs_Latn lij_Latn lim_Latn lin_Latn lit_Latn lmo_Latn ltg_Latn ltz_Latn "
    "lua_Latn lug_Latn luo_Latn lus_Latn mag_Deva mai_Deva mal_Mlym mar_Deva min_Latn mkd_Cyrl plt_Latn mlt_Latn "
    "mni_Beng khk_Cyrl mos_Latn mri_Latn zsm_Latn mya_Mymr nld_Latn nno_Latn nob_Latn npi_Deva nso_Latn nus_Latn "
    "nya_Latn oci_Latn gaz_Latn ory_Orya pag_Latn pan_Guru pap_Latn pol_Latn por_Latn prs_Arab pbt_Arab quy_Latn "
    "ron_Latn run_Latn rus_Cyrl sag_Latn san_Deva sat_Beng scn_Latn shn_Mymr sin_Sinh slk_Latn slv_Latn smo_Latn "
    "sna_Latn snd_Arab som_Latn sot_Latn spa_Latn als_Latn srd_Latn srp_Cyrl ssw_Latn sun_Latn swe_Latn swh_Latn "
    "szl_Latn tam_Taml tat_Cyrl tel_Telu tgk_Cyrl tgl_Latn tha_Thai tir_Ethi taq_Latn taq_Tfng tpi_Latn tsn_Latn "
    "tso_Latn tuk_Latn tum_Latn tur_Latn twi_Latn tzm_Tfng uig_Arab ukr_Cyrl umb_Latn urd_Arab uzn_Latn vec_Latn "
    "vie_Latn war_Latn wol_Latn xho_Latn ydd_Hebr yor_Latn yue_Hant zho_Hans zho_Hant zul_Latn"
)
_LANGUAGES_OF_M2M100 = (
    "af am ar ast az ba be bg bn br bs ca ceb cs cy da de el en es et fa ff fi fr fy ga gd gl gu ha he hi hr ht hu hy "
    "id ig ilo is it ja jv ka kk km kn ko lb lg ln lo lt lv mg mk ml mn mr ms my ne nl no ns oc or pa pl ps pt ro ru "
    "sd si sk sl so sq sr ss su sv sw ta th tl tn tr uk ur uz vi wo xh yi yo zh zu"
)
_MBART_LANGUAGES: Names = tuple(_LANGUAGES_OF_MBART.split())
_MBART50_LANGUAGES: Names = (*_MBART_LANGUAGES, *_LANGUAGES_OF_MBART50.split())
_NLLB_LANGUAGES: Names = tuple(_LANGUAGES_OF_NLLB.split())
_M2M100_LANGUAGES: Names = tuple(f"__{code}__" for code in _LANGUAGES_OF_M2M100.split())
_PLBART_LANGUAGES: Names = ("__java__", "__python__", "__en_XX__")

_SHIFTED = SentencePieceRules(
    first=("<s>", "<pad>", "</s>", "<unk>"), skipped=3, unknown="<unk>", lstrip=("<mask>",), last=("<mask>",)
)
_MBART = replace(
    _SHIFTED,
    last=(*_MBART_LANGUAGES, "<mask>"),
    languages=_MBART_LANGUAGES,
    language="en_XX",
    ends=("</s>", ""),
    between=(),
)

_SENTINELS: Names = tuple(f"<extra_id_{number}>" for number in range(99, -1, -1))
_AROUND = SentencePieceRules(starts=("[CLS]",), ends=("[SEP]",))
_BY_SETTINGS = SentencePieceRules(starts=("bos",), ends=("eos",))

SENTENCEPIECE_CLASSES: Mapping[str, SentencePieceRules] = {
    "XLMRoberta": replace(_SHIFTED, starts=("<s>",), ends=("</s>",), between=("</s>", "</s>")),
    "MBart": _MBART,
    "MBart50": replace(
        _MBART, last=(*_MBART50_LANGUAGES, "<mask>"), languages=_MBART50_LANGUAGES, starts=("",), ends=("</s>",)
    ),
    "Nllb": replace(
        _SHIFTED,
        last=(*_NLLB_LANGUAGES, "<mask>"),
        languages=_NLLB_LANGUAGES,
        language="eng_Latn",
        starts=("",),
        ends=("</s>",),
        between=(),
    ),
    "Camembert": SentencePieceRules(
        first=("<s>NOTUSED", "<pad>", "</s>NOTUSED", "<unk>", "<unk>NOTUSED"),
        skipped=1,
        last=("<mask>",),
        unknown="<unk>",
        starts=("<s>",),
        ends=("</s>",),
        between=("</s>", "</s>"),
        lstrip=("<mask>",),
    ),
    "Pegasus": SentencePieceRules(
        fixed={"offset": 103},
        first=("<pad>", "</s>", "<mask_1>", "<mask_2>", *(f"<unk_{number}>" for number in range(2, 103))),
        skipped=2,
        ends=("</s>",),
        between=(),
    ),
    "XGLM": replace(
        _SHIFTED,
        last=tuple(f"<madeupword{number}>" for number in range(7)),
        starts=("</s>",),
        between=("</s>", "</s>"),
        lstrip=(),
    ),
    "PLBart": replace(
        _SHIFTED,
        fixed={"language_codes": "base"},
        last=(*_PLBART_LANGUAGES, "<mask>"),
        languages=_PLBART_LANGUAGES,
        language_form="__{}__",
        ends=("</s>", ""),
        between=(),
    ),
    "M2M100": SentencePieceRules(
        fixed={"language_codes": "m2m100"},
        reads_vocabulary=True,
        first=_SHIFTED.first,
        last=_M2M100_LANGUAGES,
        unknown="<unk>",
        languages=_M2M100_LANGUAGES,
        language="en",
        language_form="__{}__",
        starts=("",),
        ends=("</s>",),
        between=(),
    ),
    "Speech2Text": SentencePieceRules(
        fixed={"lang_codes": None},
        reads_vocabulary=True,
        first=_SHIFTED.first,
        unknown="<unk>",
        ends=("</s>",),
        between=(),
    ),
    "T5": SentencePieceRules(last=_SENTINELS, ends=("</s>",)),
    "VideoPrism": SentencePieceRules(last=_SENTINELS),
    **dict.fromkeys(("MT5", "Udop"), SentencePieceRules(ends=("</s>",))),
    "BigBird": replace(_AROUND, lstrip=("[MASK]",)),
    "DebertaV2": replace(
        _AROUND, fixed={"split_by_punct": False}, steps=TextSteps(quotes=False), roles={"mask_token": "[MASK]"}
    ),
    "Albert": replace(
        _AROUND, fixed={"remove_space": True}, steps=TextSteps(keeps_accents=False, lower_case=True, splits_commas=True)
    ),
    "RemBert": replace(_AROUND, fixed={"remove_space": True}, steps=TextSteps()),
    "XLNet": SentencePieceRules(
        fixed={"remove_space": True, "keep_accents": False},
        steps=TextSteps(keeps_accents=False, splits_commas=True),
        ends=("<sep>", "<cls>"),
        between=("<sep>",),
        lstrip=("<mask>",),
    ),
    "Llama": replace(_BY_SETTINGS, legacy=True),
    "CodeLlama": replace(_BY_SETTINGS, legacy=False),
    "Gemma": _BY_SETTINGS,
    **dict.fromkeys(("BertGeneration", "Reformer"), SentencePieceRules()),
}
"""Class that reads a SentencePiece model -> its rules. With no class stated, the IDs are those of the model."""

OF_LANGUAGE = "splits a text by rules of its language"
_CHANGES_TEXT = "changes a text before SentencePiece reads it, by rules that are not known here"
_OTHER_IDS = "has IDs that its SentencePiece model does not give"
_MOSES = "changes a text by Moses's rules"
_OWN_WORDS = "splits a text into words by rules of its own"
_MORE_THAN_TEXT = "reads more than text: entities, tables or markup"
_LETTERS = "encodes bytes, letters or sounds without subwords"
_OWN_FILES = "reads files of a format that embedlayer does not read"

REFUSED_CLASSES: Mapping[str, str] = {
    **dict.fromkeys(("Cpm", "Siglip", "Siglip2", "Tipsv2", "GPTSw3"), _CHANGES_TEXT),
    **dict.fromkeys(("Barthez", "Bartpho", "SeamlessM4T", "LayoutXLM", "ChatGLM", "Lasr"), _OTHER_IDS),
    **dict.fromkeys(("XLM", "Flaubert", "BioGpt", "FSMT", "Marian"), _MOSES),
    **dict.fromkeys(("BertJapanese", "RoFormer", "RoCBert", "CpmAnt", "GPTNeoXJapanese"), OF_LANGUAGE),
    **dict.fromkeys(("BlenderbotSmall", "CTRL", "Clvp", "Phobert", "Bertweet"), _OWN_WORDS),
    **dict.fromkeys(("Luke", "MLuke", "Tapas", "MarkupLM"), _MORE_THAN_TEXT),
    **dict.fromkeys(
        (
            *("ByT5", "Canine", "Perceiver", "Dia", "Esm", "Esmc", "Vits", "Mgpstr", "SpeechT5", "Wav2Vec2CTC"),
            *("Wav2Vec2PhonemeCTC", "FastSpeech2Conformer"),
        ),
        _LETTERS,
    ),
    "FNet": "has other IDs in other releases of transformers",
    **dict.fromkeys(("MyT5", "ProphetNet", "Nougat", "Parakeet"), _OWN_FILES),
}
"""Class of transformers that is not read -> the reason."""

CONVERTED_CLASSES: Names = (
    *("Barthez", "SeamlessM4T", "LayoutXLM", "Lasr", "Tipsv2", "Luke", "MLuke", "Esmc", "Parakeet"),
)
"""Classes of `REFUSED_CLASSES` of which transformers writes the `tokenizer.json` from their other files."""

_TYPES_OF_CLASS: Mapping[str, Names] = {
    "GPT2": ("gpt2", "gpt_neo", "gptj", "codegen", "phi"),
    "OPT": ("opt",),
    "Roberta": (
        *("roberta", "roberta-prelayernorm", "bart", "led", "longformer", "mvp", "data2vec-text", "ibert", "lilt"),
        *("bridgetower", "clap", "mega", "mra", "florence2"),
    ),
    "Blenderbot": ("blenderbot",),
    "Deberta": ("deberta",),
    "GPTNeoX": ("gpt_neox", "mamba", "mamba2", "olmo", "olmoe", "rwkv", "xlstm"),
    "Cohere": ("cohere", "cohere2", "aya_vision"),
    "LayoutLMv3": ("layoutlmv3",),
    "Qwen2": (
        *("qwen2", "qwen2_moe", "qwen2_vl", "qwen2_5_vl", "qwen2_audio", "qwen2_5_omni", "qwen3", "qwen3_moe"),
        *("qwen3_next", "qwen3_vl", "qwen3_vl_moe", "qwen3_omni_moe", "qwen3_asr", "audioflamingo3", "colqwen2"),
        *("cosmos3_omni", "dots3_note", "fun_asr_nano", "hunyuan_vl", "internvl", "lighton_ocr", "ovis2"),
        *("moss_transcribe_diarize", "qianfan_ocr", "vibevoice"),
    ),
    "Qwen3_5": ("qwen3_5", "qwen3_5_moe", "qwen3_5_text", "qwen3_5_moe_text", "qwen4_exp"),
    "Whisper": ("whisper",),
    "CLIP": (
        *("clip", "clip_text_model", "clipseg", "owlvit", "owlv2", "groupvit", "xclip", "oneformer", "omdet-turbo"),
        *("aimv2", "sam3", "sam3_video"),
    ),
    "OpenAIGPT": ("openai-gpt",),
    "Herbert": ("herbert",),
    "XLMRoberta": ("xlm-roberta", "xlm-roberta-xl", "xmod", "jina_embeddings_v3", "metaclip_2", "trocr", "gte"),
    "MBart": ("mbart",),
    "MBart50": ("mbart50",),
    "Nllb": ("nllb", "nllb-moe"),
    "Camembert": ("camembert",),
    "Pegasus": ("pegasus",),
    "XGLM": ("xglm",),
    "T5": ("t5", "switch_transformers", "musicgen", "musicgen_melody"),
    "Udop": ("udop",),
    "VideoPrism": ("videoprism",),
    "MT5": ("mt5",),
    "BigBird": ("big_bird",),
    "DebertaV2": ("deberta-v2",),
    "Gemma": (
        *("gemma", "gemma2", "gemma3", "gemma3_text", "gemma3n", "gemma3n_text", "recurrent_gemma", "shieldgemma2"),
        *("t5gemma", "diffusion_gemma", "zaya"),
    ),
    "CodeLlama": ("code_llama",),
    "Llama": ("idefics", "idefics2"),
    "BertGeneration": ("bert-generation",),
    "Reformer": ("reformer",),
    "RemBert": ("rembert",),
    "M2M100": ("m2m_100",),
    "Speech2Text": ("speech_to_text",),
    "Marian": ("marian",),
    "PLBart": ("plbart",),
    "SeamlessM4T": ("seamless_m4t", "seamless_m4t_v2"),
    "Albert": ("albert", "yoso"),
    "FNet": ("fnet",),
    "XLNet": ("xlnet",),
    "XLM": ("xlm",),
    "Flaubert": ("flaubert",),
    "BioGpt": ("biogpt",),
    "RoFormer": ("roformer",),
    "RoCBert": ("roc_bert",),
    "Barthez": ("barthez",),
    "Bartpho": ("bartpho",),
    "BertJapanese": ("bert-japanese",),
    "Bertweet": ("bertweet",),
    "BlenderbotSmall": ("blenderbot-small",),
    "ByT5": ("byt5",),
    "CTRL": ("ctrl",),
    "Canine": ("canine",),
    "Clvp": ("clvp",),
    "Cpm": ("cpm",),
    "CpmAnt": ("cpmant",),
    "Dia": ("dia",),
    "Esm": ("esm",),
    "Esmc": ("esmc", "esmfold2"),
    "FSMT": ("fsmt",),
    "FastSpeech2Conformer": ("fastspeech2_conformer",),
    "GPTNeoXJapanese": ("gpt_neox_japanese",),
    "GPTSw3": ("gpt-sw3",),
    "Lasr": ("lasr_ctc", "lasr_encoder"),
    "LayoutXLM": ("layoutxlm",),
    "Luke": ("luke",),
    "MLuke": ("mluke",),
    "MarkupLM": ("markuplm",),
    "Mgpstr": ("mgp-str",),
    "MyT5": ("myt5",),
    "Nougat": ("nougat", "pp_formulanet"),
    "Parakeet": (
        *("granite_speech5_ctc", "nemotron3_5_asr", "nemotron_asr_streaming", "omniasr_ctc", "parakeet_ctc"),
        *("parakeet_rnnt", "parakeet_tdt"),
    ),
    "Perceiver": ("perceiver",),
    "Phobert": ("phobert",),
    "ProphetNet": ("prophetnet",),
    "Siglip": ("siglip",),
    "Siglip2": ("siglip2",),
    "SpeechT5": ("speecht5",),
    "Tapas": ("tapas",),
    "Tipsv2": ("tipsv2",),
    "Vits": ("vits",),
    "Wav2Vec2CTC": (
        *("wav2vec2", "wav2vec2-bert", "wav2vec2-conformer", "hubert", "unispeech", "unispeech-sat", "data2vec-audio"),
    ),
    "Wav2Vec2PhonemeCTC": ("wav2vec2_phoneme",),
    "MPNet": ("mpnet",),
    "Funnel": ("funnel",),
    "Splinter": ("splinter",),
    "LayoutLMv2": ("layoutlmv2",),
    "Bert": (
        *("bert", "distilbert", "electra", "mobilebert", "convbert", "squeezebert", "layoutlm", "lxmert", "ernie"),
        *("megatron-bert", "nomic_bert", "visual_bert", "align", "bark", "blip", "bros", "chinese_clip", "dpr"),
        "flava",
        *("git", "grounding-dino", "mm-grounding-dino", "nezha", "qdqbert", "realm", "retribert", "tvp", "vilt"),
    ),
}

CLASS_OF_TYPE: Mapping[str, str] = {name: kind for kind, names in _TYPES_OF_CLASS.items() for name in names}
"""Model type -> the tokenizer class that it has if no file names one."""

GENERIC_CLASSES: Names = ("PreTrained", "TokenizersBackend")
"""Classes that read a `tokenizer.json` as it is, and have no rules of their own."""

OWN_RULES: Names = ("qwen2",)
"""Model types of which transformers opens every folder with the type's own tokenizer class, which splits text by its
own rules and ignores those of `tokenizer.json`."""

SPLITS_DIGITS: Names = ("starcoder2", "gpt_bigcode", "granite", "granitemoe", "llama", "smollm3")
"""Model types whose folders name GPT-2's class, and whose `tokenizer.json` splits digits too."""


class UnreadTokenizer(NamedTuple):
    """A kind of tokenizer file that is not read."""

    pattern: str
    what: str
    copied_to: str = ""


MARIAN = UnreadTokenizer("source.spm", "the SentencePiece model of a Marian model, whose IDs are in vocab.json")
TIKTOKEN = UnreadTokenizer("*.tiktoken", "a vocabulary of tiktoken")

UNREAD_TOKENIZERS: tuple[UnreadTokenizer, ...] = (
    MARIAN,
    MARIAN._replace(pattern="target.spm"),
    TIKTOKEN,
    UnreadTokenizer("tekken.json", "a tekken tokenizer of Mistral"),
    UnreadTokenizer("tokenizer.model.v*", "a SentencePiece model under a name of Mistral's", "tokenizer.model"),
    UnreadTokenizer("*.spm", "a SentencePiece model under another name", "*.model"),
)
"""The kinds; the first one that fits a name counts."""
