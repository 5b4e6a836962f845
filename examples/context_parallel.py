"""Train a decoder whose sequences are split over processes (context parallelism), with packed documents and n-grams.

    torchrun --nproc-per-node 4 examples/context_parallel.py

Each process has the whole model, and of each sequence the tokens of its share. A copy of the model is trained on whole
sequences; in float64, the losses and the trained weights of both agree to 1e-12.
"""

from copy import deepcopy
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

import embedlayer as el
from embedlayer.cli.demo import carried_text
from embedlayer.core.documents import document_mask, shifted_targets
from embedlayer.distributed import exchange_halo, gather_shares, share_of, without_halo
from embedlayer.distributed.sequence import ShareOrder
from embedlayer.inputs import EmbeddingInjection, GatedEmbedding, InjectionContext, NgramEmbedding, NgramHash
from embedlayer.positions import causal_mask, positions_of

ORDER: ShareOrder = "zigzag"


def share(x: Tensor, dim: int = -1) -> Tensor:
    """Return the tokens of this rank."""
    return share_of(x, dist.get_rank(), dist.get_world_size(), order=ORDER, dim=dim)


class AttentionOverRanks(TorchFunctionMode):
    """Attention from this rank's queries to the keys of all ranks, in place of `scaled_dot_product_attention`.

    Keys and values are gathered. On GPUs `context_parallel` of torch sends them from rank to rank instead, with the
    same order of tokens, for one document.
    """

    def __init__(self, documents: Tensor) -> None:
        super().__init__()
        self.mask = share(causal_mask(documents.shape[-1], documents=documents), dim=-2)

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is not F.scaled_dot_product_attention:
            return function(*args, **(kwargs or {}))
        q, k, v = args
        k, v = (gather_shares(x, order=ORDER, dim=-2) for x in (k, v))
        return function(q, k, v, **{**kwargs, "attn_mask": self.mask, "is_causal": False})


class GatedOverRanks(EmbeddingInjection):
    """A `GatedEmbedding` over n-grams that also reads the tokens before each chunk, which other ranks may have."""

    def __init__(self, gated: GatedEmbedding) -> None:
        super().__init__()
        self.gated = gated
        self.halo = (gated.kernel_size - 1) * gated.dilation + gated.table.hash.max_order - 1

    def rows(self, x: Tensor) -> Tensor:
        """Return the chunks of a share behind the tokens before them."""
        return exchange_halo(x, halo=self.halo, order=ORDER)

    def read(self, ids: Tensor, documents: Tensor) -> None:
        """Set the tokens of the next batch; the model does not know its documents, which its attention would mask."""
        self.tokens = InjectionContext(self.rows(ids), self.rows(documents))

    def look_up(self, x: Tensor, context: InjectionContext) -> Tensor:
        return self.gated.look_up(x, self.tokens)

    def add_to_stream(self, x: Tensor, vectors: Tensor, depth: int, context: InjectionContext) -> Tensor:
        if depth != self.gated.block:
            return x
        result = self.gated.add_to_stream(self.rows(x), vectors, depth, self.tokens)
        return without_halo(result, halo=self.halo, order=ORDER)


def loss_of_share(model: el.DecoderLM, ids: Tensor, targets: Tensor, documents: Tensor) -> Tensor:
    """Return this rank's part of the mean loss of whole sequences: the sum over the ranks is that mean."""
    for injection in model.injections:
        injection.read(share(ids), share(documents))
    positions = share(positions_of(ids, documents))
    with AttentionOverRanks(documents):
        loss = model.loss(share(ids), share(targets), positions=positions, reduction="sum")
    return loss / (targets != -100).sum()


def build(vocab_size: int) -> el.DecoderLM:
    """Return a decoder with hashed n-grams before its second block."""
    ngrams = NgramEmbedding.dense(NgramHash.for_rows(1000, vocab_size, max_order=3, heads=4), 32)
    gated = GatedEmbedding(ngrams, 32, block=1, kernel_size=4, dilation=1)
    torch.nn.init.normal_(gated.gate.conv.weight, std=0.1)
    table = el.TokenEmbedding(vocab_size, 32, init_std=0.1)
    return el.DecoderLM(table, "rotary", num_layers=2, num_heads=4, num_kv_heads=2, injections=[gated]).double()


def train(steps: int = 3, length: int = 64) -> float:
    """Train both models, and return the largest difference of their losses and weights."""
    torch.manual_seed(0)
    tokenizer = el.train_tokenizer((), kind="byte")
    tokens = torch.tensor(tokenizer.encode(carried_text()[: 2 * length * steps]).ids[: 2 * length * steps])
    whole = build(tokenizer.get_vocab_size())
    shared = deepcopy(whole)
    shared.injections[0] = GatedOverRanks(shared.injections[0])
    optimizers = [el.RowAdamW(model.parameters(), lr=1e-2) for model in (whole, shared)]
    largest = 0.0
    for ids in tokens.view(steps, 2, length):
        documents = document_mask(separators=ids == ord("\n"))
        targets = F.pad(shifted_targets(ids, documents), (0, 1), value=-100)
        losses = [whole.loss(ids, targets, attention_mask=documents), loss_of_share(shared, ids, targets, documents)]
        for loss, optimizer in zip(losses, optimizers, strict=True):
            optimizer.zero_grad()
            loss.backward()
        losses = [loss.detach() for loss in losses]
        for tensor in (losses[1], *(parameter.grad for parameter in shared.parameters())):
            dist.all_reduce(tensor)  # DistributedDataParallel takes the mean: multiply the loss by the ranks
        for optimizer in optimizers:
            optimizer.step()
        pairs = [losses, *zip(whole.parameters(), shared.parameters(), strict=True)]
        largest = max(largest, *(float((one - other).detach().abs().max()) for one, other in pairs))
        if dist.get_rank() == 0:
            print("loss of whole sequences {:.6f}, of shares {:.6f}".format(*losses))
    return largest


if __name__ == "__main__":
    dist.init_process_group("gloo")
    difference = train()
    assert difference < 1e-12, difference
    dist.destroy_process_group()
