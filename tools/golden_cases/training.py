"""Training of row-sparse tables over 30 steps, with saves between, and of small decoders; text that they generate."""

import tempfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from golden import files_of
from kinds import EMBED_DIM, INJECTIONS, MAX_SEQ_LEN, NUM_HEADS, POSITIONS, TABLES, VOCAB_SIZE
from torch import Tensor

import embedlayer as el
from embedlayer.optim import RowwiseSecondMoment, WidthScaling
from embedlayer.row_sparse import StochasticRounding

STEPS, SAVED = 30, 13
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": partial(el.RowAdamW, lr=0.05),
    "AdamW, large decay": partial(el.RowAdamW, lr=0.05, weight_decay=0.5, betas=(0.5, 0.9), eps=1e-3),
    "AdamW, no decay": partial(el.RowAdamW, lr=0.05, weight_decay=0.0),
    "AdamW, applied each step": partial(el.RowAdamW, lr=0.05, apply_pending_every=1),
    "AdamW, applied at times": partial(el.RowAdamW, lr=0.05, apply_pending_every=7),
    "AdamW, rowwise": partial(el.RowAdamW, lr=0.05, state=RowwiseSecondMoment()),
    "AdamW, stochastic": partial(el.RowAdamW, lr=0.05, rounding=StochasticRounding(seed=1)),
    "Adagrad": partial(el.RowAdagrad, lr=0.1),
    "Adagrad, decay": partial(el.RowAdagrad, lr=0.1, weight_decay=0.1),
}
TABLES_TRAINED: dict[str, Mapping[str, Any]] = {
    "plain": {},
    "padding and scale": {"padding_idx": 0, "scale": "sqrt_dim"},
    "bfloat16": {"dtype": torch.bfloat16},
    "float64": {"dtype": torch.float64},
    "largest norm": {"max_norm": 0.5},
    "scaled by frequency": {"scale_grad_by_freq": True},
}


def cases() -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield the cases of this area."""
    for optimizer in OPTIMIZERS:
        for table in TABLES_TRAINED:
            yield f"{optimizer}, {table}", partial(rows_trained, optimizer, table)
    for table in TABLES:
        yield f"decoder over {table}", partial(decoder_trained, lambda table=table: decoder(TABLES[table]()))
    for position in POSITIONS:
        yield (
            f"decoder with {position}",
            partial(decoder_trained, lambda position=position: decoder(TABLES["dense"](), POSITIONS[position]())),
        )
    for injection in INJECTIONS:
        yield (
            f"decoder with {injection}",
            partial(
                decoder_trained,
                lambda injection=injection: el.DecoderLM(
                    TABLES["dense"](), "rotary", num_layers=2, num_heads=NUM_HEADS, injections=[INJECTIONS[injection]()]
                ),
            ),
        )
    for name, options in SAMPLING.items():
        yield f"generate, {name}", partial(generated, options)
    yield "groups of parameters", groups
    yield "clipped", clipped


def batches() -> Iterator[Tensor]:
    """Yield the same IDs in every run: a few of them often, and all of them at times."""
    generator = torch.Generator().manual_seed(1)
    for step in range(STEPS):
        most = VOCAB_SIZE if step % 5 == 0 else 12
        yield torch.randint(0, most, (2, 6), generator=generator)


def rows_trained(optimizer: str, table: str) -> object:
    """Return rows, state and saved files of training, and the same after a resumption."""
    results: dict[str, object] = {}
    module = el.RowSparseEmbedding(VOCAB_SIZE, EMBED_DIM, **TABLES_TRAINED[table])
    steps = OPTIMIZERS[optimizer](module.parameters())
    target = torch.randn(EMBED_DIM)
    for step, ids in enumerate(batches()):
        steps.param_groups[0]["lr"] *= 0.97
        loss = (module(ids).float() - target).square().mean()
        steps.zero_grad()
        loss.backward()
        el.clip_grad_norm_(module.parameters(), 1.0)
        steps.step()
        if step == SAVED:
            results["rows"] = module.rows(3, 20)
            with tempfile.TemporaryDirectory() as folder:
                module.save_pretrained(folder)
                results["files"] = files_of(folder)
                state = steps.state_dict()
                module = type(module).from_pretrained(folder)
            steps = OPTIMIZERS[optimizer](module.parameters())
            steps.load_state_dict(state)
    return {**results, "weight": module.weight.detach().clone(), "state": steps.state_dict()}


def decoder(table: el.TokenTable, position: el.Position | str = "rotary") -> el.DecoderLM:
    """Build a small decoder with a tied head, or with one of its own over a row-sparse table."""
    head = el.OutputHead(vocab_size=VOCAB_SIZE, embed_dim=EMBED_DIM) if getattr(table, "row_sparse", False) else None
    return el.DecoderLM(table, position, head, num_layers=1, num_heads=NUM_HEADS)


def decoder_trained(build: Callable[[], el.DecoderLM]) -> object:
    """Return the losses of three steps, the weights after them, and the logits of a cached token."""
    model = build()
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = el.RowAdamW(trained, lr=0.01)
    losses = []
    for ids, _ in zip(batches(), range(3), strict=False):
        loss = model.loss(ids[:, :-1], ids[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    model.eval()
    with torch.no_grad():
        logits = model(torch.arange(8)[None])
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        files = files_of(folder)
    return {"losses": losses, "weights": model.state_dict(), "logits": logits, "files": files}


SAMPLING: dict[str, Mapping[str, Any]] = {
    "greedy": {},
    "temperature": {"temperature": 0.8},
    "top-k": {"temperature": 1.0, "top_k": 5},
    "top-p": {"temperature": 1.0, "top_p": 0.7},
    "min-p": {"temperature": 1.0, "min_p": 0.2},
    "repetition": {"repetition_penalty": 1.5},
    "log probs": {"return_log_probs": True},
    "stopped": {"stop_id": [3, 4, 5, 6, 7]},
    "temperature below 0": {"temperature": -1.0},
}


def generated(options: Mapping[str, Any]) -> object:
    """Return generated tokens of a decoder."""
    model = decoder(TABLES["dense, plain"]()).eval()
    model.table.weight.data.normal_()
    return el.generate(model, torch.tensor([[1, 2, 3], [4, 5, 6]]), max_new_tokens=8, **options)


def groups() -> object:
    """Return the groups of parameters of a decoder, with rates by width."""
    model = decoder(TABLES["dense"]())
    names = {parameter: name for name, parameter in model.named_parameters()}
    plain = el.param_groups(model, weight_decay=0.01)
    scaled = el.param_groups(model, weight_decay=0.01, rates=WidthScaling(EMBED_DIM, base_width=12).rates(0.1))
    return [
        [{**group, "params": [names[each] for each in group["params"]]} for group in each] for each in (plain, scaled)
    ]


def clipped() -> object:
    """Return norms and gradients that are clipped, of dense and row-sparse tables together."""
    tables = [kind(VOCAB_SIZE, EMBED_DIM) for kind in (el.TokenEmbedding, el.RowSparseEmbedding)]
    results = []
    for norm_type in (2.0, 1.0, float("inf")):
        for table in tables:
            table.weight.grad = None
            table(torch.arange(MAX_SEQ_LEN)).square().sum().backward()
        parameters = [table.weight for table in tables]
        norm = el.clip_grad_norm_(parameters, 0.1, norm_type=norm_type)
        results.append((norm, [parameter.grad.to_dense() for parameter in parameters if parameter.grad is not None]))
    return results
