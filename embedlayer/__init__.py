"""embedlayer: the embedding layer of a language model, whole.

Every public name has one import path, this module, and is loaded when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from embedlayer.analysis.atlas import write_atlas as write_atlas
    from embedlayer.analysis.geometry import align as align
    from embedlayer.analysis.geometry import moved_most as moved_most
    from embedlayer.analysis.geometry import norms_by_frequency as norms_by_frequency
    from embedlayer.analysis.geometry import pca as pca
    from embedlayer.analysis.geometry import shared_tokens as shared_tokens
    from embedlayer.analysis.geometry import table_geometry as table_geometry
    from embedlayer.analysis.health import Health as Health
    from embedlayer.analysis.health import health as health
    from embedlayer.analysis.under_trained import UnderTrained as UnderTrained
    from embedlayer.analysis.under_trained import under_trained_scores as under_trained_scores
    from embedlayer.analysis.vectors import TokenVectors as TokenVectors
    from embedlayer.checkpoints.formats import read_vectors as read_vectors
    from embedlayer.checkpoints.formats import write_vectors as write_vectors
    from embedlayer.checkpoints.layer import EmbeddingLayer as EmbeddingLayer
    from embedlayer.checkpoints.layer import LayerReport as LayerReport
    from embedlayer.checkpoints.layer import TransformedHead as TransformedHead
    from embedlayer.checkpoints.loader import load as load
    from embedlayer.checkpoints.patch import patch as patch
    from embedlayer.checkpoints.patch import unpatch as unpatch
    from embedlayer.checkpoints.writer import WriteReceipt as WriteReceipt
    from embedlayer.compress.convert import compressed as compressed
    from embedlayer.compress.convert import with_table as with_table
    from embedlayer.compress.report import Comparison as Comparison
    from embedlayer.compress.report import compare as compare
    from embedlayer.compress.report import loss_on as loss_on
    from embedlayer.distributed.fsdp import register_fsdp_methods as register_fsdp_methods
    from embedlayer.distributed.sharded import ShardedTable as ShardedTable
    from embedlayer.distributed.sharded import keep_rows_apart as keep_rows_apart
    from embedlayer.distributed.sharded import shard_table as shard_table
    from embedlayer.distributed.state import distributed_state as distributed_state
    from embedlayer.distributed.state import load_distributed_state as load_distributed_state
    from embedlayer.errors import CheckpointError as CheckpointError
    from embedlayer.errors import EmbedLayerError as EmbedLayerError
    from embedlayer.errors import EmbedLayerWarning as EmbedLayerWarning
    from embedlayer.errors import FileError as FileError
    from embedlayer.errors import MissingExtraError as MissingExtraError
    from embedlayer.errors import PeerError as PeerError
    from embedlayer.errors import PositionError as PositionError
    from embedlayer.errors import ShapeError as ShapeError
    from embedlayer.errors import SizeError as SizeError
    from embedlayer.errors import StaleRowsError as StaleRowsError
    from embedlayer.errors import TextError as TextError
    from embedlayer.errors import TokenIdError as TokenIdError
    from embedlayer.errors import TokenizerError as TokenizerError
    from embedlayer.errors import UnknownTokenError as UnknownTokenError
    from embedlayer.errors import VocabularyError as VocabularyError
    from embedlayer.layers.input import GPT_CONFIG_124M as GPT_CONFIG_124M
    from embedlayer.layers.input import GPTEmbedding as GPTEmbedding
    from embedlayer.layers.input import TransformerEmbedding as TransformerEmbedding
    from embedlayer.layers.output import OutputHead as OutputHead
    from embedlayer.losses.linear_cross_entropy import linear_cross_entropy as linear_cross_entropy
    from embedlayer.losses.linear_cross_entropy import token_log_probs as token_log_probs
    from embedlayer.models.cache import KeyValueCache as KeyValueCache
    from embedlayer.models.config import ModelConfig as ModelConfig
    from embedlayer.models.decoder import CausalLMOutput as CausalLMOutput
    from embedlayer.models.decoder import DecoderLM as DecoderLM
    from embedlayer.models.generate import generate as generate
    from embedlayer.models.llama import load_llama as load_llama
    from embedlayer.optim.clip import clip_grad_norm_ as clip_grad_norm_
    from embedlayer.optim.param_groups import param_groups as param_groups
    from embedlayer.optim.row_adamw import RowAdamW as RowAdamW
    from embedlayer.planner import PRESETS as PRESETS
    from embedlayer.planner import Change as Change
    from embedlayer.planner import EmbeddingPlan as EmbeddingPlan
    from embedlayer.planner import changes as changes
    from embedlayer.planner import plan as plan
    from embedlayer.positions.alibi import AlibiBias as AlibiBias
    from embedlayer.positions.learned import LearnedPositionalEmbedding as LearnedPositionalEmbedding
    from embedlayer.positions.position import Position as Position
    from embedlayer.positions.position import positions_of as positions_of
    from embedlayer.positions.relative import RelativePositionBias as RelativePositionBias
    from embedlayer.positions.rotary import RotaryEmbedding as RotaryEmbedding
    from embedlayer.positions.rotary import permute_qk as permute_qk
    from embedlayer.positions.rotary import rotary_positions as rotary_positions
    from embedlayer.positions.rotary_scaling import DynamicNTK as DynamicNTK
    from embedlayer.positions.rotary_scaling import Linear as Linear
    from embedlayer.positions.rotary_scaling import Llama3 as Llama3
    from embedlayer.positions.rotary_scaling import LongRope as LongRope
    from embedlayer.positions.rotary_scaling import Proportional as Proportional
    from embedlayer.positions.rotary_scaling import Yarn as Yarn
    from embedlayer.positions.sinusoidal import SinusoidalPositionalEmbedding as SinusoidalPositionalEmbedding
    from embedlayer.positions.sinusoidal import sinusoids as sinusoids
    from embedlayer.scratch import ScratchCombinedEmbedding as ScratchCombinedEmbedding
    from embedlayer.scratch import ScratchEmbedding as ScratchEmbedding
    from embedlayer.scratch import ScratchEmbeddingWithGrad as ScratchEmbeddingWithGrad
    from embedlayer.scratch import ScratchPositionEmbedding as ScratchPositionEmbedding
    from embedlayer.scratch import demonstrate_embeddings as demonstrate_embeddings
    from embedlayer.tables.delta import DeltaEmbedding as DeltaEmbedding
    from embedlayer.tables.dense import TokenEmbedding as TokenEmbedding
    from embedlayer.tables.factorized import FactorizedEmbedding as FactorizedEmbedding
    from embedlayer.tables.ledger import pending_updates_applied as pending_updates_applied
    from embedlayer.tables.quantized import QuantizedEmbedding as QuantizedEmbedding
    from embedlayer.tables.table import TokenTable as TokenTable
    from embedlayer.text.corpus import TokenCorpus as TokenCorpus
    from embedlayer.text.shards import build_in_shards as build_in_shards
    from embedlayer.text.shards import build_shard as build_shard
    from embedlayer.text.tokenizer import load_tokenizer as load_tokenizer
    from embedlayer.text.tokenizer import train_tokenizer as train_tokenizer
    from embedlayer.text.windows import TokenWindows as TokenWindows
    from embedlayer.text.windows import WindowSampler as WindowSampler
    from embedlayer.text.windows import create_dataloader as create_dataloader
    from embedlayer.text.windows import create_dataloader_v1 as create_dataloader_v1
    from embedlayer.training.loop import Trainer as Trainer
    from embedlayer.training.loop import TrainingOptions as TrainingOptions
    from embedlayer.training.run_directory import RunDirectory as RunDirectory
    from embedlayer.training.run_directory import load_run as load_run
    from embedlayer.vocab.edit import add_tokens as add_tokens
    from embedlayer.vocab.edit import edit_vocabulary as edit_vocabulary
    from embedlayer.vocab.edit import remove_tokens as remove_tokens
    from embedlayer.vocab.edit import transplant as transplant
    from embedlayer.vocab.edit import trim_vocabulary as trim_vocabulary
    from embedlayer.vocab.row_training import merge_rows as merge_rows
    from embedlayer.vocab.row_training import train_only_rows as train_only_rows
    from embedlayer.vocab.receipt import Receipt as Receipt
    from embedlayer.vocab.tokenizer_edit import TokenizerEdit as TokenizerEdit
    from embedlayer.vocab.tokenizer_edit import edit_tokenizer as edit_tokenizer
    from embedlayer.vocab.tokenizer_match import match_tokenizers as match_tokenizers
    from embedlayer.vocab.used_tokens import used_tokens as used_tokens

_HOMES = {
    "embedlayer.analysis.atlas": ("write_atlas",),
    "embedlayer.analysis.geometry": (
        "align",
        "moved_most",
        "norms_by_frequency",
        "pca",
        "shared_tokens",
        "table_geometry",
    ),
    "embedlayer.analysis.health": ("Health", "health"),
    "embedlayer.analysis.under_trained": ("UnderTrained", "under_trained_scores"),
    "embedlayer.analysis.vectors": ("TokenVectors",),
    "embedlayer.checkpoints.formats": ("read_vectors", "write_vectors"),
    "embedlayer.checkpoints.layer": ("EmbeddingLayer", "LayerReport", "TransformedHead"),
    "embedlayer.checkpoints.loader": ("load",),
    "embedlayer.checkpoints.patch": ("patch", "unpatch"),
    "embedlayer.checkpoints.writer": ("WriteReceipt",),
    "embedlayer.compress.convert": ("compressed", "with_table"),
    "embedlayer.compress.report": ("Comparison", "compare", "loss_on"),
    "embedlayer.distributed.fsdp": ("register_fsdp_methods",),
    "embedlayer.distributed.sharded": ("ShardedTable", "keep_rows_apart", "shard_table"),
    "embedlayer.distributed.state": ("distributed_state", "load_distributed_state"),
    "embedlayer.errors": (
        "CheckpointError",
        "EmbedLayerError",
        "EmbedLayerWarning",
        "FileError",
        "MissingExtraError",
        "PeerError",
        "PositionError",
        "ShapeError",
        "SizeError",
        "StaleRowsError",
        "TextError",
        "TokenIdError",
        "TokenizerError",
        "UnknownTokenError",
        "VocabularyError",
    ),
    "embedlayer.layers.input": ("GPTEmbedding", "GPT_CONFIG_124M", "TransformerEmbedding"),
    "embedlayer.layers.output": ("OutputHead",),
    "embedlayer.losses.linear_cross_entropy": ("linear_cross_entropy", "token_log_probs"),
    "embedlayer.models.cache": ("KeyValueCache",),
    "embedlayer.models.config": ("ModelConfig",),
    "embedlayer.models.decoder": ("CausalLMOutput", "DecoderLM"),
    "embedlayer.models.generate": ("generate",),
    "embedlayer.models.llama": ("load_llama",),
    "embedlayer.optim.clip": ("clip_grad_norm_",),
    "embedlayer.optim.param_groups": ("param_groups",),
    "embedlayer.optim.row_adamw": ("RowAdamW",),
    "embedlayer.planner": ("Change", "EmbeddingPlan", "PRESETS", "changes", "plan"),
    "embedlayer.positions.alibi": ("AlibiBias",),
    "embedlayer.positions.learned": ("LearnedPositionalEmbedding",),
    "embedlayer.positions.position": ("Position", "positions_of"),
    "embedlayer.positions.relative": ("RelativePositionBias",),
    "embedlayer.positions.rotary": ("RotaryEmbedding", "permute_qk", "rotary_positions"),
    "embedlayer.positions.rotary_scaling": ("DynamicNTK", "Linear", "Llama3", "LongRope", "Proportional", "Yarn"),
    "embedlayer.positions.sinusoidal": ("SinusoidalPositionalEmbedding", "sinusoids"),
    "embedlayer.scratch": (
        "ScratchCombinedEmbedding",
        "ScratchEmbedding",
        "ScratchEmbeddingWithGrad",
        "ScratchPositionEmbedding",
        "demonstrate_embeddings",
    ),
    "embedlayer.tables.delta": ("DeltaEmbedding",),
    "embedlayer.tables.dense": ("TokenEmbedding",),
    "embedlayer.tables.factorized": ("FactorizedEmbedding",),
    "embedlayer.tables.ledger": ("pending_updates_applied",),
    "embedlayer.tables.quantized": ("QuantizedEmbedding",),
    "embedlayer.tables.table": ("TokenTable",),
    "embedlayer.text.corpus": ("TokenCorpus",),
    "embedlayer.text.shards": ("build_in_shards", "build_shard"),
    "embedlayer.text.tokenizer": ("load_tokenizer", "train_tokenizer"),
    "embedlayer.text.windows": ("TokenWindows", "WindowSampler", "create_dataloader", "create_dataloader_v1"),
    "embedlayer.training.loop": ("Trainer", "TrainingOptions"),
    "embedlayer.training.run_directory": ("RunDirectory", "load_run"),
    "embedlayer.vocab.edit": ("add_tokens", "edit_vocabulary", "remove_tokens", "transplant", "trim_vocabulary"),
    "embedlayer.vocab.row_training": ("merge_rows", "train_only_rows"),
    "embedlayer.vocab.receipt": ("Receipt",),
    "embedlayer.vocab.tokenizer_edit": ("TokenizerEdit", "edit_tokenizer"),
    "embedlayer.vocab.tokenizer_match": ("match_tokenizers",),
    "embedlayer.vocab.used_tokens": ("used_tokens",),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOME[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
