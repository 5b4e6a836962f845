"""Types of the JSON files of a run, with which `RunDirectory` checks what it reads."""

from typing import Annotated, NotRequired, TypedDict

from embedlayer.io.files import JsonObject
from embedlayer.io.json_fields import Count, Measurement, Range, Step
from embedlayer.tables.stored.folder_files import PendingUpdatesFields


class NeighborsBefore(TypedDict):
    """Nearest neighbours of a token before training, as a note in `run.json`.

    `near` has pairs of a token's text and its cosine similarity, the nearest first.
    """

    id: Count
    token: str
    near: list[tuple[str, Measurement]]


class Notes(TypedDict):
    """Type of `notes` in `run.json`, which the command `train` writes; other programs may add keys.

    `launch` is the `launch_id` of the torchrun launch that started the run. `sources` names the corpora of a mixture.
    """

    neighbors_before: NotRequired[list[NeighborsBefore]]
    launch: NotRequired[str]
    sources: NotRequired[list[str]]


class ModelDescription(TypedDict):
    """Type of those fields of a model's description, `describe(model)`, that are read without building the model."""

    kind: str
    position: NotRequired[JsonObject]
    head: NotRequired[JsonObject]


class RunDescription(TypedDict):
    """Type of the content of `run.json`: training options, model, validation fraction and notes of a run.

    `weights` has the weight of each corpus if the run trains on a mixture.
    """

    options: JsonObject
    model: ModelDescription
    validation_fraction: Annotated[float, Range(0, 1)]
    weights: NotRequired[list[float]]
    notes: Notes


class MonitorFields(TypedDict):
    """Type of `monitor` in a line of metrics: the fields of a `MonitorReport` that are not `None`.

    Tokens are named by their texts, which an edit of the vocabulary leaves as they are.
    """

    never_seen: Measurement
    norms: list[Measurement | None]
    update_ratios: list[Measurement | None]
    losses: list[Measurement | None]
    loss_never_seen: NotRequired[Measurement]
    new_norm: NotRequired[Measurement]
    new_update_ratio: NotRequired[Measurement]
    new_loss: NotRequired[Measurement]
    rows_not_finite: Count
    tokens_not_finite: list[str]
    gradients_not_finite: NotRequired[Count]
    tokens_of_gradients: list[str]
    logit_std: NotRequired[Measurement]
    log_z: NotRequired[Measurement]
    largest_logit: NotRequired[Measurement]


class MetricsLine(TypedDict):
    """Type of a line of `metrics.jsonl`, which `Trainer.run` yields. Losses are in nats per token."""

    step: Step
    loss: NotRequired[Measurement]
    lr: NotRequired[Measurement]
    tokens_per_second: NotRequired[Measurement]
    rows_touched: NotRequired[Measurement]
    validation_loss: NotRequired[Measurement]
    validation_bits_per_byte: NotRequired[Measurement]
    validation_losses: NotRequired[list[Measurement]]
    monitor: NotRequired[MonitorFields]


class BestFacts(TypedDict):
    """Type of the content of `best.json`: number of the step and validation results of the saved weights."""

    step: Step
    validation_loss: float
    validation_bits_per_byte: float
    validation_losses: NotRequired[list[float]]


class TrainerState(TypedDict):
    """Type of the JSON values that every `checkpoint.safetensors` has in its metadata.

    `Trainer.state` returns them and others. `generations` has the number of the checkpoint of each mapped table.
    """

    step: Step
    steps: Step | None
    pending_updates: dict[str, PendingUpdatesFields]
    generations: NotRequired[list[Count]]
