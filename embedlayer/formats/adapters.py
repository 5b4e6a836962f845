"""Adapters of PEFT on the rows of a table: what they are, how rows, vectors and logits change, and their folders.

Adapters on modules of a live model (`integrations.peft`) and adapters in files are the same records. A folder has
`adapter_config.json` and `adapter_model.safetensors`, whose tensors are named after the modules of the model:
`base_model.model.<module>.<what>`. `read_adapter` groups the tensors by module and checks the configuration.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Annotated, NamedTuple, NotRequired, TypedDict

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from embedlayer.core.errors import CheckpointError
from embedlayer.io.files import JsonObject, create_folder, read_json, write_json
from embedlayer.io.json_fields import Range, check_fields, printable
from embedlayer.io.safetensors_files import ADAPTER_WEIGHTS, load_tensors, save_tensors


class LowRankAdapter(NamedTuple):
    """Hold matrices of LoRA for a table of V rows of width D, whose rows become `rows + (b @ a).T * scaling`."""

    a: Float[Tensor, "R V"]
    b: Float[Tensor, "D R"]
    scaling: float


class ReplacedRows(NamedTuple):
    """Hold trained rows, which replace the rows of the same tokens in a table."""

    token_ids: list[int]
    values: Float[Tensor, "N D"]


Adapter = LowRankAdapter | ReplacedRows


def adapt_rows(adapters: Sequence[Adapter], rows: Tensor, start: int, stop: int) -> Tensor:
    """Return rows `start` to `stop - 1` of a table, `(stop - start, D)`, with adapters applied, as a new tensor."""
    for adapter in adapters:
        if isinstance(adapter, LowRankAdapter):
            dtype = torch.promote_types(rows.dtype, adapter.b.dtype)
            added = adapter.a[:, start:stop].T.to(dtype) @ adapter.b.T.to(dtype) * adapter.scaling
            rows = rows + added.to(rows.device, rows.dtype)
        else:
            index, values = _trained_between(adapter, start, stop)
            rows = rows.index_copy(0, index.to(rows.device), values.to(rows.device, rows.dtype))
    return rows


def adapt_vectors(adapters: Sequence[Adapter], vectors: Tensor, ids: Tensor) -> Tensor:
    """Return looked-up rows, `(..., D)` for IDs `(...)`, with adapters applied, as a new tensor."""
    for adapter in adapters:
        if isinstance(adapter, LowRankAdapter):
            dtype = torch.promote_types(vectors.dtype, adapter.b.dtype)
            added = F.embedding(ids, adapter.a.T).to(dtype) @ adapter.b.T.to(dtype) * adapter.scaling
            vectors = vectors + added.to(vectors.dtype)
        else:
            tokens, order = torch.tensor(adapter.token_ids, dtype=torch.long, device=ids.device).sort()
            places = torch.searchsorted(tokens, ids.long().contiguous()).clamp(max=len(tokens) - 1)
            trained = F.embedding(order[places], adapter.values).to(vectors.dtype)
            vectors = torch.where((tokens[places] == ids).unsqueeze(-1), trained, vectors)
    return vectors


def adapt_products(adapters: Sequence[Adapter], products: Tensor, hidden: Tensor, start: int, stop: int) -> Tensor:
    """Return `hidden @ adapted_rows.T`, computed from the products with the unadapted rows, as a new tensor."""
    for adapter in adapters:
        if isinstance(adapter, LowRankAdapter):
            dtype = torch.promote_types(hidden.dtype, adapter.b.dtype)
            narrow = hidden.to(dtype) @ adapter.b.to(dtype) * adapter.scaling
            products = products + (narrow @ adapter.a[:, start:stop].to(dtype)).to(products.dtype)
        else:
            index, values = _trained_between(adapter, start, stop)
            trained = F.linear(hidden, values.to(hidden.dtype)).to(products.dtype)
            products = products.index_copy(-1, index, trained)
    return products


def _trained_between(adapter: ReplacedRows, start: int, stop: int) -> tuple[Tensor, Tensor]:
    """Return the IDs, minus `start`, and the rows, `(N, D)`, of the trained tokens among `start` to `stop - 1`."""
    chosen = [number for number, token in enumerate(adapter.token_ids) if start <= token < stop]
    index = [adapter.token_ids[number] - start for number in chosen]
    return torch.tensor(index, dtype=torch.long, device=adapter.values.device), adapter.values[chosen]


ADAPTER_CONFIG = "adapter_config.json"

TRAINABLE_TOKENS = "TRAINABLE_TOKENS"

PREFIX = "base_model.model."
"""Start of the names of tensors, before the name of the module."""

OF_TOKENS = ("lora_embedding_", "trainable_tokens_")
"""Parts of the names of tensors with values for each token or for single tokens."""

_ROWS = ("trainable_tokens_delta", "token_adapter.trainable_tokens_delta")
_WEIGHTS = ("weight", "base_layer.weight")
_LOW_RANK = (("lora_embedding_A", "lora_embedding_B"), ("lora_A.weight", "lora_B.weight"))
_PARTS = sorted((*_ROWS, f"base_layer.{_ROWS[0]}", *_WEIGHTS, *_LOW_RANK[0], *_LOW_RANK[1]), key=len, reverse=True)
_STARTS = (True, False, "gaussian", "orthogonal", "eva", "mica")
"""Values of `init_lora_weights` that leave the weights of the model as they are."""

_NEUTRAL = {
    *("alpha_pattern", "auto_mapping", "base_model_name_or_path", "ensure_weight_tying", "eva_config"),
    *("exclude_modules", "fan_in_fan_out", "inference_mode", "init_lora_weights", "init_weights", "layers_pattern"),
    *("layers_to_transform", "lora_alpha", "lora_dropout", "megatron_core", "modules_to_save", "peft_type"),
    *("peft_version", "qalora_group_size", "r", "rank_pattern", "revision", "target_modules", "task_type"),
    *("token_indices", "trainable_token_indices", "use_rslora"),
}
"""Keys of a configuration that are read, or do not change what the adapter computes."""


_LARGEST = 2**31 - 1
_MOST_WAYS = 10**7

_Alpha = Annotated[float, Range(-_LARGEST, _LARGEST)]
_Rank = Annotated[int, Range(1, _LARGEST)]
_TokenIds = list[Annotated[int, Range(0, _LARGEST)]]


class AdapterFields(TypedDict):
    """Type of the fields of `adapter_config.json` that are read.

    `alpha_pattern` and `rank_pattern` have a value for each pattern of module names. `token_indices` are the tokens of
    a `TRAINABLE_TOKENS` adapter, `trainable_token_indices` those of a LoRA, for all modules or by module.
    """

    peft_type: str
    r: NotRequired[_Rank]
    lora_alpha: NotRequired[_Alpha]
    alpha_pattern: NotRequired[dict[str, _Alpha] | None]
    rank_pattern: NotRequired[dict[str, _Rank] | None]
    use_rslora: NotRequired[bool | None]
    target_modules: NotRequired[list[str] | str | None]
    token_indices: NotRequired[_TokenIds | None]
    trainable_token_indices: NotRequired[_TokenIds | dict[str, _TokenIds] | None]


@dataclass(frozen=True)
class ModuleAdapter:
    """What an adapter changes in one module with a weight of one row per token, `(V, D)`."""

    weight: Float[Tensor, "V D"] | None = None
    adapters: tuple[Adapter, ...] = ()

    @property
    def sizes(self) -> tuple[int | None, int]:
        """Return `(V, D)` of the weight that the adapter was trained on; V is `None` if it has rows of tokens only."""
        if self.weight is not None:
            return len(self.weight), self.weight.shape[1]
        first = self.adapters[0]
        if isinstance(first, LowRankAdapter):
            return first.a.shape[1], len(first.b)
        return None, first.values.shape[1]

    @property
    def tokens_alone(self) -> ReplacedRows | None:
        """Return the trained tokens if the adapter changes nothing else in the module, else `None`."""
        only = self.adapters[0] if self.weight is None and len(self.adapters) == 1 else None
        return only if isinstance(only, ReplacedRows) else None

    def equals(self, other: "ModuleAdapter") -> bool:
        """Return whether two modules are changed in the same way, bit for bit, as the two ends of a tied table are."""
        ours, theirs = (
            [torch.as_tensor(part) for part in (each.weight, *chain(*each.adapters)) if part is not None]
            for each in (self, other)
        )
        return len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


@dataclass(frozen=True)
class AdapterFolder:
    """An adapter folder of PEFT."""

    directory: Path
    modules: Mapping[str, ModuleAdapter]
    others: tuple[str, ...]
    metadata: Mapping[str, str]

    def choose(self, vocab_size: int, embed_dim: int, module: str | None = None) -> ModuleAdapter:
        """Return what the adapter changes in a weight of these sizes."""
        named = {
            name: change
            for name, change in self.modules.items()
            if module is None or name == module or name.endswith(f".{module}")
        }
        fitting = {name: c for name, c in named.items() if c.sizes in ((vocab_size, embed_dim), (None, embed_dim))}
        if not fitting:
            sizes = {name: "rows of width {1}" if c.sizes[0] is None else "{0} x {1}" for name, c in named.items()}
            shown = ", ".join(f"{name} ({sizes[name].format(*c.sizes)})" for name, c in sorted(named.items()))
            shown = shown or ", ".join(sorted(self.modules)) or "no module that can be read"
            sizes_here = f"{module or 'module'} of {vocab_size} x {embed_dim} numbers"
            raise CheckpointError(f"The adapter in {self.directory} changes no {sizes_here}: it has {shown}.")
        first, *rest = fitting.values()
        if not all(first.equals(change) for change in rest):
            names = ", ".join(sorted(fitting))
            raise CheckpointError(f"The adapter in {self.directory} changes {names} in different ways: pass module=.")
        return first


def read_adapter(directory: Path | str) -> AdapterFolder:
    """Read an adapter folder that PEFT or `write_token_rows` wrote."""
    directory = Path(directory)
    path = directory / ADAPTER_CONFIG
    config = read_json(path)
    kind = config.get("peft_type")
    if kind not in (TRAINABLE_TOKENS, "LORA"):
        raise CheckpointError(f"{path} is of peft_type {printable(kind)}; TRAINABLE_TOKENS and LORA can be read.")
    unknown = {key: value for key, value in config.items() if value and key not in _NEUTRAL and value != "none"}
    if config.get("init_lora_weights", True) not in _STARTS:
        unknown["init_lora_weights"] = config["init_lora_weights"]
    if unknown:
        shown = ", ".join(f"{printable(key)[1:-1]} {printable(value)}" for key, value in [*unknown.items()][:8])
        raise CheckpointError(f"{path} has {shown}, which is not known here. Merge it with PEFT's merge_and_unload().")
    check_fields(config, AdapterFields, path)
    tensors, metadata = load_tensors(directory / ADAPTER_WEIGHTS)
    by_module: dict[str, dict[str, Tensor]] = {}
    others: set[str] = set()
    for name, tensor in tensors.items():
        if not name.startswith(PREFIX):
            raise CheckpointError(f"{directory / ADAPTER_WEIGHTS} has {name!r}; PEFT's names start with {PREFIX!r}.")
        inner = name.removeprefix(PREFIX)
        what = next((part for part in _PARTS if inner.endswith(f".{part}")), inner.rpartition(".")[2])
        module = inner.removesuffix(what).removesuffix(".")
        if what not in _PARTS or tensor.dim() != 2:
            others.add(module)
        elif what != f"base_layer.{_ROWS[0]}":  # a second name of the same rows
            by_module.setdefault(module, {})[what] = tensor
    modules = {
        module: _module_adapter(module, own_tensors, config, directory)
        for module, own_tensors in by_module.items()
        if module not in others
    }
    return AdapterFolder(directory, modules, tuple(sorted(others)), metadata)


def write_token_rows(
    directory: Path | str,
    rows: Mapping[str, Float[Tensor, "N D"]],
    token_ids: Int[Tensor, " N"],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write an adapter folder of PEFT's method trainable tokens, which `PeftModel.from_pretrained` loads."""
    directory = create_folder(directory)
    config = {
        "peft_type": TRAINABLE_TOKENS,
        "target_modules": list(rows),
        "token_indices": token_ids.tolist(),
        "init_weights": True,
        "inference_mode": True,
        "base_model_name_or_path": None,
        "task_type": None,
    }
    tensors = {f"{PREFIX}{module}.{_ROWS[0]}": tensor for module, tensor in rows.items()}
    save_tensors(directory / ADAPTER_WEIGHTS, tensors, metadata)
    write_json(directory / ADAPTER_CONFIG, config)


def _module_adapter(module: str, tensors: Mapping[str, Tensor], config: JsonObject, directory: Path) -> ModuleAdapter:
    weights = directory / ADAPTER_WEIGHTS
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            raise CheckpointError(f"{weights} stores {module}.{name} as {tensor.dtype}: it is damaged.")
        if not tensor.isfinite().all():
            raise CheckpointError(f"{weights} has NaN or infinity in {module}.{name}. Use an earlier checkpoint.")
    weight = next((tensors[name] for name in _WEIGHTS if name in tensors), None)
    adapters: tuple[Adapter, ...] = ()
    for pair in _LOW_RANK:
        first, second = (tensors.get(name) for name in pair)
        if first is None and second is None:
            continue
        if first is None or second is None or len(first) != second.shape[1]:
            raise CheckpointError(f"{weights} has half of the LoRA of {module}: it is damaged.")
        targets = config.get("target_modules")
        if isinstance(targets, list) and not any(f".{module}".endswith(f".{name}") for name in targets):
            raise CheckpointError(f"{weights} has a LoRA of {module}, which target_modules of {ADAPTER_CONFIG} lack.")
        rank, alpha = len(first), _of_module(config, "alpha_pattern", module, directory, config.get("lora_alpha", 8))
        config_rank = _of_module(config, "rank_pattern", module, directory, config.get("r", rank))
        if rank != config_rank or not rank:
            stated = f"{directory / ADAPTER_CONFIG}, r or rank_pattern, states the rank {config_rank} for {module}"
            raise CheckpointError(f"{stated}, and {ADAPTER_WEIGHTS} has matrices of rank {rank}: copy it again.")
        a, b = (first, second) if pair == _LOW_RANK[0] else (second.T, first.T)
        scaling = alpha / (rank**0.5 if config.get("use_rslora") else rank)
        adapters = (LowRankAdapter(a.float(), b.float(), scaling),)
    rows = next((tensors[name] for name in _ROWS if name in tensors), None)
    if rows is not None:
        ids = config.get("token_indices") or config.get("trainable_token_indices") or []
        if isinstance(ids, dict):
            ids = next((ids[key] for key in ids if module == key or module.endswith(f".{key}")), [])
        if len({*ids}) < len(ids):
            twice = next(token_id for place, token_id in enumerate(ids) if token_id in ids[:place])
            raise CheckpointError(f"{directory / ADAPTER_CONFIG} names token {twice} twice for {module}.")
        if len(ids) != len(rows):
            raise CheckpointError(f"{directory} has {len(rows)} rows of {module} and {len(ids)} token IDs.")
        adapters += (ReplacedRows(list(ids), rows),)
    return ModuleAdapter(weight, adapters)


def _of_module(config: JsonObject, patterns: str, module: str, directory: Path, default: float) -> float:
    """Return the number of a module: that of the first pattern that its name or the end of its name matches."""
    source = f"{directory / ADAPTER_CONFIG}, {patterns}"
    numbers: dict[str, float] = config.get(patterns) or {}
    for pattern, number in numbers.items():
        try:
            if max(len(pattern), len(module)) > 200 or _ways(pattern) >= _MOST_WAYS:
                raise re.error("it has too many choices, or more than 200 characters")
            if re.match(rf"(.*\.)?({pattern})$", module):
                return number
        except re.error as error:
            shown = f"{source}: the pattern {pattern[:100]!a} cannot be matched: {error}"
            raise CheckpointError(f"{shown}. Write the modules' names instead.") from error
    return default


def _ways(pattern: str) -> int:
    """Return roughly how many ways `re` tries; `_MOST_WAYS` for a repeated group that contains a choice."""
    plain = re.sub(r"\\.|\[\^?\]?(\\.|[^\]\\])*\]", "x", pattern, flags=re.DOTALL).replace("(?:", "(")
    ways: int = 100 ** len(re.findall(r"[*+{]", plain)) * 2 ** plain.count("?")
    while group := re.search(r"\(([^()]*)\)([*+{]?)", plain):
        has_choice = re.search(r"[*+?{|]", group[1]) is not None
        ways *= _MOST_WAYS if has_choice and group[2] else group[1].count("|") + 1
        plain = plain.replace(group[0], ("x?" if has_choice else "x") + group[2], 1)
    return ways * (plain.count("|") + 1)
