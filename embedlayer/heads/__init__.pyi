from .draft import DraftHead as DraftHead
from .draft_map import eagle_tensors as eagle_tensors
from .draft_map import frequent_tokens as frequent_tokens
from .draft_map import load_draft_tokens as load_draft_tokens
from .draft_map import save_draft_tokens as save_draft_tokens
from .output import OutputHead as OutputHead
from .prediction import PredictionHead as PredictionHead
from .shared_tokens import DraftMap as DraftMap
