"""The quick step is the step."""

from __future__ import annotations

import pytest
import torch

from pipelines.config.model import TransformerSettings
from pipelines.nets.sequence import PlainStep
from pipelines.nets.transformer import QuickStep, Transformer

N, WIDTH, DOUBLE = 5, 12, torch.float64
SMALL = {"d_model": 16, "num_heads": 2, "d_ff": 24, "num_layers": 2}
VARIANTS = [
    {},
    {"normformer": False},
    {"sigma_reparam": False},
    {"head_scale": False},
    {"activation": "gelu"},
    {"position": "rope"},
    {"position": "both"},
    {"position": "learned"},
    {"window": 3, "sink": 1},
]


def shaken(**options):
    transformer = Transformer(WIDTH, TransformerSettings(**SMALL, **options)).double().eval()
    for number, parameter in enumerate(transformer.parameters()):
        parameter.data += 0.3 * torch.randn(
            parameter.shape, generator=torch.Generator().manual_seed(number), dtype=DOUBLE
        )
    return transformer


@torch.no_grad()
def walk(transformer, step, *, seed=0):
    """Outputs of steps in which actors forget at different times."""
    generator = torch.Generator().manual_seed(seed)
    memory, time, found = (
        transformer.memory(num_actors=N, capacity=6, dtype=DOUBLE),
        torch.zeros(N, dtype=torch.int64),
        [],
    )
    for t in range(14):
        begins = torch.arange(N) == t % 9
        memory.reset(begins)
        time = torch.where(begins, 0, time)
        found.append(step(torch.randn(N, WIDTH, generator=generator, dtype=DOUBLE), time, memory))
        time = time + 1
    return torch.stack(found)


@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_gives_what_the_step_gives(options):
    transformer = shaken(**options)
    stepper = transformer.stepper()
    assert isinstance(stepper, QuickStep)
    torch.testing.assert_close(walk(transformer, stepper), walk(transformer, transformer.step))


def test_casts_its_weights_once_where_the_step_would_at_each_use():
    transformer = Transformer(WIDTH, TransformerSettings(**SMALL)).eval()
    x_TND, time_TN = torch.randn(5, N, WIDTH), torch.arange(5)[:, None].expand(5, N)
    found = []
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        stepper = transformer.stepper()
        assert isinstance(stepper, QuickStep)
        for step in (stepper, transformer.step):
            memory = transformer.memory(num_actors=N, capacity=6, dtype=torch.bfloat16)
            found.append(torch.stack([step(x, time, memory) for x, time in zip(x_TND, time_TN, strict=True)]))
    torch.testing.assert_close(*found, atol=0.05, rtol=0.05)


@pytest.mark.parametrize("options", [{"norm": "rms"}, {"logit_clip": 5.0}], ids=str)
def test_what_it_does_not_know_is_stepped_as_it_is(options):
    transformer = shaken(**options)
    assert isinstance(transformer.stepper(), PlainStep)
    torch.testing.assert_close(walk(transformer, transformer.stepper()), walk(transformer, transformer.step))


def test_says_when_weights_have_changed():
    transformer = shaken()
    stepper = transformer.stepper()
    walk(transformer, stepper)
    assert not stepper.stale
    transformer.update_statistics()
    assert stepper.stale
    stepper = transformer.stepper()
    optimizer = torch.optim.SGD(transformer.parameters(), lr=0.1)
    transformer(torch.ones(1, 3, WIDTH, dtype=DOUBLE), torch.arange(3)[None]).sum().backward()
    optimizer.step()
    assert stepper.stale
    torch.testing.assert_close(walk(transformer, transformer.stepper()), walk(transformer, transformer.step))
