from .clip import clip_grad_norm_ as clip_grad_norm_
from .groups import WidthScaling as WidthScaling
from .groups import param_groups as param_groups
from .row_adagrad import RowAdagrad as RowAdagrad
from .row_adamw import RowAdamW as RowAdamW
from .row_state import ElementwiseMoments as ElementwiseMoments
from .row_state import RowState as RowState
from .row_state import RowwiseSecondMoment as RowwiseSecondMoment
