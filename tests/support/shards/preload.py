"""Imports of the server process, whose forks are ranks."""

import torch._dynamo
import torch.distributed.checkpoint.state_dict
import torch.testing  # noqa: F401
