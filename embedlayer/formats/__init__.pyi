from .layouts import GGUFBlocks as GGUFBlocks
from .layouts import RowLayout as RowLayout
from .rounding import CovarianceRounding as CovarianceRounding
