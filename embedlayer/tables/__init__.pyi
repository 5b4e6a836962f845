from .gguf_rows import GGUFEmbedding as GGUFEmbedding
from .pending_updates import pending_updates_applied as pending_updates_applied
