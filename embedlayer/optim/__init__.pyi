from .row_adagrad import RowAdagrad as RowAdagrad
from .row_adamw import RowAdamW as RowAdamW
from .row_state import ElementwiseMoments as ElementwiseMoments
from .row_state import RowState as RowState
from .row_state import RowwiseSecondMoment as RowwiseSecondMoment
