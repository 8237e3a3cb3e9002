"""Files that are no state dict: GGUF, ONNX, TorchScript and an exported program."""

from functools import partial

import torch
from cases import Case, X, logits, made_by, net


def of_net(path, model, state, **more):
    def own():
        fresh = net(7)
        fresh.load_state_dict(state(), strict=False)
        return fresh

    return Case(path, partial(net, 7), logits(model, X), own, **more)


@made_by("gguf/float32")
def gguf_file(folder):
    import gguf

    model, path = net(), folder / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for name, value in model.state_dict().items():
        writer.add_tensor(name, value.float().reshape(value.shape or (1,)).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    def state():
        tensors = gguf.GGUFReader(path).tensors
        found = {t.name: gguf.dequantize(t.data, t.tensor_type) for t in tensors}
        shapes = {k: v.shape for k, v in net().state_dict().items()}
        return {k: torch.tensor(v).reshape(shapes[k]) for k, v in found.items()}

    return of_net(path, model, state, way="gguf", names="GGUF")


@made_by("onnx/exported")
def onnx_file(folder):
    import onnx

    model, path = net(), folder / "model.onnx"
    torch.onnx.export(model, (X,), path, dynamo=True, external_data=False, optimize=False)

    def state():
        weights = onnx.load(path).graph.initializer
        return {w.name: torch.tensor(onnx.numpy_helper.to_array(w)) for w in weights}

    return of_net(path, model, state, way="onnx", names="ONNX")


@made_by("torch/torchscript")
def torchscript(folder):
    model, path = net(), folder / "model.pt"
    torch.jit.script(model).save(path)
    words = {"way": "torch.jit.load", "names": "TorchScript"}
    return of_net(path, model, lambda: torch.jit.load(path).state_dict(), **words)


@made_by("torch/exported_program")
def exported_program(folder):
    model, path = net(), folder / "model.pt2"
    torch.export.save(torch.export.export(model, (X,)), path)
    own = {"way": "torch.export.load", "names": "torch.export"}
    return of_net(path, model, lambda: torch.export.load(path).state_dict, **own)
