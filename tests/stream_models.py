"""Small random models of transformers whose input or output are K streams of codes."""

from collections.abc import Callable, Mapping
from typing import Any

from tiny_models import quiet, randomise
from torch import Tensor, nn

SIZES = {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
MIMI = {
    "model_type": "mimi",
    "num_filters": 4,
    "hidden_size": 16,
    "head_dim": 8,
    "codebook_size": 32,
    "codebook_dim": 8,
}
MIMI |= {"vector_quantization_hidden_dimension": 8, "num_quantizers": 4, "upsample_groups": 16, "intermediate_size": 16}
MIMI |= {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "upsampling_ratios": [2, 2]}
"""Sizes of the sound codec that the configurations of Moshi, CSM and Kyutai contain."""

T5 = {"model_type": "t5", "vocab_size": 40, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
ENCODEC = {"model_type": "encodec", "hidden_size": 16, "num_filters": 4, "codebook_size": 32, "codebook_dim": 16}
ENCODEC |= {"upsampling_ratios": [2, 2], "num_lstm_layers": 1, "target_bandwidths": [1.5]}
MUSICGEN = {"vocab_size": 24, "hidden_size": 32, "ffn_dim": 16, "num_codebooks": 4, "pad_token_id": 24}
MUSICGEN |= {"num_hidden_layers": 1, "num_attention_heads": 4, "max_position_embeddings": 64, "bos_token_id": 24}


def _musicgen(name: str, **changes: Any) -> nn.Module:
    import transformers

    config = getattr(transformers, f"{name}DecoderConfig")(**{**MUSICGEN, **changes})
    model: nn.Module = getattr(transformers, f"{name}ForCausalLM")._from_config(config, attn_implementation="eager")
    return model


def _musicgen_whole() -> nn.Module:
    import transformers

    config = transformers.MusicgenConfig(
        text_encoder=dict(T5), audio_encoder=dict(ENCODEC), decoder={"model_type": "musicgen_decoder", **MUSICGEN}
    )
    model: nn.Module = transformers.MusicgenForConditionalGeneration(config)
    return model


def _moshi() -> nn.Module:
    import transformers

    depth = SIZES | {"model_type": "moshi_depth", "hidden_size": 16, "ffn_dim": 16, "num_codebooks": 4}
    config = transformers.MoshiConfig(
        **SIZES, vocab_size=60, hidden_size=32, ffn_dim=16, num_codebooks=4, audio_vocab_size=32,
        audio_encoder_config=dict(MIMI), depth_decoder_config=depth,
    )  # fmt: skip
    model: nn.Module = transformers.MoshiForConditionalGeneration(config)
    return model


def _csm(**changes: Any) -> nn.Module:
    import transformers

    depth = SIZES | {"hidden_size": 24, "backbone_hidden_size": 32, "intermediate_size": 16, "num_codebooks": 4}
    depth |= {"vocab_size": 21, "head_dim": 8}
    config = transformers.CsmConfig(
        **SIZES, vocab_size=21, text_vocab_size=61, hidden_size=32, intermediate_size=16, num_codebooks=4,
        pad_token_id=58, codebook_pad_token_id=20, bos_token_id=57, audio_token_id=58, audio_eos_token_id=59,
        depth_decoder_config=depth, codec_config=dict(MIMI), **changes,
    )  # fmt: skip
    model: nn.Module = transformers.CsmForConditionalGeneration(config)
    return model


def _dia() -> nn.Module:
    import transformers

    sizes = {"num_hidden_layers": 1, "intermediate_size": 16, "head_dim": 8, "max_position_embeddings": 64}
    decoder = sizes | {"hidden_size": 32, "cross_hidden_size": 16, "cross_head_dim": 8, "vocab_size": 28}
    decoder |= {"num_attention_heads": 4, "num_key_value_heads": 2, "cross_num_attention_heads": 4, "num_channels": 3}
    decoder |= {"cross_num_key_value_heads": 2, "pad_token_id": 25, "eos_token_id": 24, "bos_token_id": 26}
    encoder = sizes | {"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 256}
    config = transformers.DiaConfig(encoder_config=encoder, decoder_config=decoder, delay_pattern=[0, 2, 3])
    model: nn.Module = transformers.DiaForConditionalGeneration(config)
    return model


def _higgs() -> nn.Module:
    import transformers

    config = transformers.HiggsAudioV2Config(
        **SIZES, vocab_size=61, hidden_size=32, intermediate_size=16, head_dim=8, num_codebooks=4, codebook_size=26,
        pad_token_id=50, bos_token_id=1, eos_token_id=51, audio_token_id=52, audio_bos_token_id=53,
        audio_delay_token_id=54, audio_stream_bos_id=24, audio_stream_eos_id=25,
    )  # fmt: skip
    model: nn.Module = transformers.HiggsAudioV2ForConditionalGeneration(config, use_text_head=True)
    return model


def _kyutai(**changes: Any) -> nn.Module:
    import transformers

    config = transformers.KyutaiSpeechToTextConfig(
        **SIZES, vocab_size=61, codebook_vocab_size=20, num_codebooks=4, hidden_size=32, ffn_dim=16, head_dim=8,
        audio_pad_token_id=61 + 4 * 20, audio_bos_token_id=19, pad_token_id=3, bos_token_id=60, codec_config=dict(MIMI),
        **changes,
    )  # fmt: skip
    model: nn.Module = transformers.KyutaiSpeechToTextForConditionalGeneration(config)
    return model


def _bark(part: str, **changes: Any) -> nn.Module:
    import transformers

    config = getattr(transformers, f"Bark{part}Config")(
        block_size=64, input_vocab_size=31, output_vocab_size=31, num_layers=1, num_heads=4, hidden_size=32, **changes
    )
    model: nn.Module = getattr(transformers, f"Bark{part}Model")(config)
    return model


STREAM_MODELS: Mapping[str, Callable[[], nn.Module]] = {
    "musicgen": lambda: _musicgen("Musicgen"),
    "musicgen, stereo": lambda: _musicgen("Musicgen", num_codebooks=8, audio_channels=2),
    "musicgen, melody": lambda: _musicgen("MusicgenMelody"),
    "musicgen, whole": _musicgen_whole,
    "moshi": _moshi,
    "csm": _csm,
    "csm, untied": lambda: _csm(tie_codebooks_embeddings=False),
    "dia": _dia,
    "higgs": _higgs,
    "kyutai": _kyutai,
    "kyutai, tied": lambda: _kyutai(tie_word_embeddings=True),
    "bark, fine": lambda: _bark("Fine", n_codes_total=4),
    "bark, fine, untied": lambda: _bark("Fine", n_codes_total=4, tie_word_embeddings=False),
}
"""Name -> function that builds the model; `stream_model` draws its numbers."""


def stream_model(name: str) -> nn.Module:
    """Return a model of `STREAM_MODELS` with random numbers, in evaluation mode."""
    with quiet():
        model = STREAM_MODELS[name]()
        randomise(model)
    return model.eval()


def first_input(model: nn.Module, layers: nn.ModuleList, **inputs: Any) -> Tensor:
    """Return the vectors that the first of `layers` receives in a run of a model."""
    seen: list[Tensor] = []

    def note(_: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        seen.append(arguments[0] if arguments else options["hidden_states"])

    handle = layers[0].register_forward_pre_hook(note, with_kwargs=True)
    with quiet():
        model(**inputs)
    handle.remove()
    return seen[0]
