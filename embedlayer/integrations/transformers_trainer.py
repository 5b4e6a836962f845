"""transformers: its `Trainer` in one line, and the trainers of TRL, which are subclasses of it."""

from typing import Any, TypeVar

from embedlayer.checkpoints.patching import name_of_tied_module, patch
from embedlayer.core.errors import CheckpointError, SizeError
from embedlayer.integrations.accelerate import sharding_by
from embedlayer.integrations.peft import base_model
from embedlayer.integrations.trl import is_trl, replace_losses
from embedlayer.optim.row_adamw import RowAdamW
from embedlayer.tables.row_sparse import RowSparseEmbedding
from embedlayer.tables.table import TokenTable

T = TypeVar("T")

ADAMW = ("adamw_torch", "adamw_torch_fused")
"""Optimizers of `TrainingArguments` whose results are those of `RowAdamW`."""
READERS = ("sync_ref_model", "use_vllm")
"""Options of TRL with which other code reads the memory of weights, where updates may be pending."""


def patch_trainer(trainer: T, *, row_sparse: bool | None = None) -> T:
    """Patch a `Trainer` of transformers or TRL between its construction and `train()`.

    Its model is patched, see `patch`: the loss of `model(input_ids, labels=labels)` needs no logits. Where its table is
    untied and trained, gradients are row-sparse and the optimizer is `RowAdamW`, with learning rate, betas, epsilon,
    weight decay and groups of the trainer. The weights become those of the trainer's AdamW.

    A trainer of TRL (SFT, DPO, KTO, GRPO, RLOO) computes the log-probabilities of its policy and of its reference model
    from `lm_head.weight` in its own code. They then come from `token_statistics`, as do entropy, mean logits and
    accuracy. Under PEFT only these are replaced, in the base model, and the tables stay as they are.

    Args:
        trainer: A `transformers.Trainer`, or a trainer of TRL 1.14 to 1.16.
        row_sparse: Whether the gradients of the table are row-sparse, with `RowAdamW`; `None` where it is possible.

    Returns:
        The same trainer.

    Raises:
        SizeError: The trainer uses FSDP or DeepSpeed, or computes its loss in a way that cannot be replaced.
        CheckpointError: `patch` cannot patch the model; or the forward of the model is not TRL's any more.
        VersionError: The installed release of TRL is not between 1.14 and 1.16.

    Example:
        >>> import tempfile
        >>> from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
        >>> sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
        >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=99, **sizes))
        >>> args = TrainingArguments(tempfile.mkdtemp(), report_to="none", use_cpu=True)
        >>> trainer = patch_trainer(Trainer(model, args))
        >>> type(trainer.create_optimizer()).__name__
        'RowAdamW'
    """
    any_trainer: Any = trainer
    if not all(hasattr(trainer, name) for name in ("model", "args", "create_optimizer", "optimizer_cls_and_kwargs")):
        raise CheckpointError(f"A Trainer of transformers is needed; found {type(trainer).__name__}.")
    if getattr(trainer, "model_init", None) is not None:
        raise SizeError("train() builds a new model with model_init: call embedlayer.patch inside of it instead.")
    model = base_model(any_trainer.model)
    is_adapted = model is not any_trainer.model
    table = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None
    obstacle = _obstacle(any_trainer, model, table, is_adapted=is_adapted)
    if row_sparse and obstacle:
        raise SizeError(f"row_sparse=True is impossible here: {obstacle}.")
    if is_trl(trainer):
        replace_losses(trainer)
    if not (is_adapted and is_trl(trainer)) and not isinstance(table, TokenTable):
        patch(model, row_sparse=obstacle == "" if row_sparse is None else row_sparse)
    is_row_sparse = any(isinstance(each, RowSparseEmbedding) for each in model.modules())
    if is_row_sparse and any_trainer.optimizer is None and any_trainer.optimizer_cls_and_kwargs is None:
        args = any_trainer.args
        options = {"betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon}
        any_trainer.optimizer_cls_and_kwargs = RowAdamW, {"lr": args.learning_rate, **options}
    return trainer


def _obstacle(trainer: Any, model: Any, table: Any, *, is_adapted: bool) -> str:
    """Return why the gradients of the table cannot become row-sparse now, as a clause; empty if they can."""
    args = trainer.args
    if isinstance(table, TokenTable):
        return "the model is patched already"
    weight = getattr(table, "weight", None)
    if is_adapted or weight is None or not weight.requires_grad:
        return "the table is not trained"
    if name := name_of_tied_module(model, [weight]):
        return f"{name} is tied to the table"
    if trainer.optimizer is not None or trainer.optimizer_cls_and_kwargs is not None:
        return "the trainer has an optimizer of its own"
    owner = next(base for base in type(trainer).__mro__ if "create_optimizer" in vars(base))
    if not owner.__module__.startswith("transformers."):
        return f"{owner.__name__} has a create_optimizer of its own"
    if str(getattr(args.optim, "value", args.optim)) not in ADAMW or args.optim_args:
        return f"RowAdamW replaces AdamW of torch without optim_args, and optim is {args.optim}"
    if args.adam_beta1**2 >= args.adam_beta2:
        return f"RowAdamW needs beta1 below the root of beta2, not {args.adam_beta1} and {args.adam_beta2}"
    if args.world_size > 1 or args.n_gpu > 1 or sharding_by(trainer):
        return "several processes share the model"
    readers = [name for name in READERS if getattr(args, name, False)]
    return f"with {readers[0]} other code reads the memory of the table" if readers else ""
