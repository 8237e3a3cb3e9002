"""Answers to the exercises of the cases in `one_loop`; each says how it is judged."""

import torch
from torch import nn
from torch.nn import functional as F


class train_step:
    def by_hand(net, optimizer, images, labels):
        """after two steps, the first weight is float32"""
        optimizer.zero_grad()
        loss = F.cross_entropy(net(images), labels)
        loss.backward()
        for parameter in net.parameters():
            parameter.data -= optimizer.param_groups[0]["lr"] * parameter.grad
        return loss.item()

    def emptied_late(net, optimizer, images, labels):
        """is as it was: no step was taken, or with empty gradients"""
        loss = F.cross_entropy(net(images), labels)
        loss.backward()
        optimizer.zero_grad()
        optimizer.step()
        return loss.item()

    def never_emptied(net, optimizer, images, labels):
        """is what the gradients of all steps together give"""
        loss = F.cross_entropy(net(images), labels)
        loss.backward()
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
        """the loss that is returned keeps its graph"""
        loss = F.cross_entropy(net(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    def returns_nothing(net, optimizer, images, labels):
        """nothing is returned"""
        train_step.emptied_at_the_start(net, optimizer, images, labels)

    def of_the_step_after(net, optimizer, images, labels):
        """the two losses is"""
        optimizer.zero_grad()
        F.cross_entropy(net(images), labels).backward()
        optimizer.step()
        return F.cross_entropy(net(images), labels).item()

    def no_step(net, optimizer, images, labels):
        """is as it was: no step was taken"""
        optimizer.zero_grad()
        loss = F.cross_entropy(net(images), labels)
        loss.backward()
        return loss.item()

    def emptied_at_the_start(net, optimizer, images, labels):
        """right"""
        for parameter in net.parameters():
            parameter.grad = None
        loss = nn.CrossEntropyLoss()(net(images), labels)
        loss.backward()
        optimizer.step()
        return loss.item()


class evaluate:
    def switched_off(net, batches):
        """gradients are off afterwards"""
        found = evaluate.in_one_batch(net, batches)
        torch.set_grad_enabled(False)
        return found

    def mean_of_means(net, batches):
        """the loss is the mean of the batches' means"""
        was, losses, right = net.training, [], 0
        net.eval()
        with torch.no_grad():
            for images, labels in batches:
                losses.append(F.cross_entropy(net(images), labels).item())
                right += (net(images).argmax(1) == labels).sum().item()
        net.train(was)
        return sum(losses) / len(losses), right / 10

    def mean_of_accuracies(net, batches):
        """the accuracy is the mean of the batches' accuracies"""
        loss, rates = evaluate.in_one_batch(net, batches)[0], []
        was = net.training
        net.eval()
        for images, labels in batches:
            rates.append((net(images).argmax(1) == labels).float().mean().item())
        net.train(was)
        return loss, sum(rates) / len(rates)

    def in_training_mode(net, batches):
        """batch norm's averages have changed: the model was in training mode"""
        images, labels = (torch.cat(parts) for parts in zip(*batches, strict=True))
        with torch.no_grad():
            logits = net(images)
        return F.cross_entropy(logits, labels), (logits.argmax(1) == labels).float().mean()

    def left_in_eval(net, batches):
        """the model was in training mode before"""
        net.eval()
        return evaluate.in_one_batch(net, batches)

    def left_in_training(net, batches):
        """the model was in evaluation mode before"""
        found = evaluate.in_one_batch(net, batches)
        net.train()
        return found

    def with_graphs(net, batches):
        """the loss keeps the graphs of all batches"""
        was = net.training
        net.eval()
        images, labels = (torch.cat(parts) for parts in zip(*batches, strict=True))
        logits = net(images)
        net.train(was)
        return F.cross_entropy(logits, labels), (logits.argmax(1) == labels).float().mean()

    def a_count(net, batches):
        """the accuracy is the number of right answers"""
        loss, accuracy = evaluate.in_one_batch(net, batches)
        return loss, round(accuracy * 10)

    def in_one_batch(net, batches):
        """right"""
        was = net.training
        net.eval()
        images, labels = (torch.cat(parts) for parts in zip(*batches, strict=True))
        with torch.inference_mode():
            logits = net(images)
        net.train(was)
        right = (logits.argmax(1) == labels).float().mean().item()
        return F.cross_entropy(logits, labels).item(), right


def _accumulating(scale, rest=True, empty=True):
    def accumulate(net, optimizer, batches, parts):
        optimizer.zero_grad()
        for i, (images, labels) in enumerate(batches):
            group = batches[i // parts * parts :][:parts]
            (F.cross_entropy(net(images), labels) * scale(labels, group, parts)).backward()
            if (i + 1) % parts == 0 or (rest and i + 1 == len(batches)):
                optimizer.step()
                if empty:
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

    def by_batches(net, optimizer, batches, parts):
        """weighs every batch alike, also the smaller one"""
        _accumulating(lambda labels, group, n: 1 / len(group))(net, optimizer, batches, parts)

    def summed(net, optimizer, batches, parts):
        """is what sums of the batches' losses give"""
        _accumulating(lambda labels, group, n: 1)(net, optimizer, batches, parts)

    def each_batch(net, optimizer, batches, parts):
        """is what a step after each batch gives"""
        for images, labels in batches:
            optimizer.zero_grad()
            F.cross_entropy(net(images), labels).backward()
            optimizer.step()

    def never_emptied(net, optimizer, batches, parts):
        """with 4 batches a step, the weight is"""
        _accumulating(_share, empty=False)(net, optimizer, batches, parts)

    def one_large_batch(net, optimizer, batches, parts):
        """the graphs of 14 images, more than a batch's 4, are kept at once"""
        for i in range(0, len(batches), parts):
            group = [torch.cat(of_all) for of_all in zip(*batches[i : i + parts], strict=True)]
            accumulate.by_sums(net, optimizer, [group], 1)

    def one_backward(net, optimizer, batches, parts):
        """the graphs of 8 images, more than a batch's 4, are kept at once"""
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


def _amp(autocast=True, unscale=True, clips=True, steps=True, update=True, scales=True):
    def step(net, optimizer, scaler, images, labels, clip):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = F.cross_entropy(net(images), labels)
        (scaler.scale(loss) if scales else loss).backward()
        if unscale:
            scaler.unscale_(optimizer)
        if clips:
            nn.utils.clip_grad_norm_(net.parameters(), clip)
        if steps:
            scaler.step(optimizer)
        else:
            optimizer.step()
        if update:
            scaler.update()

    return step


class amp_step:
    def each_clipped(net, optimizer, scaler, images, labels, clip):
        """in two steps, the weights and the bias move by what is"""
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(net(images), labels)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        for parameter in net.parameters():
            nn.utils.clip_grad_norm_(parameter, clip)
        scaler.step(optimizer)
        scaler.update()

    def clipped_scaled(*args):
        """the weights hardly move: the gradients were clipped while they were scaled"""
        _amp(unscale=False)(*args)

    def not_clipped(*args):
        """the weights move too far"""
        _amp(clips=False)(*args)

    def no_autocast(*args):
        """what the model computes in is {'torch.float32'}, not {'torch.bfloat16'}"""
        _amp(autocast=False)(*args)

    def never_scaled(*args):
        """Attempted unscale_ but _scale is None"""
        _amp(scales=False)(*args)

    def no_step(net, optimizer, scaler, images, labels, clip):
        """the weights do not move: no step was taken"""
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(net(images), labels)
        scaler.scale(loss).backward()

    def never_updated(net, optimizer, scaler, images, labels, clip):
        """unscale_() is being called after step()"""
        _amp(update=False)(net, optimizer, scaler, images, labels, clip)

    def no_scaler(net, optimizer, scaler, images, labels, clip):
        """the scaler is never updated"""
        _amp(unscale=False, steps=False, update=False, scales=False)(
            net, optimizer, scaler, images, labels, clip
        )

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
