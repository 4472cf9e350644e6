"""More functions of rows that a mask of unknown contents selects, as in real losses: masks after other dims, places,
edges of graphs, statistics of all rows; `x` (4, 6, 5), `labels` (4, 6), `w` (5, 5), `v` (5,)."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def behind_other_dims(x, labels, w, v):
    mask, wide = labels[0] >= 0, x.sum((0, 1)) > 0
    rows, wanted = (x @ w)[:, mask], x.flip(0)[:, mask]
    turned = (x.permute(2, 0, 1) * v[:, None, None])[:, labels >= 0]
    return (
        F.mse_loss(rows, wanted)
        + rows.sum(1).square().sum()
        + (rows * v)[..., 0].mean(1).sin().sum()
        + F.cross_entropy(rows.reshape(-1, 5), labels.clamp(min=0)[:, mask].reshape(-1))
        + (x[..., wide].sin() * x[:, :1, wide]).sum()
        + x[1, mask, 2].cos().sum()
        + turned.amax(1).sum()
        + (turned.mT * v).cos().sum()
    )


def edges_of_a_graph(x, labels, w, v):  # without edges from a node to itself, which come last
    edges, features = labels.clamp(min=0)[:2], x[0]
    kept = edges[0] != edges[1]
    edges, features = torch.stack([one[kept] for one in edges]), features[kept]
    features = features * (edges.to(x.dtype) * features[:, 0]).sum(0)[:, None]
    edges = torch.cat([edges, torch.arange(5).unsqueeze(0).repeat(2, 1)], dim=1)
    features = torch.cat([features, v.expand(5, 5)])
    source, target = edges
    degrees = torch.zeros(5, dtype=x.dtype).scatter_add_(0, target, torch.ones(edges.size(1), dtype=x.dtype))
    nodes = x[1, :5] @ w
    if source.numel() == 0:
        return nodes.sum()
    sent = nodes.index_select(-2, source) * features / degrees[target, None].sqrt()
    sent.masked_fill_(sent == 0, 1.0)
    most = nodes.new_full((5, 5), -torch.inf).scatter_reduce_(0, target[:, None].expand_as(sent), sent, "amax")
    return torch.zeros_like(nodes).index_add(0, target, sent).square().sum() + most.sin().sum()


def spread(x, labels, w, v):
    rows = (x @ w)[labels >= 0]
    deviations, means = torch.std_mean(rows, 0)
    pooled = ((rows @ v).softmax(0)[:, None] * rows).sum(0)
    return (
        ((x[..., 0] - rows[:, 0].mean()) / (rows[:, 0].std() + 1e-8) * (labels >= 0)).sin().sum()
        + (deviations * means).sum()
        + rows.var(unbiased=False)
        + rows.logsumexp(0).sin().sum()
        + pooled.square().sum()
        + torch.cat([rows, x[labels < 0]]).std()
    )


def products_over_rows(x, labels, w, v):
    rows = torch.where((labels >= 0)[..., None], x, torch.nan)[labels >= 0]
    return (
        (rows.T @ (rows @ w)).square().sum()
        + torch.einsum("nd,de,ne->n", rows, w, rows).sin().sum()
        + torch.einsum("nd,ne->de", rows, rows * v).sin().sum()
        + (rows.flip(-1)[:, None].expand(-1, 2, -1) * w[:2]).mean()
    )


def written_by_classes(x, labels, w, v):
    mask = labels >= 0
    wanted, rows, out = torch.zeros_like(x), torch.zeros(24, 5, dtype=x.dtype), (x @ w).clone()
    wanted[mask, labels[mask]] = 1.0
    places = mask.flatten().nonzero().squeeze()
    rows[places - 24] = (x * v).flatten(0, 1)[places, :]
    out[:, mask[0]] = x[:, mask[0]] * v
    out[..., x.sum((0, 1)) > 0] *= 2
    picked = out[mask].clone()
    wide = picked[:, 0] > 0
    picked[wide] = picked[wide] * picked[wide]
    picked[:, 1] = 2 * picked[:, 2]
    into = torch.zeros_like(x).masked_scatter(mask[..., None], picked)
    return F.binary_cross_entropy_with_logits(out, wanted) + rows.sin().sum() + (into * wanted).sum()


def by_how_many(x, labels, w, v):
    mask = labels >= 0
    rows, classes = (x @ w)[mask].log_softmax(-1), labels[mask]
    count, size = mask.sum().item(), x.abs().sum().item()
    each = rows[torch.arange(len(rows)), classes].sum() / max(len(rows), 1)
    counts = torch.bincount(classes, minlength=5)
    shown = (x * v).clamp(min=-1, max=count).add(x, alpha=size) + torch.full((5,), size, dtype=x.dtype)
    return each + (counts * v).sum() / max(1, mask.sum()) + min(shown.sin().sum() / max(count, 2.5), shown.sum())


def masks_of_elements(x, labels, w, v):  # as in single-shot detectors
    positive, negative = labels > 0, labels == 0
    shown, others = positive.unsqueeze(2).expand_as(x), negative.unsqueeze(2).expand_as(x)
    made = x @ w
    classes = labels[(positive + negative).gt(0)]
    return (
        F.smooth_l1_loss(made[shown].view(-1, 5), x.flip(0)[shown].view(-1, 5), reduction="sum")
        + F.cross_entropy(made[(shown + others).gt(0)].view(-1, 5), classes, reduction="sum")
        + made[positive].view(-1).std()
    )


def as_many_of_each(x, labels, w, v):  # as in masked autoencoders
    mask = torch.zeros(4, 6, dtype=torch.bool).scatter(1, x[..., 0].argsort(1)[:, :2], True)
    hidden, seen = x[mask].view(-1, 2, 5), (x * v)[~mask].reshape(4, 4, -1)
    out = (x @ w).clone()
    out[mask] = out[mask] * 0.5 + x[0, :1].cos().expand(8, 5) * torch.arange(8)[:, None]
    beside = F.cross_entropy(out[mask], labels.flatten()[:8].clamp(min=0))
    return (seen.mean(1) * hidden.amax(1)).sum() + (torch.cat([seen, hidden * v], 1) * out).sin().sum() + beside


FORMS = {
    f.__name__: f
    for f in (
        as_many_of_each,
        behind_other_dims,
        edges_of_a_graph,
        spread,
        products_over_rows,
        written_by_classes,
        by_how_many,
        masks_of_elements,
    )
}
