"""Every kind of table: look-ups, rows, logits, losses, gradients, saved files, and the classes of errors."""

import tempfile
from collections.abc import Callable, Iterator
from functools import partial

import torch
from golden import files_of
from kinds import BAGS, EMBED_DIM, LAYERS, LOOKUP_TABLES, STREAM_IDS, STREAM_TABLES, TABLES, VOCAB_SIZE
from torch import Tensor, nn

import embedlayer as el

IDS = torch.tensor([[1, 7, 49, 7, 0], [0, 48, 3, 3, 1]])
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
BAD_IDS: dict[str, object] = {
    "ID above": [[1, VOCAB_SIZE]],
    "ID below": [[-1, 2]],
    "floats": torch.tensor([1.0]),
    "booleans": torch.tensor([True]),
    "text": "a",
    "int32": torch.tensor([[1, 2]], dtype=torch.int32),
    "one": 3,
    "none": torch.zeros(0, 4, dtype=torch.int64),
}


def cases() -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield the cases of this area."""
    for name in LOOKUP_TABLES:
        for dtype in DTYPES:
            yield f"{name}, look-up, {dtype}", partial(looked_up, LOOKUP_TABLES[name], dtype)
            if name in TABLES:
                yield f"{name}, output, {dtype}", partial(output, TABLES[name], dtype)
        yield f"{name}, files", partial(files, LOOKUP_TABLES[name])
        for ids in BAD_IDS:
            yield f"{name}, {ids}", partial(bad_ids, LOOKUP_TABLES[name], ids)
    for name in STREAM_TABLES:
        yield f"streams, {name}", partial(looked_up, STREAM_TABLES[name], "float32", STREAM_IDS)
    for name in BAGS:
        yield f"bags, {name}", partial(looked_up, BAGS[name], "float32")
    for name in LAYERS:
        yield f"{name}", partial(looked_up, LAYERS[name], "float32")
        yield f"{name}, training with dropout", partial(with_dropout, LAYERS[name])


def looked_up(build: Callable[[], nn.Module], dtype: str, ids: Tensor = IDS) -> object:
    """Return vectors, their gradients, and all tensors of a module, in training and for inference."""
    module = build()
    module.to(DTYPES[dtype])
    vectors = module(ids)
    with torch.no_grad():
        inferred = module.eval()(ids)
    return {
        "vectors": vectors,
        "inferred": inferred,
        "gradients": gradients(vectors, module),
        "state": module.state_dict(),
        "repr": repr(module),
    }


def output(build: Callable[[], el.TokenTable], dtype: str) -> object:
    """Return rows, logits, losses, log-probabilities, and their gradients."""
    table = build()
    table.to(DTYPES[dtype])
    hidden = torch.randn(2, 5, EMBED_DIM).to(DTYPES[dtype]).requires_grad_()
    results = {"rows": table.rows(0, VOCAB_SIZE), "some rows": table.rows(7, 9), "logits": table.logits(hidden)}
    for impl in ("plain", "chunked"):
        loss = table.loss(hidden, IDS, impl=impl, softcap=4.0, z_loss=0.1, label_smoothing=0.1)
        results[f"{impl} loss"] = {"loss": loss, "gradients": gradients(loss, table, hidden)}
        results[f"{impl} log probs"] = table.token_log_probs(hidden, IDS, impl=impl)
    return {**results, "logit gradients": gradients(results["logits"], table, hidden)}


def gradients(result: Tensor, module: nn.Module, *inputs: Tensor) -> object:
    """Return the gradients of a fixed function of a result."""
    if not result.requires_grad:
        return "none"
    leaves = {**dict(module.named_parameters()), **{str(index): each for index, each in enumerate(inputs)}}
    for leaf in leaves.values():
        leaf.grad = None
    (result.float() * torch.linspace(0.5, 1, result.numel()).reshape(result.shape)).sum().backward(retain_graph=True)
    return {name: leaf.grad for name, leaf in leaves.items()}


def files(build: Callable[[], el.LookupTable]) -> object:
    """Return the files that a table saves, and what is read from them."""
    table = build()
    with tempfile.TemporaryDirectory() as folder:
        table.save_pretrained(folder)
        read = type(table).from_pretrained(folder)
        return {
            "files": files_of(folder),
            "read": read.state_dict(),
            "config": table.config,
        }


def bad_ids(build: Callable[[], el.LookupTable], ids: str) -> object:
    """Return the vectors of IDs of an unusual kind."""
    return build()(BAD_IDS[ids])


def with_dropout(build: Callable[[], nn.Module]) -> object:
    """Return vectors with dropout, and the gradients through the same mask."""
    module = build().train()
    for part in module.modules():
        if hasattr(part, "dropout") and isinstance(part.dropout, float):
            part.dropout = 0.5
        elif isinstance(part, nn.Dropout):
            part.p = 0.5
    vectors = module(IDS)
    return {"vectors": vectors, "gradients": gradients(vectors, module)}
