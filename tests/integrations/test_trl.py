"""Trainers of TRL after `patch_trainer`, beside the same trainers without it."""

import copy
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from memory import Shapes
from small_blocks import small_blocks
from torch import Tensor

import embedlayer as el
from embedlayer.integrations import patch_trainer, trl

pytest.importorskip("trl")
pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore")

VOCAB, WIDTH, STEPS = 600, 16, 2
TEXTS = ["the small dog sat", "a dog and the cat sat on small mats", "the cat", "small dogs sat and sat"]
WORDS = " sat on the small mat and the dog sat and the cat sat on the dog"
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
OF_1_14 = {"logits/chosen", "logits/rejected", "mean_token_accuracy"}
"""What TRL 1.14 does not log where it computes DPO and KTO without logits."""
TIMES = {"train_runtime", "train_samples_per_second", "train_steps_per_second", "step_time", "total_flos"}
Run = tuple[list[dict[str, float]], dict[str, Tensor]]

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "SFT": ("SFT", {}),
    "SFT, tied": ("SFT", {"tied": True}),
    "SFT, PEFT": ("SFT", {"lora": ["q_proj"]}),
    "SFT, packed": ("SFT", {"packing": True, "max_length": 32}),
    "SFT, answers only": ("SFT", {"assistant_only_loss": True}),
    "DPO": ("DPO", {}),
    "DPO, tied": ("DPO", {"tied": True, "loss_type": ["ipo"]}),
    "DPO, PEFT": ("DPO", {"lora": ["q_proj"]}),
    "DPO, reference computed before": ("DPO", {"precompute_ref_log_probs": True}),
    "KTO": ("KTO", {}),
    "GRPO": ("GRPO", {"temperature": 0.7}),
    "GRPO, tied, reference": ("GRPO", {"tied": True, "beta": 0.1}),
    "GRPO, PEFT, head in float32": ("GRPO", {"lora": ["q_proj"], "beta": 0.1, "cast_lm_head_to_fp32": True}),
    "GRPO, tokens of high entropy": ("GRPO", {"top_entropy_quantile": 0.5}),
    "RLOO": ("RLOO", {"beta": 0.1}),
}
SINCE_1_15 = {
    "SFT, loss by the square of probabilities": ("SFT", {"loss_type": "dft"}),
    "SFT, label smoothing": ("SFT", {"label_smoothing_factor": 0.1}),
    "DPO, weighted": ("DPO", {"use_weighting": True}),
}


def is_oldest() -> bool:
    import trl as package

    return bool(package.__version__.startswith("1.14."))


@pytest.fixture(autouse=True)
def several_blocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    with small_blocks(few_logits=0, rows=64, tokens=16):
        yield


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from transformers import PreTrainedTokenizerFast

    own = el.train_tokenizer(" ".join([*TEXTS, WORDS]) * 20, vocab_size=270)
    end = "<|endoftext|>"
    return PreTrainedTokenizerFast(tokenizer_object=own, eos_token=end, pad_token=end, chat_template=TEMPLATE)


def model_of(*, tied: bool) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": WIDTH, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=VOCAB, tie_word_embeddings=tied, initializer_range=0.3))


def rewards(completions: list[str], **_: Any) -> list[float]:
    return [float(len(text)) for text in completions]


def dataset(kind: str, options: dict[str, Any]) -> Any:
    from datasets import Dataset

    def row(number: int, text: str) -> dict[str, Any]:
        good, bad = text + WORDS, WORDS[:40] + text
        if options.get("assistant_only_loss"):
            return {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": WORDS}]}
        if kind == "SFT":
            return {"prompt": text, "completion": good}
        if kind == "DPO":
            return {"prompt": text, "chosen": good, "rejected": bad}
        return {"prompt": text, "completion": good, "label": number % 2 == 0} if kind == "KTO" else {"prompt": text}

    return Dataset.from_list([row(*each) for each in enumerate(TEXTS)] * 2)


def trainer_of(kind: str, tokenizer: Any, folder: Path, **options: Any) -> Any:
    import trl as package
    from peft import LoraConfig

    tied, lora = options.pop("tied", False), options.pop("lora", None)
    config = LoraConfig(r=2, task_type="CAUSAL_LM", target_modules=lora) if lora else None
    model: Any = model_of(tied=tied)
    rows = dataset(kind, options)
    others: dict[str, Any] = {}
    samples = kind in {"GRPO", "RLOO"}
    if samples:
        others["reward_funcs"] = rewards
        options |= {"num_generations": 2, "max_completion_length": 12}
        if options.get("beta") and not lora:  # the trainer reads its reference from the folder of the policy
            model.save_pretrained(folder / "model")
            model = str(folder / "model")
            options["model_init_kwargs"] = {"dtype": "float32"}
    elif kind in {"DPO", "KTO"} and not lora and not options.get("precompute_ref_log_probs"):
        others["ref_model"] = model_of(tied=tied)
    args = getattr(package, f"{kind}Config")(
        output_dir=str(folder),
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        save_strategy="no",
        gradient_checkpointing=False,
        logging_steps=1,
        per_device_train_batch_size=4 if samples else 2,
        adam_epsilon=1e-5,  # else numbers whose gradient is rounding move by the learning rate, in the direction of it
        **{"bf16": False, "learning_rate": 1e-2, "max_steps": STEPS, **options},
    )
    return getattr(package, f"{kind}Trainer")(
        model, args=args, train_dataset=rows, processing_class=tokenizer, peft_config=config, **others
    )


def trained(trainer: Any) -> Run:
    torch.manual_seed(1)
    trainer.train()
    numbers = [{k: v for k, v in entry.items() if isinstance(v, float)} for entry in trainer.state.log_history]
    logged = [{k: v for k, v in entry.items() if k not in TIMES and v == v} for entry in numbers]
    return logged, {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of tokens for which our statistics were computed."""
    found: list[int] = []

    def counted(logits: Any, tokens: Tensor, **options: Any) -> Any:
        found.append(tokens.numel())
        return statistics(logits, tokens, **options)

    statistics: Callable[..., Any] = trl.token_statistics_of
    monkeypatch.setattr(trl, "token_statistics_of", counted)
    return found


def cases() -> list[str]:
    return [*CASES, *SINCE_1_15]


@pytest.mark.parametrize("name", cases())
def test_a_patched_trainer_is_the_plain_one_and_stores_no_logits(name, tokenizer, tmp_path, calls) -> None:
    if is_oldest() and (name in SINCE_1_15 or name == "RLOO"):
        pytest.skip("TRL 1.14 computes all logits here")
    kind, options = (CASES | SINCE_1_15)[name]
    computed, computed_by_plain = Shapes(), Shapes()
    with computed_by_plain:
        plain = trained(trainer_of(kind, tokenizer, tmp_path / "plain", **options))
    assert calls == []
    trainer = trainer_of(kind, tokenizer, tmp_path / "ours", **options)
    assert patch_trainer(trainer) is trainer
    if name != "SFT, label smoothing":  # for which TRL computes all logits
        with computed:
            ours = trained(trainer)
        assert computed.largest(max(calls) * VOCAB) == set()
        assert computed_by_plain.largest(max(calls) * VOCAB)
    else:
        ours = trained(trainer)
    assert len(calls) >= STEPS
    lost = OF_1_14 if is_oldest() and kind in {"DPO", "KTO"} else set()
    for mine, other in zip(ours[0], plain[0], strict=True):
        assert mine.keys() >= other.keys() - lost
        for key in mine:
            assert mine[key] == pytest.approx(other[key], rel=1e-5, abs=1e-5), key
    assert ours[1].keys() == plain[1].keys()
    for key, weight in plain[1].items():
        torch.testing.assert_close(ours[1][key], weight, rtol=1e-5, atol=1e-5)


SIZES = {"hidden_size": WIDTH, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "soft cap": ("Gemma2", {"final_logit_softcapping": 2.0, "head_dim": 8, "num_key_value_heads": 1}),
    "scale": ("Cohere", {"logit_scale": 0.3, "num_key_value_heads": 2}),
    "bias": ("Phi", {}),
    "experts": ("Mixtral", {"output_router_logits": True, "num_local_experts": 2, "num_key_value_heads": 2}),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_what_models_do_to_their_logits_is_what_trl_does(name, tokenizer, tmp_path, calls) -> None:
    import transformers
    from trl import SFTConfig, SFTTrainer

    family, options = FAMILIES[name]

    def step(*, patched: bool) -> Run:
        torch.manual_seed(0)
        config = getattr(transformers, f"{family}Config")(vocab_size=VOCAB, **SIZES, **options)
        model = getattr(transformers, f"{family}ForCausalLM")(config)
        if name == "bias":
            torch.nn.init.normal_(model.lm_head.bias)
        common: dict[str, Any] = {"bf16": False, "gradient_checkpointing": False, "adam_epsilon": 1e-4}
        args = SFTConfig(
            str(tmp_path), report_to="none", use_cpu=True, max_steps=1, logging_steps=1, save_strategy="no", **common
        )
        trainer = SFTTrainer(model, args=args, train_dataset=dataset("SFT", {}), processing_class=tokenizer)
        return trained(patch_trainer(trainer) if patched else trainer)

    (plain, weights), (ours, own) = step(patched=False), step(patched=True)
    assert len(calls) == 1
    for key in plain[0]:
        assert ours[0][key] == pytest.approx(plain[0][key], rel=1e-5, abs=1e-5), key
    for key, weight in weights.items():
        torch.testing.assert_close(own[key], weight, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["SFT", "DPO", "GRPO"])
def test_gradients_in_bfloat16_are_as_near_to_float32_as_those_of_trl(kind, tokenizer, tmp_path) -> None:
    def step(*, bf16: bool, patched: bool) -> Tensor:
        options: dict[str, Any] = {"optim": "sgd", "max_grad_norm": 0.0, "learning_rate": 1.0, "max_steps": 1}
        options |= {"beta": 0.1} if kind == "GRPO" else {}
        folder = tmp_path / f"{bf16} {patched}"
        trainer = trainer_of(kind, tokenizer, folder, bf16=bf16, lr_scheduler_type="constant", **options)
        if patched:
            patch_trainer(trainer)
        before = torch.cat([p.detach().flatten().clone() for p in trainer.model.parameters()])
        after = trained(trainer)[1]
        return torch.cat([p.flatten() for p in after.values()]) - before

    exact = step(bf16=False, patched=False)
    errors = [(step(bf16=True, patched=each) - exact).norm() / exact.norm() for each in (True, False)]
    assert errors[0] <= 1.25 * errors[1]  # both round products to bfloat16, in other orders of the sums
    assert errors[1] < 0.2


def test_a_reference_in_bfloat16_equal_to_the_policy_gives_rewards_of_zero(tokenizer, tmp_path) -> None:
    trainer = trainer_of("DPO", tokenizer, tmp_path, bf16=True, max_steps=1)
    prepared = list(trainer.accelerator._models)
    assert patch_trainer(trainer).accelerator._models == prepared
    logged = trained(trainer)[0][0]
    assert {logged["rewards/chosen"], logged["rewards/rejected"]} == {0.0}


def test_row_sparse_gradients_where_the_table_is_untied_and_trained(tokenizer, tmp_path) -> None:
    def optimizer(**options: Any) -> str:
        return type(patch_trainer(trainer_of("SFT", tokenizer, tmp_path, **options)).create_optimizer()).__name__

    assert optimizer() == "RowAdamW"
    assert {optimizer(tied=True), optimizer(lora=["q_proj"])} == {"AdamW"}
    grpo = trainer_of("GRPO", tokenizer, tmp_path, sync_ref_model=True, beta=0.1)
    assert type(patch_trainer(grpo).create_optimizer()).__name__ == "AdamW"


def of_patched(model: Any, folder: Path, rows: Any, tokenizer: Any, config: Any = None) -> Any:
    from trl import SFTConfig, SFTTrainer

    if is_oldest():
        pytest.skip("SFTTrainer of TRL 1.14 takes no patched model: patch_trainer patches it")
    args = SFTConfig(str(folder), report_to="none", use_cpu=True, bf16=False, gradient_checkpointing=False)
    return SFTTrainer(model, args=args, train_dataset=rows, processing_class=tokenizer, peft_config=config)


def unchanged(trainer: Any) -> Any:
    """A trainer without `patch_trainer`, which reads the weight of the head of a patched model."""
    return trainer


@pytest.mark.parametrize("prepare", [patch_trainer, unchanged])
@pytest.mark.parametrize("adapted", ["target_modules", "modules_to_save"])
def test_a_patched_tied_head_applies_adapters_of_its_table(adapted, prepare, tokenizer, tmp_path) -> None:
    from peft import LoraConfig

    options: dict[str, Any] = {"target_modules": ["q_proj"]} | {adapted: ["embed_tokens"]}
    config = LoraConfig(r=2, task_type="CAUSAL_LM", init_lora_weights=False, **options)
    model = el.patch(model_of(tied=True))
    trainer = of_patched(model, tmp_path, dataset("SFT", {}), tokenizer, config)
    with torch.no_grad():
        for name, parameter in trainer.model.named_parameters():
            if "modules_to_save" in name:
                parameter.add_(torch.randn_like(parameter))
    prepare(trainer)
    trainer.model.eval()
    batch = next(iter(trainer.get_train_dataloader()))
    torch.testing.assert_close(trainer.compute_loss(trainer.model, dict(batch)), trainer.model(**batch).loss)


def test_the_head_dtype_of_a_patched_model_applies(tokenizer, tmp_path) -> None:
    model = el.patch(model_of(tied=True).to(torch.bfloat16), head_dtype=torch.float32)
    trainer = patch_trainer(of_patched(model, tmp_path, dataset("SFT", {}), tokenizer))
    trainer.model.eval()
    batch = next(iter(trainer.get_train_dataloader()))
    torch.testing.assert_close(trainer.compute_loss(trainer.model, dict(batch)), trainer.model(**batch).loss)


def test_a_trainer_that_reads_the_weight_of_a_head_in_float32_is_warned_about_once(tokenizer, tmp_path) -> None:
    model = copy.deepcopy(el.patch(model_of(tied=True).to(torch.bfloat16), head_dtype=torch.float32))
    trainer = of_patched(model, tmp_path, dataset("SFT", {}), tokenizer)
    batch = next(iter(trainer.get_train_dataloader()))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model(**batch)
        assert len(model.lm_head.weight) == VOCAB  # between calls of the head
        model(**batch)
        assert not [each for each in caught if each.category is el.EmbedLayerWarning]
        for _ in range(3):
            trainer.compute_loss(trainer.model, dict(batch))
    assert ["head_dtype" in str(each.message) for each in caught if each.category is el.EmbedLayerWarning] == [True]


@pytest.mark.parametrize("prepare", [patch_trainer, unchanged])
@pytest.mark.parametrize("tied", [True, False])
def test_rows_that_are_added_and_trained_alone(tied, prepare, tokenizer, tmp_path) -> None:
    model = el.patch(model_of(tied=tied))
    model.resize_token_embeddings(len(tokenizer))
    receipt = el.vocab.add_tokens(model, [" otters"], tokenizer=tokenizer, train_only_new=True)
    new = el.vocab.transformers_tokenizer(receipt.tokenizer, like=tokenizer)
    trainer = prepare(of_patched(model, tmp_path, otters(), new))
    batch = next(iter(trainer.get_train_dataloader()))
    assert (batch["input_ids"] == len(tokenizer)).any()
    trained_rows = [p for p in model.parameters() if p.requires_grad]
    losses = trainer.compute_loss(model, dict(batch)), model(**batch).loss
    torch.testing.assert_close(*losses)
    ours, own = (torch.autograd.grad(loss, trained_rows) for loss in losses)
    torch.testing.assert_close(ours, own)


def otters() -> Any:
    from datasets import Dataset

    return Dataset.from_list([{"text": "the otters sat small otters"}] * 2)


def test_what_cannot_work_is_an_error(tokenizer, tmp_path, monkeypatch) -> None:
    trainer = trainer_of("SFT", tokenizer, tmp_path, tied=True)
    with pytest.raises(el.SizeError, match="row_sparse=True is impossible here: lm_head is tied"):
        patch_trainer(trainer, row_sparse=True)
    for installed in ("1.13.0", "1.17.0", "2.0"):
        monkeypatch.setattr(trl, "version", lambda _, installed=installed: installed)
        with pytest.raises(el.VersionError, match=r"TRL 1\.14 to 1\.16"):
            patch_trainer(trainer)
    monkeypatch.undo()
    monkeypatch.setattr(type(trainer.accelerator), "mixed_precision", "no", raising=False)
    trainer.is_fsdp_enabled = True
    with pytest.raises(el.SizeError, match="FSDP"):
        patch_trainer(trainer)
    trainer.is_fsdp_enabled = False
    del trainer.model.forward
    with pytest.raises(el.CheckpointError, match="is not TRL's"):
        patch_trainer(trainer)
    assert type(trainer.model.lm_head) is torch.nn.Linear


def test_a_second_call_and_an_empty_batch_change_nothing(tokenizer, tmp_path, calls) -> None:
    trainer = patch_trainer(patch_trainer(trainer_of("SFT", tokenizer, tmp_path)))
    batch = next(iter(trainer.get_train_dataloader()))
    batch["labels"] = torch.full_like(batch["labels"], -100)
    loss = trainer.compute_loss(trainer.model, dict(batch))
    assert loss == 0
    loss.backward()
    assert calls == [0]


def test_a_model_that_is_patched_after_its_trainer_was_built(tokenizer, tmp_path, calls) -> None:
    trainer = trainer_of("SFT", tokenizer, tmp_path, tied=True)
    el.patch(trainer.model)
    patch_trainer(trainer)
    batch = next(iter(trainer.get_train_dataloader()))
    trainer.model.eval()
    loss = trainer.compute_loss(trainer.model, dict(batch))
    if not is_oldest():  # whose forward replaces the loss of every call with labels
        weights = torch.ones_like(batch["labels"], dtype=torch.float32)
        torch.testing.assert_close(trainer.model(**batch, token_weights=weights).loss, loss)
    assert len(calls) == 1
    el.unpatch(trainer.model)
    torch.testing.assert_close(trainer.compute_loss(trainer.model, dict(batch)), loss)
