"""What torchrun, and launchers like it, tell a rank of its group; and how a group breaks."""

import re

GROUP = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# What a rank says when another one is gone; the last words are NCCL's, the others gloo's.
PEER_IS_GONE = re.compile("Connection (closed|reset) by peer|Broken pipe|remote process exited")
