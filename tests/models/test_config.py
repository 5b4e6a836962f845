"""A model called and configured by transformers' names."""

import json
from copy import deepcopy

import pytest
import torch
import torch.nn.functional as F
from kinds import TABLES, VOCAB_SIZE, dense

from embedlayer import DecoderLM, OutputHead, ShapeError, SizeError

IDS = torch.randint(1, VOCAB_SIZE, (24, 8), generator=torch.Generator().manual_seed(0))


def decoder(table=None) -> DecoderLM:
    torch.manual_seed(1)
    return DecoderLM(dense() if table is None else table, "rotary", num_layers=1)


def with_ignored(ids: torch.Tensor) -> torch.Tensor:
    labels = ids.clone()
    labels[::3, 3:] = -100
    labels[1, :] = -100
    return labels


def plain_loss(model: DecoderLM, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)


@pytest.mark.parametrize("name", TABLES)
def test_the_configuration_of_every_table_builds_it_and_has_the_names_tools_read(name, tmp_path) -> None:
    model = decoder(TABLES[name]()) if name != "row-sparse" else None
    if model is None:
        table = TABLES[name]()
        model = DecoderLM(table, "rotary", OutputHead(table.embed_dim, table.vocab_size), num_layers=1)
    config = model.config
    assert isinstance(config, dict)
    model.save_pretrained(tmp_path)
    assert DecoderLM.from_pretrained(tmp_path).config == config
    assert (config.vocab_size, config.hidden_size, config.num_hidden_layers) == (50, 24, 1)
    assert config.get_text_config().max_position_embeddings is None
    assert json.loads(config.to_json_string()) == config.to_dict()
    assert (
        config.to_dict().items()
        >= {**config, "model_type": "embedlayer", "pad_token_id": model.table.padding_idx}.items()
    )
    assert not set(vars(config)) - {"head_dim"} & set(config)


def test_what_a_tool_sets_in_the_configuration_is_kept_and_changes_no_model() -> None:
    model = decoder()
    before = dict(model.config)
    model.config.eos_token_id = 3
    assert (model.config.eos_token_id, deepcopy(model).config.eos_token_id) == (3, 3)
    assert model.config == before
    with pytest.raises(AttributeError):
        decoder().config.eos_token_id  # noqa: B018


def test_labels_are_shifted_and_minus_100_costs_nothing() -> None:
    model, labels = decoder(), with_ignored(IDS)
    mean = plain_loss(model, IDS, labels)
    output = model(input_ids=IDS, labels=labels)
    torch.testing.assert_close(output.loss, mean)
    assert output.logits is None
    count = (labels[:, 1:] != -100).sum()
    torch.testing.assert_close(model(IDS, labels=labels, num_items_in_batch=2 * count).loss, mean / 2)
    loss, logits = model.eval()(input_ids=IDS, labels=labels)
    torch.testing.assert_close(loss, mean)
    assert torch.equal(logits, model(IDS))
    assert torch.equal(model(input_ids=IDS).logits, model(IDS))
    assert model(input_ids=IDS[:, :1], labels=IDS[:, :1]).loss.item() == 0.0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_weights_of_tokens_are_shifted_as_the_labels(dtype, unchecked) -> None:
    model, labels = decoder().double(), with_ignored(IDS)
    weights = torch.randn(labels.shape).to(dtype).masked_fill(labels == -100, torch.inf)
    weights[:, 0] = torch.nan  # the first token is no target
    logits, kept = model(IDS)[:, :-1], labels[:, 1:] != -100
    each = F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), reduction="none")
    expected = (each * weights[:, 1:].where(kept, 0).flatten()).sum()
    found = [
        model(IDS, labels=labels, token_weights=weights).loss * kept.sum(),
        model(IDS, labels=labels, token_weights=weights, num_items_in_batch=5.0).loss * 5,
        model.loss(IDS[:, :-1], labels[:, 1:], token_weights=weights[:, 1:], reduction="sum"),
    ]
    torch.testing.assert_close(found, [expected] * 3)
    with pytest.raises(SizeError):
        model(IDS, token_weights=weights)
    with pytest.raises(ShapeError):
        model(IDS, labels=labels, token_weights=weights.long())


@pytest.mark.parametrize("arguments", [{}, {"ids": IDS, "input_ids": IDS}])
def test_ids_are_passed_once(arguments) -> None:
    with pytest.raises(SizeError):
        decoder()(**arguments)


@pytest.fixture
def trained(tmp_path):
    """Train a model with transformers' Trainer: the Trainer, after it was saved."""
    pytest.importorskip("accelerate")
    transformers = pytest.importorskip("transformers")

    def train(model, steps: int, **options):
        arguments = transformers.TrainingArguments(
            str(tmp_path / "run"),
            max_steps=steps,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            learning_rate=1e-2,
            lr_scheduler_type="constant",
            max_grad_norm=0.5,
            save_steps=2,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            dataloader_pin_memory=False,
            train_sampling_strategy="sequential",
        )
        rows = [{"input_ids": ids, "labels": labels} for ids, labels in zip(IDS, with_ignored(IDS), strict=True)]
        trainer = transformers.Trainer(model, arguments, train_dataset=rows, eval_dataset=rows[:8])
        trainer.train(**options)
        return trainer

    return train


def test_transformers_trainer_trains_a_decoder_as_a_plain_loop_does(trained) -> None:
    model, plain = decoder(), decoder()
    trainer = trained(model, steps=3)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.0)
    for ids, labels in zip(IDS.split(8), with_ignored(IDS).split(8), strict=True):
        optimizer.zero_grad()
        plain_loss(plain, ids, labels).backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        optimizer.step()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value, rtol=1e-4, atol=1e-5)
    predicted = trainer.predict(trainer.eval_dataset)
    torch.testing.assert_close(torch.from_numpy(predicted.predictions), model(IDS[:8]).detach())


def test_what_the_trainer_saved_is_resumed_and_the_model_read_back(trained, tmp_path) -> None:
    whole, resumed = decoder(), decoder()
    trained(whole, steps=3)
    trained(resumed, steps=3, resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    resumed.save_pretrained(tmp_path / "model")
    again = DecoderLM.from_pretrained(tmp_path / "model")
    torch.testing.assert_close(again(IDS), whole(IDS))


def test_lora_on_a_decoder_is_trained_by_transformers_trainer(trained) -> None:
    peft = pytest.importorskip("peft")
    model = decoder()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    lora = peft.get_peft_model(model, peft.LoraConfig(target_modules=["query", "value"]))
    trained(lora, steps=2)
    after = lora.unload().state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    with pytest.raises(ValueError, match="Please specify `target_modules`"):
        peft.get_peft_model(decoder(), peft.LoraConfig())
