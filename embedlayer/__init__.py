"""embedlayer: the embedding layer of a language model, whole.

Every public name has one import path, this module, and is loaded when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from embedlayer.analysis.atlas import write_atlas as write_atlas
    from embedlayer.analysis.geometry import align_tables as align_tables
    from embedlayer.analysis.geometry import norms_by_frequency as norms_by_frequency
    from embedlayer.analysis.geometry import principal_components as principal_components
    from embedlayer.analysis.geometry import row_movement as row_movement
    from embedlayer.analysis.geometry import shared_tokens as shared_tokens
    from embedlayer.analysis.geometry import table_geometry as table_geometry
    from embedlayer.analysis.health import TableHealth as TableHealth
    from embedlayer.analysis.health import table_health as table_health
    from embedlayer.analysis.under_trained import UnderTrained as UnderTrained
    from embedlayer.analysis.under_trained import under_trained_scores as under_trained_scores
    from embedlayer.analysis.vectors import TokenVectors as TokenVectors
    from embedlayer.checkpoints.embedding_layer import EmbeddingLayer as EmbeddingLayer
    from embedlayer.checkpoints.embedding_layer import LayerReport as LayerReport
    from embedlayer.checkpoints.embedding_layer import load as load
    from embedlayer.checkpoints.patch import patch as patch
    from embedlayer.checkpoints.patch import unpatch as unpatch
    from embedlayer.checkpoints.vector_files import read_vectors as read_vectors
    from embedlayer.checkpoints.vector_files import write_vectors as write_vectors
    from embedlayer.checkpoints.writer import WriteReceipt as WriteReceipt
    from embedlayer.compress.convert import compress_table as compress_table
    from embedlayer.compress.convert import replace_table as replace_table
    from embedlayer.compress.report import CompressionResult as CompressionResult
    from embedlayer.compress.report import compare_compression as compare_compression
    from embedlayer.compress.report import loss_on_text as loss_on_text
    from embedlayer.data.corpus import TokenCorpus as TokenCorpus
    from embedlayer.data.sharded_build import build_in_shards as build_in_shards
    from embedlayer.data.sharded_build import build_shard as build_shard
    from embedlayer.data.tokenizer import load_tokenizer as load_tokenizer
    from embedlayer.data.tokenizer import train_tokenizer as train_tokenizer
    from embedlayer.data.windows import TokenWindows as TokenWindows
    from embedlayer.data.windows import WindowSampler as WindowSampler
    from embedlayer.data.windows import create_dataloader as create_dataloader
    from embedlayer.data.windows import create_dataloader_v1 as create_dataloader_v1
    from embedlayer.distributed.data_parallel import distributed_data_parallel as distributed_data_parallel
    from embedlayer.distributed.fsdp import register_fsdp_methods as register_fsdp_methods
    from embedlayer.distributed.sharded import ShardedTable as ShardedTable
    from embedlayer.distributed.sharded import shard_table as shard_table
    from embedlayer.distributed.sharded import sharded_parameters as sharded_parameters
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
    from embedlayer.layers.prediction_head import PredictionHead as PredictionHead
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
    from embedlayer.planner import EmbeddingPlan as EmbeddingPlan
    from embedlayer.planner import PlanAlternative as PlanAlternative
    from embedlayer.planner import plan as plan
    from embedlayer.planner import plan_alternatives as plan_alternatives
    from embedlayer.positions.alibi import AlibiBias as AlibiBias
    from embedlayer.positions.learned import LearnedPositionalEmbedding as LearnedPositionalEmbedding
    from embedlayer.positions.position import Position as Position
    from embedlayer.positions.position import positions_of as positions_of
    from embedlayer.positions.relative import RelativePositionBias as RelativePositionBias
    from embedlayer.positions.rotary import RotaryEmbedding as RotaryEmbedding
    from embedlayer.positions.rotary import permute_qk as permute_qk
    from embedlayer.positions.rotary import rotary_positions as rotary_positions
    from embedlayer.positions.rotary_scaling import DynamicNTKScaling as DynamicNTKScaling
    from embedlayer.positions.rotary_scaling import LinearScaling as LinearScaling
    from embedlayer.positions.rotary_scaling import Llama3Scaling as Llama3Scaling
    from embedlayer.positions.rotary_scaling import LongRopeScaling as LongRopeScaling
    from embedlayer.positions.rotary_scaling import ProportionalScaling as ProportionalScaling
    from embedlayer.positions.rotary_scaling import YarnScaling as YarnScaling
    from embedlayer.positions.sinusoidal import SinusoidalPositionalEmbedding as SinusoidalPositionalEmbedding
    from embedlayer.positions.sinusoidal import sinusoids as sinusoids
    from embedlayer.scratch import ScratchCombinedEmbedding as ScratchCombinedEmbedding
    from embedlayer.scratch import ScratchEmbedding as ScratchEmbedding
    from embedlayer.scratch import ScratchEmbeddingWithGrad as ScratchEmbeddingWithGrad
    from embedlayer.scratch import ScratchPositionEmbedding as ScratchPositionEmbedding
    from embedlayer.scratch import demonstrate_embeddings as demonstrate_embeddings
    from embedlayer.sources import OpenedModel as OpenedModel
    from embedlayer.sources import open_model as open_model
    from embedlayer.tables.delta import DeltaEmbedding as DeltaEmbedding
    from embedlayer.tables.dense import TokenEmbedding as TokenEmbedding
    from embedlayer.tables.factorized import FactorizedEmbedding as FactorizedEmbedding
    from embedlayer.tables.pending_updates import pending_updates_applied as pending_updates_applied
    from embedlayer.tables.quantized import QuantizedEmbedding as QuantizedEmbedding
    from embedlayer.tables.table import TokenTable as TokenTable
    from embedlayer.training.loop import Trainer as Trainer
    from embedlayer.training.loop import TrainingOptions as TrainingOptions
    from embedlayer.training.run_directory import RunDirectory as RunDirectory
    from embedlayer.vocab.edit import add_tokens as add_tokens
    from embedlayer.vocab.edit import edit_vocabulary as edit_vocabulary
    from embedlayer.vocab.edit import remove_tokens as remove_tokens
    from embedlayer.vocab.edit import transplant as transplant
    from embedlayer.vocab.edit import trim_vocabulary as trim_vocabulary
    from embedlayer.vocab.receipt import Receipt as Receipt
    from embedlayer.vocab.row_training import merge_rows as merge_rows
    from embedlayer.vocab.row_training import train_only_rows as train_only_rows
    from embedlayer.vocab.tokenizer_edit import TokenizerEdit as TokenizerEdit
    from embedlayer.vocab.tokenizer_edit import edit_tokenizer as edit_tokenizer
    from embedlayer.vocab.tokenizer_match import match_tokenizers as match_tokenizers
    from embedlayer.vocab.used_tokens import used_tokens as used_tokens

_HOMES = {
    "embedlayer.analysis.atlas": ("write_atlas",),
    "embedlayer.analysis.geometry": (
        "align_tables",
        "row_movement",
        "norms_by_frequency",
        "principal_components",
        "shared_tokens",
        "table_geometry",
    ),
    "embedlayer.analysis.health": ("TableHealth", "table_health"),
    "embedlayer.analysis.under_trained": ("UnderTrained", "under_trained_scores"),
    "embedlayer.analysis.vectors": ("TokenVectors",),
    "embedlayer.checkpoints.vector_files": ("read_vectors", "write_vectors"),
    "embedlayer.checkpoints.embedding_layer": ("EmbeddingLayer", "LayerReport", "load"),
    "embedlayer.layers.prediction_head": ("PredictionHead",),
    "embedlayer.checkpoints.patch": ("patch", "unpatch"),
    "embedlayer.checkpoints.writer": ("WriteReceipt",),
    "embedlayer.compress.convert": ("compress_table", "replace_table"),
    "embedlayer.compress.report": ("CompressionResult", "compare_compression", "loss_on_text"),
    "embedlayer.distributed.fsdp": ("register_fsdp_methods",),
    "embedlayer.distributed.data_parallel": ("distributed_data_parallel",),
    "embedlayer.distributed.sharded": ("ShardedTable", "shard_table", "sharded_parameters"),
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
    "embedlayer.planner": ("EmbeddingPlan", "PRESETS", "PlanAlternative", "plan", "plan_alternatives"),
    "embedlayer.positions.alibi": ("AlibiBias",),
    "embedlayer.positions.learned": ("LearnedPositionalEmbedding",),
    "embedlayer.positions.position": ("Position", "positions_of"),
    "embedlayer.positions.relative": ("RelativePositionBias",),
    "embedlayer.positions.rotary": ("RotaryEmbedding", "permute_qk", "rotary_positions"),
    "embedlayer.positions.rotary_scaling": (
        "DynamicNTKScaling",
        "LinearScaling",
        "Llama3Scaling",
        "LongRopeScaling",
        "ProportionalScaling",
        "YarnScaling",
    ),
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
    "embedlayer.tables.pending_updates": ("pending_updates_applied",),
    "embedlayer.tables.quantized": ("QuantizedEmbedding",),
    "embedlayer.tables.table": ("TokenTable",),
    "embedlayer.data.corpus": ("TokenCorpus",),
    "embedlayer.data.sharded_build": ("build_in_shards", "build_shard"),
    "embedlayer.data.tokenizer": ("load_tokenizer", "train_tokenizer"),
    "embedlayer.data.windows": ("TokenWindows", "WindowSampler", "create_dataloader", "create_dataloader_v1"),
    "embedlayer.training.loop": ("Trainer", "TrainingOptions"),
    "embedlayer.sources": ("OpenedModel", "open_model"),
    "embedlayer.training.run_directory": ("RunDirectory",),
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
