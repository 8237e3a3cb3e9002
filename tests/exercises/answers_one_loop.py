"""Answers to the exercises of the cases in `one_loop`; each says how it is judged."""

import contextlib

import torch
from torch import nn
from torch.nn import functional as F


class train_step:
    def emptied_late(net, optimizer, images, labels):
        """is as it was: no step was taken, or with empty gradients"""
        loss = F.cross_entropy(net(images), labels)
        loss.backward()
        optimizer.zero_grad()
        optimizer.step()
        return loss.item()

    def softmax(net, optimizer, images, labels):
        """is that of a loss of the softmax of a softmax"""
        loss = F.cross_entropy(net(images).softmax(1), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    def with_a_graph(net, optimizer, images, labels):
        """each of the two losses keeps its graph"""
        loss = F.cross_entropy(net(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    def emptied_at_the_start(net, optimizer, images, labels):
        """right"""
        for parameter in net.parameters():
            parameter.grad = None
        loss = nn.CrossEntropyLoss()(net(images), labels)
        loss.backward()
        optimizer.step()
        return loss.item()


class evaluate:
    def mean_of_means(net, batches):
        """the loss is the mean of the batches' means"""
        was, losses, right = net.training, [], 0
        net.eval()
        with torch.no_grad():
            for images, labels in batches:
                losses.append(F.cross_entropy(net(images), labels).item())
                right += (net(images).argmax(1) == labels).sum().item()
        net.train(was)
        return sum(losses) / len(losses), right / 14

    def in_training_mode(net, batches):
        """batch norm's averages have changed: the model was in training mode"""
        net.eval = lambda: net  # as if it had been forgotten
        return evaluate.weighted(net, batches)

    def left_in_eval(net, batches):
        """`net.training`, afterwards, is False, not True"""
        net.eval()
        return evaluate.weighted(net, batches)

    def outputs_until_the_end(net, batches):
        """the outputs of 12 inputs are kept at once, where 8 would do"""
        with torch.no_grad(), _evaluating(net):
            logits = torch.cat([net(x) for x, _ in batches])
        labels = torch.cat([y for _, y in batches])
        return F.cross_entropy(logits, labels).item(), (logits.argmax(1) == labels).float().mean()

    def weighted(net, batches):
        """right"""
        sums = torch.zeros(3)
        with torch.no_grad(), _evaluating(net):
            for x, y in batches:
                loss, right = F.cross_entropy(logits := net(x), y), (logits.argmax(1) == y).sum()
                sums += torch.tensor([loss * len(y), right, len(y)])
        return (sums[0] / sums[2]).item(), (sums[1] / sums[2]).item()


@contextlib.contextmanager
def _evaluating(net):
    before = net.training
    net.eval()
    yield
    net.train(before)


def _accumulating(scale, rest=True):
    def accumulate(net, optimizer, batches, parts):
        optimizer.zero_grad()
        for i, (images, labels) in enumerate(batches):
            group = batches[i // parts * parts :][:parts]
            (F.cross_entropy(net(images), labels) * scale(labels, group, parts)).backward()
            if (i + 1) % parts == 0 or (rest and i + 1 == len(batches)):
                optimizer.step()
                optimizer.zero_grad()

    return accumulate


def _share(labels, group, parts):
    return len(labels) / sum(len(y) for _, y in group)


class accumulate:
    def by_parts(net, optimizer, batches, parts):
        """is what a division by `parts` gives: the last group has fewer images"""
        _accumulating(lambda labels, group, n: 1 / n)(net, optimizer, batches, parts)

    def without_the_rest(net, optimizer, batches, parts):
        """is what steps without the last group give"""
        _accumulating(_share, rest=False)(net, optimizer, batches, parts)

    def one_backward(net, optimizer, batches, parts):
        """the graphs of 8 inputs are kept at once, where 4 would do"""
        for i in range(0, len(batches), parts):
            group = batches[i : i + parts]
            sums = [F.cross_entropy(net(x), y, reduction="sum") for x, y in group]
            optimizer.zero_grad()
            (sum(sums) / sum(len(y) for _, y in group)).backward()
            optimizer.step()

    def by_sums(net, optimizer, batches, parts):
        """right"""
        for first in range(0, len(batches), parts):
            optimizer.zero_grad()
            group = batches[first : first + parts]
            for images, labels in group:
                F.cross_entropy(net(images), labels, reduction="sum").backward()
            for parameter in net.parameters():
                parameter.grad /= sum(len(labels) for _, labels in group)
            optimizer.step()


def _amp(autocast=True, loss_inside=True, empty=True, unscale=True, steps=True):
    def step(net, optimizer, scaler, images, labels, clip):
        if empty:
            optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = F.cross_entropy(logits := net(images), labels)
        if not loss_inside:
            loss = F.cross_entropy(logits, labels)
        scaler.scale(loss).backward()
        if unscale:
            scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(net.parameters(), clip)
        if steps:
            scaler.step(optimizer)
        else:
            optimizer.step()
        scaler.update()

    return step


class amp_step:
    def gradients_added(*args):
        """is what gradients give that are not emptied before"""
        _amp(empty=False)(*args)

    def loss_outside_autocast(net, optimizer, scaler, images, labels, clip):
        """right"""
        _amp(loss_inside=False)(net, optimizer, scaler, images, labels, clip)

    def clipped_scaled(*args):
        """the weights hardly move: the gradients were clipped while they were scaled"""
        _amp(unscale=False)(*args)

    def no_autocast(*args):
        """what the model computes in is {'torch.float32'}, not {'torch.bfloat16'}"""
        _amp(autocast=False)(*args)

    def optimizer_steps(net, optimizer, scaler, images, labels, clip):
        """only scaler.step skips it"""
        _amp(steps=False)(net, optimizer, scaler, images, labels, clip)

    def under_autocast(net, optimizer, scaler, images, labels, clip):
        """right"""
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(net(images), labels)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(net.parameters(), max_norm=clip)
        scaler.step(optimizer)
        scaler.update()
