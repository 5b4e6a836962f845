from .opened_model import OpenedModel as OpenedModel
from .path_kinds import PathKind as PathKind
from .path_kinds import path_kind as path_kind
from .readers import open_model as open_model
