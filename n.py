# which ordinary file types share head check: a safetensors with padded header, BOM etc; timing of header parse
import json, time, torch
from safetensors.torch import save_file
save_file({f"model.layers.{i}.mlp.experts.{j}.weight": torch.ones(1) for i in range(60) for j in range(512)}, "many.safetensors", metadata={"format":"pt"})
from torchclinic.checkpoint_files.reading import open_checkpoint
s=time.process_time(); open_checkpoint("many.safetensors"); print(time.process_time()-s)
