"""A patched model trains without logits, in the ways in which models of transformers are trained."""

import copy
import logging
from itertools import product
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from covering import LONG, cases, some
from deferred_heads import is_unread
from torch import Tensor, nn

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


@pytest.mark.parametrize("kind", ["tied", "soft cap"])
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


def test_a_compiled_model_has_a_head_in_float32(unchecked: None) -> None:
    patched = built("tied", torch.bfloat16, num_hidden_layers=0)
    exact: Any = with_float32_head(patched)
    compiled = torch.compile(patched, backend="aot_eager", fullgraph=True)
    outputs = compiled(**batch(), use_cache=False)
    assert outputs.logits.dtype == torch.float32
    torch.testing.assert_close(outputs.loss, exact(**batch()).loss, rtol=1e-6, atol=1e-6)
    outputs.loss.backward()
    assert all(each.isfinite().all() for each in gradients(patched).values())


def test_a_patched_head_keeps_its_options_until_it_is_unpatched() -> None:
    patched: Any = patch(built("tied", torch.bfloat16), head_dtype=torch.float32, batch_invariant=True)
    with pytest.raises(CheckpointError, match="unpatch it first"):
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
    with pytest.raises(CheckpointError, match="no LM head"):
        patch(cast(nn.Module, built("tied").model), batch_invariant=True)
    with pytest.raises(SizeError, match="head_dtype must be torch.float32 or None"):
        patch(built("tied"), head_dtype=torch.float64)
