"""A patched model of transformers is the same function, of whatever type it is, and so is one that is resized."""

import copy
import pickle
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from covering import LONG, covering, looped, some
from deferred_heads import deferred
from torch import nn
from torch.overrides import TorchFunctionMode

import embedlayer as el
from embedlayer import CheckpointError, OutputHead, RowAdamW, ShapeError, TokenEmbedding, patch, unpatch

transformers = pytest.importorskip("transformers", reason="the dev extra is not installed")
auto = pytest.importorskip("transformers.models.auto.modeling_auto")

V, D = 99, 16
WIDTHS = dict.fromkeys(["hidden_size", "d_model", "n_embd", "dim", "emb_dim", "embed_dim"], D)
INNER = ["d_ff", "intermediate_size", "encoder_ffn_dim", "decoder_ffn_dim", "ffn_dim", "hidden_dim", "n_inner"]
LAYERS = ["num_layers", "num_hidden_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers"]
LAYERS += ["num_encoder_layers", "num_decoder_layers"]
HEADS = ["num_heads", "num_attention_heads", "n_head", "n_heads", "encoder_attention_heads", "decoder_attention_heads"]
HEADS += ["num_key_value_heads", "num_encoder_attention_heads", "num_decoder_attention_heads"]
LENGTHS = ["max_position_embeddings", "n_positions"]
TINY: dict[str, Any] = {
    **dict.fromkeys(["vocab_size", "decoder_vocab_size", "src_vocab_size", "tgt_vocab_size"], V),
    **WIDTHS,
    **dict.fromkeys(INNER, 24),
    **dict.fromkeys(LAYERS, 2),
    **dict.fromkeys(HEADS, 2),
    **dict.fromkeys(LENGTHS, 64),
    "embedding_size": 8,
    "head_dim": 8,
    "d_kv": 8,
    "attention_window": 4,
    "num_experts": 2,
    "num_local_experts": 2,
    "num_experts_per_tok": 1,
    "pad_token_id": 1,
    "bos_token_id": 2,
    "eos_token_id": 2,
    "forced_eos_token_id": None,
}
"""Every size that configurations of text models have, under the names that they use."""

HEARING = ["audioflamingo3", "glmasr", "granite_speech", "granite_speech_plus", "moss_transcribe_diarize"]
HEARING += ["musicflamingo", "nemo_speechlm", "omniasr", "qwen2_audio", "qwen3_asr", "vibevoice_asr", "voxtral"]
NESTED = ["encoder-decoder", "t5gemma", "t5gemma2", *HEARING, "voxtral_realtime"]
"""Sequence-to-sequence types whose sizes are in configurations of their parts."""

SEQ_TO_SEQ = [kind for kind in auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES if kind not in NESTED]
CAUSAL = ["bart", "bert", "biogpt", "bloom", "cohere", "ctrl", "gemma", "gemma2", "gemma3_text", "gpt2", "gpt_neox"]
CAUSAL += ["granite", "llama", "mamba", "minicpm3", "mistral", "mixtral", "mpt", "olmo2", "opt", "phi3", "qwen3"]
CAUSAL += ["rwkv", "starcoder2", "stablelm", "vaultgemma", "xglm", "xlm"]
MASKED = ["albert", "bert", "deberta-v2", "distilbert", "electra", "fnet", "mobilebert", "modernbert", "mpnet"]
MASKED += ["rembert", "roberta", "xlm-roberta-xl"]
NAMES = {
    "sequence to sequence": auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    "causal": auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "masked": auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
}
CASES = [
    *(("sequence to sequence", kind) for kind in SEQ_TO_SEQ),
    *(("causal", kind) for kind in CAUSAL),
    *(("masked", kind) for kind in MASKED),
]
IDS = torch.randint(3, 90, (2, 8), generator=torch.Generator().manual_seed(0))
IDS[0, 3] = TINY["pad_token_id"]


SMALL: set[tuple[str, str]] = set()
"""What was found to be small: to count parameters takes as long as to build the model."""


def built(task: str, kind: str, **options: object) -> nn.Module:
    base = transformers.CONFIG_MAPPING[kind]()
    sizes = {name: value for name, value in TINY.items() if hasattr(base, name)}
    if kind == "prophetnet":
        del sizes["num_hidden_layers"]  # it refuses that one
    model_class, config = (
        getattr(transformers, NAMES[task][kind]),
        type(base)(**sizes, decoder_start_token_id=2, **options),
    )
    if (task, kind) not in SMALL:
        with torch.device("meta"):
            count = sum(p.numel() for p in model_class(copy.deepcopy(config)).parameters())
        assert count < 5_000_000, f"{kind} has {count:,} parameters: it names its sizes in another way than TINY"
        SMALL.add((task, kind))
    torch.manual_seed(0)
    model = model_class(config)
    with torch.no_grad():  # large enough that a wrong scale, a zeroed padding row or a masked logit shows
        model.get_input_embeddings().weight.normal_(std=0.5)
    return model


def outputs(model: nn.Module, ids: torch.Tensor = IDS) -> dict[str, torch.Tensor]:
    """Logits in evaluation, loss in training, and all gradients."""
    with torch.no_grad():
        logits = model.eval()(input_ids=ids, labels=ids).logits
    torch.manual_seed(5)
    loss = model.train()(input_ids=ids, labels=ids).loss
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"logits": logits, "loss": loss.detach(), **gradients}


def assert_same(ours: nn.Module, theirs: nn.Module, ids: torch.Tensor = IDS) -> None:
    """The logits are the same to the bit, and so are loss and gradients with logits; without logits they are close."""
    expected = outputs(theirs, ids)
    largest = max(tensor.abs().max() for name, tensor in expected.items() if name not in ("logits", "loss"))
    heads = [module for module in ours.modules() if isinstance(module, OutputHead) and module.logits_report is not None]
    precise = expected["loss"].dtype == torch.float32 and next(ours.parameters()).dtype == torch.float32
    if heads:
        found = outputs(ours, ids)
        assert found.keys() == expected.keys()
        assert torch.equal(found["logits"], expected["logits"])
        for name, tensor in expected.items():
            atol = (2e-6 if precise else 2e-2) * max(largest, 1.0)
            torch.testing.assert_close(found[name], tensor, rtol=1e-5 if precise else 2e-2, atol=atol)
        ours.zero_grad()
    reports = [head.logits_report for head in heads]
    for head in heads:
        head.logits_report = None
    found = outputs(ours, ids)
    assert found.keys() == expected.keys()
    assert not [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)]
    for head, report in zip(heads, reports, strict=True):
        head.logits_report = report


def reads_logits(model: nn.Module) -> bool:
    """Whether a training step of a patched model computes its logits."""
    heads = [deferred(module) for module in model.modules() if isinstance(module, OutputHead)]
    model.train()(input_ids=IDS, labels=IDS).loss.backward()
    model.zero_grad()
    is_read = any(head.logits_report.is_done for head in heads)
    return is_read or not isinstance(model.get_output_embeddings(), OutputHead)


WITH_LOGITS = {"fsmt", "prophetnet"}
"""Types of `CASES` that train with logits: one multiplies by its table itself, one smooths labels by log_softmax."""


ALWAYS = [("sequence to sequence", kind) for kind in ("t5", "marian", *sorted(WITH_LOGITS))]
ALWAYS += [("causal", kind) for kind in ("llama", "gemma3_text")] + [("masked", "bert")]
"""Each form of a table and a head; tests/test_all_families.py patches the whole sample."""


@looped("task, kind", some(ALWAYS, CASES))
def test_every_type_of_model_stays_the_same_to_the_bit(task, kind) -> None:
    plain = built(task, kind)
    patched = copy.deepcopy(plain)
    before = dict(patched.named_parameters(remove_duplicate=False))
    kinds = {name: type(module) for name, module in plain.named_modules() if isinstance(module, nn.Embedding)}
    patch(patched)
    weight = patched.get_input_embeddings().weight
    holders = [module for module in patched.modules() if any(p is weight for p in module._parameters.values())]
    assert holders
    assert all(isinstance(module, TokenEmbedding | OutputHead) for module in holders)
    assert isinstance(patched.get_output_embeddings(), TokenEmbedding | OutputHead)
    after = dict(patched.named_parameters(remove_duplicate=False))
    assert list(after) == list(before)
    assert all(after[name] is before[name] for name in before)
    patched.tie_weights()
    after = dict(patched.named_parameters(remove_duplicate=False))
    assert all(after[name] is before[name] for name in before)
    assert list(patched.state_dict()) == list(plain.state_dict())
    assert reads_logits(patched) == (kind in WITH_LOGITS)
    assert_same(patched, plain)
    unpatch(patched)
    assert {name: type(module) for name, module in patched.named_modules() if name in kinds} == kinds
    assert not any(isinstance(module, TokenEmbedding | OutputHead) for module in patched.modules())
    for model in (plain, patched):
        model.zero_grad()
    assert_same(patched, plain)


RESIZED: dict[str, tuple[str, str, dict[str, bool]]] = {
    **{kind: ("sequence to sequence", kind, {}) for kind in ("t5", "bart", "marian", "m2m_100")},
    **{kind: ("causal", kind, {}) for kind in ("gpt2", "llama", "opt", "gemma3_text")},
    "llama, tied": ("causal", "llama", {"tie_word_embeddings": True}),
    "bert": ("masked", "bert", {}),
}
RESIZES = [*product(RESIZED, (120, 64, (100, 64)))]
RESIZES.remove(("marian", (100, 64)))  # which fails without a patch too
FEW = [case for case in RESIZES if case[0] in ("t5", "marian", "gpt2", "llama")]


@looped("name, size", some(covering(FEW), RESIZES))
def test_a_resized_model_agrees_with_the_plain_one_and_with_itself(name, size) -> None:
    task, kind, options = RESIZED[name]
    plain = built(task, kind, **options)
    patched = patch(copy.deepcopy(plain))
    for model in (plain, patched):
        torch.manual_seed(1)
        model.resize_token_embeddings(*(size if isinstance(size, tuple) else (size,)))
    table, head = patched.get_input_embeddings(), patched.get_output_embeddings()
    rows = len(table.weight)
    ids = torch.randint(max(0, rows - 20), rows, (2, 8))
    assert_same(patched, plain, ids)
    assert isinstance(head, OutputHead)
    sizes = (table.vocab_size, table.num_embeddings, head.out_features, head.weight.shape[0])
    assert {*sizes, patched.config.vocab_size, patched.vocab_size} == {rows}
    with pytest.raises(IndexError, match=f"token id {rows} .* table of {rows} rows"):
        table(torch.tensor([[rows]]))
    hidden, targets = torch.randn(5, head.in_features), torch.randint(0, rows, (5,))
    factor = D**-0.5 if kind == "t5" else 1.0  # its model scales the hidden states of a tied head
    expected = nn.functional.cross_entropy(factor * head(hidden), targets)
    torch.testing.assert_close(head.loss(hidden, targets), expected)
    resized = head.weight.clone()
    patched.post_init()  # transformers draws weights that are not marked as initialised
    assert torch.equal(head.weight, resized)
    unpatch(patched)
    assert isinstance(patched.get_output_embeddings(), nn.Linear)
    assert patched.get_input_embeddings().num_embeddings == rows
    assert patched.get_output_embeddings().out_features == rows
    for model in (plain, patched):
        model.zero_grad()
    assert_same(patched, plain, ids)


@pytest.mark.parametrize(("task", "kind"), [("sequence to sequence", "t5"), ("causal", "llama"), ("causal", "gpt2")])
def test_a_patched_model_follows_the_setters_of_transformers(task, kind) -> None:
    plain = built(task, kind)
    patched = patch(copy.deepcopy(plain))
    for model in (plain, patched):
        torch.manual_seed(1)
        model.set_input_embeddings(nn.Embedding(V + 11, D))
        if not model.config.tie_word_embeddings:
            model.set_output_embeddings(nn.Linear(D, V + 11, bias=False))
        model.config.vocab_size = V + 11
        model.tie_weights()
    ids = torch.randint(V, V + 11, (2, 8))
    assert_same(patched, plain, ids)
    patch(patched)
    assert isinstance(patched.get_input_embeddings(), TokenEmbedding)
    assert isinstance(patched.get_output_embeddings(), OutputHead)
    for model in (plain, patched):
        model.zero_grad()
    assert_same(patched, plain, ids)


@pytest.mark.parametrize("kind", some(["t5"], ["t5", "bart"]))
def test_a_sequence_to_sequence_model_is_saved_and_read_as_before(kind, tmp_path) -> None:
    plain = built("sequence to sequence", kind).eval()
    patched = patch(copy.deepcopy(plain))
    ids = IDS.clamp(min=3)
    options = {"max_new_tokens": 6, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    assert torch.equal(patched.generate(ids, **options), plain.generate(ids, **options))
    for name, model in (("plain", plain), ("patched", patched)):
        model.save_pretrained(tmp_path / name)
    for file in (tmp_path / "plain").iterdir():
        assert file.read_bytes() == (tmp_path / "patched" / file.name).read_bytes()
    again = patch(type(plain).from_pretrained(tmp_path / "patched"))
    assert_same(again, plain)


def test_an_encoder_and_a_decoder_with_tables_of_their_own_are_both_replaced() -> None:
    sizes = {"hidden_size": D, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    encoder = transformers.BertConfig(vocab_size=V, **sizes)
    decoder = transformers.BertConfig(vocab_size=50, is_decoder=True, add_cross_attention=True, **sizes)
    config = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    torch.manual_seed(0)
    plain = transformers.EncoderDecoderModel(config)
    patched = patch(copy.deepcopy(plain))
    tables = [module.vocab_size for module in patched.modules() if isinstance(module, TokenEmbedding)]
    assert sorted(tables) == [50, V]
    ids = IDS.clamp(max=49)
    for model in (plain, patched):
        torch.manual_seed(2)
        model.train()(input_ids=IDS, decoder_input_ids=ids).logits.square().mean().backward()
    found, expected = (dict(model.named_parameters()) for model in (patched, plain))
    assert all(torch.equal(found[name].grad, p.grad) for name, p in expected.items() if p.grad is not None)
    assert torch.equal(
        patched.eval()(IDS, decoder_input_ids=ids).logits, plain.eval()(IDS, decoder_input_ids=ids).logits
    )


ROW_SPARSE = [
    ("causal", "llama", {}),
    ("causal", "gemma", {"tie_word_embeddings": False}),
    pytest.param("causal", "gpt2", {"tie_word_embeddings": False}, marks=LONG),
    pytest.param("causal", "opt", {"tie_word_embeddings": False}, marks=LONG),
]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 6) -> list[torch.Tensor]:
    """A few steps on batches of which each has other tokens, and a schedule."""
    losses, generator = [], torch.Generator().manual_seed(3)
    model.train()
    for number in range(steps):
        torch.manual_seed(number)
        ids = torch.randint(3, 90, (2, 6), generator=generator)
        ids[0, 2] = TINY["pad_token_id"]
        optimizer.param_groups[0]["lr"] = 0.02 / (number + 1)
        optimizer.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


class UnroundedLogits(TorchFunctionMode):
    """Leaves logits in float64 where transformers rounds them to float32, which Adam can turn into a step."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.float and args[0].dtype == torch.float64 and args[0].shape[-1:] == (V,):
            return args[0]
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("task", "kind", "options"), ROW_SPARSE)
def test_a_row_sparse_model_trains_and_is_saved_as_the_plain_one(task, kind, options, tmp_path) -> None:
    plain = built(task, kind, **options).double()
    patched = patch(copy.deepcopy(plain), row_sparse=True)
    table = patched.get_input_embeddings()
    assert table.row_sparse
    optimizer = RowAdamW(patched.parameters(), lr=0.02, weight_decay=0.1)
    losses = train(patched, optimizer)
    assert table.weight.grad.is_sparse
    with UnroundedLogits():
        expected = train(plain, torch.optim.AdamW(plain.parameters(), lr=0.02, weight_decay=0.1))
    torch.testing.assert_close(torch.stack(losses), torch.stack(expected), atol=1e-6, rtol=0)
    patched.save_pretrained(tmp_path)
    again = type(plain).from_pretrained(tmp_path, dtype=torch.float64)
    twin = unpatch(copy.deepcopy(patched))
    unpatch(patched)
    wanted = dict(plain.named_parameters())
    for model in (again, twin, patched):
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter, wanted[name], atol=1e-6, rtol=0, msg=name)
    patched.zero_grad()
    patched(input_ids=IDS, labels=IDS).loss.backward()
    assert not patched.get_input_embeddings().weight.grad.is_sparse


@pytest.mark.parametrize(("task", "kind"), [("causal", "gpt2"), ("sequence to sequence", "t5"), ("masked", "bert")])
def test_row_sparse_look_ups_of_a_tied_weight_are_refused(task, kind) -> None:
    model = built(task, kind)
    kinds = [type(module) for module in model.modules()]
    with pytest.raises(CheckpointError, match="shares the table's weight.*tie_word_embeddings=False"):
        patch(model, row_sparse=True)
    assert [type(module) for module in model.modules()] == kinds
    with pytest.raises(CheckpointError, match="patched already: unpatch it first"):
        patch(patch(model), row_sparse=True)


def test_a_row_sparse_model_is_resized_with_its_pending_updates() -> None:
    plain = built("causal", "llama").double()
    patched = patch(copy.deepcopy(plain), row_sparse=True)
    optimizer = RowAdamW(patched.parameters(), lr=0.02)
    train(patched, optimizer)
    train(plain, torch.optim.AdamW(plain.parameters(), lr=0.02, weight_decay=0.01))
    for model in (plain, patched):
        torch.manual_seed(1)
        model.resize_token_embeddings(120, mean_resizing=False)
    ours, theirs = (model.get_input_embeddings().weight for model in (patched, plain))
    torch.testing.assert_close(ours[:V], theirs[:V], atol=1e-6, rtol=0)
    with pytest.raises(ShapeError, match="Build the optimizer again after resizing"):
        train(patched, optimizer, steps=1)
    train(patched, RowAdamW(patched.parameters(), lr=0.02), steps=2)


HOOKS = {
    "forward pre": lambda module, called: module.register_forward_pre_hook(lambda *_: called.append(1)),
    "forward pre, with kwargs": lambda module, called: module.register_forward_pre_hook(
        lambda *_: called.append(1), with_kwargs=True
    ),
    "forward": lambda module, called: module.register_forward_hook(lambda *_: called.append(1)),
    "forward, with kwargs": lambda module, called: module.register_forward_hook(
        lambda *_: called.append(1), with_kwargs=True
    ),
    "forward, always called": lambda module, called: module.register_forward_hook(
        lambda *_: called.append(1), always_call=True
    ),
    "backward": lambda module, called: module.register_full_backward_hook(lambda *_: called.append(1)),
    "backward pre": lambda module, called: module.register_full_backward_pre_hook(lambda *_: called.append(1)),
    "state dict": lambda module, called: module.register_state_dict_post_hook(lambda *_: called.append(1)),
    "state dict pre": lambda module, called: module.register_state_dict_pre_hook(lambda *_: called.append(1)),
    "load pre": lambda module, called: module.register_load_state_dict_pre_hook(lambda *_: called.append(1)),
    "load post": lambda module, called: module.register_load_state_dict_post_hook(lambda *_: called.append(1)),
}


@looped("hook", some(["forward", "backward", "state dict", "load pre"], HOOKS))
@pytest.mark.filterwarnings("ignore:Full backward hook is firing when gradients are computed")
def test_hooks_of_every_kind_go_along_and_can_be_removed(hook) -> None:
    def count() -> int:
        called.clear()
        model(input_ids=IDS, labels=IDS).loss.backward()
        model.load_state_dict(model.state_dict())
        return len(called)

    called: list[int] = []
    model = built("causal", "llama").train()
    handles = [HOOKS[hook](part, called) for part in (model.model.embed_tokens, model.lm_head)]
    expected = count()
    assert expected
    patch(model)
    assert count() == expected
    later = HOOKS[hook](model.model.embed_tokens, called)
    assert count() > expected
    unpatch(model)
    assert count() > expected
    later.remove()
    assert count() == expected
    for handle in handles:
        handle.remove()
    assert count() == 0


def test_a_forward_of_its_own_and_a_look_up_that_does_more_are_refused() -> None:
    model = built("causal", "llama")
    model.model.embed_tokens.forward = model.model.embed_tokens.forward
    with pytest.raises(CheckpointError, match="whose forward has been replaced"):
        patch(model)
    assert type(model.lm_head) is nn.Linear

    class Scaled(nn.Embedding):
        embed_scale = 2.0

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return super().forward(ids) * self.embed_scale + 1

    model.model.embed_tokens = Scaled(V, D)
    with pytest.raises(CheckpointError, match="What a Scaled does beyond look-up and scale is unknown"):
        patch(model)
    assert type(model.lm_head) is nn.Linear


KINDS = [("causal", "gpt2"), ("causal", "llama"), ("causal", "gemma"), ("masked", "bert")]
KINDS += [("sequence to sequence", "t5"), ("sequence to sequence", "mbart")]


def checkpointed(model: nn.Module) -> nn.Module:
    enable = getattr(model, "activation_checkpointing_enable", None)  # transformers 5.23
    (enable or model.gradient_checkpointing_enable)()
    return model


OPERATIONS = {
    "bfloat16": lambda model: model.to(torch.bfloat16),
    "a copy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "gradient checkpointing": checkpointed,
    "frozen": lambda model: model.requires_grad_(False).requires_grad_(True),
}


@looped("model, operation", KINDS, OPERATIONS)
def test_what_is_done_to_a_model_may_be_done_to_a_patched_one(model, operation) -> None:
    task, kind = model
    plain = built(task, kind)
    plain, patched = (OPERATIONS[operation](model) for model in (plain, patch(copy.deepcopy(plain))))
    assert_same(patched, plain)


def with_table(table: str, tie_word_embeddings: bool) -> Any:
    """A patched LLaMA with a kind of table."""
    model = patch(built("causal", "llama", tie_word_embeddings=tie_word_embeddings), row_sparse=table == "row-sparse")
    if table == "new rows":
        el.vocab.add_tokens(model, 2, train_only_new=True)
    if table in ("int8", "rank=8"):
        model = el.compress.replace_table(model, el.compress.compress_table(model.get_input_embeddings(), table))
    return model.eval()


CALLS_OF_TRANSFORMERS: dict[str, Callable[[Any, Path], object]] = {
    "tie_weights": lambda model, _: model.tie_weights(),
    "resize_token_embeddings": lambda model, _: model.resize_token_embeddings(V + 2),
    "input_embeddings": lambda model, _: model.set_input_embeddings(model.get_input_embeddings()),
    "output_embeddings": lambda model, _: model.set_output_embeddings(model.get_output_embeddings()),
    "save_pretrained": lambda model, folder: model.save_pretrained(folder),
    "state_dict": lambda model, _: model.load_state_dict(model.state_dict()),
    "num_parameters": lambda model, _: model.num_parameters(exclude_embeddings=True),
    "get_memory_footprint": lambda model, _: model.get_memory_footprint(),
    "input gradients": lambda model, _: (model.enable_input_require_grads(), model(IDS)),
    "checkpointing": lambda model, _: checkpointed(model.train())(input_ids=IDS, labels=IDS).loss.backward(),
    "assistant": lambda model, _: model.generate(IDS[:1], assistant_model=copy.deepcopy(model), max_new_tokens=3),
    "to": lambda model, _: model.to("cpu", torch.float32),
    "half": lambda model, _: model.half().float(),
    "bfloat16": lambda model, _: model.bfloat16()(IDS),
    "train": lambda model, _: model.train(),
    "deepcopy": lambda model, _: copy.deepcopy(model)(IDS),
}
"""What transformers and its users call on a model."""

CANNOT = {
    ("new rows", "resize_token_embeddings"): "merge_rows",
    ("int8", "resize_token_embeddings"): "before its table is compressed",
    ("rank=8", "resize_token_embeddings"): "before its table is compressed",
    ("int8", "save_pretrained"): "embedlayer.compress.save_model",
    ("rank=8", "save_pretrained"): "embedlayer.compress.save_model",
}
"""What a table has no weight for, and what the error says."""


@pytest.mark.filterwarnings("ignore")
@looped(
    "table, tied, call",
    ["dense", "row-sparse", "new rows", "int8", "rank=8"],
    [True, False],
    CALLS_OF_TRANSFORMERS,
    pairs=["table, call"],
)
def test_what_transformers_calls_works_with_every_table(table, tied, call, tmp_path, unchecked) -> None:
    model = with_table(table, tied and table != "row-sparse")
    before = model(IDS).logits.detach().clone()
    if (table, call) in CANNOT:
        with pytest.raises(CheckpointError, match=CANNOT[table, call]):
            CALLS_OF_TRANSFORMERS[call](model, tmp_path)
    else:
        CALLS_OF_TRANSFORMERS[call](model, tmp_path)
    rounding = {"half": 1e-2, "bfloat16": 1e-1}.get(call, 1e-5)
    after = model.eval()(IDS).logits.detach()[..., : before.shape[-1]].float()
    torch.testing.assert_close(after, before, rtol=0, atol=rounding)


@looped("task, kind", [case for case in KINDS if case[0] != "masked"])
def test_greedy_decoding_with_a_cache_gives_the_same_tokens(task, kind) -> None:
    plain = built(task, kind).eval()
    patched = patch(copy.deepcopy(plain))
    ids = IDS.clamp(min=3)
    options = {"max_new_tokens": 6, "do_sample": False, "attention_mask": torch.ones_like(ids), "use_cache": True}
    assert torch.equal(patched.generate(ids, **options), plain.generate(ids, **options))
