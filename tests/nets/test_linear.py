import copy

import pytest
import torch
from torch import nn

from pipelines.nets.compute import cast_weights
from pipelines.nets.linear import MLP, SigmaLinear, _ScaledTogether, update_spectral_norms


def settled(inputs=6, outputs=5):
    layer = SigmaLinear(inputs, outputs)
    for _ in range(200):
        update_spectral_norms(layer)
    return layer


def test_effective_weight_has_the_gain_as_spectral_norm():
    torch.manual_seed(0)
    layer = settled()
    layer.gain.data.fill_(1.7)
    effective = layer(torch.eye(6)).T - layer.bias[:, None]
    assert torch.linalg.matrix_norm(effective, 2).item() == pytest.approx(1.7, rel=1e-4)


def test_forward_changes_nothing_and_a_power_iteration_does():
    layer = SigmaLinear(6, 5)
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    layer(torch.randn(3, 6))
    assert all(torch.equal(value, before[name]) for name, value in layer.state_dict().items())
    layer.weight.data += torch.randn(5, 6)
    update_spectral_norms(layer)
    assert not torch.equal(layer.left, before["left"])


def test_few_rows_and_many_give_the_same_values_and_gradients():
    layer, x = SigmaLinear(6, 5), torch.randn(8, 6)
    layer.gain.data.fill_(0.3)
    torch.testing.assert_close(torch.cat([layer(row[None]) for row in x]), layer(x))
    many = torch.autograd.grad(layer(x).square().sum(), layer.parameters())
    few = torch.autograd.grad(sum(layer(row[None]).square().sum() for row in x), layer.parameters())
    torch.testing.assert_close(few, many)


@pytest.mark.parametrize("rows", [1, 40])
def test_the_gradient_goes_through_the_spectral_norm(rows):
    """That of gain W / |W|_2 by singular values, where power iteration has settled."""
    torch.manual_seed(0)
    layer = settled()
    x, direction = torch.randn(rows, 6), torch.randn(rows, 5)
    (actual,) = torch.autograd.grad((layer(x) * direction).sum(), [layer.weight])
    weight = layer.weight.detach().double().requires_grad_()
    exact = x.double() @ (weight / torch.linalg.matrix_norm(weight, 2)).T
    (expected,) = torch.autograd.grad((exact * direction).sum(), [weight])
    torch.testing.assert_close(actual.double(), expected, rtol=1e-3, atol=1e-3)
    along = (actual * layer.weight).sum() / (actual.norm() * layer.weight.norm())
    assert abs(along.item()) < 1e-4  # the layer does not change with the weight's size, so no gradient is along it


def test_mlp_without_hidden_layers_is_linear():
    layer = MLP(3, (), 2)
    torch.testing.assert_close(layer(torch.ones(1, 3)) * 2, layer(2 * torch.ones(1, 3)))


def test_layers_that_are_scaled_together_have_the_gradients_of_each():
    layers = [SigmaLinear(i, o).double() for i, o in ((8, 12), (8, 8), (16, 8), (8, 12))]
    inputs = [torch.randn(5, layer.weight.shape[1], dtype=torch.float64) for layer in layers]
    for layer in layers:
        nn.init.normal_(layer.gain, mean=1.0, std=0.3)
        nn.init.normal_(layer.bias)
    parameters = [parameter for layer in layers for parameter in layer.parameters()]

    def learn():
        loss = sum(layer(x).square().sum() for layer, x in zip(layers, inputs, strict=True))
        return loss, torch.autograd.grad(loss, parameters)

    apart = learn()
    columns = zip(*((layer.weight, layer.gain, layer.bias) for layer in layers), strict=True)
    made = _ScaledTogether.apply(torch.float64, layers, *(tensor for column in columns for tensor in column))
    for layer, weight, bias in zip(layers, made, made[4:], strict=False):
        layer.keep_prepared(weight, bias)
    for _ in range(2):  # some weights serve several backward passes
        torch.testing.assert_close(learn(), apart)
    with torch.no_grad():
        layers[0].gain.mul_(2)
    assert not torch.equal(learn()[0], apart[0]), "weights that have changed are scaled again"


@pytest.mark.parametrize("learns", [True, False])
def test_casts_of_all_layers_together_equal_autocasts_own(learns):
    network = MLP(6, (8,), 3)
    x = torch.randn(5, 6)

    def learn():
        with torch.autocast("cpu", torch.bfloat16):
            loss = network(x).float().square().sum()
        return loss, torch.autograd.grad(loss, [*network.parameters()]) if learns else None

    with torch.set_grad_enabled(learns):
        alone = learn()
        with torch.autocast("cpu", torch.bfloat16):
            cast_weights([network.hidden[0], network.last])
        torch.testing.assert_close(learn(), alone, rtol=0, atol=0)
        with torch.no_grad():
            network.last.weight.mul_(2)
        assert not torch.equal(learn()[0], alone[0]), "weights that have changed are cast again"


@torch.no_grad()
def test_layers_iterated_together_agree_with_one_at_a_time():
    shapes = [(6, 4), (4, 6), (6, 4), (5, 5), (6, 4), (4, 6)]
    layers = [SigmaLinear(*shape) for shape in shapes]
    alone = copy.deepcopy(layers)
    for _ in range(2):
        norms = SigmaLinear._iterate_together(layers)
        for layer, norm, own in zip(layers, norms, alone, strict=True):
            torch.testing.assert_close(norm, SigmaLinear.iterate([own])[0])
            torch.testing.assert_close(layer.left, own.left)
            torch.testing.assert_close(layer.right, own.right)
