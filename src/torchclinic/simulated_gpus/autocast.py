"""`autocast("cuda")`: which operations of a simulated GPU compute in which dtype.

The lists are those of `autocast("cuda")`; the kernels that cast are the CPU's, replaced by these.
"""

import functools
import warnings
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from torchclinic.simulated_gpus.placing import device_of, here

# https://docs.pytorch.org/docs/stable/amp.html#cuda-op-specific-behavior; all others: float32.
LOW = {"linear", "matmul", "mm", "mv", "bmm", "addmm", "addmv", "addr", "addbmm", "baddbmm"}
LOW |= {"chain_matmul", "linalg_multi_dot", "conv1d", "conv2d", "conv3d", "convolution"}
LOW |= {"conv_tbc", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "_convolution"}
LOW |= {"prelu", "einsum", "scaled_dot_product_attention", "rnn_relu_cell", "rnn_tanh_cell"}
LOW |= {"gru_cell", "lstm_cell", "_thnn_fused_lstm_cell", "_thnn_fused_gru_cell"}
WIDEST = {"addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "vdot", "index_put"}
WIDEST |= {"scatter_add", "tensordot", "grid_sampler"}
LEFT = {"cat", "stack", "native_layer_norm", "_cudnn_rnn", "cudnn_convolution"}
LEFT |= {"cudnn_convolution_transpose"}
HALVES = (torch.float16, torch.bfloat16)
AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
kernels = torch.library.Library("aten", "IMPL")
DTYPES = {"cuda": torch.float16, "cpu": torch.bfloat16}
real = {name: getattr(torch, f"set_autocast_{name}") for name in ("enabled", "dtype")}


def enabled(device: str = "cuda") -> bool:
    return getattr(here, "autocast", {}).get(device, False)


def set_enabled(*args: Any) -> None:
    device = "cuda" if len(args) == 1 else args[0]  # its old form was CUDA's
    if device not in DTYPES:
        return real["enabled"](*args)
    here.autocast = {**getattr(here, "autocast", {}), device: args[-1]}
    real["enabled"]("cpu", any(here.autocast.values()))


def set_dtype(device: str, dtype: torch.dtype) -> None:
    here.dtypes = {**getattr(here, "dtypes", DTYPES), device: dtype}
    real["dtype"]("cpu" if device == "cuda" else device, dtype)


def dtype_of(device: str = "cuda") -> torch.dtype:
    return getattr(here, "dtypes", DTYPES).get(device, torch.bfloat16)


def casts(tensor: torch.Tensor) -> bool:
    return tensor.dtype in (torch.float32, *HALVES) and enabled(device_of(tensor).type)


def computed(run: Any, name: str, of_both: bool, *args: Any, **kwargs: Any) -> Any:
    """What `run` gives if its arguments have first become what autocast has them be.

    `of_both` says whether the CPU's own autocast has the operation in a list, too.
    """
    found = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor) and casts(t)]
    if name == "binary_cross_entropy" and any(t.is_cuda for t in found):
        raise RuntimeError(
            "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to "
            "autocast.\nMany models use a sigmoid layer right before the binary cross entropy "
            "layer.\nIn this case, combine the two layers using torch.nn.functional."
            "binary_cross_entropy_with_logits\nor torch.nn.BCEWithLogitsLoss.  "
            "binary_cross_entropy_with_logits and BCEWithLogits are\nsafe to autocast."
        )
    keep = name in WIDEST and all(tensor.dtype in HALVES for tensor in found)

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        if keep or not casts(tensor) or not (of_both or tensor.is_cuda):
            return tensor
        return tensor.to(dtype_of(device_of(tensor).type) if name in LOW else torch.float32)

    with torch._C._ExcludeDispatchKeyGuard(AUTOCAST):
        args, kwargs = tree_map_only(torch.Tensor, cast, (args, kwargs))
        return run(*args, **kwargs)


def simulate_autocast() -> None:
    torch.set_autocast_enabled, torch.set_autocast_dtype = set_enabled, set_dtype
    torch.is_autocast_enabled = enabled
    torch.get_autocast_dtype = torch.get_autocast_gpu_dtype = dtype_of
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    for whole in torch._C._dispatch_get_all_op_names():
        library, _, name = whole.partition("::")
        name, _, overload = name.partition(".")
        if library != "aten" or name in LEFT or not has(whole, "AutocastCUDA"):
            continue
        of_both = has(whole, "AutocastCPU")
        if name in LOW or name == "binary_cross_entropy" or not of_both:
            run = getattr(getattr(torch.ops.aten, name), overload or "default")
            kernel = functools.partial(computed, run, name, of_both)
            with warnings.catch_warnings(action="ignore"):  # PyTorch 2.10 tells of an override
                kernels.impl(run, kernel, "AutocastCPU", allow_override=True)
