import pytest
import torch

from pipelines.config.model import ImageSettings, TimestepSettings, TokenSettings
from pipelines.errors import UsageError
from pipelines.lake.spaces import Box, Discrete, MultiBinary, MultiDiscrete, Ragged, Spaces
from pipelines.nets import timestep
from pipelines.nets.timestep import ImageEncoder, TokenEncoder, make_timestep_encoder, shift_images

SMALL = TimestepSettings(hidden=(8,), output=6, normalize=False)


def encoder(observation, action=None, settings=SMALL):
    torch.manual_seed(0)
    return make_timestep_encoder(Spaces(observation=observation, action=action or Discrete(n=3)), settings)


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


@pytest.mark.system
def test_the_activation_of_the_settings_is_that_of_every_layer():
    settings = SMALL.model_copy(update={"activation": "gelu", "hidden": (8, 8)})
    flat = encoder({"obs": Box(shape=(2,))}, settings=settings)
    inputs = {"obs": torch.randn(3, 2)}, torch.zeros(3, dtype=torch.int64), torch.zeros(3), torch.zeros(3)
    first, _, second, _ = flat.body.hidden
    x = torch.nn.functional.gelu(first(flat.flat_inputs(*inputs)))
    torch.testing.assert_close(flat(*inputs), flat.out(flat.body.last(torch.nn.functional.gelu(second(x)))))
    for kind in ("nature", "impala", "grid"):
        image = encoder(
            {"obs": Box(shape=(36, 36, 3), dtype="uint8")},
            settings=settings.model_copy(update={"image": ImageSettings(kind=kind)}),
        )
        kinds = {type(part) for part in image.modules()}
        assert torch.nn.GELU in kinds
        assert torch.nn.LeakyReLU not in kinds


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
    with pytest.raises(UsageError, match="too small for 'nature'"):
        ImageEncoder((20, 20, 3), ImageSettings(kind="nature"))


def test_convolutions_are_those_of_the_settings():
    net = ImageEncoder((20, 21, 3), ImageSettings(layers=((4, 5, 2), (6, 3, 1)), features=5))
    convolutions = [layer for layer in net.convolutions if isinstance(layer, torch.nn.Conv2d)]
    assert [tuple(layer.weight.shape) for layer in convolutions] == [(4, 3, 5, 5), (6, 4, 3, 3)]
    assert net.head.in_features == 6 * 6 * 7  # (20 - 5) // 2 + 1 = 8 and 9, less 2
    assert net(torch.zeros(2, 20, 21, 3, dtype=torch.uint8)).shape == (2, 5)
    with pytest.raises(UsageError, match=r"too small for agent\.timestep\.image\.layers"):
        ImageEncoder((8, 8, 1), ImageSettings(layers=((4, 4, 4), (4, 4, 4), (4, 4, 4))))


def test_channels_first_and_last_agree():
    torch.manual_seed(0)
    last = ImageEncoder((9, 8, 3), ImageSettings(features=5))
    torch.manual_seed(0)
    first = ImageEncoder((3, 9, 8), ImageSettings(features=5))
    image = torch.randint(0, 256, (2, 9, 8, 3), dtype=torch.uint8)
    torch.testing.assert_close(last(image), first(image.permute(0, 3, 1, 2)))


@pytest.mark.parametrize(("shape", "places"), [((84, 84, 3), 9 * 9), ((15, 23, 3), 1 * 2), ((3, 64, 64), 7 * 7)])
def test_impala_halves_three_times(shape, places):
    net = ImageEncoder(shape, ImageSettings(kind="impala", features=5))
    assert net.head.in_features == 32 * places
    assert net(torch.randint(256, (2, 3, *shape), dtype=torch.uint8)).shape == (2, 3, 5)


@pytest.mark.parametrize(("kind", "least"), [("nature", 36), ("impala", 15)])
def test_images_too_small_for_strides_are_refused(kind, least):
    ImageEncoder((least, least, 3), ImageSettings(kind=kind))
    with pytest.raises(UsageError, match=f"{least} pixels or more"):
        ImageEncoder((least, least - 1, 3), ImageSettings(kind=kind))


def test_floats_that_are_routed_to_convolutions_are_not_divided():
    net = encoder(
        {"obs": Box(shape=(5, 5, 2))}, settings=SMALL.model_copy(update={"columns": {"obs": "image"}})
    ).image_encoders[0]
    pixels = torch.randint(256, (4, 5, 5, 2), dtype=torch.uint8)
    torch.testing.assert_close(net(pixels), net(pixels.float() / 255))


@pytest.mark.parametrize("first", [False, True])
def test_a_window_is_shifted_as_a_whole(first):
    torch.manual_seed(0)
    image = torch.arange(1, 31, dtype=torch.uint8).view(1, 1, 5, 6, 1) + torch.zeros(40, 3, 5, 6, 2, dtype=torch.uint8)
    given = image.permute(0, 1, 4, 2, 3) if first else image
    moved = shift_images(given, 2, 0.5, first=first)
    moved = moved.permute(0, 1, 3, 4, 2) if first else moved
    padded = torch.nn.functional.pad(image.permute(0, 1, 4, 2, 3).flatten(0, 1).float(), (2, 2, 2, 2), "replicate")
    padded = padded.view(40, 3, 2, 9, 10).permute(0, 1, 3, 4, 2).byte()
    crops = {(y, x): padded[:, :, y : y + 5, x : x + 6] for y in range(5) for x in range(5)}
    used = [[at for at, crop in crops.items() if torch.equal(crop[b], moved[b])] for b in range(40)]
    assert all(len(ways) == 1 for ways in used)
    unmoved = sum(ways == [(2, 2)] for ways in used)
    assert 12 <= unmoved <= 30  # half of them, and 1 in 25 of the others
    assert len({ways[0] for ways in used}) > 8


def test_images_are_shifted_only_if_so_wanted():
    spaces = {"obs": Box(shape=(7, 7, 3), dtype="uint8"), "obs.x": Box(shape=(2,))}
    pixels = {"obs": torch.randint(256, (8, 2, 7, 7, 3), dtype=torch.uint8), "obs.x": torch.randn(8, 2, 2)}
    assert encoder(spaces).augment(pixels) is pixels
    image = ImageSettings(random_shift=3, random_shift_share=1.0)
    moved = encoder(spaces, settings=SMALL.model_copy(update={"image": image})).augment(pixels)
    assert not torch.equal(moved["obs"], pixels["obs"])
    assert moved["obs.x"] is pixels["obs.x"]


@pytest.mark.parametrize("kind", ["nature", "impala"])
def test_recomputed_images_have_the_same_gradients_and_keep_no_activations(kind, monkeypatch):
    monkeypatch.setattr(timestep, "CPU_PIXELS", 4 * 36 * 36)  # 14 frames: 4, 4, 4 and 2
    torch.manual_seed(0)
    net = ImageEncoder((36, 36, 3), ImageSettings(kind=kind, features=5)).double()
    image = torch.randint(256, (2, 7, 36, 36, 3), dtype=torch.uint8)
    outs, grads, kept = [], [], []
    for activation_checkpointing in (False, True):
        net.zero_grad()
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x, saved=saved: saved.append(x) or x, lambda x: x):
            out = net(image, activation_checkpointing=activation_checkpointing)
        out.square().sum().backward()
        outs.append(out)
        grads.append([parameter.grad for parameter in net.parameters()])
        kept.append(sum(x.nbytes for x in saved if x.is_floating_point()))
        with torch.no_grad():
            torch.testing.assert_close(net(image, activation_checkpointing=activation_checkpointing), out.detach())
    torch.testing.assert_close(outs[1], outs[0])
    for again, plain in zip(grads[1], grads[0], strict=True):
        torch.testing.assert_close(again, plain, rtol=1e-10, atol=1e-12)
    assert kept[1] == 0 < kept[0]


def test_recomputing_images_draws_the_same_shifts(monkeypatch):
    monkeypatch.setattr(timestep, "CPU_PIXELS", 4 * 9 * 9)
    spaces = {"obs": Box(shape=(9, 9, 3), dtype="uint8"), "obs.x": Box(shape=(2,))}
    image = ImageSettings(random_shift=3, random_shift_share=0.5)
    net = encoder(spaces, settings=SMALL.model_copy(update={"image": image}))
    pixels = {"obs": torch.randint(256, (2, 7, 9, 9, 3), dtype=torch.uint8), "obs.x": torch.randn(2, 7, 2)}
    rest = torch.zeros(2, 7, dtype=torch.int32), torch.zeros(2, 7), torch.arange(7).expand(2, -1)
    found = []
    for net.activation_checkpointing in (False, True):
        net.zero_grad()
        torch.manual_seed(5)
        out = net(net.augment(pixels), *rest)
        out.square().sum().backward()
        found.append([out, torch.rand(1), *(parameter.grad for parameter in net.parameters())])
    for again, plain in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(again, plain)


TEXT = {"obs.mission": Ragged(max_length=6, dtype="uint8", scale=255.0), "obs.mission.length": Discrete(n=7)}


def test_texts_go_through_an_encoder_that_reads_up_to_their_end():
    net = encoder(TEXT)
    assert net.sequences.keys() == {"obs.mission"}
    assert net.flat == {}
    rest = torch.zeros(1, 3, dtype=torch.int32), torch.zeros(1, 3), torch.arange(3)[None]
    letters = torch.tensor([[[7, 8, 9, 0, 0, 0], [9, 8, 7, 0, 0, 0], [7, 8, 9, 5, 5, 5]]])

    def read(value, lengths):
        with torch.no_grad():
            return net({"obs.mission": value, "obs.mission.length": torch.tensor([lengths])}, *rest)[0]

    full = read(letters, [3, 3, 3])
    torch.testing.assert_close(full[0], net({
        "obs.mission": letters[0, :1], "obs.mission.length": torch.tensor([3]),
    }, rest[0][0, :1], rest[1][0, :1], rest[2][0, :1])[0])  # fmt: skip
    alone = read(letters[:, [0, 0, 0]], [3, 3, 3])
    torch.testing.assert_close(alone[0], full[0])
    torch.testing.assert_close(alone[2], full[2])  # what stands behind the end is not read
    assert not torch.allclose(alone[1], full[1])  # the order is
    torch.testing.assert_close(read(letters, [0, 0, 0]), read(letters[:, [1, 2, 0]], [0, 0, 0]))


@pytest.mark.parametrize("repeats", [1, 4])
def test_each_distinct_sequence_is_encoded_once(repeats):
    torch.manual_seed(0)
    net = TokenEncoder(10, TokenSettings(embedding=3, hidden=4))
    rows = torch.tensor([[1, 2, 3], [1, 2, 3], [4, 13, 0], [1, 2, 3]]).repeat_interleave(repeats, 0)
    lengths = torch.tensor([3, 2, 2, 3]).repeat_interleave(repeats)
    seen = []
    hook = net.rnn.register_forward_pre_hook(lambda _, inputs: seen.append(int(inputs[0].batch_sizes[0])))
    with torch.no_grad():
        out = net(rows, lengths)
    hook.remove()
    assert seen == [3]
    for row, length, actual in zip(rows, lengths, out, strict=True):
        expected = net.rnn(net.embedding(row[:length] % 10)[None])[1][0, 0]  # 13 shares the row of 3
        torch.testing.assert_close(actual, expected)


def test_gradients_of_sequences_are_those_of_one_gru_for_each():
    torch.manual_seed(0)
    net = TokenEncoder(10, TokenSettings(embedding=3, hidden=4)).double()
    tokens, lengths = torch.randint(0, 10, (3, 4, 6)), torch.randint(0, 7, (3, 4))
    tokens[1], lengths[1] = tokens[0], lengths[0]
    lengths[2, :2] = torch.tensor([0, 6])
    weight = torch.randn(3, 4, 4, dtype=torch.float64)
    (net(tokens, lengths) * weight).sum().backward()
    found = {name: parameter.grad.clone() for name, parameter in net.named_parameters()}
    net.zero_grad()
    for row, length, share in zip(tokens.flatten(0, 1), lengths.flatten(), weight.flatten(0, 1), strict=True):
        if length:
            (net.rnn(net.embedding(row[:length])[None])[1][0, 0] * share).sum().backward()
    for name, parameter in net.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, msg=name)


def test_the_settings_route_columns_elsewhere():
    spaces = {**TEXT, "obs.image": Box(shape=(7, 7, 3), dtype="uint8"), "obs.secret": Box(shape=(2,)),
              "obs.room": Discrete(n=9)}  # fmt: skip
    columns = {"obs.mission": "flat", "obs.image": "flat", "obs.secret": "hidden", "obs.room": "tokens"}
    net = encoder(spaces, settings=SMALL.model_copy(update={"columns": columns}))
    assert list(net.flat) == ["obs.mission", "obs.mission.length", "obs.image"]
    assert net.images == {}
    values = {
        "obs.mission": torch.zeros(2, 6, dtype=torch.uint8),
        "obs.mission.length": torch.zeros(2, dtype=torch.int32),
        "obs.image": torch.zeros(2, 7, 7, 3, dtype=torch.uint8),
        "obs.secret": torch.zeros(2, 2),
        "obs.room": torch.zeros(2, dtype=torch.int32),
    }
    rest = torch.zeros(2, dtype=torch.int32), torch.zeros(2), torch.zeros(2, dtype=torch.int64)
    out = net(values, *rest)
    for name, matters in (("obs.secret", False), ("obs.room", True), ("obs.image", True), ("obs.mission", True)):
        assert torch.allclose(net(values | {name: values[name] + 1}, *rest), out) is not matters, name


def test_a_route_to_nowhere_is_refused():
    with pytest.raises(UsageError, match=r"not observed: obs\.goal"):
        encoder({"obs": Box(shape=(2,))}, settings=SMALL.model_copy(update={"columns": {"obs.goal": "hidden"}}))
    with pytest.raises(UsageError, match="is not an image"):
        encoder({"obs": Box(shape=(2,))}, settings=SMALL.model_copy(update={"columns": {"obs": "image"}}))


@pytest.mark.parametrize("hidden", ["reward", "action"])
def test_the_previous_reward_and_action_can_be_hidden(hidden):
    net = encoder({"obs": Box(shape=(2,))}, settings=SMALL.model_copy(update={f"hide_{hidden}": True}))
    obs, time = {"obs": torch.ones(1, 2)}, torch.ones(1)
    out = net(obs, torch.tensor([0]), torch.zeros(1), time)
    assert torch.equal(net(obs, torch.tensor([0]), torch.ones(1), time), out) is (hidden == "reward")
    assert torch.equal(net(obs, torch.tensor([2]), torch.zeros(1), time), out) is (hidden == "action")
