"""The hidden cases of the exercises on one device's training loop: chapters 05 to 07."""

import functools
from unittest import mock

import torch
from torch import nn
from torch.nn import functional as F

from torchexercises import Wrong, exercise, expect, graphs_of_at_most, unchanged


@exercise("05", 10, hint="Empty the gradients, loss, backward, step; then detach.")
def train_step(train_step) -> None:
    batches = [(torch.randn(6, 4), torch.randint(3, (6,))) for _ in range(2)]

    def trained(step, **options):
        torch.manual_seed(1)
        net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        first = net.get_parameter("0.weight")
        before = first.detach().clone()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.9)
        first.grad = torch.ones(8, 4)  # left over from before
        losses = [step(net, optimizer, *batch, **options) for batch in batches]
        return losses, [p.detach() for p in net.parameters()], before

    def by_hand(net, optimizer, images, labels, empty=True, before=lambda logits: logits):
        if empty:
            optimizer.zero_grad()
        loss = F.cross_entropy(before(net(images)), labels)
        loss.backward()
        optimizer.step()
        return loss.item()

    (losses, rights, start), (returned, found, _) = trained(by_hand), trained(train_step)
    summed, twice = trained(by_hand, empty=False), trained(by_hand, before=lambda x: x.softmax(1))
    mistakes = {
        "is as it was: no step was taken, or with empty gradients": start,
        "is what the gradients of all steps together give": summed[1][0],
        "is that of a loss of the softmax of a softmax": twice[1][0],
    }
    expect("after two steps, the first weight", found[0], rights[0], mistakes)
    expect("each of the two losses", returned, losses)
    expect("after two steps, each parameter", found, rights)


@exercise("05", 10, hint="Add up sums, and divide once, by the number of images.")
def evaluate(evaluate) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3))
    images = torch.randn(14, 4)
    logits = net.eval()(images).detach()
    labels = logits.argmax(1)
    labels[:12] = (labels[:12] + 1) % 3  # right are the last batch's two alone
    batches = list(zip(images.split(4), labels.split(4), strict=True))  # 4, 4, 4 and 2
    losses = [F.cross_entropy(net(x), y).item() for x, y in batches]
    state = {key: value.clone() for key, value in net.state_dict().items()}
    for training in (True, False):
        net.train(training)
        # A loop's names keep the batch before until they get the next one.
        with graphs_of_at_most(8, net, outputs=True):
            found = evaluate(net, batches)
        loss, accuracy = found
        if any(not torch.equal(state[key], value) for key, value in net.state_dict().items()):
            raise Wrong("batch norm's averages have changed: the model was in training mode")
        expect("`net.training`, afterwards,", net.training, training)
        expect("`torch.is_grad_enabled()`, afterwards,", torch.is_grad_enabled(), True)
        of_batches = {"is the mean of the batches' means": sum(losses) / 4}
        expect("the loss", loss, F.cross_entropy(logits, labels).item(), of_batches)
        of_batches = {"is the mean of the batches' accuracies": 1 / 4}
        of_batches |= {"is the number of right answers": 2}
        expect("the accuracy", accuracy, 2 / 14, of_batches)


@exercise("06", 15, hint="Each group's loss is a mean over its images.")
def accumulate(accumulate) -> None:
    images, labels = torch.randn(22, 4), torch.randint(3, (22,))
    sizes, accumulate = [4, 4, 2, 4, 4, 4], unchanged(accumulate, "_ _ batches")
    small = list(zip(images.split(sizes), labels.split(sizes), strict=True))

    def trained(epoch):
        torch.manual_seed(0)
        net = nn.Linear(4, 3)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.5)
        with graphs_of_at_most(4, net):
            for _ in range(2):
                epoch(net, optimizer)
        return net.weight.detach()

    def by_hand(groups, scale):
        def epoch(net, optimizer):
            for group in groups:
                optimizer.zero_grad()
                for x, y in group:
                    (F.cross_entropy(net(x), y) * scale(y, group)).backward()
                optimizer.step()

        return trained(epoch)

    def share(y, group):
        return len(y) / sum(len(labels) for _, labels in group)

    for parts in (4, 3, 5, 1, 9):
        weight = trained(lambda net, optim, n=parts: accumulate(net, optim, small, n))
        groups = [small[i : i + parts] for i in range(0, len(small), parts)]
        full = [group for group in groups if len(group) == parts] or groups
        by_parts = by_hand(groups, lambda y, group, n=parts: 1 / n)
        mistakes = {
            "is what a division by `parts` gives: the last group has fewer images": by_parts,
            "is what steps without the last group give": by_hand(full, share),
            "weighs every batch alike": by_hand(groups, lambda y, group: 1 / len(group)),
            "is what sums of the batches' losses give": by_hand(groups, lambda y, group: 1),
        }
        expect(f"with {parts} batches a step, the weight", weight, by_hand(groups, share), mistakes)


@exercise("07", 15, hint="scale, backward, unscale_, clip, scaler.step, scaler.update.")
def amp_step(amp_step) -> None:
    x, y = torch.randn(8, 4), torch.randint(3, (8,))
    amp_step = unchanged(amp_step, "_ _ _ images labels")

    def moved(step, images, clip):
        torch.manual_seed(0)
        net, scaler = nn.Linear(4, 3), torch.amp.GradScaler("cpu", init_scale=1024.0)
        types = set()
        net.register_forward_hook(lambda module, args, out: types.add(str(out.dtype)))
        optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
        before = [p.detach().clone() for p in net.parameters()]
        for parameter in net.parameters():
            parameter.grad = torch.full_like(parameter, 1024.0)  # left over from before
        with mock.patch.object(scaler, "update", wraps=scaler.update) as update:
            for _ in range(2):
                step(net, optimizer, scaler, images, y, clip)
        moves = [(p.detach() - b).flatten() for p, b in zip(net.parameters(), before, strict=True)]
        return torch.cat(moves), types, update.called

    def by_hand(net, optimizer, scaler, x, y, clip, empty=True):
        if empty:
            optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(net(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(net.parameters(), clip)
        optimizer.step()
        scaler.update()

    (found, types, updated), (right, *_) = moved(amp_step, 50 * x, 1.0), moved(by_hand, 50 * x, 1.0)
    expect("what the model computes in", types, {"torch.bfloat16"})
    if not found.any():
        raise Wrong("the weights do not move: no step was taken")
    if found.norm() < right.norm() / 100:
        raise Wrong("the weights hardly move: the gradients were clipped while they were scaled")
    if found.norm() > right.norm() * 2:
        raise Wrong("the weights move too far: the gradients are not clipped, or still scaled")
    added = moved(functools.partial(by_hand, empty=False), 50 * x, 1.0)[0]

    def norms(moves):  # to the rounding of bfloat16, in which the loss may be computed
        return torch.stack([moves.norm(), moves[-3:].norm()]).bfloat16()

    mistakes = {"is what gradients give that are not emptied before": norms(added)}
    what = "what the weights and the bias move by"
    expect(f"in two steps, {what}", norms(found), norms(right), mistakes)
    if not updated:
        raise Wrong("the scaler is never updated: after an overflow its scale would stay")
    if moved(amp_step, x * float("inf"), 1.0)[0].count_nonzero():  # NaN is not zero
        raise Wrong("a step was taken whose gradients are not finite: only scaler.step skips it")
    found, right = (norms(moved(step, 50 * x, 1e4)[0]) for step in (amp_step, by_hand))
    expect(f"where nothing needs clipping, {what}", found, right)
