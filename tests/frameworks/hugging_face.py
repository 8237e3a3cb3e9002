"""Checkpoints of transformers, PEFT, accelerate and diffusers."""

from functools import partial

import torch
from cases import IDS, Case, X, logits, made_by, net


def llama(seed=0, tied=False):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    size = {"hidden_size": 16, "intermediate_size": 32, "vocab_size": 32}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 32}
    return LlamaForCausalLM(LlamaConfig(**size, **heads, tie_word_embeddings=tied)).eval()


def language(path, model, own=None, fresh=None, **more):
    """A case of a language model; its own loader is transformers'."""
    loader = own or (lambda: type(model).from_pretrained(path))
    return Case(path, fresh or partial(llama, 7), logits(model, IDS), loader, IDS, **more)


@made_by("transformers/one_file")
@made_by("transformers/shards", max_shard_size="10KB")
@made_by("transformers/tied", tied=True)
def saved(folder, tied=False, **size):
    (model := llama(tied=tied)).save_pretrained(folder, **size)
    return language(folder, model, fresh=partial(llama, 7, tied))


@made_by("transformers/bin")
def as_bin(folder):
    """As transformers 4 wrote it; 5 still reads it."""
    (model := llama()).config.save_pretrained(folder)
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    return language(folder, model)


def trained(model, folder):
    from transformers import Trainer, TrainingArguments

    data = [{"input_ids": IDS[0], "labels": IDS[0]}] * 4
    choice = {"max_steps": 2, "save_steps": 2, "report_to": [], "use_cpu": True}
    quiet = {"disable_tqdm": True, "logging_strategy": "no", "per_device_train_batch_size": 1}
    Trainer(model, TrainingArguments(str(folder), **choice, **quiet), train_dataset=data).train()
    return folder / "checkpoint-2"


@made_by("transformers/trainer")
def trainer_folder(folder):
    model = llama()
    return language(trained(model, folder), model)


def adapted(seed=0, rank=4):
    from peft import LoraConfig, get_peft_model

    base = llama(seed)
    wanted = ["q_proj", "v_proj"]
    lora = LoraConfig(r=rank, target_modules=wanted, init_lora_weights=False, task_type="CAUSAL_LM")
    return get_peft_model(base, lora).eval()


def merged(path):
    from peft import PeftModel

    return PeftModel.from_pretrained(llama(), path).merge_and_unload()


@made_by("peft/adapter_folder")
@made_by("peft/adapter_file", file="adapter_model.safetensors")
@made_by("peft/trainer", train=True)
def adapter(folder, train=False, file=""):
    model = adapted()
    if train:
        folder = trained(model, folder)
    else:
        model.save_pretrained(folder)
    words = {"way": "merge_and_unload", "names": "LoRA"}
    return language(folder / file, model, own=lambda: merged(folder), **words)


@made_by("peft/whole_state_dict")
def whole_peft_model(folder):
    """Of model.state_dict(), which fits a model with the same adapter."""
    path, model = folder / "model.pt", adapted()
    torch.save(model.state_dict(), path)

    def own():
        fresh = adapted(7)
        fresh.load_state_dict(torch.load(path))
        return fresh

    return language(path, model, own=own, fresh=partial(adapted, 7))


@made_by("accelerate/save_state", file="model.safetensors")
@made_by("accelerate/save_model_shards", file="")
def by_accelerate(folder, file):
    from accelerate import Accelerator, load_checkpoint_in_model

    accelerator, model = Accelerator(cpu=True), net()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    if file:
        accelerator.save_state(str(folder))
    else:
        accelerator.save_model(model, str(folder), max_shard_size="1KB")

    def own():
        load_checkpoint_in_model(fresh := net(7), str(folder / file))
        return fresh

    return Case(folder, partial(net, 7), logits(model, X), own)


def unet(seed=0):
    from diffusers import UNet2DConditionModel

    torch.manual_seed(seed)
    return UNet2DConditionModel(
        sample_size=8, block_out_channels=(8, 8), layers_per_block=1, cross_attention_dim=8,
        norm_num_groups=4, attention_head_dim=4, in_channels=4, out_channels=4,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    ).eval()  # fmt: skip


NOISE = torch.linspace(-1, 1, 4 * 8 * 8).reshape(1, 4, 8, 8)
TEXT = torch.ones(1, 2, 8)


@torch.no_grad()
def denoised(model, x):
    return model.eval()(x, 1, TEXT).sample


def of_unet(path, model, own, **more):
    fresh, want = partial(unet, 7), denoised(model, NOISE)
    return Case(path, fresh, want, own, NOISE, run=denoised, **more)


@made_by("diffusers/unet")
@made_by("diffusers/unet_shards", max_shard_size="50KB")
def one_unet(folder, **size):
    (model := unet()).save_pretrained(folder, **size)
    return of_unet(folder, model, lambda: type(model).from_pretrained(folder))


@made_by("diffusers/lora", kohya=False)
@made_by("diffusers/lora_kohya", kohya=True)
def unet_with_lora(folder, kohya):
    """A pipeline's LoRA file in the layout of diffusers or of kohya's scripts."""
    from diffusers import StableDiffusionPipeline
    from diffusers.utils import convert_state_dict_to_diffusers, convert_state_dict_to_kohya
    from peft import LoraConfig, get_peft_model_state_dict
    from safetensors.torch import save_file

    model = unet()
    wanted = {"target_modules": ["to_q", "to_v"], "init_lora_weights": False}
    model.add_adapter(LoraConfig(r=4, lora_alpha=4, **wanted))
    state = get_peft_model_state_dict(model)
    path = folder / "pytorch_lora_weights.safetensors"
    if kohya:
        whole = convert_state_dict_to_kohya({f"unet.{k}": v for k, v in state.items()})
        save_file(whole, path)
    else:
        layers = convert_state_dict_to_diffusers(state)
        StableDiffusionPipeline.save_lora_weights(folder, unet_lora_layers=layers)

    def own():
        fresh = unet()
        state, alphas = StableDiffusionPipeline.lora_state_dict(
            str(folder), unet_config=fresh.config
        )
        StableDiffusionPipeline.load_lora_into_unet(state, network_alphas=alphas, unet=fresh)
        fresh.fuse_lora()
        return fresh

    return of_unet(path, model, own, way="load_lora_weights", names="LoRA")


@made_by("diffusers/ema_model")
def diffusers_ema(folder):
    """EMAModel.state_dict(): the averages are a list without names."""
    from diffusers.training_utils import EMAModel

    model = unet()
    ema = EMAModel(model.parameters())
    torch.save(ema.state_dict(), folder / "ema.pt")

    def own():
        fresh = unet(7)
        other = EMAModel(fresh.parameters())
        other.load_state_dict(torch.load(folder / "ema.pt"))
        other.copy_to(fresh.parameters())
        return fresh

    return of_unet(folder / "ema.pt", model, own, way="shadow_params", names="shadow_params")
