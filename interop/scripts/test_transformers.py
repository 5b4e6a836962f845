"""transformers' own model tests (`ModelTesterMixin`), over small models of six kinds, plain or patched."""

import unittest

import torch
import transformers
from tests.test_modeling_common import ModelTesterMixin

COMMON = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "pad_token_id": 1}
SIZES = {"intermediate_size": 37, "num_key_value_heads": 2}
BART = {"encoder_layers": 2, "encoder_ffn_dim": 37, "encoder_attention_heads": 4}
BART = {**BART, **{key.replace("encoder", "decoder"): size for key, size in BART.items()}, "d_model": 32}
KINDS = {  # name: classes besides the one with a head, options of the configuration
    "GPT2LMHeadModel": ("GPT2Model", {"bos_token_id": 2, "eos_token_id": 3, "n_positions": 64}),
    "LlamaForCausalLM": ("LlamaModel", SIZES),
    "Gemma2ForCausalLM": (None, {**SIZES, "head_dim": 8}),
    "BertForMaskedLM": ("BertModel", {"intermediate_size": 37}),
    "T5ForConditionalGeneration": (None, {"d_ff": 37, "d_kv": 8, "num_layers": 2, "num_heads": 4}),
    "BartForConditionalGeneration": (None, {**BART, "max_position_embeddings": 64}),
}


class Tester:
    def __init__(self, parent, config_class, options) -> None:
        self.parent, self.config_class, self.options = parent, config_class, options
        self.is_training, self.batch_size, self.seq_length = True, 3, 7
        self.encoder_seq_length = self.decoder_seq_length = 7
        self.hidden_size, self.num_hidden_layers, self.num_attention_heads = 32, 2, 4

    def prepare_config_and_inputs_for_common(self):
        config = self.config_class(**COMMON, **self.options)
        ids = torch.randint(4, 99, (self.batch_size, self.seq_length))
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        decoder = {"decoder_input_ids": ids, "decoder_attention_mask": torch.ones_like(ids)}
        return config, {**inputs, **(decoder if config.is_encoder_decoder else {})}


def suite(name, other, options):
    kind = getattr(transformers, name)
    classes = tuple(getattr(transformers, each) for each in (other, name) if each)
    is_encoder_decoder = "Conditional" in name
    options = {**options, "decoder_start_token_id": 2} if is_encoder_decoder else options

    def set_up(self):
        self.model_tester = Tester(self, kind.config_class, options)

    members = {"all_model_classes": classes, "setUp": set_up, "is_encoder_decoder": is_encoder_decoder}
    return type(f"{name}Test", (ModelTesterMixin, unittest.TestCase), members)


globals().update({f"{name}Test": suite(name, *rest) for name, rest in KINDS.items()})
del ModelTesterMixin
