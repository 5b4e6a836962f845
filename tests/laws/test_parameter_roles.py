"""Every trained parameter of every kind of table, position, head and injection is in the group of its module's role."""

import warnings
from collections.abc import Callable

import pytest
import torch
from covering import looped
from kinds import (
    EMBED_DIM,
    INJECTIONS,
    LAYERS,
    LOOKUP_TABLES,
    NUM_HEADS,
    POSITIONS,
    STREAM_HEADS,
    TABLES,
    TIED_STREAM_HEADS,
    UNTIED_HEADS,
    VOCAB_SIZE,
    tied_streams,
)
from torch import nn

import embedlayer as el
from embedlayer.vocab import train_only_rows

ROLES = ("tables", "heads", "positions", "norms", "matrices")


def head_over(rows: str) -> el.OutputHead:
    """An untied head whose rows are a table of its own, as those of a sharded or quantised head are."""
    return el.OutputHead(rows=TABLES[rows](), bias=True)


def transformed(output: el.OutputHead) -> el.heads.PredictionHead:
    return el.heads.PredictionHead(output, dense=nn.Linear(EMBED_DIM, EMBED_DIM), norm=nn.LayerNorm(EMBED_DIM))


def decoder(table: str = "dense", position: str = "rotary", head: object = None, injection: str = "") -> el.DecoderLM:
    made = TABLES[table]()
    head = UNTIED_HEADS["untied"]() if made.row_sparse else head
    injections = [INJECTIONS[injection]()] if injection else []
    options = {"num_layers": 2, "num_heads": NUM_HEADS, "injections": injections}
    return el.DecoderLM(made, POSITIONS[position](), head, **options)


def peft_model(model: nn.Module, **options: object) -> nn.Module:
    peft = pytest.importorskip("peft")
    with warnings.catch_warnings():  # PEFT's, of models that are not transformers', and of transformers' to PEFT
        warnings.simplefilter("ignore")
        adapted: nn.Module = peft.get_peft_model(model, peft.LoraConfig(r=3, **options))
    return adapted


def with_trained_rows(**options: object) -> nn.Module:
    model = decoder(**options)
    train_only_rows(model, [7, 48])
    return model


def llama(*, tied: bool) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": EMBED_DIM, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=VOCAB_SIZE, tie_word_embeddings=tied, **sizes)
    model: nn.Module = transformers.LlamaForCausalLM(config)
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    **{f"decoder over {name}": lambda name=name: decoder(name) for name in TABLES},
    **{f"decoder with position {name}": lambda name=name: decoder(position=name) for name in POSITIONS},
    **{f"decoder, head {name}": lambda name=name: decoder(head=UNTIED_HEADS[name]()) for name in UNTIED_HEADS},
    **{
        f"decoder, head with rows {name}": lambda name=name: decoder(head=head_over(name))
        for name in TABLES
        if name != "row-sparse"
    },
    **{f"decoder with {name}": lambda name=name: decoder(injection=name) for name in INJECTIONS},
    **{name: LAYERS[name] for name in LAYERS},
    **{
        f"a look-up of {name}": lambda name=name: nn.ModuleDict({"table": LOOKUP_TABLES[name]()})
        for name in LOOKUP_TABLES
    },
    **{
        f"head of streams, {name}": lambda name=name: nn.ModuleDict({"head": STREAM_HEADS[name]()})
        for name in STREAM_HEADS
    },
    **{
        name: lambda its=its: nn.ModuleDict({"table": (t := TABLES[its]()), "head": tied_streams(t)})
        for name, its in TIED_STREAM_HEADS.items()
    },
    "streams": lambda: nn.ModuleDict({"table": el.tables.StreamTable(TABLES["dense"](), [20, 30])}),
    "a tied transform": lambda: el.EmbeddingLayer(table=(t := TABLES["dense"]()), head=transformed(el.OutputHead(t))),
    "an untied transform": lambda: el.EmbeddingLayer(
        table=TABLES["dense"](), head=transformed(UNTIED_HEADS["untied, bias, softcap"]())
    ),
    "LoRA, tied": lambda: peft_model(decoder(), target_modules=["table", "query"]),
    "LoRA, untied": lambda: peft_model(
        decoder(head=UNTIED_HEADS["untied"]()), target_modules=["table", "head", "query"]
    ),
    "trainable tokens": lambda: peft_model(
        decoder(), target_modules=["query"], trainable_token_indices={"table": [3, 5]}
    ),
    "a trained copy": lambda: peft_model(
        decoder(head=UNTIED_HEADS["untied"]()), target_modules=["query"], modules_to_save=["table", "head"]
    ),
    "only rows, tied": with_trained_rows,
    "only rows, untied": lambda: with_trained_rows(head=UNTIED_HEADS["untied"]()),
    "transformers, tied": lambda: llama(tied=True),
    "transformers, untied": lambda: llama(tied=False),
    "transformers, patched": lambda: el.patch(llama(tied=False)),
    "transformers, LoRA": lambda: peft_model(llama(tied=False), target_modules=["embed_tokens", "lm_head", "q_proj"]),
    "frozen": lambda: decoder().requires_grad_(False),
}


def role_by_name(name: str, parameter: nn.Parameter) -> str:
    """The role that the place of a parameter in the model says."""
    parts = name.removeprefix("base_model.model.").split(".")
    rest = "norms" if parameter.dim() < 2 else "matrices"
    if {"head", "lm_head"} & {*parts}:
        return rest if rest == "norms" or "dense" in parts else "heads"
    if {"table", "tables", "tok_emb", "embed_tokens"} & {*parts}:
        return "tables"
    return "positions" if {"position", "pos_emb"} & {*parts} else rest


@looped("name", MODELS)
def test_every_trained_parameter_is_in_one_group_with_the_role_of_its_module(name) -> None:
    torch.manual_seed(0)
    model = MODELS[name]()
    groups = el.param_groups(model, weight_decay=0.3)
    expected: dict[str, list[nn.Parameter]] = {}
    for place, parameter in model.named_parameters():
        if parameter.requires_grad:
            expected.setdefault(role_by_name(place, parameter), []).append(parameter)
    assert {group["name"]: {*group["params"]} for group in groups} == {key: {*its} for key, its in expected.items()}
    assert [group["name"] for group in groups] == [role for role in ROLES if role in expected]
    assert sum(len(group["params"]) for group in groups) == sum(p.requires_grad for p in model.parameters())
    assert {group["name"] for group in groups if group["weight_decay"]} <= {"heads", "matrices"}
    of_tokens = [
        p for group in groups if group["name"] in ("norms", "matrices") for p in group["params"] if p.dim() > 1
    ]
    assert not any(VOCAB_SIZE in parameter.shape for parameter in of_tokens)
