from .gguf_rows import GGUFEmbedding as GGUFEmbedding
from .mapped import MappedEmbedding as MappedEmbedding
from .quantized import gguf_blocks as gguf_blocks
from .rounding import CovarianceRounding as CovarianceRounding
from .row_layouts import GGUFBlocks as GGUFBlocks
from .row_layouts import RowLayout as RowLayout
