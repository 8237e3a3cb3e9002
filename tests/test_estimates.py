"""The calculators' formulas against what is published, and against what FSDP holds.

Chapter 11 holds them against PyTorch's tensors in a step, site/test_will_it_fit.py against the
page and what authors report of whole models.
"""

import copy
import math
from functools import partial
from itertools import accumulate, count

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from torchclinic.will_it_fit import memory_per_gpu, serving, speed_up, transformer
from torchladder.launching import launch

KORTHIKANTI = {  # V. Korthikanti et al., 2022, arXiv:2205.05198, table 3
    22e9: {"layers": 48, "hidden": 6144, "heads": 64},
    175e9: {"layers": 96, "hidden": 12288, "heads": 96},
    530e9: {"layers": 105, "hidden": 20480, "heads": 128},
    1e12: {"layers": 128, "hidden": 25600, "heads": 160},
}


def sizes_of(parameters):
    return KORTHIKANTI[parameters] | {"sequence": 2048, "vocabulary": 51200}


def layer_bytes(parameters, **options):
    """What one layer saves; what comes before and after the layers is left out."""
    sizes = sizes_of(parameters)
    two, one = (transformer(**sizes | {"layers": n}, **options).activation_bytes for n in (2, 1))
    return two - one


def flops_of(parameters):
    """Forwards and backwards: with the parameters, and between all pairs of positions."""
    sizes = sizes_of(parameters)
    attention = 3 * 2 * 2 * sizes["layers"] * sizes["hidden"] * 2048**2
    return 6 * transformer(**sizes).parameters * 2048, attention


# --- a transformer ------------------------------------------------------------------------------


def test_korthikantis_models_are_as_large_and_save_as_much():
    for parameters in KORTHIKANTI:
        found = transformer(**sizes_of(parameters))
        assert found.parameters == pytest.approx(parameters, rel=0.1)
        products, attention = flops_of(parameters)
        assert found.flops == products + attention
        half = transformer(**sizes_of(parameters), causal=True).flops
        assert half == products + attention / 2
        again = transformer(**sizes_of(parameters), checkpointing=True)
        assert again.flops == pytest.approx(4 / 3 * found.flops)
    s, h, a = 2048, 12288, 96
    sixteen = {"precision": "bf16"}
    whole = layer_bytes(175e9, fused_attention=False, **sixteen)
    assert whole == s * h * (34 + 5 * a * s / h)  # their formula
    # Section 5: not saving attention's table saves 70 % and 65 % of the activations.
    for parameters, saved in [(175e9, 0.70), (530e9, 0.65)]:
        whole = layer_bytes(parameters, fused_attention=False, **sixteen)
        share = 1 - layer_bytes(parameters, **sixteen) / whole
        assert share == pytest.approx(saved, rel=0.1)


def test_bytes_that_a_layer_saves():
    s, h = 2048, 12288
    cases = {"fp32": (66, 4), "bf16-mixed": (38, 4), "bf16": (34, 2), "bf16-master": (34, 2)}
    for precision, (each, kept) in cases.items():
        assert layer_bytes(175e9, precision=precision) == each * s * h
        assert layer_bytes(175e9, precision=precision, checkpointing=True) == kept * s * h
        assert layer_bytes(175e9, precision=precision, checkpointing="offloaded") == 0


def test_bytes_that_a_score_of_attention_keeps():
    s, a = 2048, 96
    for precision, each in {"fp32": 9, "bf16-mixed": 7, "bf16": 5}.items():  # softmax, cast, mask
        table = layer_bytes(175e9, precision=precision, fused_attention=False)
        assert table - layer_bytes(175e9, precision=precision) == each * a * s * s


def test_gpt_2_is_twelve_blocks_embeddings_and_a_norm():
    sizes = {"layers": 12, "hidden": 768, "heads": 12, "sequence": 1024}
    found, more = (transformer(**sizes, vocabulary=tokens) for tokens in (50257, 50258))
    assert found.parameters == 124_439_808 == 12 * found.largest_block + found.root
    assert found.root == (50257 + 1024) * 768 + 2 * 768
    assert more.activation_bytes - found.activation_bytes == 12 * 1024  # a logit and its gradient


PUBLISHED = {  # tables, layers, hidden, heads, KV heads, MLP, head size, vocabulary, parameters
    "llama 2": (2, 32, 4096, 32, 32, 11008, 128, 32000, 6_738_415_616),
    "llama 3.2": (1, 16, 2048, 32, 8, 8192, 64, 128256, 1_235_814_400),
    "llama 3.1": (2, 32, 4096, 32, 8, 14336, 128, 128256, 8_030_261_248),
    "qwen3": (1, 36, 2560, 32, 8, 9728, 128, 151936, 4_022_468_096),
    "qwen3, 8B": (2, 36, 4096, 32, 8, 12288, 128, 151936, 8_190_735_360),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_models_of_today_have_their_published_parameters(name):
    tables, layers, hidden, heads, kv_heads, mlp, head, vocabulary, parameters = PUBLISHED[name]
    sizes = {"layers": layers, "hidden": hidden, "heads": heads, "kv_heads": kv_heads, "mlp": mlp}
    sizes |= {"head_size": head, "vocabulary": vocabulary, "sequence": 100, "tied": tables == 1}
    found = transformer(**sizes, block=name[:5].strip())
    assert found.parameters == parameters
    assert found.root == tables * vocabulary * hidden + hidden
    products = 6 * (parameters - found.lookup) * 100  # looking up a row takes no FLOPs
    assert found.flops == products + 12 * layers * heads * head * 100**2
    frozen = transformer(**sizes, block=name[:5].strip(), frozen=True)
    assert frozen.flops == pytest.approx(found.flops - products / 3)


MIXTURES = {  # layers, hidden, heads, KV heads, MLP, head size, vocabulary, experts, chosen
    # https://huggingface.co/Qwen/Qwen3-30B-A3B and arXiv:2505.09388: 30.5 billion, 3.3 active
    "qwen3": (48, 2048, 32, 4, 768, 128, 151936, 128, 8, 30_532_122_624, 3.3e9),
    # A. Q. Jiang et al., 2024, arXiv:2401.04088: 47 billion, 13 active
    "llama": (32, 4096, 32, 8, 14336, 128, 32000, 8, 2, 46_702_792_704, 13e9),
}


@pytest.mark.parametrize("block", MIXTURES)
def test_mixtures_of_experts_have_their_published_parameters_whole_and_active(block):
    layers, hidden, heads, kv_heads, mlp, head, vocabulary, experts, chosen, *both = MIXTURES[block]
    sizes = {"layers": layers, "hidden": hidden, "heads": heads, "kv_heads": kv_heads, "mlp": mlp}
    sizes |= {"head_size": head, "vocabulary": vocabulary, "sequence": 100, "tied": False}
    found = transformer(**sizes, block=block, experts=experts, chosen=chosen)
    assert found.parameters == both[0]
    assert found.active == pytest.approx(both[1], rel=0.02)
    one = transformer(**sizes, block=block)
    assert (one.active, one.experts, one.share) == (one.parameters, 0, 1)
    with pytest.raises(ValueError, match="chosen=9 of experts=8: at most all"):
        transformer(**sizes, block=block, experts=8, chosen=9)


class Norm(nn.LayerNorm):
    """What RMSNorm is on a GPU: it saves its input, which autocast has turned into float32."""

    def forward(self, x):
        return super().forward(x.to(self.weight.dtype))


class InOperations(nn.Module):
    """RMSNorm as Transformers has it: a step in float32, and a product with what is cast back."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * wide.to(x.dtype)


class Block(nn.Module):
    """A layer of Llama or Qwen 3, with a matrix for each product, as their authors have it."""

    def __init__(
        self, *, hidden, heads, kv_heads, mlp, head_size, block, experts=1, chosen=1, norm=None
    ):
        super().__init__()
        self.head, self.again, self.chosen = head_size, heads // kv_heads, chosen
        wide, kv = heads * head_size, kv_heads * head_size
        sizes = {"q": (hidden, wide), "k": (hidden, kv), "v": (hidden, kv), "out": (wide, hidden)}
        for at in range(experts):
            sizes |= dict.fromkeys([f"gate{at}", f"up{at}"], (hidden, mlp))
            sizes[f"down{at}"] = mlp, hidden
        sizes |= {"router": (hidden, experts)} if experts > 1 else {}
        self.of = nn.ModuleDict({n: nn.Linear(*io, bias=False) for n, io in sizes.items()})
        widths = [hidden, hidden, *([head_size] * 2 if block == "qwen3" else [])]
        self.norms = nn.ModuleList((norm or partial(Norm, bias=False))(each) for each in widths)

    def forward(self, x, angles, fused):
        normed = self.norms[0](x)
        q, k, v = (self.of[n](normed).unflatten(2, (-1, self.head)) for n in "qkv")
        if len(self.norms) == 4:
            q, k = self.norms[2](q), self.norms[3](k)
        q, k, v = (each.transpose(1, 2) for each in (rotated(q, angles), rotated(k, angles), v))
        if fused:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.again > 1)
        else:
            k, v = (each.repeat_interleave(self.again, 1) for each in (k, v))
            y = (q @ k.mT).softmax(-1) @ v
        x = x + self.of["out"](y.transpose(1, 2).flatten(2))
        normed = self.norms[1](x)
        return x + (self.mixed(normed[0])[None] if "router" in self.of else self.mlp(normed, 0))

    def mlp(self, x, at):
        return self.of[f"down{at}"](F.silu(self.of[f"gate{at}"](x)) * self.of[f"up{at}"](x))

    def mixed(self, x):
        """As Qwen3 MoE has it: for each expert its tokens, whose outputs are weighted and added."""
        weights, chosen = self.of["router"](x).float().softmax(-1).topk(self.chosen)
        weights, result = weights.to(x.dtype), torch.zeros_like(x)
        for at in range(self.of["router"].out_features):
            rows, place = (chosen == at).nonzero(as_tuple=True)
            found = self.mlp(x[rows], at) * weights[rows, place, None]
            result = result.index_add(0, rows, found.to(x.dtype))
        return result


def rotated(x, angles):
    (a, b), (sin, cos) = x.float().chunk(2, dim=-1), angles
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1).type_as(x)


LAYER = {"hidden": 128, "heads": 4, "kv_heads": 2, "mlp": 320, "head_size": 48}


EXPERTS = [{"experts": 4, "chosen": 1}, {"experts": 16, "chosen": 8}]


@pytest.mark.parametrize(
    "more", [{}, {"fused_attention": False}, {"fused_norms": False}, *EXPERTS], ids=str
)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-mixed"])
@pytest.mark.parametrize("block", ["llama", "qwen3"])
def test_a_layer_saves_and_computes_what_the_formula_says(block, precision, more):
    s, fused = 300, more.get("fused_attention", True)
    numbers = {"sequence": s, "vocabulary": 100, "precision": precision, "block": block}
    two, one = (transformer(layers=n, **LAYER | numbers | more) for n in (2, 1))
    experts = {name: number for name, number in more.items() if "fused" not in name}
    sizes = LAYER | {"block": block} | experts
    if "fused_norms" in more:
        sizes["norm"] = InOperations
    said = two.activation_bytes - one.activation_bytes
    if precision == "bf16-mixed" and not fused:
        said -= 4 * 4 * s * s  # autocast computes softmax in float32 on a GPU, not here
    # Left out: mean and scale of a norm, the sum of a row of scores, what a router gives.
    few = 80 + (experts["experts"] * 4 + experts["chosen"] * 40 if experts else 0)
    assert 0 <= saved(sizes, precision, fused, sequence=s) - said <= few * s
    if precision == "fp32":
        net, x = Block(**sizes), torch.randn(1, s, 128, requires_grad=True)
        with FlopCounterMode(display=False) as counter:
            net(x, torch.randn(2, s, 1, 24), False).sum().backward()
        assert counter.get_total_flops() == pytest.approx(two.flops - one.flops, rel=0.01)


def test_norms_in_several_operations_keep_four_bytes_more_and_the_least_is_without():
    numbers = LAYER | {"layers": 2, "sequence": 40, "vocabulary": 100, "block": "llama"}
    several, fused = (transformer(fused_norms=is_one, **numbers) for is_one in (False, True))
    assert several.activation_bytes - fused.activation_bytes == (2 * 2 + 1) * 4 * 128 * 40
    assert several.least_bytes == fused.least_bytes


def saved(sizes, precision, fused, sequence):
    """Bytes of the storages that a layer saves, without parameters, their casts, and angles."""
    net = Block(**sizes).to(torch.bfloat16 if precision == "bf16" else torch.float32)
    x = torch.randn(1, sequence, sizes["hidden"], dtype=net.norms[0].weight.dtype)
    angles = torch.randn(2, sequence, 1, sizes["head_size"] // 2)
    not_counted = {t.untyped_storage().data_ptr() for t in (*net.parameters(), angles)}
    weights = {each.weight.shape for each in net.of.values()}
    storages = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        is_cast = tensor.dim() == 2 and {tensor.shape, tensor.mT.shape} & weights
        if storage.data_ptr() not in not_counted and not is_cast:
            storages[storage.data_ptr()] = storage
        return tensor

    autocast = torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16-mixed")
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), autocast:
        net(x.requires_grad_() * 1, angles, fused)
    return sum(storage.nbytes() for storage in storages.values())


@pytest.mark.parametrize("block", ["llama", "qwen3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("experts", "chosen"), [(1, 1), (4, 2)])
def test_selective_checkpointing_keeps_and_computes_again_what_the_formula_says(
    block, dtype, experts, chosen
):
    s, heads = 300, 4
    sizes = LAYER | {"block": block, "experts": experts, "chosen": chosen}
    numbers = {"sequence": s, "vocabulary": 100, "checkpointing": "selective"} | sizes
    numbers["precision"] = "fp32" if dtype == torch.float32 else "bf16"
    two, one = (transformer(layers=n, **numbers) for n in (2, 1))
    net, kept, places = Block(**sizes).to(dtype), [], (count(), count())  # and where it runs again

    def policy(context, operation, *inputs, **options):
        """Every second product, and attention, as torchtitan's ``op``; no product of experts."""
        if operation == torch.ops.aten.mm.default:
            place, size = next(places[context.is_recompute]), len(inputs[0]) * inputs[1].shape[1]
            is_kept = place % 2 == 0 and (experts == 1 or place < 4)
        else:
            is_kept = "attention" in str(operation)
            size = inputs[0].numel() if is_kept else 0  # as many numbers as the queries
        if is_kept and not context.is_recompute:
            kept.append(size)
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE

    x, angles = torch.randn(1, s, 128, dtype=dtype, requires_grad=True), torch.randn(2, s, 1, 24)
    context = partial(create_selective_checkpoint_contexts, policy)
    name = "_scaled_dot_product_flash_attention_for_cpu"  # which PyTorch 2.10 does not count
    attention = {
        getattr(torch.ops.aten, name): lambda q, k, *_, **__: 4 * math.prod(q) * k[-2],
        getattr(torch.ops.aten, f"{name}_backward"): (
            lambda gradient, q, k, *_, **__: 10 * math.prod(q) * k[-2]
        ),
    }
    attention = {k: v for k, v in attention.items() if k not in flop_registry}
    with FlopCounterMode(display=False, custom_mapping=attention) as counter:
        y = checkpoint(net, x, angles, True, use_reentrant=False, context_fn=context)
        y.sum().backward()
    assert x.itemsize * (x.numel() + sum(kept)) == two.activation_bytes - one.activation_bytes
    scores = 2 * heads * 48 * s**2  # which fused attention computes again, as MFU does not count
    assert counter.get_total_flops() - scores == pytest.approx(two.flops - one.flops, rel=2e-3)


@pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="this PyTorch has it not yet")
def test_a_loss_in_parts_never_holds_all_logits():
    s, h, vocabulary = 512, 64, 6000
    sizes = {"layers": 1, "hidden": h, "heads": 4, "sequence": s, "vocabulary": vocabulary}
    whole, parts = (transformer(**sizes, loss=loss).activation_bytes for loss in ("whole", "parts"))
    assert whole - parts == 12 * s * (vocabulary - h)
    compact = nn.LinearCrossEntropyOptions(acc_policy="compact")  # as on a GPU
    for dtype in (torch.float32, torch.bfloat16):
        assert 7 * s * h <= peak_of_loss(s, h, vocabulary, dtype, compact) <= 12 * s * h
    reference = peak_of_loss(s, h, vocabulary, torch.float32, None)
    assert reference == pytest.approx(12 * s * vocabulary, rel=0.1)


def peak_of_loss(positions, hidden, vocabulary, dtype, options):
    x = torch.randn(positions, hidden, dtype=dtype, requires_grad=True)
    head = torch.randn(vocabulary, hidden, dtype=dtype)
    targets = torch.randint(vocabulary, (positions,))
    return peak_of(lambda: F.linear_cross_entropy(x, head, targets, options=options).backward())


def peak_of(action):
    """Bytes that the allocator of the CPU has given out at most."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as seen:
        action()
    found = [event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"]
    found.sort(key=lambda event: event.start_ns())
    return max(accumulate(event.nbytes() for event in found))


# --- a rung -------------------------------------------------------------------------------------


def test_bytes_for_each_parameter():
    cases = {("sgd", "fp32"): 8, ("momentum", "fp32"): 12, ("adam", "fp32"): 16}
    cases |= {("adam", "bf16-mixed"): 18, ("adam", "fp16-mixed"): 18}
    cases |= {("adam", "bf16"): 8, ("adam", "bf16-master"): 16}
    cases |= {("muon", "fp32"): 12, ("muon", "bf16-mixed"): 14}
    cases |= {("adam-8bit", "fp32"): 10, ("adam-8bit", "bf16-mixed"): 12, ("adam-8bit", "bf16"): 6}
    for (optimizer, precision), each in cases.items():
        memory = memory_per_gpu(1000, optimizer=optimizer, precision=precision, rung="cpu")
        assert memory.total == 1000 * each


def counted(optimizers):
    """Bytes of the state, and of the peak in the next step."""
    state = [t for each in optimizers for of in each.state.values() for t in of.values()]
    before = peak = sum(t.nbytes for t in state if isinstance(t, torch.Tensor) and t.dim())
    for each in optimizers:
        peak = max(peak, before + peak_of(each.step))
    return before, peak


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "muon"])
def test_what_sgds_weight_decay_and_muon_take(optimizer):
    table = nn.Parameter(torch.randn(3000, 64))
    parts = [nn.Parameter(torch.randn(300, 64)) for _ in range(10)]
    for p in (table, *parts):
        p.grad = torch.randn_like(p)
    if optimizer == "muon":
        made = [torch.optim.Muon(parts), torch.optim.AdamW([table], foreach=True)]
    else:
        how = {"momentum": 0.9 * (optimizer == "momentum"), "weight_decay": 1e-4}
        made = [torch.optim.SGD([table, *parts], foreach=True, **how)]
    for each in made:
        each.step()
    root, parameters = table.numel(), sum(p.numel() for p in (table, *parts))
    options = {"optimizer": optimizer, "root": root, "weight_decay": True}
    memory = memory_per_gpu(parameters, **options)
    state, peak = counted(made)
    assert memory.optimizer == state
    assert memory.step == pytest.approx(peak - state, rel=0.02)
    assert memory_per_gpu(parameters, rung="cpu", **options).step == 0  # one at a time
    if optimizer != "muon":
        assert memory_per_gpu(parameters, optimizer=optimizer).step == 0


def test_what_the_choices_of_held_need():
    options = {"optimizer": "adam", "largest_block": 1000, "root": 500, "activation_bytes": 700}
    one = {"held": "one-gradient", "largest": 2000} | options
    memory = memory_per_gpu(8000, **one)
    assert (memory.gradients, memory.step) == (4 * 2000, 0)
    assert memory.total == 4 * (8000 + 16000 + 2000) + 700
    fsdp = {"rung": "fsdp", "gpus": 4}
    assert memory_per_gpu(8000, **one, **fsdp).gradients == 4 * 1000 / 4  # the block's
    for more in ({"accumulation": 2}, {"rung": "ddp", "gpus": 2}):  # all of them are needed
        assert memory_per_gpu(8000, **one, **more).gradients == 4 * 8000
    memory = memory_per_gpu(8000, held="blocks", accumulation=2, **options, **fsdp)
    assert memory.total == memory.at_least == memory.communication + 700
    without = memory_per_gpu(8000, held="blocks", **options)  # one GPU has no FSDP
    assert without == memory_per_gpu(8000, **options)


def test_pages_of_the_optimizer_and_a_compiled_loss_count_at_the_most_alone():
    sizes = {"layers": 2, "hidden": 64, "heads": 4, "sequence": 100, "vocabulary": 3000}
    for precision, logit in {"fp32": 8, "bf16-mixed": 4, "bf16": 4}.items():
        for checkpointing in (False, True):
            how = {"precision": precision, "checkpointing": checkpointing}
            found = transformer(**sizes, **how)
            assert found.activation_bytes - found.least_bytes == (12 - logit) * 100 * 3000
    given = {"activation_bytes": found.activation_bytes, "least_bytes": found.least_bytes}
    paged, kept = (
        memory_per_gpu(1000, optimizer=optimizer, accumulation=2, batch=3, **given)
        for optimizer in ("adam-8bit-paged", "adam-8bit")
    )
    assert paged.total == kept.total == 4000 + 4000 + 2000 + 3 * found.activation_bytes
    assert kept.at_least - paged.at_least == 2000
    assert paged.at_least == 4000 + 4000 + 3 * found.least_bytes


def test_the_first_gpu_of_dp_holds_what_one_of_ddp_does():
    dp, ddp, one = (
        memory_per_gpu(1000, rung=rung, gpus=gpus, optimizer="adam", held="one-gradient")
        for rung, gpus in (("dp", 2), ("ddp", 2), ("dp", 1))
    )
    assert dp == ddp
    assert ddp.communication == ddp.gradients  # its buckets
    assert one == memory_per_gpu(1000, optimizer="adam", held="one-gradient")


def test_hsdp_has_a_copy_of_fsdp_on_each_machine():
    options = {"optimizer": "adam", "activation_bytes": 100, "largest_block": 1000, "root": 500}
    found = memory_per_gpu(8000, rung="hsdp", gpus=16, machines=2, **options)
    assert found == memory_per_gpu(8000, rung="fsdp", gpus=8, **options)


def test_zero_2_holds_what_its_paper_and_deepspeed_say():
    options = {"rung": "zero2", "precision": "bf16-master", "optimizer": "adam"}
    # S. Rajbhandari et al., 2020, figure 1: 7.5 billion parameters on 64 GPUs
    paper = memory_per_gpu(7.5e9, gpus=64, largest_block=0, **options).at_least
    assert paper == pytest.approx(16.6e9, rel=0.005)
    for gpus in (1, 2, 64):  # estimate_zero2_model_states_mem_needs of deepspeed.runtime.zero
        most = memory_per_gpu(8000, gpus=gpus, **options).total
        assert most == 4 * 8000 + 16 * 8000 / gpus
        offloaded = memory_per_gpu(8000, gpus=gpus, largest_block=0, held="blocks", **options)
        assert offloaded.at_least == 2 * 8000
    blocks = {"largest_block": 1000, "root": 500}
    least, fsdp = (
        memory_per_gpu(8000, gpus=4, **blocks, **options | {"rung": rung}).at_least
        for rung in ("zero2", "fsdp")
    )
    # Weights that stay where they were gathered, and no shard of them
    assert least - fsdp == 2 * (8000 - 2500) - 2 * 8000 / 4


def test_lora_trains_its_adapters_alone():
    sizes = {"hidden": 64, "heads": 4, "kv_heads": 2, "mlp": 176, "head_size": 32, "block": "llama"}
    model = transformer(**sizes, layers=2, vocabulary=100, sequence=8)
    ranks = [each.in_features + each.out_features for each in Block(**sizes).of.values()]
    assert (model.lora, model.lora_attention) == (2 * sum(ranks), 2 * sum(ranks[:4]))
    options = {"optimizer": "adam", "gpus": 4, "largest_block": 1000}
    for rung, shards, sent in [("ddp", 1, 4 * 80), ("fsdp", 4, 2000 / 8000 * (8 * 80 + 4000))]:
        memory = memory_per_gpu(8000, rung=rung, lora=80, frozen_bytes=0.5, **options)
        assert memory.parameters * shards == 4 * 80 + 0.5 * 8000
        assert (memory.gradients * shards, memory.optimizer * shards) == (4 * 80, 8 * 80)
        assert memory.communication == sent
    options |= {"rung": "fsdp", "lora": 80, "frozen_bytes": 0.5, "frozen_root_bytes": 2}
    gathered = 2500 / 8000 * 8 * 80 + 2 * 500 + 2000 / 7500 * 0.5 * 7500
    assert memory_per_gpu(8000, root=500, **options).communication == pytest.approx(gathered)


def test_fsdp_gathers_two_blocks_and_the_root():
    options = {"rung": "fsdp", "gpus": 2, "precision": "bf16-mixed"}
    # The whole model, unless blocks are told; two of 400 are more than there are.
    cases = [(0, None, 1000), (300, None, 1000), (300, 100, 500), (300, 400, 1000)]
    for root, block, gathered in cases:
        memory = memory_per_gpu(1000, root=root, largest_block=block, **options)
        assert memory.communication == gathered * (2 + 4)


def test_unknown_options_are_named():
    for message, options in {
        "rung='tpu': one of 'cpu', 'gpu'": {"rung": "tpu"},
        "held='none': one of 'all'": {"held": "none"},
        "gpus=2 on rung 'gpu'": {"rung": "gpu", "gpus": 2},
        "gpus=0 on rung 'ddp'": {"rung": "ddp", "gpus": 0},
        "machines=3: of HSDP, and gpus=8": {"rung": "hsdp", "gpus": 8, "machines": 3},
    }.items():
        with pytest.raises(ValueError, match=message):
            memory_per_gpu(1000, **options)


def gathered_by_fsdp():
    """How many numbers are gathered after the forward pass, and how many the root and all have."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.distributed.tensor import DTensor

    blocks = [nn.Linear(8, 8) for _ in range(3)]
    net = nn.Sequential(nn.Embedding(10, 8), *blocks, nn.LayerNorm(8))
    parameters = sum(p.numel() for p in net.parameters())
    root = sum(p.numel() for layer in (net[0], net[-1]) for p in layer.parameters())
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    gathered = {}
    for rung, again in (("fsdp", None), ("zero2", False)):
        sharded = copy.deepcopy(net)
        for part in (*sharded[1:-1], sharded):
            mesh = dist.init_device_mesh("cpu", (2,))
            fully_shard(part, mesh=mesh, mp_policy=policy, reshard_after_forward=again)
        sharded(torch.arange(4))
        held = [p.numel() for p in sharded.parameters() if not isinstance(p, DTensor)]
        gathered[rung] = sum(held)
    return gathered, root, parameters


@pytest.mark.slow
def test_fsdp_keeps_the_root_and_zero_2_all_weights():
    for gathered, root, parameters in launch(gathered_by_fsdp, backend="gloo", timeout=120):
        assert gathered["zero2"] == parameters > gathered["fsdp"]
        for rung, whole in gathered.items():
            options = {"rung": rung, "gpus": 2, "precision": "bf16-mixed", "largest_block": 0}
            memory = memory_per_gpu(parameters, root=root, **options)
            assert memory.communication == (2 + 4) * whole > 0  # weights, and gradients to reduce


# --- faster -------------------------------------------------------------------------------------


def test_the_speed_up_is_that_of_chapter_14():
    for world_size, scaling, expected in [(1, "weak", 1), (2, "weak", 1.67), (2, "strong", 1.43)]:
        found = speed_up(0.1, 100e6, world_size, 20e-6, 5e9, scaling=scaling)
        assert found == pytest.approx(expected, abs=0.005)
    # An exchange of a second: half of two can hide it, of half a second a quarter.
    assert speed_up(2.0, 1e9, 2, 0, 1e9, overlap=0.5) == 2
    assert speed_up(0.5, 1e9, 2, 0, 1e9, overlap=0.5) == 2 * 0.5 / 1.25
    assert speed_up(0.5, 1e9, 2, 0, 1e9, rung="fsdp") == 2 * 0.5 / 2  # sends half as much again
    # Three of four batches without an exchange; FSDP gathers and reduces for each.
    assert speed_up(2.0, 1e9, 2, 0, 1e9, accumulation=4) == 2 * 8 / 9
    assert speed_up(2.0, 1e9, 2, 0, 1e9, accumulation=4, overlap=0.25) == 2 * 8 / 8.5
    once, four = (speed_up(2.0, 1e9, 2, 0, 1e9, rung="fsdp", accumulation=n) for n in (1, 4))
    assert once == four
    # Chapter 21: between two machines, an all-reduce of the gradients; within one, FSDP's three.
    options = {"gradients": 4e9, "machines": 2, "network": (0, 1e9)}
    found = speed_up(4.0, 3e9, 16, 0, 9e9, rung="hsdp", **options)
    assert found == pytest.approx(16 * 4 / (4 + 1.5 * 2 * 7 / 8 * 3 / 9 + 4))
    assert speed_up(1.0, 1e9, 16, 0, 9e9, **options) == speed_up(1.0, 1e9, 16, 0, 1e9)
    with pytest.raises(ValueError, match="rung='dp': one of 'ddp', 'fsdp'"):
        speed_up(0.1, 100e6, 2, 0, 5e9, rung="dp")


# --- answering ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("bits", "gpus"), [(16, 1), (4, 1), (16, 4)])
def test_each_token_reads_the_weights_once_and_the_cache_of_each_request(bits, gpus):
    sizes = {"layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "mlp": 176, "vocabulary": 1000}
    model = transformer(**sizes, sequence=8, block="llama", tied=False)
    weights = 2 * model.largest_block * bits / 8 + 2 * (2 * 64_000 + 64)  # tables keep 16 bits
    read = weights - 2 * 64_000
    cache = 2 * (2 * 2 * 2 * 16) * 100  # chapter 18 counts it
    cache *= 2 if gpus == 4 else 1  # of two heads each is kept by two GPUs
    one = gpus / (read + cache)
    for memory, requests, rates in [
        (((weights + 3.5 * cache) / gpus + 2**31) / 0.9, 3, (one, 3 * gpus / (read + 3 * cache))),
        ((weights + 1.01 * cache) / gpus + 2**29, 0, (one, 0)),  # with half a GiB free, for CUDA
        ((weights + 0.99 * cache) / gpus + 2**29, 0, (0, 0)),
    ]:
        found = serving(model, tokens=100, memory=memory, bandwidth=1, bits=bits, gpus=gpus)
        assert found[:3] == (weights, cache, requests)
        assert found[3:] == pytest.approx(rates)


def test_of_experts_a_token_reads_those_that_it_meets():
    sizes = {"layers": 2, "hidden": 64, "heads": 4, "mlp": 176, "vocabulary": 1000, "sequence": 8}
    model = transformer(**sizes, block="llama", experts=8, chosen=2)
    weights, cache = 2 * model.parameters, 2 * model.cached

    def answers(count):
        memory = (weights + (count + 0.5) * cache + 2 * 2**30) / 0.9
        return serving(model, tokens=1, memory=memory, bandwidth=1)

    assert answers(1).one == pytest.approx(1 / (2 * model.active + cache))
    assert answers(99).all == pytest.approx(99 / (weights + 99 * cache))  # they meet all
    draws = torch.rand(50_000, 2, 8).argsort(-1)[..., :2].flatten(1).sort(-1).values
    met = (1 + (draws.diff(dim=1) > 0).sum(1)).double().mean() / 8
    read = weights - 2 * model.experts * (1 - met)
    assert answers(2).all == pytest.approx(2 / (read + 2 * cache).item(), rel=0.01)
