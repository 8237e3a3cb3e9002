"""Files that are no state dict: GGUF and ONNX."""

from functools import partial

import torch
from cases import Case, X, logits, made_by, net
from hugging_face import language, llama


@made_by("gguf/float32")
def gguf_file(folder):
    """As llama.cpp's converter writes a Llama, whose rotated matrices it sorts by pairs."""
    import gguf

    model, path = llama(), folder / "model.gguf"
    size, writer = model.config, gguf.GGUFWriter(path, "llama")
    writer.add_context_length(size.max_position_embeddings)
    writer.add_embedding_length(size.hidden_size)
    writer.add_block_count(size.num_hidden_layers)
    writer.add_feed_forward_length(size.intermediate_size)
    writer.add_head_count(size.num_attention_heads)
    writer.add_head_count_kv(size.num_key_value_heads)
    writer.add_layer_norm_rms_eps(size.rms_norm_eps)
    writer.add_vocab_size(size.vocab_size)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, size.num_hidden_layers)
    for key, value in model.state_dict().items():
        if "q_proj" in key or "k_proj" in key:
            pairs = value.reshape(size.num_attention_heads, 2, -1, size.hidden_size)
            value = pairs.swapaxes(1, 2).reshape(value.shape)
        writer.add_tensor(names.get_name(key, (".weight",)), value.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    def own():
        return type(model).from_pretrained(folder, gguf_file=path.name)

    return language(path, model, own=own, way="gguf_file=", names="GGUF")


@made_by("onnx/exported")
def onnx_file(folder):
    import onnx

    model, path = net(), folder / "model.onnx"
    torch.onnx.export(model, (X,), path, dynamo=True, external_data=False, optimize=False)

    def own():
        weights = onnx.load(path).graph.initializer
        state = {w.name: torch.tensor(onnx.numpy_helper.to_array(w)) for w in weights}
        (fresh := net(7)).load_state_dict(state, strict=False)
        return fresh

    return Case(path, partial(net, 7), logits(model, X), own, way="onnx", names="ONNX")
