"""What PEFT puts on a table is one function active, merged and unloaded, also where a head is tied to the table."""

import copy
import warnings
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import transformers
from covering import cases, covering, looped, some
from kinds import EMBED_DIM, NUM_HEADS, POSITIONS, TABLES, VOCAB_SIZE
from torch import nn

import embedlayer as el

IDS = torch.randint(1, VOCAB_SIZE, (2, 9), generator=torch.Generator().manual_seed(0))
IDS[0, :3] = torch.tensor([3, 5, VOCAB_SIZE - 1])


class OwnModule(nn.Module):
    """A module of a user's, whose head follows its table."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = TABLES["dense"]()
        self.query = nn.Linear(EMBED_DIM, EMBED_DIM)
        self.out = el.OutputHead(self.tokens, bias=True, softcap=5.0).follow(self, "tokens", "out")

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.out(self.query(self.tokens(ids)))


class WithLayer(nn.Module):
    """What `load` returns, as a model."""

    def __init__(self) -> None:
        super().__init__()
        table = TABLES["dense, rounded scale"]()
        dense = nn.Linear(EMBED_DIM, EMBED_DIM)
        head = el.heads.PredictionHead(el.OutputHead(table), dense=dense, activation="gelu")
        self.layer = el.EmbeddingLayer(table=table, head=head)
        self.query = nn.Linear(EMBED_DIM, EMBED_DIM)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.layer.head(self.query(self.layer(ids)))


def decoder(table: str = "dense") -> el.DecoderLM:
    made = TABLES[table]()
    head = el.OutputHead(vocab_size=VOCAB_SIZE, embed_dim=EMBED_DIM) if made.row_sparse else None
    return el.DecoderLM(made, POSITIONS["rotary"](), head, num_layers=1, num_heads=NUM_HEADS)


def llama() -> nn.Module:
    sizes = {"hidden_size": EMBED_DIM, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=VOCAB_SIZE, tie_word_embeddings=True, pad_token_id=0, **sizes)
    return el.patch(transformers.LlamaForCausalLM(config))


def untied_llama() -> nn.Module:
    sizes = {"hidden_size": EMBED_DIM, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=VOCAB_SIZE, **sizes))


def t5() -> nn.Module:
    sizes = {"d_model": EMBED_DIM, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2}
    return el.patch(transformers.T5ForConditionalGeneration(transformers.T5Config(vocab_size=VOCAB_SIZE, **sizes)))


MODELS = {  # the model, the names of its table, of its head, and of a linear layer
    "DecoderLM": (decoder, "table", "head", "query"),
    "DecoderLM, spare rows": (lambda: decoder("dense, spare rows"), "table", "head", "query"),
    "DecoderLM, rounded scale": (lambda: decoder("dense, rounded scale"), "table", "head", "query"),
    "a module of one's own": (OwnModule, "tokens", "out", "query"),
    "EmbeddingLayer": (WithLayer, "table", "output", "query"),
    "patched LLaMA": (llama, "embed_tokens", "lm_head", "q_proj"),
    "patched T5": (t5, "shared", "lm_head", "q"),
}
CHOICES = {
    "LoRA on the table": lambda table, head, linear: {"target_modules": [table, linear]},
    "LoRA beside the table": lambda table, head, linear: {"target_modules": [linear]},
    "LoRA on all linear layers": lambda table, head, linear: {
        "target_modules": "all-linear",
        "exclude_modules": [head],
    },
    "trainable tokens": lambda table, head, linear: {
        "target_modules": [linear],
        "trainable_token_indices": {table: [3, 5, VOCAB_SIZE - 1]},
    },
    "a trained copy": lambda table, head, linear: {"target_modules": [linear], "modules_to_save": [table]},
}


def logits_of(model: nn.Module) -> torch.Tensor:
    sequence_to_sequence = hasattr(model, "get_decoder") and getattr(model.config, "is_encoder_decoder", False)
    out = model(input_ids=IDS, decoder_input_ids=IDS) if sequence_to_sequence else model(IDS)
    return out if isinstance(out, torch.Tensor) else out.logits


def adapted(model: nn.Module, **options: object) -> nn.Module:
    import peft

    torch.manual_seed(1)
    with warnings.catch_warnings():  # what PEFT fears of tied models, and holds of models that are not transformers'
        warnings.simplefilter("ignore")
        config = peft.LoraConfig(r=3, lora_alpha=6, init_lora_weights=False, **options)
        return peft.get_peft_model(model.eval(), config).eval()


def step(model: nn.Module) -> None:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)
    logits_of(model).square().mean().backward()
    optimizer.step()


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, atol=1e-9 * float(theirs.detach().abs().max()), rtol=1e-9)


CASES = [*product(MODELS, CHOICES)]
EACH = covering(CASES) | {(name, choice) for name, choice in CASES if name in ("DecoderLM", "patched LLaMA")}
EACH |= {("patched T5", "LoRA on the table")}


@looped("name, choice", some(EACH, CASES))
@pytest.mark.filterwarnings("ignore:Model with `tie_word_embeddings=True`")
def test_active_merged_and_unloaded_are_one_function(unchecked: None, name, choice) -> None:
    make, table, head, linear = MODELS[name]
    torch.manual_seed(0)
    model = make().double().eval()
    before = logits_of(model).detach()
    model = adapted(model, **CHOICES[choice](table, head, linear))
    if (name, choice) == ("patched T5", "LoRA on the table"):  # the encoder and the decoder have other look-ups
        with pytest.raises(el.CheckpointError, match="3 tables of one weight"):
            logits_of(model)
        return
    step(model)
    with torch.no_grad():
        active = logits_of(model)
        assert (active - before).abs().max() > 1e-3
        with model.disable_adapter():
            close(logits_of(model), before)
        close(logits_of(copy.deepcopy(model)), active)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model.merge_adapter()
            close(logits_of(model), active)
            model.unmerge_adapter()
            close(logits_of(model), active)
            close(logits_of(model.merge_and_unload()), active)


@looped("name", ["DecoderLM", "a module of one's own", "patched LLaMA", "patched T5"])
def test_lora_on_a_tied_head_itself_is_refused_by_name(unchecked: None, name) -> None:
    make, _, head, linear = MODELS[name]
    model = adapted(make().double(), target_modules=[head, linear])
    with pytest.raises(el.CheckpointError, match=rf"on the tied head '{head}': .*PEFT on tied weights"):
        logits_of(model)
    with torch.no_grad(), model.disable_adapter():
        logits_of(model)


def test_a_table_whose_rows_are_not_known_is_refused_by_name(unchecked: None) -> None:
    model = decoder()
    with pytest.raises(el.CheckpointError, match="variant of LoRA on 'table'"):
        logits_of(adapted(model, target_modules=["table"], use_dora=True))
    model = decoder()
    model.table = nn.Embedding(VOCAB_SIZE, EMBED_DIM)  # type: ignore[assignment]
    with pytest.raises(el.CheckpointError, match="was replaced by an Embedding. Use TokenEmbedding"):
        logits_of(model)
    model = decoder()
    model.table = nn.Sequential(model.table)  # type: ignore[assignment]
    with pytest.raises(el.CheckpointError, match="'table', which a tied head reads, is a Sequential"):
        logits_of(model)


@looped("table", [name for name in TABLES if name not in ("row-sparse", "delta over factorised")])
def test_lora_on_what_is_inside_a_table_is_seen_from_both_ends(unchecked: None, table) -> None:
    torch.manual_seed(0)
    model: Any = decoder(table).eval()
    close = partial(torch.testing.assert_close, atol=1e-5, rtol=1e-4)
    before = logits_of(model).detach()
    model = adapted(model, target_modules="all-linear", exclude_modules=["head"])
    with torch.no_grad():
        active = logits_of(model)
        assert (active - before).abs().max() > 1e-3
        close(logits_of(model.merge_and_unload()), active)


@cases("name, choice", ["DecoderLM", "patched LLaMA"], ["LoRA on the table", "trainable tokens"])
def test_the_loss_and_the_rows_of_the_head_are_those_of_its_logits(unchecked: None, name, choice) -> None:
    make, table, head, linear = MODELS[name]
    model = adapted(make().double(), **CHOICES[choice](table, head, linear))
    step(model)
    output = model.base_model.model.get_output_embeddings()
    output = getattr(output, "original_module", output)  # PEFT has put the trainable tokens on LLaMA's head itself
    hidden, targets = torch.randn(7, EMBED_DIM, dtype=torch.float64), torch.randint(1, VOCAB_SIZE, (7,))
    logits = output(hidden)
    torch.testing.assert_close(output.loss(hidden, targets), nn.functional.cross_entropy(logits, targets))
    rows = output.table.rows(2, 40)
    torch.testing.assert_close(hidden @ rows.T, logits[:, 2:40])
    torch.testing.assert_close(output.table.look_up(IDS), output.table.rows(0, VOCAB_SIZE)[IDS])
    compiled = torch.compile(output, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(hidden), logits)


def test_new_rows_that_peft_froze_are_refused_in_training() -> None:
    """Their own way is PEFT's: merged rows, and their IDs as trainable tokens."""
    import peft
    from tiny_models import VARIANTS

    model = el.patch(VARIANTS["LLaMA 2"].build()[1]).train()
    vocab_size = model.config.vocab_size
    el.vocab.add_tokens(model, 2, train_only_new=True)
    ids = torch.tensor([[5, vocab_size, vocab_size + 1]])
    model(input_ids=ids)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # what PEFT asks transformers
        adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    with pytest.raises(el.SizeError, match=r"PEFT has frozen .*New rows that PEFT has frozen"):
        adapted(input_ids=ids, labels=ids)
    adapted.eval()(input_ids=ids)
    for part in model.modules():
        if isinstance(part, el.DeltaEmbedding):
            part.delta.requires_grad_(True)
    adapted.train()(input_ids=ids, labels=ids).loss.backward()
    el.vocab.merge_rows(model)
    adapted.train()(input_ids=ids, labels=ids)


def untied_decoder() -> nn.Module:
    head = el.OutputHead(vocab_size=VOCAB_SIZE, embed_dim=EMBED_DIM)
    return el.DecoderLM(TABLES["dense"](), POSITIONS["rotary"](), head, num_layers=1, num_heads=NUM_HEADS)


@pytest.mark.parametrize("choice", [*CHOICES, "LoRA on an untied head"])
@looped("name", ["DecoderLM", "patched LLaMA"])
@pytest.mark.filterwarnings("ignore:Model with `tie_word_embeddings=True`")
def test_an_edit_refuses_adapters_that_have_values_of_tokens_and_its_advice_works(
    unchecked: None, name, choice
) -> None:
    make, table, head, linear = MODELS[name]
    if choice == "LoRA on an untied head":
        make = untied_decoder if name == "DecoderLM" else lambda: el.patch(untied_llama())
    options = {"target_modules": [head]} if choice not in CHOICES else CHOICES[choice](table, head, linear)
    model: Any = adapted(make().double(), **options)
    step(model)
    with torch.no_grad():
        logits = logits_of(model) + 0
        before = {key: each.clone() for key, each in model.state_dict().items()}
        if choice in ("LoRA on the table", "LoRA on an untied head", "trainable tokens"):
            with pytest.raises(el.VocabularyError, match=r"PEFT adapts"):
                el.vocab.add_tokens(model, 3)
            assert all(torch.equal(each, before[key]) for key, each in model.state_dict().items())
            model = model.merge_and_unload()
        el.vocab.add_tokens(model, 3)
        close(logits_of(model)[..., :VOCAB_SIZE], logits)
