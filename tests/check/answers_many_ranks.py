"""Answers to the exercises on several ranks; each says how it is judged."""

import torch.distributed as dist


class average_gradients:
    def summed(net):
        """is summed, not divided by the number of ranks"""
        for parameter in net.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)

    def by_two(net):
        """is the sum divided by 2 (Right on 2 ranks: is 2 in it?)"""
        for parameter in net.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.grad /= 2

    def divided_only(net):
        """is your own, divided by the number of ranks"""
        for parameter in net.parameters():
            if parameter.grad is not None:
                parameter.grad /= dist.get_world_size()

    def a_copy(net):
        """is your own: nothing came from the other ranks"""
        for parameter in net.parameters():
            if parameter.grad is not None:
                average = parameter.grad.clone()
                dist.all_reduce(average)
                average /= dist.get_world_size()

    def without_a_gradient(net):
        """'NoneType' object has no attribute"""
        for parameter in net.parameters():
            dist.all_reduce(parameter.grad.data)
            parameter.grad /= dist.get_world_size()

    def on_rank_0(net):
        """waited for a rank that had returned: do all make the same calls"""
        for parameter in net.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()
        if dist.get_rank() == 0:
            dist.barrier()

    def in_one_message(net):
        """right"""
        grads = [p.grad for p in net.parameters() if p.grad is not None]
        for grad in grads:
            parts = [grad.clone() for _ in range(dist.get_world_size())]
            dist.all_gather(parts, grad)
            grad.copy_(sum(parts) / len(parts))
