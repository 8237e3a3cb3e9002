"""The hidden cases of the exercises on one device's training loop: chapters 05 to 07."""

from functools import partial
from unittest import mock

import torch
from torch import nn
from torch.nn import functional as F

from torchexercises import Wrong, exercise, expect


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3))


@exercise(
    "05", minutes=10, hint="Empty the gradients, compute the loss, backward, step; then detach."
)
def train_step(train_step) -> None:
    torch.manual_seed(1)
    batches = [(torch.randn(6, 4), torch.randint(3, (6,))) for _ in range(2)]

    def trained(step):
        net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        net.load_state_dict(start)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.9)
        net.get_parameter("0.weight").grad = torch.ones(8, 4)  # left over from before
        losses = [step(net, optimizer, *batch) for batch in batches]
        weight, bias = net.get_parameter("0.weight"), net.get_parameter("2.bias")
        return weight.detach(), losses, bias.detach()

    def by_hand(net, optimizer, images, labels, empty=True, before=lambda logits: logits):
        if empty:
            optimizer.zero_grad()
        loss = F.cross_entropy(before(net(images)), labels)
        loss.backward()
        optimizer.step()
        return loss.item()

    start = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).state_dict()
    (right, losses, bias), (found, said, other) = trained(by_hand), trained(train_step)
    summed = partial(by_hand, empty=False)
    twice = partial(by_hand, before=lambda logits: logits.softmax(1))
    if None in said:
        raise Wrong("nothing is returned")
    mistakes = {
        "is as it was: no step was taken, or with empty gradients": start["0.weight"],
        "is what the gradients of all steps together give": trained(summed)[0],
        "is that of a loss of the softmax of a softmax": trained(twice)[0],
    }
    expect("after two steps, the first weight", found, right, mistakes)
    if any(isinstance(loss, torch.Tensor) and loss.requires_grad for loss in said):
        raise Wrong("the loss that is returned keeps its graph, and so the memory of all layers")
    expect("the two losses", [float(loss) for loss in said], losses)
    expect("after two steps, the last bias", other, bias)


@exercise("05", minutes=10, hint="Add up sums, and divide once, by the number of images.")
def evaluate(evaluate) -> None:
    net = _net()
    images = torch.randn(10, 4)
    logits = net.eval()(images).detach()
    labels = logits.argmax(1)
    labels[:8] = (labels[:8] + 1) % 3  # right are the last batch's two alone
    batches = list(zip(images.split(4), labels.split(4), strict=True))  # 4, 4 and 2
    losses = [F.cross_entropy(net(x), y).item() for x, y in batches]
    state = {key: value.clone() for key, value in net.state_dict().items()}
    for training in (True, False):
        net.train(training)
        if (found := evaluate(net, batches)) is None:
            raise Wrong("nothing is returned")
        loss, accuracy = found
        if any(not torch.equal(state[key], value) for key, value in net.state_dict().items()):
            raise Wrong("batch norm's averages have changed: the model was in training mode")
        if net.training != training:
            raise Wrong(f"the model was in {'training' if training else 'evaluation'} mode before")
        if getattr(loss, "requires_grad", False):
            raise Wrong("the loss keeps the graphs of all batches, and so their memory")
        if not torch.is_grad_enabled():
            raise Wrong("gradients are off afterwards, also for what the program does next")
        of_batches = {"is the mean of the batches' means": sum(losses) / 3}
        expect("the loss", float(loss), F.cross_entropy(logits, labels).item(), of_batches)
        of_batches = {"is the mean of the batches' accuracies": 1 / 3}
        of_batches |= {"is the number of right answers": 2}
        expect("the accuracy", float(accuracy), 0.2, of_batches)


@exercise(
    "06", minutes=15, hint="Each group's loss is a mean over its images; the last one is smaller."
)
def accumulate(accumulate) -> None:
    images, labels = torch.randn(22, 4), torch.randint(3, (22,))
    sizes = [4, 4, 2, 4, 4, 4]
    small = list(zip(images.split(sizes), labels.split(sizes), strict=True))
    alive = []  # of how many images there is a graph

    def watch(net, inputs, output):
        if output.requires_grad:
            alive.append(len(output))
            output.register_hook(lambda gradient: alive.clear())
        if sum(alive) > 4:
            raise Wrong(
                f"the graphs of {sum(alive)} images, more than a batch's 4, are kept at once"
            )

    def weights(groups, parts=None, scale=lambda y, group: 1.0):
        torch.manual_seed(0)
        net = nn.Linear(4, 3)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.5)
        if parts:
            net.register_forward_hook(watch)
        for _ in range(2 if parts else 0):  # epochs
            accumulate(net, optimizer, small, parts)
        for group in 2 * groups:
            optimizer.zero_grad()
            for x, y in group:
                (F.cross_entropy(net(x), y) * scale(y, group)).backward()
            optimizer.step()
        return net.weight.detach()

    for parts in (4, 3, 5, 1, 9):
        groups = [small[i : i + parts] for i in range(0, len(small), parts)]
        share = weights(groups, None, lambda y, group: len(y) / sum(len(b) for _, b in group))
        full = [group for group in groups if len(group) == parts] or groups
        mistakes = {
            "is what a division by `parts` gives: the last group has fewer images": weights(
                groups, None, lambda y, group, parts=parts: 1 / parts
            ),
            "is what steps without the last group give": weights(
                full, None, lambda y, group: len(y) / sum(len(b) for _, b in group)
            ),
            "weighs every batch alike, also the smaller one": weights(
                groups, None, lambda y, group: 1 / len(group)
            ),
            "is what sums of the batches' losses give": weights(groups),
            "is what a step after each batch gives": weights([[batch] for batch in small]),
        }
        said = f"with {parts} batches a step, the weight"
        expect(said, weights([], parts), share, mistakes)


@exercise("07", minutes=15, hint="scale, backward, unscale_, clip, scaler.step, scaler.update.")
def amp_step(amp_step) -> None:
    x, y = torch.randn(8, 4), torch.randint(3, (8,))

    def moved(step, scaler, overflow=False, clip=1.0):
        torch.manual_seed(0)
        net = nn.Linear(4, 3)
        types = []
        net.register_forward_hook(lambda module, args, out: types.append(out.dtype))
        optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
        before = [p.detach().clone() for p in net.parameters()]
        for _ in range(2):  # the second time, gradients are there
            step(net, optimizer, scaler, 50 * x if not overflow else x * float("inf"), y, clip)
        moves = [(p.detach() - b).flatten() for p, b in zip(net.parameters(), before, strict=True)]
        return torch.cat(moves), types

    def by_hand(net, optimizer, scaler, x, y, clip):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(net(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), clip)
        optimizer.step()

    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with mock.patch.object(scaler, "update", wraps=scaler.update) as update:
        found, types = moved(amp_step, scaler)
    expect("what the model computes in", set(map(str, types)), {"torch.bfloat16"})
    right = moved(by_hand, None)[0]
    if not found.any():
        raise Wrong("the weights do not move: no step was taken")
    if found.norm() < right.norm() / 100:
        raise Wrong("the weights hardly move: the gradients were clipped while they were scaled")
    if found.norm() > right.norm() * 2:
        raise Wrong("the weights move too far: the gradients are not clipped, or still scaled")
    moves, rights = ([part.norm().item() for part in (m, m[-3:])] for m in (found, right))
    expect("in two steps, the weights and the bias move by what", moves, rights)
    if not update.called:
        raise Wrong("the scaler is never updated: after an overflow its scale would stay")
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    if moved(amp_step, scaler, overflow=True)[0].count_nonzero():  # NaN is not zero
        raise Wrong("a step was taken whose gradients are not finite: only scaler.step skips it")
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    right, found = (moved(*step, clip=1e4)[0] for step in ((by_hand, None), (amp_step, scaler)))
    expect("where nothing needs clipping, the weight moves by what", found.norm(), right.norm())
