from .cross_entropy import LogitOptions as LogitOptions
from .cross_entropy import LossOptions as LossOptions
from .cross_entropy import ScoreOptions as ScoreOptions
from .cross_entropy import finish_logits as finish_logits
