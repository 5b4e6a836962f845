"""axolotl with our plugin: losses and weights of its plain trainer, our loss at each step, and no logits."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from memory import Shapes

import embedlayer as el
from embedlayer import integrations

pytestmark = pytest.mark.filterwarnings("ignore")  # advice of axolotl's dependencies
NAME = "embedlayer.integrations.axolotl.EmbedLayerPlugin"
V, D, ROWS, TOKENS = 999, 16, 2, 300


def llama(**options: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": V, "hidden_size": D, "intermediate_size": 24, "num_hidden_layers": 1}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, **options))


@pytest.fixture
def manager(monkeypatch) -> Iterator[Any]:
    """axolotl's own manager of plugins, with ours."""
    base = pytest.importorskip("axolotl.integrations.base")
    monkeypatch.setattr("axolotl.utils.distributed.distributed_state", None)  # other trainers reset accelerate's
    manager = base.PluginManager.get_instance()
    before = dict(manager.plugins)
    manager.register(NAME)
    yield manager
    manager.plugins.clear()
    manager.plugins.update(before)


def configuration(**options: Any) -> Any:
    from axolotl.utils.dict import DictDefault

    return DictDefault({"plugins": [NAME], **options})


def trained(model: Any, folder: Any, *, packed: bool) -> tuple[Any, list[float]]:
    """Train a model by axolotl's trainer of supervised fine-tuning; return it and its losses."""
    trainers = pytest.importorskip("axolotl.core.trainers.base")
    from axolotl.core.training_args_base import AxolotlTrainingMixins
    from datasets import Dataset
    from transformers import TrainingArguments

    @dataclass
    class Arguments(AxolotlTrainingMixins, TrainingArguments):
        """`AxolotlTrainingArguments`, whose module needs the release of TRL that axolotl names."""

    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(0, V, (3 * ROWS, TOKENS), generator=generator).tolist()
    columns = {"input_ids": rows, "labels": [[-100, -100, *row[2:]] for row in rows]}
    if packed:  # as axolotl packs: positions begin again
        columns["position_ids"] = [[*range(100), *range(TOKENS - 100)] for _ in rows]
    options = {"max_steps": 3, "per_device_train_batch_size": ROWS, "learning_rate": 1e-3, "weight_decay": 0.1}
    quiet = {"report_to": [], "save_strategy": "no", "use_cpu": True, "disable_tqdm": True, "logging_steps": 1}
    arguments = Arguments(output_dir=str(folder), **options, **quiet, seed=3)
    trainer = trainers.AxolotlTrainer(
        model,
        arguments,
        train_dataset=Dataset.from_dict(columns),
        data_collator=lambda rows: {key: torch.tensor([row[key] for row in rows]) for key in rows[0]},
    )
    trainer.train()
    return trainer.model, [line["loss"] for line in trainer.state.log_history if "loss" in line]


@pytest.mark.parametrize(("tied", "packed"), [(True, True), (False, False)])
def test_the_plugin_trains_as_the_plain_trainer_without_logits(tied, packed, manager, calls, tmp_path) -> None:
    plain, ours = llama(tie_word_embeddings=tied), llama(tie_word_embeddings=tied)
    manager.pre_model_load(configuration())
    manager.post_model_build(configuration(), ours)
    with Shapes() as plain_shapes:
        plain, plain_losses = trained(plain, tmp_path, packed=packed)
    assert calls == []
    with Shapes() as our_shapes:
        ours, our_losses = trained(ours, tmp_path, packed=packed)
    assert len(our_losses) == 3
    assert our_losses == pytest.approx(plain_losses, abs=1e-5)
    theirs = dict(plain.named_parameters())
    for name, parameter in ours.named_parameters():
        assert (parameter - theirs[name]).abs().max() <= 1e-5, name
    assert len(calls) >= 3
    logits = ROWS * (TOKENS - 1) * V
    assert plain_shapes.largest(logits)
    assert not our_shapes.largest(logits)


def test_an_option_that_replaces_the_loss_is_an_error(manager) -> None:
    with pytest.raises(el.SizeError, match="liger_cross_entropy"):
        manager.pre_model_load(configuration(liger_cross_entropy=True))


def test_trainers_of_trl_are_patched_after_they_are_built(manager, monkeypatch) -> None:
    found: list[Any] = []
    monkeypatch.setattr(
        integrations, "patch_trainer", lambda *args, **options: found.append((args, options)), raising=False
    )
    manager.post_trainer_create(configuration(), "SFT")
    for kind in ("dpo", "grpo", "orpo"):
        manager.post_trainer_create(configuration(rl=kind), kind)
    assert found == [(("dpo",), {"row_sparse": False}), (("grpo",), {"row_sparse": False})]
