import embedlayer.optim.row_adagrad as _row_adagrad
import embedlayer.optim.row_adamw as _row_adamw
import embedlayer.tables.stochastic_rounding as _stochastic_rounding

from .row_state import ElementwiseMoments as ElementwiseMoments
from .row_state import RowState as RowState
from .row_state import RowwiseSecondMoment as RowwiseSecondMoment

RowAdagrad = _row_adagrad.RowAdagrad
RowAdamW = _row_adamw.RowAdamW
StochasticRounding = _stochastic_rounding.StochasticRounding
