from .gguf_rows import GGUFEmbedding as GGUFEmbedding
from .mapped import MappedEmbedding as MappedEmbedding
from .pending_updates import pending_updates_applied as pending_updates_applied
from .quantized import gguf_blocks as gguf_blocks
from .rounding import CovarianceRounding as CovarianceRounding
from .row_layouts import GGUFBlocks as GGUFBlocks
from .row_layouts import RowLayout as RowLayout
from .stochastic_rounding import StochasticRounding as StochasticRounding
