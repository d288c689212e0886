import torch

torch.set_num_threads(1)  # the tensors are small: more threads only wait for each other
