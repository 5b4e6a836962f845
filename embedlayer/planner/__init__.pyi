from .embedding_plan import EmbeddingPlan as EmbeddingPlan
from .embedding_plan import PlanAlternative as PlanAlternative
from .embedding_plan import Value as Value
from .embedding_plan import command_flag as command_flag
from .embedding_plan import options_table as options_table
from .embedding_plan import plan_alternatives as plan_alternatives
from .presets import Model as Model
from .presets import plan as plan
