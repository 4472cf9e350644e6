"""Functions of rows that a mask of unknown contents selects: `x` (4, 6, 5), `labels` (4, 6), `w` (5, 5), `v` (5,)."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from picked_form_cases import FORMS
from torch import nn

Tensor = torch.Tensor
Function = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def over_places(x, labels, w, v):
    places = (labels >= 0).flatten().nonzero().squeeze(-1)
    return F.cross_entropy(x.flatten(0, 1)[places] @ w, labels.flatten()[places])


def over_index_select(x, labels, w, v):
    places = torch.nonzero(labels.view(-1) >= 0).view(-1)
    return (x.view(-1, 5).index_select(0, places) * v).tanh().sum()


def over_columns(x, labels, w, v):
    places = torch.nonzero(labels >= 0)
    return x[places[:, 0], places[:, 1]].square().mean() + (labels >= 0).argwhere().shape[0]


def over_two_places(x, labels, w, v):
    rows, columns = torch.where(labels >= 0)
    return -F.log_softmax(x @ w, -1)[rows, columns, labels[rows, columns]].mean()


def over_tuple(x, labels, w, v):
    return F.nll_loss((x @ w).log_softmax(-1)[(labels >= 0).nonzero(as_tuple=True)], labels[labels >= 0])


def written_back(x, labels, w, v):
    x, nearer = x * v, (x @ w)[..., 0]
    distance = x[..., 1]
    mask = nearer < distance
    distance[mask] = nearer[mask]
    return x.square().sum()


def raised(x, labels, w, v):
    x = x.clone()
    x[labels > 1] *= v
    x[labels < 0] += 1.0
    x[torch.where(labels == 0)] = 0.5
    return (x @ w).tanh().sum()


def mask_changed_later(x, labels, w, v):
    mask = labels >= 0
    classes = labels[mask]
    mask[0] = False
    return (x @ w).sum() * classes.sum() + 3 * labels[mask].sum()


def changed_between(x, labels, w, v):
    labels = labels.clone()
    first = labels >= 0
    labels[1] = 1
    second = x[first] @ w
    return second.sum() * x[labels >= 0].sum() + labels[labels >= 0].sum()


def values_changed_later(x, labels, w, v):
    x = x * v
    rows = x[labels >= 0]
    x.zero_()
    return (rows @ w).square().sum() + x.sum()


def depth(x, labels, w, v):
    target = labels.clamp(min=-1).to(x.dtype)
    valid = target > 0
    error = (x @ w).exp()[..., 0][valid].log() - target[valid].log()
    return ((error**2).mean() - 0.85 * error.mean() ** 2).sqrt()


def picked_again(x, labels, w, v):
    rows = x[labels >= 0] @ w
    positive = rows[rows[:, 0] > 0]
    return positive.square().mean() + rows[:, 1:].sum() + F.softplus(rows[rows[:, 1] > 9]).sum()


def by_count(x, labels, w, v):
    rows = x[labels >= 0]
    count = rows.shape[0]
    grouped = rows.view(count, 5, 1).transpose(1, 2).reshape(count, -1)
    return ((grouped @ w).sum(0) / count).square().sum() + rows.numel() + rows.size(0) * rows.size(1)


def put_together(x, labels, w, v):
    rows, classes = x[labels >= 0], F.one_hot(labels[labels >= 0], 5)
    both = torch.cat([rows @ w, rows * v, classes.to(x.dtype)], dim=-1)
    normal = F.normalize(both[:, None] + 1, dim=-1).squeeze(1)
    return F.layer_norm(normal, (15,)).square().sum(-1).sqrt().mean() + torch.stack([rows, -rows], 1).amax(1).sum()


def losses(x, labels, w, v):
    mask = labels >= 0
    made, wanted = (x @ w)[mask], x.flip(0)[mask]
    share = wanted.softmax(-1)
    return (
        F.mse_loss(made, wanted)
        + F.l1_loss(made, wanted, reduction="sum")
        + F.smooth_l1_loss(made, wanted)
        + F.huber_loss(made, wanted, reduction="none").mean(0).square().sum()
        + F.kl_div(made.log_softmax(-1), share, reduction="batchmean")
        + F.binary_cross_entropy_with_logits(made, share, pos_weight=v.detach().abs())
        + F.binary_cross_entropy(made.sigmoid(), share, weight=v.detach().abs())
        + F.cross_entropy(made, share, label_smoothing=0.1)
        + F.cosine_embedding_loss(made, wanted, torch.ones_like(made[:, 0]))
        + F.triplet_margin_loss(made, wanted, made * v)
    )


def losses_of_classes(x, labels, w, v):
    mask = labels >= 0
    made, classes = (x @ w)[mask], labels[mask]
    return (
        F.cross_entropy(made, classes, weight=v.detach().abs(), label_smoothing=0.1)
        + F.cross_entropy(made, classes, ignore_index=2, reduction="sum")
        + F.cross_entropy(made, classes, reduction="none").square().mean()
        + F.multi_margin_loss(made, classes)
        + made.gather(1, classes[:, None]).mean()
        + made.logsumexp(-1).sum()
    )


def extrema(x, labels, w, v):
    made = (x @ w)[labels >= 0]
    best = made.max(-1)
    return made.amax() + made.min() + best.values.sum() + best.indices.sum() + made.norm() + (made > 0).sum() + (
        made.mean(0) * made.std(-1).mean()
    ).sum()  # fmt: skip


def looked_up(x, labels, w, v):
    classes = labels[labels >= 0]
    return (F.embedding(classes, w) * x[labels >= 0]).sum() + w[classes].square().mean()


def standardised(x, labels, w, v):  # rows that are not selected are constant
    rows = x[labels >= 0]
    rows = (rows - rows.mean(-1, keepdim=True)) / rows.std(-1, keepdim=True)
    return (rows @ w).square().sum()


def of_a_domain(x, labels, w, v):
    positive = (x @ w)[..., 0] > 0
    made = (x[positive] @ w)[:, 0]
    share = F.binary_cross_entropy(made / (1 + made.detach()), torch.ones_like(made))
    return made.sqrt().sum() + (made**0.5 * v[0]).sum() + (1 / (x[positive] - 0.5) * v).sum() + share


def all_but_padding(x, labels, w, v):  # rows that are not selected have no padding
    rows, kept = x[labels >= 0] @ w, labels[labels >= 0, None] >= torch.arange(5)
    return (rows.masked_fill(~kept, -torch.inf).softmax(-1) @ w).square().sum()


def of_whole_numbers(x, labels, w, v):
    mask = labels > 0
    classes, rows = labels[mask] - 1, x[mask] @ w
    behind = (mask.flatten() & (torch.arange(24) < 23)).nonzero().squeeze(-1) + 1
    return (
        F.embedding(classes, w).sin().sum()
        + F.cross_entropy(rows, classes, reduction="none").sin().sum()
        + F.cross_entropy(rows, labels[mask].to(torch.uint8) - 1)
        + (F.one_hot(classes, 5) * rows).sum()
        + rows.gather(1, classes[:, None]).sum()
        + x.flatten(0, 1)[behind].sin().sum()
        + (100 % labels[mask]).sum()
    )


def in_place(x, labels, w, v):
    rows = x[labels >= 0]
    same = rows
    classes = labels[labels >= 0]
    classes += 1
    rows += v
    rows /= 3
    rows[:, 1:].mul_(2)
    roots = ((rows @ w) ** 2 / v[0].detach()).abs_().sqrt_()  # also defined for rows that are not selected
    return roots.sum() + (F.relu(rows @ w, inplace=True) * same).sum() + same.norm() * classes.sum()


def by_keywords(x, labels, w, v):
    rows = torch.mul(input=x[labels >= 0], other=v)
    rows = torch.where(condition=rows > 0, input=rows, other=0.0)
    return torch.sum(input=rows @ w, dim=0).sin().sum() + rows.sum(axis=0).cos().sum() + rows.max(axis=1)[0].mean()


def beside_the_same_for_all(x, labels, w, v):  # as candidates of a sampled softmax
    rows = x[labels >= 0]
    others = torch.cat([rows @ w, v.expand(len(rows), -1), v[None].repeat(rows.shape[0], 2)], 1)
    return F.cross_entropy(others, torch.zeros(len(rows), dtype=torch.long))


def of_half_precision(x, labels, w, v):
    rows = (x[labels >= 0] * 0 + 30000).half()
    return (x @ w).sum() + rows.mean().double() + rows.mean(0).double().sum()


PICKED: dict[str, Function] = {
    "mean": lambda x, labels, w, v: (x @ w)[labels >= 0].mean(),
    "of a mask with other dims behind": lambda x, labels, w, v: (x[labels >= 0, 1:] * v[1:]).sum(),
    "masked_select": lambda x, labels, w, v: (x @ w).masked_select((labels >= 0)[..., None]).square().mean(),
    "a mask of all dims": lambda x, labels, w, v: (x * v)[x > 0].log().sum(),
    "a reduced loss": lambda x, labels, w, v: F.mse_loss(x @ w, x, reduction="none")[labels >= 0].mean(),
    "an accuracy": lambda x, labels, w, v: (
        (x @ w).sum() + ((x @ w)[labels >= 0].argmax(-1) == labels[labels >= 0]).double().mean()
    ),
    "none picked": lambda x, labels, w, v: (x @ w).sum() + (x * v)[labels > 50].sum(),
    **{f.__name__: f for f in (over_places, over_index_select, over_columns, over_two_places, over_tuple)},
    **{
        f.__name__: f
        for f in (written_back, raised, mask_changed_later, changed_between, values_changed_later, depth, picked_again)
    },
    **{f.__name__: f for f in (standardised, of_a_domain, all_but_padding, of_whole_numbers, in_place, by_keywords)},
    **{f.__name__: f for f in (of_half_precision, beside_the_same_for_all)},
    **FORMS,
    **{f.__name__: f for f in (by_count, put_together, losses, losses_of_classes, extrema, looked_up)},
}


def experts(x, labels, w, v):
    out = x.clone()
    for number, weight in enumerate((w, w.t(), w @ w)):
        out[labels == number] = x[labels == number] @ weight
    return out.sum()


NOT_TOLD: dict[str, Function] = {
    "returned": lambda x, labels, w, v: x[labels >= 0],
    "their order": lambda x, labels, w, v: x[labels >= 0].cumsum(0).sum(),
    "one of them": lambda x, labels, w, v: x[labels >= 0][0].sum(),
    "all in a row": lambda x, labels, w, v: x[labels >= 0].view(-1)[:3].sum(),
    "places of a mask of them": lambda x, labels, w, v: x.sum() + torch.where(x[labels >= 0][:, 0] > 0)[0].sum(),
    "the largest of each column": lambda x, labels, w, v: x[labels >= 0].max(0).values.sum(),
    "as many of each sample": lambda x, labels, w, v: x[labels >= 0].reshape(4, -1, 5).sum(),
    "each beside each other": lambda x, labels, w, v: (x[labels >= 0] @ x[labels >= 0].T).sum(),
    "written into where they may be a copy": lambda x, labels, w, v: (
        x.transpose(1, 2)[labels[:, 0] >= 0].contiguous().mul_(2).sum() + labels.sum()
    ),
    "of two masks": lambda x, labels, w, v: (x[labels >= 0] + x[labels >= 1]).sum(),
    "their number as a branch": lambda x, labels, w, v: x.sum() if x[labels >= 0].shape[0] > 3 else w.sum(),
    "a mean of integers": lambda x, labels, w, v: x.sum() + labels[labels >= 0].mean(),
    "experts, each on few rows": experts,
}


class Model(nn.Module):
    """One of these functions, with parameters."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function
        self.w = nn.Parameter(torch.randn(5, 5, dtype=torch.float64))
        self.v = nn.Parameter(torch.randn(5, dtype=torch.float64))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return self.function(x, labels, self.w, self.v)


def batch(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 5, (4, 6), generator=generator)
    return {
        "x": torch.randn(4, 6, 5, dtype=torch.float64, generator=generator),
        "labels": torch.where(torch.rand(4, 6, generator=generator) < 0.5, -100, labels),
    }
