"""Limits of the networks that a stranger's record describes."""

import math
import threading
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from pipelines.files.checksums import Mismatch
from pipelines.nets.init import limit_parameters, make_outline

ONE = {"weight": torch.zeros(4, 4)}


def test_another_thread_may_construct_an_outline_in_the_middle_of_a_registration():
    """torch goes through its hooks while it registers a parameter: one added meanwhile raises a RuntimeError."""
    outlined = []

    def outline_elsewhere(*registered):
        if not outlined:
            outlined.append(None)
            make = partial(make_outline, lambda: nn.Linear(2, 2), {"weight": torch.zeros(16)})
            thread = threading.Thread(target=make)
            thread.start()
            thread.join()

    hooks = [
        register_module_parameter_registration_hook(each) for each in (outline_elsewhere, lambda *registered: None)
    ]
    try:
        nn.Linear(3, 3)
    finally:
        for hook in hooks:
            hook.remove()
    assert outlined


def test_limits_are_of_one_thread_and_end():
    with limit_parameters(ONE):
        with pytest.raises(Mismatch):
            nn.Linear(5, 5)
        thread = threading.Thread(target=lambda: made.append(nn.Linear(5, 5)))
        made: list[nn.Module] = []
        thread.start()
        thread.join()
    assert made
    assert math.isfinite(nn.Linear(50, 50).weight.sum().item())


def test_an_outer_limit_holds_after_an_inner_one():
    with limit_parameters(ONE):
        with limit_parameters({"weight": torch.zeros(100, 100)}):
            nn.Linear(50, 50)
        with pytest.raises(Mismatch):
            nn.Linear(5, 5)
