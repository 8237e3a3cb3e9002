"""The helper package of *The Device Ladder: PyTorch from one tensor to many GPUs*.

One module an idea, in the order of the book: `devices`, `data`, `models`, `training`, `measuring`,
`launching`, `checkpoint`, `showing`. What a chapter teaches stands in the chapter; what the reader
has seen twice lives here.
"""

from torchclinic import __version__ as __version__
