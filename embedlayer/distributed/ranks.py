"""What a training loop asks of the processes that train together: which of them it is, and how they agree.

One process is `Alone`, and every answer is free. Those that `torchrun` starts are `Together`
(`embedlayer.distributed.together`).
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from embedlayer.data.windows import share_of
from embedlayer.errors import SizeError
from embedlayer.io.files import JsonObject
from embedlayer.io.safetensors_files import load_tensors, save_tensors
from embedlayer.pretrained import build, describe

if TYPE_CHECKING:
    from embedlayer.models.decoder import DecoderLM

Loss = Callable[[Tensor, Tensor], Tensor]
Whole = Callable[[Tensor], Tensor]


class Ranks(ABC):
    """Abstract: the processes that train one model.

    Attributes:
        rank: Which of them this is, from 0.
        size: How many there are.
        launch: What started them and starts them again, on rank 0 that of all, with spaces between; empty for one
            process.
    """

    rank: int = 0
    size: int = 1
    launch: str = ""

    @property
    def first(self) -> bool:
        """Whether this is the one that writes files and speaks."""
        return self.rank == 0

    def share(self, count: int) -> range:
        """This rank's part of `count` things: consecutive, and as many as anyone's, or one less.

        Example:
            >>> Alone().share(3)
            range(0, 3)
        """
        return share_of(count, self.rank, self.size)

    @abstractmethod
    def any(self, flag: bool) -> bool:
        """Whether it is so on any rank."""

    @abstractmethod
    def sum(self, numbers: Tensor) -> Tensor:
        """The sum over the ranks."""

    @abstractmethod
    def first_says(self, number: int) -> int:
        """The number of rank 0."""

    @abstractmethod
    def agree(self, facts: Mapping[str, Any]) -> None:
        """Refuse to go on unless all ranks come with the same facts, JSON by name.

        Raises:
            PeerError: Naming each rank that differs from rank 0, and in what.
        """

    @abstractmethod
    def after_first(self) -> None:
        """Wait until rank 0 comes here, however long it takes, as long as it gives signs of life.

        Raises:
            PeerError: It gave none for the time-out.
        """

    @abstractmethod
    def seed(self, seed: int, step: int) -> None:
        """Let what is drawn in this step be this rank's own, and follow from the step."""

    @abstractmethod
    def divide(self, model: "DecoderLM") -> None:
        """Divide the rows of the model's table, and of an untied head, among the ranks; move the model to the device."""

    @abstractmethod
    def build(self, description: JsonObject, device: torch.device | str) -> "DecoderLM":
        """The model of a description, freshly drawn, on the device; where it is to be divided, each rank its part.

        Raises:
            CheckpointError: The description does not fit.
        """

    @abstractmethod
    def describe(self, model: "DecoderLM") -> JsonObject:
        """`describe(model)`, of the model before it was divided."""

    @abstractmethod
    def loss_of(self, model: "DecoderLM") -> Loss:
        """The model's loss, whose gradients are means over the ranks after `backward()`."""

    @abstractmethod
    def local_gradients(self) -> AbstractContextManager[Any]:
        """Gradients that arrive meanwhile are summed on each rank, and become means with the next that arrive."""

    @abstractmethod
    def join_gradients(self, model: nn.Module) -> None:
        """After the last backward pass of a step: make means of the gradients that are not yet."""

    @abstractmethod
    def parameters(self, model: nn.Module) -> Iterator[tuple[str, nn.Parameter, Whole]]:
        """Each parameter, its name in an undivided model, and what makes its rows' numbers a part of all rows'."""

    @abstractmethod
    def local(self, tensor: Tensor) -> Tensor:
        """What this rank has of a tensor that `load` gave."""

    @abstractmethod
    def save(self, path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
        """`save_tensors`, by rank 0, of whole tensors; what is divided arrives a piece at a time."""

    @abstractmethod
    def load(self, path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
        """`load_tensors`, of divided tensors this rank's rows alone."""


class Alone(Ranks):
    """One process."""

    def any(self, flag: bool) -> bool:
        """It is as it is here."""
        return flag

    def sum(self, numbers: Tensor) -> Tensor:
        """The numbers."""
        return numbers

    def first_says(self, number: int) -> int:
        """The number."""
        return number

    def agree(self, facts: Mapping[str, Any]) -> None:
        """There is nobody to differ from."""

    def after_first(self) -> None:
        """Go on."""

    def seed(self, seed: int, step: int) -> None:
        """Go on with the generator as it is."""

    def divide(self, model: "DecoderLM") -> None:
        """Leave the model as it is."""

    def build(self, description: JsonObject, device: torch.device | str) -> "DecoderLM":
        """All of it."""
        model: DecoderLM = build(description)
        return model.to(device)

    def describe(self, model: "DecoderLM") -> JsonObject:
        """`describe(model)`."""
        return describe(model)

    def loss_of(self, model: "DecoderLM") -> Loss:
        """The model's loss."""
        return model.loss

    def local_gradients(self) -> AbstractContextManager[Any]:
        """All gradients are local."""
        return nullcontext()

    def join_gradients(self, model: nn.Module) -> None:
        """They are."""

    def parameters(self, model: nn.Module) -> Iterator[tuple[str, nn.Parameter, Whole]]:
        """The named parameters, which are whole."""
        return ((name, parameter, lambda tensor: tensor) for name, parameter in model.named_parameters())

    def local(self, tensor: Tensor) -> Tensor:
        """All of it."""
        return tensor

    def save(self, path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
        """`save_tensors`."""
        save_tensors(path, tensors, metadata)

    def load(self, path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
        """`load_tensors`."""
        return load_tensors(path)


@contextmanager
def started_ranks(device: str, timeout_seconds: float, table_ranks: int | None = None) -> Iterator[Ranks]:
    """The processes that `torchrun` started, this among them; without it this one alone.

    Args:
        device: `"cpu"`, or `"cuda"` for the GPU of each process's number on its machine.
        timeout_seconds: How long they wait for each other.
        table_ranks: Among how many of them a table is divided; all, if `None`.

    Raises:
        PeerError: One of them hangs or has ended.
        SizeError: The time is not positive, or the processes are no multiple of `table_ranks`.
    """
    if not 0 < timeout_seconds < 1e9:
        raise SizeError(f"The time-out must be a positive number of seconds, not {timeout_seconds:g}.")
    if not {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys():
        if table_ranks not in (None, 1):
            raise SizeError(f"One process cannot divide a table among {table_ranks}: start several with torchrun.")
        yield Alone()
        return
    from embedlayer.distributed.together import started_together

    with started_together(device, timeout_seconds, table_ranks) as ranks:
        yield ranks
