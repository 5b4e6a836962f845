"""transformers' own model tests (`ModelTesterMixin`), over small models of five kinds, plain or patched."""

import unittest

import torch
from tests.test_modeling_common import ModelTesterMixin
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertForMaskedLM,
    BertModel,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPT2Model,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    T5Config,
    T5ForConditionalGeneration,
)  # fmt: skip

COMMON = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "pad_token_id": 1}
BART = {
    f"{part}_{size}": n for part in ("encoder", "decoder") for size, n in {"ffn_dim": 37, "attention_heads": 4}.items()
}
BART = {**BART, "max_position_embeddings": 64, "decoder_start_token_id": 2, "d_model": 32}
KINDS = {
    "GPT2": (GPT2Config, (GPT2Model, GPT2LMHeadModel), {"bos_token_id": 2, "eos_token_id": 3, "n_positions": 64}),
    "Llama": (LlamaConfig, (LlamaModel, LlamaForCausalLM), {"intermediate_size": 37, "num_key_value_heads": 2}),
    "Gemma2": (Gemma2Config, (Gemma2ForCausalLM,), {"intermediate_size": 37, "head_dim": 8, "num_key_value_heads": 2}),
    "Bert": (BertConfig, (BertModel, BertForMaskedLM), {"intermediate_size": 37}),
    "T5": (
        T5Config,
        (T5ForConditionalGeneration,),
        {"d_ff": 37, "d_kv": 8, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0},
    ),
    "Bart": (BartConfig, (BartForConditionalGeneration,), {"encoder_layers": 2, "decoder_layers": 2, **BART}),
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


def suite(name, config_class, classes, options):
    def set_up(self):
        self.model_tester = Tester(self, config_class, options)

    members = {"all_model_classes": classes, "setUp": set_up, "is_encoder_decoder": name in ("T5", "Bart")}
    return type(f"{name}Test", (ModelTesterMixin, unittest.TestCase), members)


for name, (config_class, classes, options) in KINDS.items():
    globals()[f"{name}Test"] = suite(name, config_class, classes, options)
del ModelTesterMixin
