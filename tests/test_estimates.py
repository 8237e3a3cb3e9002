"""The calculators' formulas: against PyTorch's tensors and against what others have published."""

import json
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from torchclinic.will_it_fit import (
    all_reduce_seconds,
    computing_seconds,
    exchange_seconds,
    memory_per_gpu,
    speed_up,
    step_seconds,
    transformer,
)
from torchladder.launching import launch

GPT2 = {"layers": 12, "hidden": 768, "heads": 12, "sequence": 1024, "vocabulary": 50257}
GPT2_XL = {"layers": 48, "hidden": 1600, "heads": 25, "sequence": 1024, "vocabulary": 50257}


def gpt(layers, hidden, heads):
    return {
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "sequence": 2048,
        "vocabulary": 51200,
    }


KORTHIKANTI = {  # their table 3: layers, hidden size, heads; sequence 2048, vocabulary 51,200
    22e9: gpt(48, 6144, 64),
    175e9: gpt(96, 12288, 96),
    530e9: gpt(105, 20480, 128),
    1e12: gpt(128, 25600, 160),
}


class TestPublished:
    """Within 10 % of what the authors report; where not, the test says why."""

    def test_zero_plain_data_parallel_is_120_gb(self):
        # S. Rajbhandari et al., ZeRO, 2020, arXiv:1910.02054, figure 1: 7.5 billion parameters,
        # Adam in mixed precision, 64 GPUs: 120 GB.
        memory = memory_per_gpu(7.5e9, precision="master", optimizer="adam")
        assert memory.total == pytest.approx(120e9, rel=0.1)

    def test_ddp_needs_its_buckets_more_than_zeros_figure_counts(self):
        options = {"rung": "ddp", "gpus": 64, "precision": "master", "optimizer": "adam"}
        assert memory_per_gpu(7.5e9, bucket_view=True, **options).total == 120e9
        assert memory_per_gpu(7.5e9, **options).total == 135e9

    def test_zero_stage_3_is_1_9_gb(self):
        # The same figure: 1.9 GB. It leaves out the parameters that are gathered meanwhile.
        options = {"rung": "fsdp", "gpus": 64, "precision": "master", "optimizer": "adam"}
        memory = memory_per_gpu(7.5e9, largest_block=0, **options)
        assert memory.total == pytest.approx(1.9e9, rel=0.1)
        # With 36 equal layers, two that are gathered, with gradients, double it.
        assert memory_per_gpu(7.5e9, largest_block=7.5e9 / 36, **options).total > 3.5e9

    def test_gpt_2_of_1_5_billion_needs_24_gb(self):
        # The same paper, section 3.1: "at least 24 GB", 16 bytes for each of 1.5 billion.
        parameters = transformer(**GPT2_XL).parameters
        memory = memory_per_gpu(parameters, precision="master", optimizer="adam")
        assert memory.total == pytest.approx(24e9, rel=0.1)

    def test_gpt_2_activations_are_more_than_zero_says(self):
        # The same paper, section 3.2: about 60 GB for 32 sequences. It counts 12 numbers of two
        # bytes for each layer and position, and no table of attention. Counted one by one there
        # are 34 bytes (Korthikanti et al.), and the logits with their gradient.
        fused = 32 * transformer(**GPT2_XL, precision="master").activation_bytes
        assert 1.6 < fused / 60e9 < 1.8
        papers = 32 * 48 * 12 * 2 * 1024 * 1600
        assert papers == pytest.approx(60e9, rel=0.1)

    @pytest.mark.parametrize("parameters", KORTHIKANTI)
    def test_korthikantis_models_have_as_many_parameters(self, parameters):
        # V. Korthikanti et al., 2022, arXiv:2205.05198, table 3.
        assert transformer(**KORTHIKANTI[parameters]).parameters == pytest.approx(
            parameters, rel=0.1
        )

    @pytest.mark.parametrize(("parameters", "saved"), [(175e9, 0.70), (530e9, 0.65)])
    def test_korthikantis_selective_recomputation_saves_as_much(self, parameters, saved):
        # The same, section 5: not saving attention's table saves 70 % and 65 % of the activations.
        whole = layers_only(parameters, fused_attention=False)
        assert 1 - layers_only(parameters) / whole == pytest.approx(saved, rel=0.1)

    def test_gpt_neox_20b_checkpoint_is_268_gb(self):
        # https://github.com/EleutherAI/gpt-neox, README: full weights, with optimizer states,
        # 268 GB; without, 39 GB. Figures of `du`: GB of 1024^3 bytes.
        neox = gpt(44, 6144, 64) | {"vocabulary": 50432}
        memory = memory_per_gpu(
            transformer(**neox).parameters, precision="master", optimizer="adam"
        )
        assert memory.parameters / 2**30 == pytest.approx(39, rel=0.1)
        assert (memory.parameters + memory.optimizer) / 2**30 == pytest.approx(268, rel=0.1)

    def test_llama_65b_lies_between_two_precisions(self):
        # T. Dettmers et al., QLoRA, 2023, arXiv:2305.14314: more than 780 GB for 16-bit
        # fine-tuning. That is 12 bytes for each parameter: weights and gradients in 16 bits, Adam
        # in 32, no float32 weights. PyTorch offers 8 (all in bf16) or 16 and more.
        low, high = (
            memory_per_gpu(65e9, precision=precision, optimizer="adam").at_least
            for precision in ("bf16", "master")
        )
        assert low < 780e9 < high
        assert (low + high) / 2 == 780e9

    def test_gpt_3_takes_34_days_on_1024_gpus(self):
        # D. Narayanan et al., 2021, arXiv:2104.04473, section 5.1: 300 billion tokens, each GPU
        # at 140 TFLOPS, with recomputation: 34 days.
        gpt3 = transformer(**KORTHIKANTI[175e9], checkpointing=True)
        seconds = computing_seconds(300e9 / 2048 * gpt3.flops, 1024 * 140e12)
        assert seconds / 86400 == pytest.approx(34, rel=0.1)


def layers_only(parameters, precision="master", **options):
    """Activations without what comes before and after the layers; in 16 bits, as in the paper."""
    two, one = (
        transformer(
            **KORTHIKANTI[parameters] | {"layers": n}, precision=precision, **options
        ).activation_bytes
        for n in (2, 1)
    )
    return two - one


class Peak(TorchDispatchMode):
    """The most bytes that tensors have held at a time, from those given on."""

    def __init__(self, held):
        super().__init__()
        self.now, self.most, self.seen = 0, 0, set()
        self.see(held)

    def see(self, tensors):
        for storage in (t.untyped_storage() for t in tensors if torch.is_tensor(t)):
            if storage._cdata not in self.seen:
                self.seen.add(storage._cdata)
                self.now += storage.nbytes()
                weakref.finalize(storage, self.gone, storage._cdata, storage.nbytes())
        self.most = max(self.most, self.now)

    def gone(self, key, size):
        self.seen.discard(key)
        self.now -= size

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.see(tree_leaves(result))
        return result


class Block(nn.Module):
    def __init__(self, hidden, heads):
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(hidden) for _ in range(2))
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x):
        qkv = self.qkv(self.norms[0](x)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*qkv, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class GPT(nn.Module):
    """GPT-2 without dropout."""

    def __init__(self, *, layers, hidden, heads, sequence, vocabulary):
        super().__init__()
        self.words, self.places = nn.Embedding(vocabulary, hidden), nn.Embedding(sequence, hidden)
        self.blocks = nn.ModuleList(Block(hidden, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden)

    def forward(self, tokens, checkpointing):
        x = self.words(tokens) + self.places.weight
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if checkpointing else block(x)
        return self.norm(x) @ self.words.weight.T


def bounds_and_peak(sizes, batch, precision, checkpointing, **adam):
    """`at_least`, the peak of a second step with Adam, and `total`."""
    net = GPT(**sizes).to(torch.bfloat16 if precision == "bf16" else torch.float32)
    optimizer = torch.optim.AdamW(net.parameters(), **adam)
    for parameter in net.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()  # makes the state
    optimizer.zero_grad()
    tokens = torch.randint(sizes["vocabulary"], (batch, sizes["sequence"] + 1))
    states = [value for state in optimizer.state.values() for value in state.values()]
    with Peak([*net.parameters(), *states]) as peak:
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "amp"):
            logits = net(tokens[:, :-1], checkpointing)
            loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        del logits
        loss.backward()
        optimizer.step()
    model = transformer(**sizes, precision=precision, checkpointing=checkpointing)
    assert model.parameters == sum(p.numel() for p in net.parameters())
    options = {"precision": precision, "optimizer": "adam", "batch": batch}
    options |= {"rung": "gpu" if adam["foreach"] else "cpu"}
    memory = memory_per_gpu(model.parameters, activation_bytes=model.activation_bytes, **options)
    return memory.at_least, peak.most, memory.total


NO_DROPOUT = 0.94  # the formula counts dropout's masks: up to 6 % of what is saved


@pytest.mark.parametrize("precision", ["fp32", "amp", "bf16"])
def test_a_step_with_a_real_vocabulary_stays_between_the_bounds(precision):
    for vocabulary in (256, 50257):
        sizes = {"layers": 2, "hidden": 128, "heads": 2, "sequence": 128, "vocabulary": vocabulary}
        for checkpointing in (False, True):
            case = sizes, 2, precision, checkpointing
            at_least, peak, total = bounds_and_peak(*case, foreach=checkpointing)
            assert NO_DROPOUT * at_least <= peak <= total, case
            assert total < 1.35 * peak, case


@pytest.mark.slow
def test_a_step_of_gpt_2_stays_between_the_bounds():
    at_least, peak, total = bounds_and_peak(GPT2, 2, "amp", checkpointing=True, foreach=False)
    assert NO_DROPOUT * at_least <= peak <= total < 1.3 * peak


class TestMemory:
    @pytest.mark.parametrize(
        ("optimizer", "precision", "bytes_each"),
        [
            ("sgd", "fp32", 8),
            ("momentum", "fp32", 12),
            ("adam", "fp32", 16),
            ("adam", "amp", 18),
            ("adam", "bf16", 8),
            ("adam", "master", 16),
        ],
    )
    def test_bytes_for_each_parameter(self, optimizer, precision, bytes_each):
        memory = memory_per_gpu(1000, optimizer=optimizer, precision=precision, rung="cpu")
        assert memory.total == 1000 * bytes_each

    def test_adam_on_a_gpu_needs_a_copy_when_the_activations_are_gone(self):
        options = {"optimizer": "adam", "activation_bytes": 100}
        for batch, most in [(0, 20_000), (30, 20_000), (50, 21_000)]:
            memory = memory_per_gpu(1000, batch=batch, **options)
            assert (memory.step, memory.total) == (4000, most)
        for rung in ("cpu", "fsdp"):  # a loop over the parameters
            assert memory_per_gpu(1000, rung=rung, optimizer="adam").step == 0
        assert memory_per_gpu(1000, rung="dp", gpus=2, optimizer="adam", first=False).step == 0

    def test_gradients_and_activations_take_turns_at_the_least(self):
        memory = memory_per_gpu(1000, activation_bytes=100, batch=50)
        assert memory.total == 4000 + 4000 + 5000
        assert memory.at_least == 4000 + 5000

    def test_ddps_buckets_make_no_room_for_activations(self):
        options = {"rung": "ddp", "gpus": 2, "activation_bytes": 100, "batch": 50}
        views, buckets = (memory_per_gpu(1000, bucket_view=v, **options) for v in (True, False))
        assert views.at_least == views.total == 4000 + 4000 + 5000
        assert (buckets.at_least, buckets.total) == (4000 + 4000 + 5000, 4000 + 8000 + 5000)

    def test_first_gpu_of_dp_holds_more(self):
        options = {"rung": "dp", "gpus": 2, "optimizer": "adam", "output_bytes": 10, "batch": 4}
        first, other = (memory_per_gpu(1000, first=first, **options) for first in (True, False))
        assert (first.optimizer, other.optimizer) == (8000, 0)
        assert (first.communication, other.communication) == (4000 + 2 * 4 * 10, 0)
        assert first.parameters == other.parameters

    def test_fsdp_on_one_gpu_is_one_gpu(self):
        options = {"optimizer": "adam", "activation_bytes": 7, "batch": 3}
        fsdp, gpu = (memory_per_gpu(99, rung=rung, **options) for rung in ("fsdp", "gpu"))
        assert fsdp.at_least == gpu.at_least == 16 * 99

    def test_fsdp_shards_all_but_activations(self):
        options = {"optimizer": "adam", "activation_bytes": 100, "rung": "fsdp"}
        memory = memory_per_gpu(8000, gpus=4, largest_block=1000, **options)
        assert (memory.parameters, memory.gradients, memory.optimizer) == (8000, 8000, 16000)
        assert memory.activations == 100
        assert memory.communication == 2 * 1000 * (4 + 4)

    def test_fsdp_around_the_whole_model_gathers_all_of_it(self):
        whole = memory_per_gpu(1000, rung="fsdp", gpus=2)
        assert whole.communication == 1000 * (4 + 4)
        assert memory_per_gpu(1000, rung="fsdp", gpus=2, root=300) == whole

    def test_fsdps_root_stays_gathered(self):
        options = {"rung": "fsdp", "gpus": 2, "precision": "amp", "root": 300}
        memory = memory_per_gpu(1000, largest_block=100, **options)
        assert memory.communication == (300 + 2 * 100) * (2 + 4)
        memory = memory_per_gpu(1000, largest_block=400, **options)  # two are more than there are
        assert memory.communication == 1000 * (2 + 4)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"rung": "tpu"}, "rung='tpu': one of 'cpu', 'gpu'"),
            ({"precision": "fp8"}, "precision='fp8': one of 'fp32'"),
            ({"optimizer": "lion"}, "optimizer='lion': one of 'sgd'"),
            ({"rung": "gpu", "gpus": 2}, "gpus=2 on rung 'gpu'"),
            ({"rung": "ddp", "gpus": 0}, "gpus=0 on rung 'ddp'"),
        ],
    )
    def test_unknown_options_are_named(self, options, message):
        with pytest.raises(ValueError, match=message):
            memory_per_gpu(1000, **options)


def gradients_and_buckets(trace, bucket_view):
    """Bytes that DDP has allocated after three steps, as a multiple of the net's own.

    By PyTorch's profiler, which does not see what gloo's threads free: so without `init_sync`.
    """
    from torch.profiler import ProfilerActivity, profile

    net = torch.nn.Sequential(*(torch.nn.Linear(512, 512, bias=False) for _ in range(4)))
    options = {"gradient_as_bucket_view": bucket_view, "init_sync": False}
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as seen:
        ddp = torch.nn.parallel.DistributedDataParallel(net, **options)
        for _ in range(3):
            ddp.zero_grad()
            ddp(torch.ones(1, 512)).sum().backward()
    seen.export_chrome_trace(f"{trace}-{torch.distributed.get_rank()}")
    with open(f"{trace}-{torch.distributed.get_rank()}") as file:
        events = json.load(file)["traceEvents"]
    left = sum(event["args"]["Bytes"] for event in events if event.get("name") == "[memory]")
    return left / sum(p.nbytes for p in net.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("bucket_view", [False, True])
def test_ddps_buckets_are_a_second_set_of_gradients_unless_gradients_are_views(
    bucket_view, tmp_path, monkeypatch
):
    monkeypatch.setenv("KINETO_LOG_LEVEL", "9")
    measured = launch(
        gradients_and_buckets, tmp_path / "trace", bucket_view, backend="gloo", timeout=120
    )
    memory = memory_per_gpu(1.0, rung="ddp", gpus=2, bucket_view=bucket_view)
    predicted = (memory.gradients + memory.communication) / memory.parameters
    assert measured == pytest.approx([predicted] * 2, rel=0.01)


def whole_between_the_passes():
    """How many parameters FSDP has gathered after the forward pass, and how many the root has."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.distributed.tensor import DTensor

    blocks = [torch.nn.Linear(8, 8) for _ in range(3)]
    net = torch.nn.Sequential(torch.nn.Embedding(10, 8), *blocks, torch.nn.LayerNorm(8))
    root = sum(p.numel() for layer in (net[0], net[-1]) for p in layer.parameters())
    mesh = torch.distributed.init_device_mesh("cpu", (2,))
    options = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}
    for block in blocks:
        fully_shard(block, **options)
    fully_shard(net, **options)
    types = []
    net[-1].register_forward_pre_hook(lambda _, given: types.append(given[0].dtype))
    net(torch.arange(4))
    assert types == [torch.bfloat16]  # also what is passed from layer to layer
    whole = [p.numel() for p in net.parameters() if not isinstance(p, DTensor)]
    return sum(whole), root


@pytest.mark.slow
def test_fsdp_frees_the_blocks_after_the_forward_pass_and_keeps_the_root():
    for whole, root in launch(whole_between_the_passes, backend="gloo", timeout=120):
        options = {"rung": "fsdp", "gpus": 2, "precision": "amp", "largest_block": 0}
        memory = memory_per_gpu(1000, root=root, **options)
        assert memory.communication == (2 + 4) * whole > 0  # weights, and gradients to reduce


@pytest.mark.gpu
def test_on_a_gpu_the_peak_of_a_step_lies_between_the_two_bounds():
    width, layers, device = 4096, 6, torch.device("cuda")
    blocks = (m for _ in range(layers) for m in (torch.nn.Linear(width, width), torch.nn.ReLU()))
    net = torch.nn.Sequential(*blocks).to(device)
    optimizer = torch.optim.AdamW(net.parameters(), fused=True)
    x = torch.randn(width, width, device=device)
    for _ in range(2):  # the first step makes the optimizer's state
        torch.cuda.reset_peak_memory_stats(device)
        net(x).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    parameters = sum(p.numel() for p in net.parameters())
    saved = {"activation_bytes": 4 * width * (layers + 1), "batch": width}  # each layer's input
    memory = memory_per_gpu(parameters, optimizer="adam", **saved)
    peak = torch.cuda.max_memory_allocated(device)
    assert memory.at_least <= peak <= 1.1 * memory.total


class TestTransformer:
    def test_sixteen_bit_layer_is_the_papers_formula(self):
        s, h, a = 2048, 12288, 96
        assert layers_only(175e9, fused_attention=False) == s * h * (34 + 5 * a * s / h)
        assert layers_only(175e9) == 34 * s * h

    @pytest.mark.parametrize(
        ("precision", "each", "kept"),
        [("fp32", 66, 4), ("amp", 38, 4), ("bf16", 34, 2), ("master", 34, 2)],
    )
    def test_bytes_that_a_layer_saves(self, precision, each, kept):
        s, h = 2048, 12288
        assert layers_only(175e9, precision) == each * s * h
        assert layers_only(175e9, precision, checkpointing=True) == kept * s * h

    def test_autocast_passes_float32_from_layer_to_layer(self):
        x, norm, linear = torch.ones(1, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 8)
        with torch.autocast("cpu", torch.bfloat16):
            added = linear(norm(x))
            assert (added.dtype, (x + added).dtype) == (torch.bfloat16, torch.float32)

    def test_gpt_2_has_as_many_parameters_as_published(self):
        found = transformer(**GPT2)
        assert found.parameters == 124_439_808 == 12 * found.largest_block + found.root
        assert found.root == (50257 + 1024) * 768 + 2 * 768  # the embeddings and the last norm

    def test_recomputation_computes_a_third_more(self):
        once, twice = (transformer(**GPT2_XL, checkpointing=c) for c in (False, True))
        assert once.flops == 6 * once.parameters * 1024
        assert twice.flops == 8 * once.parameters * 1024


class TestSpeed:
    def test_link_formulas_are_chapter_11s(self):
        assert all_reduce_seconds(2e9, ranks=2, latency=0, bandwidth=2e9) == 1.0
        assert all_reduce_seconds(2e9, ranks=4, latency=0, bandwidth=2e9) == 1.5
        assert step_seconds(2.0, 1.0, overlap=0.5) == 2.0
        assert step_seconds(0.5, 1.0, overlap=0.5) == 1.25

    @pytest.mark.parametrize(
        ("ranks", "scaling", "expected"),
        [(1, "weak", 1), (2, "weak", 1.67), (8, "weak", 5.91), (2, "strong", 1.43)],
    )
    def test_speed_up_is_chapter_11s_table(self, ranks, scaling, expected):
        found = speed_up(0.1, 100e6, ranks, 20e-6, 5e9, scaling=scaling)
        assert found == pytest.approx(expected, abs=0.005)

    def test_fsdp_sends_half_as_much_again(self):
        link = (100e6, 4, 20e-6, 5e9)
        assert exchange_seconds(*link, "fsdp") == 1.5 * exchange_seconds(*link)
        assert speed_up(0.1, *link, rung="fsdp") < speed_up(0.1, *link)

    def test_dp_is_not_predicted(self):
        with pytest.raises(ValueError, match="rung='dp': one of 'ddp', 'fsdp'"):
            speed_up(0.1, 100e6, 2, 0, 5e9, rung="dp")

    def test_a_gpu_that_is_half_used_takes_twice_as_long(self):
        assert computing_seconds(6e12, 1e12) == 6.0
        assert computing_seconds(6e12, 1e12, utilisation=0.5) == 12.0
