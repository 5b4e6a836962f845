"""A head over some rows gives what selecting columns of all logits gives."""

import copy
import math
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from covering import cases, some
from kinds import EMBED_DIM, TABLES, TIED_HEADS, UNTIED_HEADS, VOCAB_SIZE
from memory import Shapes
from processes import on_ranks
from releases import skip_without
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import embedlayer as el
from embedlayer.distributed import shard_table
from embedlayer.heads import DraftHead, PredictionHead, StreamHead, eagle_tensors
from embedlayer.losses import divergence

TOKENS = [0, 3, 7, 20, 48, 49]
UNSORTED = [48, 3, 0, 49, 20, 7]
OPTIONS = {"softcap": 5.0, "logit_scale": 0.7, "bias": True}


def prediction_head() -> PredictionHead:
    output = el.OutputHead(TABLES["dense"](), bias=True)
    return PredictionHead(output, dense=nn.Linear(EMBED_DIM, EMBED_DIM), activation="gelu")


HEADS = {
    **{name: lambda name=name: el.OutputHead(TABLES[TIED_HEADS[name]](), **OPTIONS) for name in TIED_HEADS},
    **{f"the table, {name}": TABLES[name] for name in TABLES if name != "row-sparse"},
    **UNTIED_HEADS,
    "with a transform": prediction_head,
}


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    head = HEADS[name]()
    for bias in [each for key, each in owners(head).double().named_parameters() if key.endswith("bias")]:
        nn.init.normal_(bias)
    return head


def owners(head: nn.Module) -> nn.ModuleList:
    """The head and its table, whose parameters its loss trains."""
    output = head.output if isinstance(head, PredictionHead) else head
    table = output.table if isinstance(output, el.OutputHead) else None
    return nn.ModuleList([head] if table is None else [head, table])


def all_logits(head: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    return head.logits(hidden) if isinstance(head, el.TokenTable) else head(hidden)


def gradients(result: torch.Tensor, head: nn.Module, hidden: torch.Tensor) -> list[torch.Tensor]:
    parameters = [each for each in owners(head).parameters() if each.requires_grad]
    found = torch.autograd.grad(result, [hidden, *parameters], allow_unused=True)
    return [torch.zeros(1) if each is None or not each.any() else each.to_dense() for each in found]


def batch(rows: int = 7, *, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(2, rows, EMBED_DIM, generator=generator, dtype=dtype).requires_grad_()
    targets = torch.tensor(TOKENS)[torch.randint(0, len(TOKENS), (2, rows), generator=generator)]
    return hidden, targets


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", some(["the table, factorised", "tied to int8", "with a transform"], HEADS))
def test_an_untied_copy_has_the_same_logits_and_parameters_of_its_own(name: str) -> None:
    head, (hidden, _) = made(name), batch()
    untied = DraftHead(head, UNSORTED).untied()
    states = head.transform(hidden) if isinstance(head, PredictionHead) else hidden
    close(untied(states), all_logits(head, hidden)[..., UNSORTED])
    shared = {each.untyped_storage().data_ptr() for each in owners(head).parameters()}
    assert not shared & {each.untyped_storage().data_ptr() for each in untied.parameters()}


def test_statistics_are_in_token_ids() -> None:
    draft, hidden = DraftHead(head := made("tied to dense"), UNSORTED), batch(3)[0]
    found = draft.token_statistics(hidden, OUTSIDE, statistics=("log_probs", "is_argmax"), top_k=2, temperature=0.7)
    close(found.log_probs, draft.token_log_probs(hidden, OUTSIDE, temperature=0.7))
    best = torch.tensor(UNSORTED)[all_logits(head, hidden)[..., UNSORTED].topk(2).indices]
    assert torch.equal(found.top_ids, best.where((OUTSIDE != -100).unsqueeze(-1), -1))
    assert torch.equal(found.is_argmax, best[..., 0] == OUTSIDE)
    assert draft.token_statistics(hidden, statistics=("entropy",)).entropy.isfinite().all()


def test_a_divergence_from_the_target_model_has_the_gradients_of_eagle_3s_training() -> None:
    """The loop body of `eagle/traineagle3/cnets.py`, with the distribution of a target model as the teacher."""
    target, student, (hidden, _) = made("untied"), made("the table, dense"), batch(3)
    t2d, states = eagle_tensors(TOKENS, VOCAB_SIZE)["t2d"], torch.randn(2, 3, EMBED_DIM, dtype=torch.float64)
    target_head = target(states)
    position_mask = t2d[target_head.argmax(-1)][..., None].int()
    target_p = target_head[..., t2d].softmax(2).detach()
    out_logp = student.logits(hidden)[..., t2d].log_softmax(2)
    theirs = -torch.sum(position_mask * target_p * out_logp, 2).mean()
    labels = target_head.argmax(-1).masked_fill(position_mask[..., 0] == 0, -100)
    logits = [DraftHead(head, TOKENS).uncomputed_logits(x) for head, x in ((student, hidden), (target, states))]
    ours = divergence(*logits, labels=labels, reduction="sum") / labels.numel()
    for one, other in zip(gradients(ours, student, hidden), gradients(theirs, student, hidden), strict=True):
        close(one, other)


def test_options_of_a_call_are_those_of_the_full_vocabulary() -> None:
    head, (hidden, targets) = made("untied"), batch()
    draft, bias = DraftHead(head, UNSORTED), torch.randn(VOCAB_SIZE, dtype=torch.float64)
    expected = (head(hidden) + bias)[..., UNSORTED]
    expected[..., UNSORTED.index(7)] = -math.inf
    targets = targets.masked_fill(targets == 7, 48)
    places = torch.tensor([[UNSORTED.index(token) for token in row] for row in targets.tolist()])
    options = {"bias": bias, "padding_idx": 7, "mask_padding": True, "ignore_index": 3, "vocab_size": VOCAB_SIZE}
    expected_loss = F.cross_entropy(expected.flatten(0, 1), places.masked_fill(targets == 3, -100).flatten())
    close(draft.loss(hidden, targets, **options), expected_loss)


def test_a_row_sparse_table_learns_the_draft_rows_alone() -> None:
    table, (hidden, targets) = TABLES["row-sparse"]().double(), batch()
    rows = table.weight.detach().clone().requires_grad_()
    DraftHead(table, TOKENS).loss(hidden, targets).backward()
    logits = (hidden @ rows[TOKENS].T).index_fill(-1, torch.tensor([0]), 0.0)
    places = torch.tensor([[TOKENS.index(token) for token in row] for row in targets.tolist()])
    F.cross_entropy(logits.flatten(0, 1), places.flatten()).backward()
    assert table.weight.grad.is_sparse
    close(table.weight.grad.to_dense(), rows.grad)


def test_nothing_of_tokens_times_the_full_vocabulary_is_allocated() -> None:
    head = el.OutputHead(vocab_size=5000, embed_dim=4)
    hidden, targets = torch.randn(600, 4, requires_grad=True), torch.randint(0, 64, (600,))
    draft = DraftHead(head, range(64))
    with Shapes() as seen:
        draft.loss(hidden, targets).backward()
        draft.token_log_probs(hidden, targets)
    assert not seen.largest(max(5000 * 4, 600 * 64) + 1)


OUTSIDE = torch.tensor([[3, 5, 48], [-100, 7, 1]])  # 5 and 1 are not in the draft vocabulary


def test_a_target_outside_is_ignored_or_counted_or_an_error() -> None:
    head, (hidden, _) = made("untied, bias, softcap"), batch(3)
    draft = DraftHead(head, TOKENS)
    each = draft.loss(hidden, OUTSIDE, reduction="none")
    assert each.ne(0).tolist() == [[True, False, True], [False, True, False]]
    close(draft.loss(hidden, OUTSIDE), each.sum() / 3)
    close(draft.loss(hidden, OUTSIDE, outside="count"), each.sum() / 5)
    for reduction in ("sum", "none"):
        close(
            draft.loss(hidden, OUTSIDE, outside="count", reduction=reduction),
            each.sum() if reduction == "sum" else each,
        )
    assert draft.count_outside(OUTSIDE).item() == 2
    with pytest.raises(el.TokenIdError, match=r"token id 5 at row 0, column 1 is outside the draft vocabulary"):
        draft.loss(hidden, OUTSIDE, outside="error")
    inside = OUTSIDE.masked_fill((OUTSIDE == 5) | (OUTSIDE == 1), -100)
    close(draft.loss(hidden, inside, outside="error"), each.sum() / 3)
    scores = draft.token_log_probs(hidden, OUTSIDE)
    assert scores.isneginf().tolist() == [[False, True, False], [False, False, True]]
    assert scores[1, 0] == 0
    (found,) = torch.autograd.grad(draft.loss(hidden, OUTSIDE), hidden)
    assert found.ne(0).any(-1).tolist() == [[True, False, True], [False, True, False]]


@pytest.mark.parametrize("name", some(["with a transform"], HEADS))
@pytest.mark.parametrize("outside", ["ignore", "count"])
def test_hidden_states_of_targets_that_do_not_count_have_no_effect(name: str, outside: str) -> None:
    head, (hidden, _) = made(name), batch(3)
    hidden, is_left_out = hidden.detach(), torch.tensor([[False, True, False], [True, False, True]])
    dirty = hidden.masked_fill(is_left_out.unsqueeze(-1), torch.nan)
    found = []
    for states in (hidden.requires_grad_(), dirty.requires_grad_()):
        loss = DraftHead(head, TOKENS).loss(states, OUTSIDE, outside=outside, z_loss=0.1)
        found.append([loss.detach(), *gradients(loss, head, states)])
    torch.testing.assert_close(found[0], found[1], rtol=1e-10, atol=1e-10)


def test_the_loss_that_counts_is_that_of_eagle_3s_training() -> None:
    """The loop body of `eagle/traineagle3/cnets.py`, with the one-hot distribution of the targets as the teacher."""
    head, (hidden, _) = made("untied"), batch(3)
    draft, targets = DraftHead(head, TOKENS), OUTSIDE.clamp(min=2)
    t2d = eagle_tensors(TOKENS, VOCAB_SIZE)["t2d"]
    target_head = F.one_hot(targets, VOCAB_SIZE).double()[..., t2d]
    out_logp = head(hidden)[..., t2d].log_softmax(2)
    theirs = -torch.sum(t2d[targets][..., None].int() * target_head * out_logp, 2).mean()
    close(draft.loss(hidden, targets, outside="count"), theirs)


WITHOUT_A_TARGET = [OUTSIDE[:, 1:2].clamp(max=1), torch.full((2, 1), -100), OUTSIDE[:, :0]]


@cases("targets, outside", WITHOUT_A_TARGET, ["ignore", "count"])
def test_without_a_target_the_loss_and_its_gradients_are_zero(targets: torch.Tensor, outside: str) -> None:
    head, hidden = made("untied"), torch.randn(*targets.shape, EMBED_DIM, dtype=torch.float64, requires_grad=True)
    targets = targets.masked_fill(targets == 1, 5)
    loss = DraftHead(head, TOKENS).loss(hidden, targets, outside=outside)
    assert loss.item() == 0
    assert all(not each.any() for each in gradients(loss, head, hidden))


def test_ids_are_mapped_both_ways_and_bad_ones_are_refused(unchecked: None) -> None:
    draft = DraftHead(TABLES["dense"](), UNSORTED)
    assert draft.to_tokens(torch.arange(6).view(2, 3)).tolist() == [[48, 3, 0], [49, 20, 7]]
    assert draft.to_draft(torch.tensor(UNSORTED)).tolist() == list(range(6))
    assert draft.to_draft(torch.tensor([1, 47], dtype=torch.int32)).tolist() == [-1, -1]
    for call, bad in (
        (draft.to_tokens, 6),
        (draft.to_tokens, -1),
        (draft.to_draft, VOCAB_SIZE),
        (draft.count_outside, VOCAB_SIZE),
    ):
        with pytest.raises(el.TokenIdError, match=f"token id {bad} at row 0, column 1"):
            call(torch.tensor([0, bad]))
    with pytest.raises(el.SizeError, match="outside must be one of ignore, count, error, not 'skip'"):
        draft.loss(torch.randn(1, EMBED_DIM), torch.tensor([0]), outside="skip")


def test_a_bad_target_that_an_accelerator_clamps_has_no_loss_and_is_reported_later() -> None:
    draft, (hidden, _) = DraftHead(made("untied"), TOKENS), batch(3)
    expected = draft.loss(hidden, OUTSIDE.masked_fill(OUTSIDE == 5, -100), reduction="sum")
    draft.token_check.forward = draft.token_check.clamp_and_record  # type: ignore[assignment]
    close(draft.loss(hidden, OUTSIDE.masked_fill(OUTSIDE == 5, VOCAB_SIZE + 9), reduction="sum"), expected)
    with pytest.raises(el.TokenIdError, match="token id 59 at row 0, column 1"):
        draft.token_check.check()


NO_VOCABULARY: list[tuple[Any, type[Exception], str]] = [
    ([], el.SizeError, "token_ids is empty"),
    ([3, 7, 3], el.SizeError, "Token 3 is at places 0 and 2"),
    ([3, -1], el.TokenIdError, "token id -1 at place 1 of token_ids is outside the full vocabulary of 50"),
    ([VOCAB_SIZE], el.TokenIdError, "token id 50 at place 0"),
    ([True, False], el.ShapeError, "Entry 0 of token_ids is True"),
    (torch.zeros(VOCAB_SIZE, dtype=torch.bool), el.ShapeError, r"Pass mask.nonzero\(\).flatten\(\)"),
    ([1.0], el.ShapeError, "Entry 0 of token_ids is 1.0"),
    (torch.zeros(2, 2, dtype=torch.long), el.ShapeError, r"must be \(N,\), not \(2, 2\)"),
]


def test_tokens_that_are_no_vocabulary_and_modules_that_are_no_head_are_refused(unchecked: None) -> None:
    for token_ids, error, message in NO_VOCABULARY:
        with pytest.raises(error, match=message):
            DraftHead(TABLES["dense"](), token_ids)
    for head in (nn.Linear(4, 50), nn.Embedding(50, 4), None):
        with pytest.raises(el.SizeError):
            DraftHead(head, [1])


def test_it_has_no_state_follows_its_head_and_a_copied_model_refers_to_the_copy() -> None:
    model = nn.ModuleDict({"table": TABLES["dense"]()})
    model["head"] = el.OutputHead(model["table"])
    model["draft"] = DraftHead(model["head"], TOKENS)
    assert list(model.state_dict()) == ["table.weight"]
    assert len(list(model.parameters())) == 1
    twin = copy.deepcopy(model)
    hidden = torch.randn(3, EMBED_DIM)
    with torch.no_grad():
        twin["table"].weight.mul_(2)
    assert twin["draft"].head is twin["head"]
    torch.testing.assert_close(twin["draft"](hidden), 2 * model["draft"](hidden))
    model["table"].weight = nn.Parameter(model["table"].weight.detach() * 3)
    torch.testing.assert_close(2 * model["draft"](hidden), 3 * twin["draft"](hidden))
    assert repr(model["draft"]).startswith("DraftHead(\n  6 of 50 tokens")


def test_casts_and_moves_keep_its_maps() -> None:
    with torch.device("meta"):
        model = nn.ModuleDict({"head": el.OutputHead(vocab_size=VOCAB_SIZE, embed_dim=EMBED_DIM)})
        model["draft"] = DraftHead(model["head"], UNSORTED)
    assert model["draft"](torch.randn(2, EMBED_DIM, device="meta")).shape == (2, 6)
    model.to_empty(device="cpu")
    assert model["draft"].to_tokens(torch.arange(6)).tolist() == UNSORTED
    model.bfloat16()
    assert model["draft"].to_draft(torch.tensor(UNSORTED)).tolist() == list(range(6))
    hidden = torch.randn(2, EMBED_DIM, dtype=torch.bfloat16)
    assert model["draft"](hidden).dtype == torch.bfloat16
    with torch.autocast("cpu"):
        assert model.float()["draft"](hidden.float()).dtype == torch.bfloat16


def test_a_vocabulary_of_another_size_is_refused_and_an_edit_of_the_model_too() -> None:
    model = nn.ModuleDict({"table": TABLES["dense, plain"]()})
    model["head"] = el.OutputHead(model["table"])
    draft = DraftHead(model["head"], TOKENS)
    model["draft"] = draft
    with pytest.raises(el.VocabularyError, match="draft is a DraftHead"):
        el.vocab.edit_vocabulary(model, keep=range(40))
    del model["draft"]
    el.vocab.edit_vocabulary(model, keep=range(40))
    with pytest.raises(el.SizeError, match="had 50 tokens when this DraftHead was built, and has 40 now"):
        draft(torch.randn(1, EMBED_DIM))


def test_rows_of_a_table_that_computes_them_are_honoured_and_not_copied() -> None:
    class DoubledRows(el.TokenEmbedding):
        def rows(self, start: int, stop: int) -> torch.Tensor:
            return 2 * super().rows(start, stop)

    table, (hidden, targets) = DoubledRows(VOCAB_SIZE, EMBED_DIM, init_std=1.0), batch(dtype=torch.float32)
    draft, expected = DraftHead(table, TOKENS), table.logits(hidden)[..., TOKENS]
    torch.testing.assert_close(draft(hidden), expected)
    theirs = F.cross_entropy(3 * expected.flatten(0, 1), draft.to_draft(targets).flatten())
    torch.testing.assert_close(draft.loss(hidden, targets, logit_scale=3.0), theirs)
    with pytest.raises(el.SizeError, match="overrides forward or logits"):
        draft.untied()


def test_a_head_behind_which_its_model_adds_a_bias_is_not_copied() -> None:
    transformers = pytest.importorskip("transformers", reason="the dev extra is not installed")
    sizes = {"d_model": EMBED_DIM, "max_position_embeddings": 8}
    for side in ("encoder", "decoder"):
        sizes |= {f"{side}_layers": 1, f"{side}_attention_heads": 2, f"{side}_ffn_dim": 8}
    config = transformers.BartConfig(vocab_size=VOCAB_SIZE, **sizes)
    model = el.patch(transformers.BartForConditionalGeneration(config))
    with pytest.raises(el.SizeError, match="The model adds final_logits_bias to the logits behind this head"):
        DraftHead(model.lm_head, TOKENS).untied()


def test_it_compiles_to_one_graph_and_runs_under_transforms(unchecked: None) -> None:
    head, (hidden, targets) = el.OutputHead(TABLES["dense"](), bias=True), batch(3, dtype=torch.float32)
    draft = DraftHead(head, TOKENS)

    def both(hidden: torch.Tensor, targets: torch.Tensor, outside: str) -> tuple[torch.Tensor, torch.Tensor]:
        return draft(hidden), draft.loss(hidden, targets, outside=outside)

    compiled = torch.compile(both, fullgraph=True, backend="eager")
    for outside, given in (("count", OUTSIDE), ("error", targets)):
        for one, other in zip(compiled(hidden, given, outside), both(hidden, given, outside), strict=True):
            torch.testing.assert_close(one, other)
    with pytest.raises(el.TokenIdError, match="token id 5 at row 0, column 1"):
        compiled(hidden, OUTSIDE, "error")
    model = nn.Sequential(nn.Linear(EMBED_DIM, EMBED_DIM), draft)
    exported = torch.export.export(model, (hidden.detach(),)).module()
    torch.testing.assert_close(exported(hidden), model(hidden))
    (theirs,) = torch.autograd.grad(draft.loss(hidden, OUTSIDE), hidden)
    torch.testing.assert_close(torch.func.grad(lambda x: draft.loss(x, OUTSIDE))(hidden.detach()), theirs)


def test_adapters_that_peft_puts_on_both_ends_are_read_once(unchecked: None) -> None:
    peft = pytest.importorskip("peft", reason="the dev extra is not installed")
    skip_without("peft.tuners.tuners_utils:warn_msg_weight_tying")
    transformers = pytest.importorskip("transformers", reason="the dev extra is not installed")
    sizes = {"hidden_size": 24, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=VOCAB_SIZE, tie_word_embeddings=True, **sizes)
    model = el.patch(transformers.LlamaForCausalLM(config).double())
    draft, hidden = DraftHead(model.lm_head, UNSORTED), batch()[0]
    options = {"target_modules": ["embed_tokens"], "ensure_weight_tying": True, "init_lora_weights": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted = peft.get_peft_model(model, peft.LoraConfig(r=3, **options)).base_model.model
    assert adapted.lm_head is not draft.head
    close(draft(hidden), adapted.lm_head(hidden)[..., UNSORTED])


def test_an_untied_head_that_peft_wraps_is_refused_until_it_is_merged(unchecked: None) -> None:
    peft = pytest.importorskip("peft", reason="the dev extra is not installed")
    table = TABLES["dense, plain"]()
    model = el.DecoderLM(table, el.Position(), el.OutputHead(vocab_size=50, embed_dim=24), num_layers=1, num_heads=4)
    model.head.follow(model, "table", "head")
    draft, hidden = DraftHead(model.head, TOKENS), torch.randn(2, EMBED_DIM)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrapped = peft.get_peft_model(model, peft.LoraConfig(target_modules=["head"], init_lora_weights=False))
    with pytest.raises(el.CheckpointError, match="is active: call merge_and_unload"):
        draft(hidden)
    merged = wrapped.merge_and_unload()
    torch.testing.assert_close(draft(hidden), merged.head(hidden)[..., TOKENS])


def sharded_results() -> list[list[torch.Tensor]]:
    """Per kind, the loss of this rank and the gradient of its rows: of the sharded table, and of the whole one."""
    results: list[Any] = []
    for kind in ("dense", "factorised"):
        torch.manual_seed(0)
        whole = TABLES[kind]().double()
        table = shard_table(whole, init_device_mesh("cpu", (2,)))
        hidden, targets = batch()
        places = DraftHead(whole, UNSORTED).to_draft(targets)
        logits = whole.logits(hidden)[..., UNSORTED]
        theirs = [F.cross_entropy(logits[rank], places[rank]) for rank in range(2)]
        rows = next(parameter for parameter in whole.parameters() if len(parameter) == VOCAB_SIZE)
        (expected,) = torch.autograd.grad(sum(theirs) / 2, rows)
        with pytest.raises(el.SizeError, match="sharded over ranks cannot be divided into streams"):
            StreamHead(el.OutputHead(table), 2).uncomputed_logits(hidden)
        rank, part = table.mesh.get_rank(), slice(table.partition.start, table.partition.stop)
        ours = DraftHead(el.OutputHead(table), UNSORTED).loss(hidden[rank], targets[rank])
        ours.backward()
        gradient = next(parameter for _, parameter in table.sharded_parameters()).grad
        results += [[ours.detach(), theirs[rank].detach()], [gradient, expected[part]]]
    return results


def test_a_sharded_table_gives_the_losses_and_gradients_of_the_whole_one() -> None:
    for results in on_ranks(2, sharded_results):
        for ours, theirs in results:
            close(ours, theirs)
