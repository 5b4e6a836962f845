"""A patched model trains without logits, in the ways in which models of transformers are trained."""

import copy
import logging
import warnings
from itertools import product
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from covering import LONG, cases, some
from deferred_heads import is_unread
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from embedlayer import CheckpointError, OutputHead, SizeError, StaleRowsError, patch, token_log_probs, unpatch
from embedlayer.vocab.operations import edit_vocabulary

transformers = pytest.importorskip("transformers", reason="the dev extra is not installed")

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning")  # in peft

V, B, T = 97, 3, 10
LLAMA = {"vocab_size": V, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
KINDS = {
    "untied": ("LlamaForCausalLM", "LlamaConfig", LLAMA),
    "tied": ("LlamaForCausalLM", "LlamaConfig", {**LLAMA, "tie_word_embeddings": True}),
    "soft cap": ("Gemma2ForCausalLM", "Gemma2Config", {**LLAMA, "num_key_value_heads": 1, "head_dim": 8}),
    "scale": ("CohereForCausalLM", "CohereConfig", {**LLAMA, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}),
    "masked": ("BertForMaskedLM", "BertConfig", LLAMA),
    "bias of the model": (
        "BartForConditionalGeneration",
        "BartConfig",
        {"vocab_size": V, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 24}
        | {"decoder_ffn_dim": 24, "encoder_attention_heads": 2, "decoder_attention_heads": 2},
    ),
}
CAUSAL = ["untied", "tied", "soft cap", "scale"]


def built(kind: str, dtype: torch.dtype = torch.float32, **changes: Any) -> nn.Module:
    torch.manual_seed(0)
    model, config, options = KINDS[kind]
    made = getattr(transformers, model)(getattr(transformers, config)(**{**options, **changes})).to(dtype).eval()
    with torch.no_grad():
        made.get_input_embeddings().weight.normal_(std=0.5)
        if hasattr(made, "final_logits_bias"):
            made.final_logits_bias.normal_()
    return made


def batch(**more: Any) -> dict[str, Any]:
    ids = torch.randint(3, V, (B, T), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[:, 3] = -100
    return {"input_ids": ids, "labels": labels, **more}


def reports(model: nn.Module) -> Any:
    """The report of all heads of a model, from now on."""
    report, *_ = (module.logits_report for module in model.modules() if isinstance(module, OutputHead))
    report.is_done = False
    return report


def gradients(model: nn.Module) -> dict[str, Tensor]:
    found = {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}
    model.zero_grad()
    return found


def float64_loss(
    logits: Tensor, labels: Tensor, vocab_size: int, num_items_in_batch: Any = None, token_weights: Any = None, **others
):
    """The loss of transformers' `loss_utils.py`, without rounding logits to float32; weighted with `token_weights`."""
    if token_weights is None:
        token_weights = torch.ones(labels.shape)
    if others.get("shift_labels") is None:
        token_weights = F.pad(token_weights, (0, 1))[..., 1:]
    if others.get("shift_labels") is None:
        labels = F.pad(labels, (0, 1), value=-100)[..., 1:]
    else:
        labels = others["shift_labels"]
    losses = F.cross_entropy(logits.view(-1, vocab_size), labels.reshape(-1), reduction="none")
    loss = (losses * token_weights.reshape(-1).where(labels.reshape(-1) != -100, 0)).sum()
    return loss / ((labels != -100).sum() if num_items_in_batch is None else num_items_in_batch)


ARGUMENTS = {
    "labels": {},
    "number of items": {"num_items_in_batch": 13},
    "number of items as a tensor": {"num_items_in_batch": torch.tensor(13)},
    "shifted labels": {"shift_labels": torch.arange(B * T).view(B, T)},
}
WEIGHTS = torch.linspace(-1, 2, B * T).view(B, T)
WEIGHTS[:, 3] = torch.nan  # of a label that is ignored
ARGUMENTS |= {
    "weights": {"token_weights": WEIGHTS.bfloat16()},
    "weights, number of items": {"token_weights": WEIGHTS, "num_items_in_batch": torch.tensor(13)},
    "weights, shifted labels": {"token_weights": WEIGHTS.nan_to_num(0.5)} | ARGUMENTS["shifted labels"],
}


@cases("kind, name", CAUSAL, ARGUMENTS)
def test_the_gradients_are_those_of_a_cross_entropy_in_float64(kind, name) -> None:
    plain: Any = built(kind, torch.float64)
    patched = patch(copy.deepcopy(plain))
    report, inputs = reports(patched), batch(**ARGUMENTS[name])
    ours = patched(**inputs).loss
    if "token_weights" not in inputs:
        torch.testing.assert_close(ours.double(), plain(**inputs).loss.double(), rtol=1e-6, atol=0)
    plain.loss_function = float64_loss
    exact = plain(**inputs).loss
    exact.backward()
    ours.backward()
    torch.testing.assert_close(ours, exact, rtol=1e-12, atol=0)
    torch.testing.assert_close(gradients(patched), gradients(plain), rtol=1e-10, atol=1e-14)
    assert not report.is_done


@cases("kind, dtype", KINDS, [torch.bfloat16, "autocast"])
def test_in_bfloat16_it_is_no_worse_than_the_plain_model(kind, dtype) -> None:
    stored = torch.float32 if dtype == "autocast" else dtype
    plain = built(kind, stored)
    patched, truth = patch(copy.deepcopy(plain)), copy.deepcopy(plain).float()
    report, errors = reports(patched), []
    truth(**batch()).loss.backward()
    exact = gradients(truth)
    for model in (plain, patched):
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "autocast"):
            outputs = model(**batch())
        outputs.loss.backward()
        errors.append({name: (each.float() - exact[name]).norm() for name, each in gradients(model).items()})
    theirs, ours = (torch.stack(list(each.values())).norm() for each in errors)
    assert ours <= 1.2 * theirs  # their ratio was 0.8 to 1.15 over seeds
    assert not report.is_done


@pytest.mark.parametrize("kind", KINDS)
def test_the_output_looks_as_before(kind) -> None:
    plain = built(kind)
    patched = patch(copy.deepcopy(plain))
    report = reports(patched)
    theirs, ours = plain(**batch()), patched(**batch())
    assert not report.is_done
    assert is_unread(ours.logits)
    assert list(ours) == list(theirs)
    assert ours.logits.shape == theirs.logits.shape
    assert torch.equal(ours.logits, theirs.logits)
    assert torch.equal(ours.to_tuple()[1], theirs.to_tuple()[1])
    assert torch.equal(patched(**batch(), return_dict=False)[1], theirs.logits)
    assert report.is_done
    assert type(unpatch(patched)(**batch()).logits) is Tensor


@pytest.mark.parametrize("kind", CAUSAL)
def test_some_logits_are_kept(kind) -> None:
    plain = built(kind)
    patched = patch(copy.deepcopy(plain))
    report = reports(patched)
    inputs = {"input_ids": batch()["input_ids"], "logits_to_keep": 4}
    assert torch.equal(patched(**inputs).logits, plain(**inputs).logits)
    inputs["shift_labels"] = inputs["labels"] = batch()["labels"][:, -4:].contiguous()
    report.is_done = False
    torch.testing.assert_close(patched(**inputs).loss, plain(**inputs).loss, rtol=1e-6, atol=0)
    assert not report.is_done


NUMBERS: dict[str, dict[str, Any]] = {
    "a mean": {},
    "a number": {"num_items_in_batch": 4},
    "0 items": {"num_items_in_batch": 0},
    "a tensor of 0": {"num_items_in_batch": torch.tensor(0)},
}
IGNORED: dict[str, dict[str, Any]] = {
    "labels": {},
    "shifted labels": {"shift_labels": torch.full((B, T), -100)},
    "weights": {"token_weights": WEIGHTS},
}


@cases("kind, number, name", KINDS, NUMBERS, IGNORED)
def test_labels_that_are_all_ignored_give_the_loss_and_the_gradients_of_the_plain_model(kind, number, name) -> None:
    """The first window of an accumulated step has labels, so gradients are those of that one."""
    if kind not in CAUSAL and name != "labels":
        pytest.skip("an option of causal models")
    plain: Any = built(kind, torch.float64)
    patched = patch(copy.deepcopy(plain))
    ignored = batch(**NUMBERS[number])
    ignored["labels"] = torch.full_like(ignored["labels"], -100)
    losses = []
    for model, more in ((plain, {}), (patched, IGNORED[name])):
        model(**batch()).loss.backward()
        losses.append(model(**ignored, **more).loss)
        losses[-1].backward()
    torch.testing.assert_close(losses[0].double(), losses[1].double(), equal_nan=True)
    found = gradients(patched)
    assert all(bool(each.isfinite().all()) for each in found.values())
    torch.testing.assert_close(found, gradients(plain), rtol=1e-5, atol=1e-7)


def test_hooks_on_head_and_model_read_the_plain_logits(caplog) -> None:
    caplog.set_level(logging.INFO, "embedlayer")
    plain = built("soft cap")
    patched, seen = patch(copy.deepcopy(plain)), []
    expected = plain(**batch())
    patched.lm_head.register_forward_hook(lambda module, args, output: seen.append(output.detach().clone()))
    ours = patched(**batch())
    (logits,) = seen
    assert torch.equal(torch.tanh(logits / 30) * 30, expected.logits)
    torch.testing.assert_close(ours.loss, expected.loss)
    for outputs in (expected, ours):
        outputs.loss.backward()
    torch.testing.assert_close(gradients(patched), gradients(plain))
    (record,) = [record for record in caplog.records if record.name.startswith("embedlayer")]
    assert record.getMessage().startswith("Gemma2ForCausalLM: torch.Tensor.detach reads the logits")


def test_a_loss_of_the_callers_own_on_the_logits() -> None:
    plain = built("soft cap")
    patched = patch(copy.deepcopy(plain))
    report, inputs, found = reports(patched), batch(), []
    labels = inputs.pop("labels")
    for model in (plain, patched):
        logits = model(**inputs).logits
        loss = nn.CrossEntropyLoss(label_smoothing=0.1)(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())
        loss.backward()
        found.append((loss.detach(), gradients(model)))
    assert not report.is_done
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-6)
    for model in (plain, patched):  # and a regulariser beside the loss
        outputs = model(**inputs, labels=labels)
        (outputs.loss + 1e-2 * outputs.logits.logsumexp(-1).square().mean()).backward()
    torch.testing.assert_close(gradients(patched), gradients(plain), rtol=1e-4, atol=1e-6)


def test_logits_are_read_before_the_optimizer_steps() -> None:
    patched = patch(built("tied"))
    outputs, read = patched(**batch()), patched(**batch())
    before = read.logits.detach()
    outputs.loss.backward()
    torch.optim.AdamW(patched.parameters(), lr=0.1).step()
    assert torch.equal(read.logits, before)
    with pytest.raises(StaleRowsError, match=r"Use them before optimizer.step\(\)"):
        print(outputs.logits)


# PEFT


def with_lora(model: nn.Module, **options: Any) -> nn.Module:
    peft = pytest.importorskip("peft", reason="the dev extra is not installed")
    torch.manual_seed(5)
    config = peft.LoraConfig(r=3, lora_alpha=6, **{"init_lora_weights": False, **options})
    with warnings.catch_warnings():  # that the head of a tied model does not follow: here it does
        warnings.filterwarnings("ignore", message=".*tie_word_embeddings=True.*")
        warnings.filterwarnings("ignore", message=".*but no tied modules are added.*")
        return peft.get_peft_model(model, config)


ADAPTERS = {
    "attention": ("tied", {"target_modules": ["q_proj", "v_proj"]}, False),
    "table": ("untied", {"target_modules": ["embed_tokens"]}, False),
    "head": ("untied", {"target_modules": ["lm_head", "q_proj"]}, True),
    "all linear": ("tied", {"target_modules": "all-linear"}, False),
    "copies of table and head": (
        "untied",
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "embed_tokens"]},
        False,
    ),
}


@pytest.mark.parametrize("name", some(["table", "head", "copies of table and head"], ADAPTERS))
def test_lora_trains_as_on_the_plain_model(name) -> None:
    kind, options, reads = ADAPTERS[name]
    plain = built(kind)
    patched = with_lora(patch(copy.deepcopy(plain)), **options)
    plain = with_lora(plain, **options)
    report, found = reports(patched), []
    for model in (plain, patched):
        loss = model(**batch()).loss
        loss.backward()
        found.append((loss.detach(), gradients(model)))
    assert report.is_done == reads
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=2e-6)


def adapted_gradients(logits_of: Any, lora: Any, hidden: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
    loss = F.cross_entropy(logits_of(hidden)[:, :-1].reshape(-1, V), targets[:, 1:].reshape(-1))
    parts = (hidden, lora.lora_embedding_A["default"], lora.lora_embedding_B["default"])
    return loss.detach(), *torch.autograd.grad(loss, parts)


@pytest.mark.filterwarnings("ignore:Model with `tie_word_embeddings=True`")
def test_a_tied_head_trains_the_lora_of_its_table_without_logits() -> None:
    patched = with_lora(patch(built("tied", torch.float64)), target_modules=["embed_tokens"]).double()
    head = patched.get_output_embeddings()
    report, lora = reports(patched), patched.get_input_embeddings()
    hidden, targets = torch.randn(B, T, 16, dtype=torch.float64, requires_grad=True), batch()["input_ids"]
    assert is_unread(head(hidden))
    ours = adapted_gradients(head, lora, hidden, targets)
    assert not report.is_done

    def plain(x: Tensor) -> Tensor:
        return x @ (lora.base_layer.weight + lora.get_delta_weight("default")).T

    torch.testing.assert_close(ours, adapted_gradients(plain, lora, hidden, targets), rtol=1e-10, atol=1e-12)
    with torch.no_grad():  # deferred logits have the adapters of the forward pass
        deferred, expected = head(hidden), plain(hidden)
        with patched.disable_adapter():
            torch.testing.assert_close(deferred + 0, expected, rtol=1e-10, atol=1e-12)
            torch.testing.assert_close(head(hidden) + 0, hidden @ head.weight.T)
        later = head(hidden)
        patched.merge_adapter()
        with pytest.raises(StaleRowsError):
            later.sum()


# Trainers


def trainer(model: nn.Module, folder: Any, **options: Any) -> Any:
    pytest.importorskip("accelerate", reason="the interop group is not installed")
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(3, V, (8, T))]
    for row in rows[::3]:
        row["labels"] = row["labels"].index_fill(0, torch.tensor([1, 4]), -100)
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=2,
        per_device_train_batch_size=2,
        optim="sgd",
        learning_rate=0.1,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        save_strategy="no",
        **{name: value for name, value in options.items() if name != "compute_metrics"},
    )
    return transformers.Trainer(
        model=model,
        args=arguments,
        train_dataset=rows,
        eval_dataset=rows,
        compute_metrics=options.get("compute_metrics"),
    )


def accuracy(prediction: Any) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


@pytest.mark.parametrize(
    ("options", "reads"),
    [
        pytest.param({"gradient_accumulation_steps": 2}, False, marks=LONG),
        ({"gradient_accumulation_steps": 2, "gradient_checkpointing": True, "bf16": True}, False),
        ({"compute_metrics": accuracy}, True),
        pytest.param({"label_smoothing_factor": 0.1}, True, marks=LONG),
    ],
    ids=["accumulation", "checkpointing and bfloat16", "metrics", "label smoothing"],
)
@pytest.mark.filterwarnings("ignore:.*use_reentrant.*:UserWarning")
def test_the_trainer_trains_and_evaluates_as_on_the_plain_model(options, reads, tmp_path) -> None:
    plain = built("untied")
    patched, results = patch(copy.deepcopy(plain)), []
    report = reports(patched)
    for model in (plain, patched):
        torch.manual_seed(2)
        runner = trainer(model, tmp_path, **options)
        loss = runner.train().training_loss
        metrics = {name: value for name, value in runner.evaluate().items() if "loss" in name or "accuracy" in name}
        results.append((loss, metrics, {name: each.detach() for name, each in model.named_parameters()}))
    assert report.is_done == reads
    rough = "bf16" in options
    torch.testing.assert_close(results[1], results[0], rtol=1e-2 if rough else 1e-5, atol=1e-2 if rough else 1e-5)


def test_accelerate_prepares_a_patched_model() -> None:
    accelerate = pytest.importorskip("accelerate", reason="the interop group is not installed")
    accelerator = accelerate.Accelerator(mixed_precision="bf16", cpu=True)
    patched = patch(built("soft cap"))
    report = reports(patched)
    model, optimizer = accelerator.prepare(patched, torch.optim.SGD(patched.parameters(), lr=0.1))
    outputs = model(**batch())
    assert outputs.logits.dtype == outputs.loss.dtype == torch.float32  # accelerate converts what a model returns
    accelerator.backward(outputs.loss)
    assert not report.is_done
    gathered = accelerator.gather_for_metrics((outputs.logits, batch()["labels"]))[0]
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(gathered, unpatch(copy.deepcopy(patched))(**batch()).logits.float())
    optimizer.step()


@pytest.mark.parametrize(
    ("kind", "weighted"), some([("soft cap", True)], product(["untied", "soft cap"], [False, True]))
)
def test_a_compiled_model_has_the_same_loss_and_gradients(unchecked: None, kind, weighted) -> None:
    plain: Any = built(kind, num_hidden_layers=0)
    patched, found = patch(copy.deepcopy(plain)), []
    weights = {"token_weights": WEIGHTS} if weighted else {}
    if weighted:
        plain.loss_function = float64_loss
    for model in (plain, torch.compile(patched, backend="aot_eager", fullgraph=True)):
        loss = model(**batch(), use_cache=False, **weights).loss
        loss.backward()
        found.append(loss.detach())
    torch.testing.assert_close(found[1], found[0])
    torch.testing.assert_close(gradients(patched), gradients(plain), rtol=1e-4, atol=1e-6)


# A head in float32, and results that do not depend on the batch


class Float32Head(nn.Module):
    """An untied float32 copy of a head, under autocast too."""

    def __init__(self, head: nn.Linear) -> None:
        super().__init__()
        self.weight = nn.Parameter(head.weight.detach().float())
        self.bias = None if head.bias is None else nn.Parameter(head.bias.detach().float())

    def forward(self, hidden: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return F.linear(hidden.float(), self.weight, self.bias)


def with_float32_head(model: nn.Module) -> nn.Module:
    """A copy of a model of transformers with an untied float32 head; the model itself is patched with `head_dtype`."""
    other: Any = copy.deepcopy(model)
    head = other.get_output_embeddings()
    parent, _, name = next(n for n, each in other.named_modules() if each is head).rpartition(".")
    setattr(other.get_submodule(parent), name, Float32Head(head))
    patch(model, head_dtype="float32")
    return other


def without_heads(found: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """The gradients of the blocks of a model: neither of its tables nor of its heads."""
    ends = [part for part in model.modules() if isinstance(part, nn.Embedding | nn.Linear)]
    ends = [part for part in ends if len(cast(Tensor, part.weight)) == V]
    ids = {id(parameter) for part in ends for parameter in part.parameters(recurse=False)}
    names = {name for name, parameter in model.named_parameters() if id(parameter) not in ids}
    return {name: each for name, each in found.items() if name in names}


@cases("kind, dtype", KINDS, [torch.bfloat16, torch.float16, "autocast"])
def test_with_head_dtype_loss_and_logits_are_those_of_an_untied_float32_head(kind, dtype) -> None:
    patched: Any = built(kind, torch.float32 if dtype == "autocast" else dtype)
    exact = with_float32_head(patched)
    report, losses, found = reports(patched), [], []
    for model in (exact, patched):
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "autocast"):
            outputs = model(**batch())
        assert outputs.logits.dtype == torch.float32
        outputs.loss.backward()
        losses.append(outputs.loss.detach())
        found.append(without_heads(gradients(model), patched))
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-6, atol=1e-6)
    errors, norms = (
        torch.stack([x.float().norm() for x in parts]).norm()
        for parts in ([found[1][name] - each for name, each in found[0].items()], found[0].values())
    )
    assert errors <= 1e-2 * norms  # hidden gradients are rounded to the dtype of the hidden states, as in the copy
    assert is_unread(outputs.logits)
    assert not report.is_done
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=dtype == "autocast"):
        logits, tokens = exact(**batch()).logits, batch()["input_ids"]
        expected = logits.log_softmax(-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
        ours = patched(**batch()).logits
        torch.testing.assert_close(token_log_probs(ours, tokens), expected, rtol=0, atol=2e-6)
        assert ours.is_unread
        torch.testing.assert_close(ours + 0, logits, rtol=1e-6, atol=1e-5)
        one = patched(**{name: each[:1, :1] for name, each in batch().items()}).logits
        assert one.dtype == torch.float32


def test_the_loss_of_a_head_in_float32_is_that_of_its_model() -> None:
    patched: Any = built("soft cap", torch.bfloat16)
    exact: Any = with_float32_head(patched)
    hidden = patched.model(batch()["input_ids"]).last_hidden_state[:, :-1]
    targets = batch()["labels"][:, 1:]
    loss = patched.get_output_embeddings().loss(hidden, targets)
    torch.testing.assert_close(loss, exact(**batch()).loss, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", some(["head", "all linear"], ADAPTERS))
def test_with_head_dtype_lora_trains_as_beside_an_untied_float32_head(name) -> None:
    kind, options, reads = ADAPTERS[name]
    patched = built(kind, torch.bfloat16)
    exact = with_float32_head(patched)
    if name == "head":  # PEFT knows no adapter of another module than nn.Linear
        exact.lm_head = linear_copy(exact.lm_head)
    exact, patched = (with_lora(model, **options) for model in (exact, patched))
    with torch.no_grad():  # PEFT rounds the adapters to the dtype of the rows first
        for each, parameter in exact.named_parameters():
            if "lora_" in each:
                parameter.copy_(patched.get_parameter(each))
    report = reports(patched)
    losses = [model(**batch()).loss for model in (exact, patched)]
    losses[1].backward()
    assert report.is_done == reads
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-6, atol=1e-6)
    assert all(each.isfinite().all() for each in gradients(patched).values())


class WideLinear(nn.Linear):
    """A linear layer in float32 of hidden states of any dtype."""

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden.float())


def linear_copy(head: nn.Module) -> nn.Linear:
    weight: Any = head.weight
    layer = WideLinear(weight.shape[1], len(weight), bias=False)
    layer.weight = weight
    return layer


@pytest.mark.parametrize(
    "options",
    [pytest.param({"gradient_accumulation_steps": 2}, marks=LONG), {"bf16": True}],
    ids=["accumulation", "autocast"],
)
def test_the_trainers_loss_is_that_of_an_untied_float32_head(options, tmp_path) -> None:
    patched = built("tied", torch.float32 if "bf16" in options else torch.bfloat16)
    exact = with_float32_head(patched)
    losses = []
    for model in (exact, patched):
        torch.manual_seed(2)
        runner = trainer(model, tmp_path, **options, logging_steps=1, eval_strategy="no")
        losses.append((runner.evaluate()["eval_loss"], runner.train().training_loss))
    torch.testing.assert_close(losses[1][0], losses[0][0], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(losses[1][1], losses[0][1], rtol=1e-3, atol=1e-3)  # after a step of tied rows


def test_a_compiled_model_has_a_head_in_float32(unchecked: None) -> None:
    patched = built("tied", torch.bfloat16, num_hidden_layers=0)
    exact: Any = with_float32_head(patched)
    compiled = torch.compile(patched, backend="aot_eager", fullgraph=True)
    outputs = compiled(**batch(), use_cache=False)
    assert outputs.logits.dtype == torch.float32
    torch.testing.assert_close(outputs.loss, exact(**batch()).loss, rtol=1e-6, atol=1e-6)
    outputs.loss.backward()
    assert all(each.isfinite().all() for each in gradients(patched).values())


def test_no_float32_copy_of_the_rows_exists() -> None:
    class LargestFloat32(TorchDispatchMode):
        numbers = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            for each in tree_leaves(result):
                if isinstance(each, Tensor) and each.dtype == torch.float32 and not each.is_meta:
                    self.numbers = max(self.numbers, each.untyped_storage().nbytes() // 4)
            return result

    config = {**LLAMA, "vocab_size": 20_000, "hidden_size": 64, "tie_word_embeddings": True}
    patched = patch(
        transformers.LlamaForCausalLM(transformers.LlamaConfig(**config)).bfloat16(), head_dtype=torch.float32
    )
    patched.get_input_embeddings().weight.requires_grad_(False)  # a gradient of the rows may be summed in float32
    with LargestFloat32() as largest:
        outputs = patched(**batch())
        outputs.loss.backward()
        token_log_probs(patched(**batch()).logits, batch()["input_ids"]).sum().backward()
        (patched(**batch()).logits[:, :2] * 1.0).sum().backward()
    assert largest.numbers < 20_000 * 64


def test_a_patched_head_keeps_its_options_until_it_is_unpatched() -> None:
    patched: Any = patch(built("tied", torch.bfloat16), head_dtype=torch.float32, batch_invariant=True)
    with pytest.raises(CheckpointError, match="patched already: unpatch it first"):
        patch(patched, head_dtype=torch.float32)
    patched.resize_token_embeddings(V + 5)
    head = patched.get_output_embeddings()
    assert (head.head_dtype, head.batch_invariant, head.out_features) == (torch.float32, True, V + 5)
    edit_vocabulary(patched, remove=[3, 4])
    head = patched.get_output_embeddings()
    assert (head.head_dtype, head.batch_invariant, head.out_features) == (torch.float32, True, V + 3)
    assert patched(**batch()).logits.dtype == torch.float32
    assert unpatch(patched)(**batch()).logits.dtype == torch.bfloat16
    assert not any(module._forward_pre_hooks for module in patched.modules())
    with pytest.raises(CheckpointError, match="a LlamaModel has none that is an nn.Linear"):
        patch(cast(nn.Module, built("tied").model), batch_invariant=True)
    with pytest.raises(SizeError, match="head_dtype must be torch.float32 or None"):
        patch(built("tied"), head_dtype=torch.float64)


@cases("kind, head_dtype", ["tied", "soft cap", "scale", "masked"], [None, torch.float32])
def test_results_of_a_batch_invariant_head_are_those_of_any_part_of_the_batch(kind, head_dtype) -> None:
    patched: Any = patch(built(kind, torch.bfloat16), batch_invariant=True, head_dtype=head_dtype)
    head, tokens = patched.get_output_embeddings(), batch()["input_ids"]
    hidden = torch.randn(B, T, 16).bfloat16()
    with torch.no_grad():
        logits = head(hidden)
        assert is_unread(logits)
        log_probs = token_log_probs(logits, tokens)
        assert logits.is_unread
        for part in (slice(0, 1), slice(1, 3)):
            of_part = head(hidden[part])
            assert torch.equal(token_log_probs(of_part, tokens[part]), log_probs[part])
            assert torch.equal(of_part + 0, logits[part] + 0)
        steps = torch.stack([head(hidden[:, step]) for step in range(T)], 1)  # as with cached keys and values
        assert torch.equal(steps, logits + 0)
        assert torch.equal(token_log_probs(steps, tokens), token_log_probs(logits + 0, tokens))
