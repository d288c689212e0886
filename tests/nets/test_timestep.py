import pytest
import torch

from pipelines.config.encoders import ImageSettings, TimestepSettings
from pipelines.lake.spaces import Box, Discrete, MultiBinary, MultiDiscrete, Spaces
from pipelines.nets.cnn import ImageEncoder
from pipelines.nets.timestep import timestep_encoder

SMALL = TimestepSettings(hidden=(8,), output=6, normalize=False)


def encoder(observation, action=None, settings=SMALL):
    torch.manual_seed(0)
    return timestep_encoder(Spaces(observation=observation, action=action or Discrete(n=3)), settings)


def test_mixed_columns_are_routed_by_their_space():
    columns = {
        "obs.image": Box(shape=(7, 7, 3), dtype="uint8"),
        "obs.position": Box(shape=(2,)),
        "obs.room": Discrete(n=300),
        "obs.keys": MultiBinary(n=4),
        "obs.tool": MultiDiscrete(nvec=(2, 5)),
    }
    net = encoder(columns)
    values = {
        "obs.image": torch.randint(0, 256, (2, 3, 7, 7, 3), dtype=torch.uint8),
        "obs.position": torch.randn(2, 3, 2),
        "obs.room": torch.full((2, 3), 299, dtype=torch.int32),
        "obs.keys": torch.ones(2, 3, 4, dtype=torch.uint8),
        "obs.tool": torch.ones(2, 3, 2, dtype=torch.int32),
    }
    rest = torch.zeros(2, 3, dtype=torch.int32), torch.zeros(2, 3), torch.arange(3).expand(2, -1)
    out = net(values, *rest)
    assert out.shape == (2, 3, 6)
    for name, value in values.items():  # every column matters
        changed = values | {name: torch.zeros_like(value)}
        assert not torch.allclose(net(changed, *rest), out), name


def test_there_is_no_previous_action_at_time_zero():
    net = encoder({"obs": Box(shape=(2,))})
    obs = {"obs": torch.ones(2, 2)}
    time = torch.tensor([0, 1])
    first, second = (net(obs, torch.tensor([a, a]), torch.zeros(2), time) for a in (0, 2))
    assert torch.equal(first[0], second[0])
    assert not torch.allclose(first[1], second[1])


def test_symlog_can_be_switched_off():
    inputs = {"obs": torch.full((1, 2), 99.0)}, torch.zeros(1, dtype=torch.int64), torch.zeros(1), torch.ones(1)
    squashed = encoder({"obs": Box(shape=(2,))}).flat_inputs(*inputs)
    plain = encoder({"obs": Box(shape=(2,))}, settings=SMALL.model_copy(update={"symlog": False})).flat_inputs(*inputs)
    assert squashed[0, 0].item() == pytest.approx(4.60517)
    assert plain.tolist() == [[99.0, 99.0, 0.0, 1.0, 0.0, 0.0]]


@pytest.mark.parametrize(("shape", "kind"), [
    ((84, 84, 3), "auto"), ((4, 84, 84), "auto"), ((36, 36, 1), "nature"),
    ((7, 7, 3), "auto"), ((2, 2, 3), "auto"), ((1, 5, 3), "grid"), ((64, 64, 3), "grid"),
])  # fmt: skip
def test_images_of_any_size_are_encoded(shape, kind):
    net = ImageEncoder(shape, ImageSettings(kind=kind, features=5))
    assert net(torch.zeros(2, 3, *shape, dtype=torch.uint8)).shape == (2, 3, 5)


def test_a_small_image_is_refused_by_nature():
    with pytest.raises(ValueError, match="too small for 'nature'"):
        ImageEncoder((20, 20, 3), ImageSettings(kind="nature"))


def test_channels_first_and_last_agree():
    torch.manual_seed(0)
    last = ImageEncoder((9, 8, 3), ImageSettings(features=5))
    torch.manual_seed(0)
    first = ImageEncoder((3, 9, 8), ImageSettings(features=5))
    image = torch.randint(0, 256, (2, 9, 8, 3), dtype=torch.uint8)
    torch.testing.assert_close(last(image), first(image.permute(0, 3, 1, 2)))
