"""The recipes: each page computes the loss and gradients of the plain formulation, and of TRL where TRL has it."""

import copy
import runpy
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from patched_loss import LargeOperations
from small_blocks import small_blocks
from torch import Tensor, nn

import embedlayer as el

PAGES = sorted((Path(__file__).resolve().parents[1] / "examples" / "recipes").glob("*.py"))
TOKENS = 4 * 18
"""Tokens of which each plain formulation computes the logits at once, or fewer."""

DEPRECATED = "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
"""transformers says so of TRL."""


@pytest.fixture
def small_chunks() -> Iterator[None]:
    """Divide the tokens of a recipe into several chunks."""
    with small_blocks(tokens=16):
        yield


def gradients(model: nn.Module, step: Callable[[], Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of a step, and the gradient of each parameter."""
    model.zero_grad()
    loss = step()
    loss.backward()
    return loss.detach(), {name: each.grad.clone() for name, each in model.named_parameters()}


def check(model: nn.Module, step: Callable, plain_model: nn.Module, plain_step: Callable, tolerance: float) -> None:
    """Compare loss and gradients, each relative to the largest number of it."""
    (loss, grads), (plain_loss, plain_grads) = gradients(model, step), gradients(plain_model, plain_step)
    torch.testing.assert_close(loss, plain_loss.to(loss), rtol=tolerance, atol=0)
    for name, grad in plain_grads.items():
        scale = grad.abs().max()
        assert scale > 0, name
        torch.testing.assert_close(grads[name] / scale, grad / scale, rtol=0, atol=tolerance)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_loss_and_gradients_are_those_of_the_plain_formulation(page, small_chunks) -> None:
    model, losses = import_module(f"recipes.{page.stem}").example(torch.float64)
    for step, plain_step in losses.values():
        check(model, step, model, plain_step, 1e-10)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_no_operation_computes_a_number_for_each_token_and_vocabulary_entry(page, small_chunks) -> None:
    model, losses = import_module(f"recipes.{page.stem}").example()
    for step, plain_step in losses.values():
        found = []
        for each in (step, plain_step):
            with LargeOperations(TOKENS, 2048, model) as operations:
                each().backward()
            found.append(operations.found)
        assert not found[0]
        assert found[1]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_recipe_is_a_short_page_that_prints_both_losses(page, capsys) -> None:
    assert len(page.read_text().splitlines()) <= 60
    runpy.run_path(str(page), run_name="__main__")
    for line in capsys.readouterr().out.splitlines():
        ours, theirs = line.rpartition(": ")[2].split(", ")
        assert float(ours.split()[0]) == pytest.approx(float(theirs.split()[0]), abs=2e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_from_the_same_hidden_states_trainer_and_sampler_have_a_ratio_of_exactly_1(dtype, monkeypatch) -> None:
    from recipes import sampler_and_trainer

    states: list[Tensor] = []
    hidden = el.DecoderLM.hidden

    def recorded(self: el.DecoderLM, *arguments: Any, **options: Any) -> Tensor:
        states.append(hidden(self, *arguments, **options))
        return states[-1]

    with monkeypatch.context() as patched:
        patched.setattr(el.DecoderLM, "hidden", recorded)
        model, losses = sampler_and_trainer.example(dtype)
    sampled = losses["policy gradient"][0].args[2]
    before, tokens = torch.stack([each[:, -1] for each in states], 1), sampled.ids[:, -sampler_and_trainer.new_tokens :]
    assert (sampler_and_trainer.score(model, before, tokens) - sampled.log_probs).exp().eq(1).all()


def test_a_cached_step_and_a_pass_over_the_text_agree_on_a_trained_model(shared_data, monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(PAGES[0].parents[1]))
    log_ratios: Any = import_module("log_ratios")
    path = str(shared_data / "models" / "stories260K.safetensors")
    largest = {}
    for dtype in (torch.float32, torch.bfloat16):
        for name, options in log_ratios.OPTIONS.items():
            same, whole = log_ratios.log_ratios(log_ratios.load(path, dtype, options), 40)
            largest[dtype, name] = (whole.double().exp() - 1).abs().max().item()
            assert name == "before" or same.eq(0).all()
    assert largest[torch.float32, "after"] <= 1e-4
    assert largest[torch.bfloat16, "after"] < largest[torch.bfloat16, "before"]


@pytest.fixture
def trainer() -> MagicMock:
    """Return what the losses of TRL's trainers read of the trainer, which would need data and a tokenizer."""
    pytest.importorskip("trl", reason="trl is not installed; `make course` installs it")
    accelerator = MagicMock()
    for name in ("gather", "gather_for_metrics", "reduce"):
        getattr(accelerator, name).side_effect = lambda tensor, **options: tensor
    return MagicMock(accelerator=accelerator, aux_loss_enabled=False, _metrics=defaultdict(lambda: defaultdict(list)))


def with_head_of_trl(model: nn.Module, **options) -> nn.Module:
    """Return a copy of the unpatched model with TRL's own head without logits, which sums in float32."""
    from trl.trainer.utils import add_fused_lm_head

    plain_model = el.unpatch(copy.deepcopy(model))
    add_fused_lm_head(plain_model, **options)
    return plain_model


@pytest.mark.filterwarnings(DEPRECATED)
def test_the_dpo_step_is_that_of_the_dpo_trainer(trainer) -> None:
    from recipes import dpo
    from trl import DPOTrainer

    step, _ = dpo.example(torch.float64)[1]["DPO"]
    _, model, ref_model, inputs = step.args
    trainer.configure_mock(loss_types=["sigmoid"], loss_weights=[1.0], f_divergence_type="reverse_kl", beta=0.1)
    trainer.configure_mock(ld_alpha=None, precompute_ref_logps=False, use_weighting=False)
    trainer.configure_mock(_total_train_tokens=0, _tp_size=1, ref_model=with_head_of_trl(ref_model))
    theirs = trainer.model = with_head_of_trl(model, outputs=("log_probs", "entropy", "mean_logits", "is_top1"))
    check(model, step, theirs, lambda: DPOTrainer._compute_loss(trainer, theirs, inputs, False), 2e-6)


def test_the_grpo_step_is_that_of_the_grpo_trainer(trainer) -> None:
    from recipes import grpo
    from trl import GRPOTrainer

    step, _ = grpo.example(torch.float64)[1]["GRPO"]
    _, model, inputs = step.args
    inputs = inputs | {"prompt_mask": torch.ones_like(inputs["prompt_ids"])}
    trainer.configure_mock(loss_type="grpo", beta=grpo.beta, epsilon_low=grpo.epsilon, epsilon_high=grpo.epsilon)
    trainer.configure_mock(entropy_coef=grpo.entropy_coef, use_adaptive_entropy=False, top_entropy_quantile=1.0)
    trainer.configure_mock(importance_sampling_level="token", off_policy_mask_threshold=None, use_vllm=False)
    trainer.configure_mock(current_gradient_accumulation_steps=1)
    trainer.args.configure_mock(delta=None, use_bias_correction_kl=False)
    trainer._get_per_token_logps_and_entropies.side_effect = lambda *arguments, **options: (
        GRPOTrainer._get_per_token_logps_and_entropies(trainer, *arguments, **options)
    )
    theirs = with_head_of_trl(model, temperature=grpo.temperature, outputs=("log_probs", "entropy"))
    check(model, step, theirs, lambda: GRPOTrainer._compute_loss(trainer, theirs, inputs), 2e-6)


def test_the_divergences_are_those_of_the_gkd_trainer(monkeypatch) -> None:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    pytest.importorskip("trl", reason="trl is not installed; `make course` installs it")
    from recipes import distillation

    student, losses = distillation.example(torch.float64)
    for step, _ in losses.values():
        _, teacher, ids, labels, beta, top_k = step.args
        if top_k == 0:
            options = {"labels": labels[:, 1:], "beta": beta, "temperature": distillation.temperature}
            loss = partial(generalized_jsd_loss, student, teacher, ids, options)
            check(student, step, student, loss, 1e-10)


def generalized_jsd_loss(student: nn.Module, teacher: nn.Module, ids: Tensor, options: dict) -> Tensor:
    """Return TRL's divergence of the logits of two models, where they predict the token after each but the last."""
    from trl.experimental.gkd import GKDTrainer

    return GKDTrainer.generalized_jsd_loss(student(ids)[:, :-1], teacher(ids)[:, :-1], **options)
