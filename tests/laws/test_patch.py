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
from model_families import few_layers
from tiny_models import SAMPLE, VOCAB, build
from torch import nn
from torch.overrides import TorchFunctionMode

import embedlayer as el
from embedlayer import CheckpointError, OutputHead, RowAdamW, ShapeError, TokenEmbedding, patch, unpatch

transformers = pytest.importorskip("transformers", reason="the dev extra is not installed")

SEQ2SEQ = [("seq2seq", kind) for kind in ("t5", "bart", "marian", "m2m_100", "fsmt", "prophetnet")]
CAUSAL = [("causal", kind) for kind in (*SAMPLE["causal"], "gemma", "gemma2", "cohere", "rwkv", "xlm", "ctrl")]
MASKED = [("masked", kind) for kind in (*SAMPLE["masked"], "mobilebert", "albert", "fnet")]
IDS = torch.randint(3, 90, (2, 8), generator=torch.Generator().manual_seed(0))
IDS[0, 3] = 1  # padding, in some types


@pytest.fixture(autouse=True)
def two_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    few_layers(monkeypatch)


def built(task: str, kind: str, **options: object) -> nn.Module:
    settings = {"decoder_start_token_id": 2} if task == "seq2seq" else {}
    model = build(kind, task, settings | options)[1]
    model.config.use_cache = True
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
"""Types that train with logits: one multiplies by its table itself, one smooths labels by log_softmax."""

ALWAYS = [("seq2seq", kind) for kind in ("t5", "marian", *sorted(WITH_LOGITS))]
ALWAYS += [("causal", "llama"), ("causal", "gemma3_text"), ("masked", "bert")]
"""Each form of a table and a head."""


@looped("task, kind", some(ALWAYS, SEQ2SEQ + CAUSAL + MASKED))
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
    **{kind: ("seq2seq", kind, {}) for kind in ("t5", "bart", "marian", "m2m_100")},
    **{kind: ("causal", kind, {}) for kind in ("gpt2", "llama", "opt", "gemma3_text")},
    "llama, tied": ("causal", "llama", {"tie_word_embeddings": True}),
    "bert": ("masked", "bert", {}),
}
RESIZES = [*product(RESIZED, (150, 64, (140, 64)))]
RESIZES.remove(("marian", (140, 64)))  # which fails without a patch too
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
    factor = head.in_features**-0.5 if kind == "t5" else 1.0  # its model scales the hidden states of a tied head
    bias = getattr(patched, "final_logits_bias", 0.0)  # which it adds behind the head
    expected = nn.functional.cross_entropy(factor * head(hidden) + bias, targets)
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


@pytest.mark.parametrize(("task", "kind"), [("seq2seq", "t5"), ("causal", "llama"), ("causal", "gpt2")])
def test_a_patched_model_follows_the_setters_of_transformers(task, kind) -> None:
    plain = built(task, kind)
    patched = patch(copy.deepcopy(plain))
    width = plain.get_input_embeddings().embedding_dim
    for model in (plain, patched):
        torch.manual_seed(1)
        model.set_input_embeddings(nn.Embedding(VOCAB + 11, width))
        if not model.config.tie_word_embeddings:
            model.set_output_embeddings(nn.Linear(width, VOCAB + 11, bias=False))
        model.config.vocab_size = VOCAB + 11
        model.tie_weights()
    ids = torch.randint(VOCAB, VOCAB + 11, (2, 8))
    assert_same(patched, plain, ids)
    patch(patched)
    assert isinstance(patched.get_input_embeddings(), TokenEmbedding)
    assert isinstance(patched.get_output_embeddings(), OutputHead)
    for model in (plain, patched):
        model.zero_grad()
    assert_same(patched, plain, ids)


SAVED = [("seq2seq", "t5"), ("causal", "gpt2"), ("causal", "gemma")]


@pytest.mark.parametrize(("task", "kind"), some(SAVED, [*SAVED, ("seq2seq", "bart"), ("causal", "opt")]))
def test_a_patched_model_generates_and_is_saved_as_before(task, kind, tmp_path) -> None:
    plain = built(task, kind).eval()
    patched = patch(copy.deepcopy(plain))
    ids = IDS.clamp(min=3)
    options = {"max_new_tokens": 6, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    assert torch.equal(patched.generate(ids, **options), plain.generate(ids, **options))
    for name, model in (("plain", plain), ("patched", patched)):
        model.save_pretrained(tmp_path / name)
    for file in (tmp_path / "plain").iterdir():
        assert file.read_bytes() == (tmp_path / "patched" / file.name).read_bytes()
    again = patch(type(plain).from_pretrained(tmp_path / "patched", attn_implementation="eager"))
    assert_same(again, plain)


def test_an_encoder_and_a_decoder_with_tables_of_their_own_are_both_replaced() -> None:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    encoder = transformers.BertConfig(vocab_size=VOCAB, **sizes)
    decoder = transformers.BertConfig(vocab_size=50, is_decoder=True, add_cross_attention=True, **sizes)
    config = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    torch.manual_seed(0)
    plain = transformers.EncoderDecoderModel(config)
    patched = patch(copy.deepcopy(plain))
    tables = [module.vocab_size for module in patched.modules() if isinstance(module, TokenEmbedding)]
    assert sorted(tables) == [50, VOCAB]
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
        ids[0, 2] = 1
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
        if func is torch.Tensor.float and args[0].dtype == torch.float64 and args[0].shape[-1:] == (VOCAB,):
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


@pytest.mark.parametrize(("task", "kind"), [("causal", "gpt2"), ("seq2seq", "t5"), ("masked", "bert")])
def test_row_sparse_look_ups_of_a_tied_weight_are_refused(task, kind) -> None:
    model = built(task, kind)
    kinds = [type(module) for module in model.modules()]
    with pytest.raises(CheckpointError, match="shares the table's weight"):
        patch(model, row_sparse=True)
    assert [type(module) for module in model.modules()] == kinds
    with pytest.raises(CheckpointError, match="unpatch it first"):
        patch(patch(model), row_sparse=True)


def test_a_row_sparse_model_is_resized_with_its_pending_updates() -> None:
    plain = built("causal", "llama").double()
    patched = patch(copy.deepcopy(plain), row_sparse=True)
    optimizer = RowAdamW(patched.parameters(), lr=0.02)
    train(patched, optimizer)
    train(plain, torch.optim.AdamW(plain.parameters(), lr=0.02, weight_decay=0.01))
    for model in (plain, patched):
        torch.manual_seed(1)
        model.resize_token_embeddings(150, mean_resizing=False)
    ours, theirs = (model.get_input_embeddings().weight for model in (patched, plain))
    torch.testing.assert_close(ours[:VOCAB], theirs[:VOCAB], atol=1e-6, rtol=0)
    with pytest.raises(ShapeError, match="Build the optimizer again after resizing"):
        train(patched, optimizer, steps=1)
    train(patched, RowAdamW(patched.parameters(), lr=0.02), steps=2)


HOOKS = ["forward_pre_hook", "forward_hook", "full_backward_hook", "full_backward_pre_hook", "state_dict_post_hook"]
HOOKS += ["state_dict_pre_hook", "load_state_dict_pre_hook", "load_state_dict_post_hook"]


@looped("hook", HOOKS)
@pytest.mark.filterwarnings("ignore:Full backward hook is firing when gradients are computed")
def test_hooks_of_every_kind_go_along_and_can_be_removed(hook) -> None:
    def add(part: nn.Module) -> Any:
        return getattr(part, f"register_{hook}")(lambda *_: called.append(1))

    def count() -> int:
        called.clear()
        model(input_ids=IDS, labels=IDS).loss.backward()
        model.load_state_dict(model.state_dict())
        return len(called)

    called: list[int] = []
    model = built("causal", "llama").train()
    handles = [add(part) for part in (model.model.embed_tokens, model.lm_head)]
    expected = count()
    assert expected
    patch(model)
    assert count() == expected
    later = add(model.model.embed_tokens)
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
    with pytest.raises(CheckpointError, match="replaced forward"):
        patch(model)
    assert type(model.lm_head) is nn.Linear

    class Scaled(nn.Embedding):
        embed_scale = 2.0

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return super().forward(ids) * self.embed_scale + 1

    model.model.embed_tokens = Scaled(VOCAB, model.config.hidden_size)
    with pytest.raises(CheckpointError, match="What a Scaled does beyond look-up and scale is unknown"):
        patch(model)
    assert type(model.lm_head) is nn.Linear


KINDS = [("causal", "gpt2"), ("causal", "llama"), ("causal", "gemma"), ("masked", "bert")]
KINDS += [("seq2seq", "t5"), ("seq2seq", "mbart")]


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
    "resize_token_embeddings": lambda model, _: model.resize_token_embeddings(VOCAB + 2),
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
