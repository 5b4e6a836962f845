"""Open a checkpoint: its configuration, and single tensors out of it.

A checkpoint is a folder in Hugging Face's layout, one safetensors file, an index of several, or a name on the hub,
where a shard that is not asked for is never downloaded.
"""

import json
import re
from pathlib import Path

from embedlayer.errors import CheckpointError, FileError, MissingExtraError, require
from embedlayer.files import JsonObject, read_json
from embedlayer.weight_files import Place, WeightFiles, files_in, is_plain_name, locate, nothing_at

CONFIG = "config.json"


class _Hub(Place):
    def __init__(self, repository: str, revision: str | None, folder: str = "") -> None:
        self.name = f"{repository}/{folder}" if folder else repository
        self.repository = repository
        self.revision = revision
        self.folder = folder

    def find(self, file: str) -> Path | None:
        try:
            hub = require("huggingface_hub", extra="hf")
        except MissingExtraError as error:
            raise MissingExtraError(
                f"There is no folder or file {self.name!r} here. To ask the hub: {error}"
            ) from error
        errors = require("huggingface_hub.errors", extra="hf")
        try:
            return Path(
                hub.hf_hub_download(self.repository, file, subfolder=self.folder or None, revision=self.revision)
            )
        except errors.EntryNotFoundError:  # also: not in the cache, and offline
            return None
        except (OSError, ValueError) as error:
            reason = str(error).strip().splitlines()[:1]
            raise FileError(
                f"Cannot get {file} of {self.name!r} from the hub: {(reason or [type(error).__name__])[0]}\n"
                f"There is no folder or file of that name here either."
            ) from error

    def files(self) -> None:
        return None

    def below(self, folder: str) -> "_Hub":
        return _Hub(self.repository, self.revision, folder)


class Checkpoint(WeightFiles):
    """A checkpoint that is open: its configuration, the names of its tensors, and each tensor when it is asked for.

    Attributes:
        config: Its `config.json`, empty if there is none.
        is_static_embedding: Whether it is sentence-transformers' StaticEmbedding, a table without a model.
    """

    def __init__(self, place: Place, file: str | None = None, *, is_static_embedding: bool = False) -> None:
        super().__init__(place, files_in(place, file))
        self.is_static_embedding = is_static_embedding
        config = place.find(CONFIG)
        self.config: JsonObject = {} if config is None else read_json(config)

    @classmethod
    def open(cls, source: Path | str, *, revision: str | None = None) -> "Checkpoint":
        """Open a folder, a safetensors file, an index, or a name on the hub such as `"openai-community/gpt2"`.

        Args:
            source: What to open. A name on the hub needs the `hf` extra, and is looked up in its cache only if
                `HF_HUB_OFFLINE` is set.
            revision: Branch, tag or commit on the hub.

        Raises:
            FileError: There is nothing of that name.
            CheckpointError: It holds no safetensors, only pickles, or is damaged.
            MissingExtraError: There is nothing here, and the hub needs `pip install 'embedlayer[hf]'`.
        """
        found = locate(Path(source))
        if found is not None and found[1] is not None:
            return cls(*found)
        if found is None and (isinstance(source, Path) or not _is_name(source)):
            raise nothing_at(source)
        place = _Hub(str(source), revision) if found is None else found[0]
        folder, is_static = _first_module(place)
        return cls(place.below(folder) if folder else place, is_static_embedding=is_static)

    def file(self, name: str) -> Path | None:
        """Another file of the checkpoint, such as `tokenizer.json`; `None` if it has none."""
        return self._place.find(name)


def _is_name(source: str) -> bool:
    """Whether it can be a name on the hub; with a first part that is a folder here it is a path that was mistyped."""
    owner, slash, _ = source.partition("/")
    return re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", source) is not None and not (slash and Path(owner).is_dir())


def _first_module(place: Place) -> tuple[str, bool]:
    """Of a sentence-transformers model: the folder of its first module, and whether that is a StaticEmbedding."""
    path = place.find("modules.json")
    if path is None:
        return "", False
    try:
        first = json.loads(path.read_text(encoding="utf-8"))[0]
        folder, kind = first["path"], first["type"]
    except OSError as error:
        raise FileError(f"Cannot read {path}: {error.strerror or error}.") from error
    except (ValueError, RecursionError, LookupError, TypeError) as error:
        raise CheckpointError(f"{path} is no list of modules ({error!r}): it is damaged.") from error
    if not (isinstance(folder, str) and isinstance(kind, str) and (not folder or is_plain_name(folder))):
        raise CheckpointError(
            f"{path} puts its first module into {folder!r}, which is not a folder beside it: refused."
        )
    return folder, kind.endswith(".StaticEmbedding")
